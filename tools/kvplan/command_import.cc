#include <filesystem>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/base/mapped_file.h"
#include "libcalib/base/plural.h"
#include "libcalib/base/sha256.h"
#include "libcalib/base/utf8.h"
#include "libcalib/export/kvtuner.h"
#include "libcalib/io/json.h"
#include "libcalib/plan/verify.h"
#include "tools/kvplan/commands.h"
#include "tools/kvplan/plan_io.h"
#include "tools/kvplan/plan_text.h"

namespace calib::tools {
namespace {

void check_import(const KvplanOptions& o) {
  if (o.from.empty()) fail(ErrorKind::kUsage, "kvplan import", "needs --from, the tool that wrote {}; known: kvtuner", to_valid_utf8(o.source));
  if (o.from != "kvtuner") fail(ErrorKind::kUnsupported, "--from " + to_valid_utf8(o.from), "files of this tool are not read by this version; known: kvtuner");
  if (o.mode.empty()) fail(ErrorKind::kUsage, "kvplan import", "needs --mode pertoken or kivi: the file does not say how its widths are meant");
  if (o.model.empty() && o.stats.empty()) fail(ErrorKind::kUsage, "kvplan import", "needs --base-model, the model that the plan is for (or --stats, which name it)");
}

/// Names of KVTuner's own presets say the mode; contents do not.
void check_name(const std::string& path, exports::KvtunerMode mode, Progress& progress) {
  const std::string name = std::filesystem::path(path).filename().string();
  for (const exports::KvtunerMode other : {exports::KvtunerMode::kPerToken, exports::KvtunerMode::kKivi})
    if (other != mode && name.find(fmt::format("_{}_", exports::kvtuner_mode_name(other))) != std::string::npos)
      progress.warning(fmt::format("{} is named as a file for --mode {}; read as {}", to_valid_utf8(name), exports::kvtuner_mode_name(other),
                                   exports::kvtuner_mode_name(mode)));
}

void print_import(const plan::Plan& plan, const exports::KvtunerBits& bits, const KvplanOptions& o, const Invocation& call) {
  if (call.json) {
    fmt::print("{}", io::json_text({{"plan", o.dry_run ? nlohmann::ordered_json() : nlohmann::ordered_json(o.output)},
                                    {"from", o.from},
                                    {"mode", o.mode},
                                    {"mean_bits", bits.mean_bits()},
                                    {"effective_bits", plan.summary.effective_bits},
                                    {"bytes", plan.summary.bytes},
                                    {"sink_tokens", plan.sink_tokens},
                                    {"window_tokens", plan.window_tokens},
                                    {"per_head", bits.per_head},
                                    {"uneven_layers", bits.n_uneven()}},
                                   "standard output"));
    return;
  }
  fmt::print("{}\n", headline(plan));
  fmt::print("KVTuner counts {:.3f} bits, (sum K + sum V) / 2L; with scales, minima, padding and window they take {:.3f} effective bits\n", bits.mean_bits(),
             plan.summary.effective_bits);
  fmt::print("{}\n", o.dry_run ? "nothing written (--dry-run)" : to_valid_utf8(o.output));
}

}  // namespace

int run_import(const KvplanOptions& o, const Invocation& call, Progress& progress) {
  check_import(o);
  const exports::KvtunerMode mode = exports::parse_kvtuner_mode("--mode", o.mode);
  const plan::Accounting accounting = accounting_of(o);
  check_plan_output(o, {o.source, o.model, o.stats});
  require_file(o.source, "give the YAML file of a KVTuner search");
  const MappedFile file(o.source);
  const std::string sha256 = sha256_hex(file.bytes());
  Parents parents = {{"kvtuner", sha256}};
  ModelIdentity model;
  if (!o.model.empty()) model = identity_of(o.model, o.fast_identity, call, progress);
  plan::EvidenceByLayer evidence;
  if (!o.stats.empty()) {
    LayerSource source(o.stats);
    if (o.model.empty()) model = source.header().model;
    else plan::check_same_model(source.header().model, o.stats, model, o.model);
    evidence = source.evidence();
    parents.emplace_back("stats", sha256_of_file(o.stats));
  }
  if (model.layers.empty()) fail(ErrorKind::kMismatch, o.model.empty() ? o.stats : o.model, "is of a model without layers that keep a cache");
  const exports::KvtunerBits bits = exports::parse_kvtuner(file.bytes(), o.source, model.layers);
  plan::Plan plan = exports::kvtuner_plan(model, bits, mode, accounting, evidence);
  if (plan.sink_tokens + plan.window_tokens >= o.context)
    fail(ErrorKind::kUsage, "--context", "is {}, which KVTuner's window of {} keeps exact: nothing would be compressed; take a longer one", o.context,
         plan.window_tokens);
  plan.decision = {
      {"imported",
       fmt::format("{} (sha256 {}), mode {}: {:.3f} bits as KVTuner counts, {:.3f} effective bits",
                   to_valid_utf8(std::filesystem::path(o.source).filename().string()), sha256, o.mode, bits.mean_bits(), plan.summary.effective_bits),
       {{"mean_bits", bits.mean_bits()}, {"effective_bits", plan.summary.effective_bits}}}};
  check_name(o.source, mode, progress);
  if (bits.per_head)
    progress.warning(fmt::format(
        "{} gives each KV head its own widths; a plan stores all heads of a layer alike, so each takes the widest: {} of {} layers have heads that differ",
        o.source, bits.n_uneven(), bits.layers.size()));
  finish_plan(plan, o, call, std::move(parents), progress);
  print_import(plan, bits, o, call);
  return 0;
}

}  // namespace calib::tools
