#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/plan_file.h"
#include "libcalib/artifacts/stats_file.h"
#include "libcalib/base/plural.h"
#include "libcalib/io/json.h"
#include "libcalib/model/streaming_model.h"
#include "libcalib/plan/verify.h"
#include "tools/kvplan/commands.h"

namespace calib::tools {
namespace {

ModelIdentity identity_of(const std::string& path, bool fast, const Invocation& call, Progress& progress) {
  model::ModelOptions options;
  options.n_threads = call.n_threads();
  options.fast_identity = fast;
  const model::StreamingModel model = model::StreamingModel::open(path, options, progress.sink());
  ModelIdentity identity = model.identity();
  identity.tokenizer_sha256 = model.load_tokenizer(progress.sink())->sha256();
  return identity;
}

}  // namespace

int run_check(const KvplanOptions& options, const Invocation& call, Progress& progress) {
  const plan::Plan plan = artifacts::read_plan(options.plan, progress.sink());
  std::vector<std::string> problems = plan::verify_plan(plan);
  for (const std::string& path : artifacts::plan_schema_problems(options.plan)) problems.push_back(fmt::format("{} breaks the plan schema", path));
  if (!options.stats.empty()) plan::check_same_model(artifacts::StatsReader(options.stats).header().model, options.stats, plan.model, options.plan);
  if (!options.model.empty()) plan::check_same_model(identity_of(options.model, plan.model.fast, call, progress), options.model, plan.model, options.plan);
  if (call.json) {
    fmt::print("{}", io::json_text({{"plan", options.plan}, {"ok", problems.empty()}, {"problems", problems}}, "standard output"));
  } else if (problems.empty()) {
    fmt::print("{}: ok, {}, {} bytes, {:.3f} effective bits{}{}\n", options.plan, counted(plan.layers.size(), "layer"), plan.summary.bytes, plan.summary.effective_bits,
               options.stats.empty() ? "" : ", statistics are of the same model", options.model.empty() ? "" : ", model matches");
  } else {
    fmt::print("{}: {}\n", options.plan, counted(problems.size(), "problem"));
    for (const std::string& problem : problems) fmt::print("  {}\n", problem);
  }
  return problems.empty() ? 0 : 1;
}

}  // namespace calib::tools
