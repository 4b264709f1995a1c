#include "tools/kvplan/plan_io.h"

#include <set>

#include <fmt/format.h>

#include "kernels/core/layout.h"
#include "libcalib/artifacts/plan_file.h"
#include "libcalib/model/streaming_model.h"
#include "libcalib/plan/verify.h"
#include "libcalib/quant/unit_evidence.h"
#include "tools/common/option_values.h"

namespace calib::tools {
namespace {

void warn_of_the_runtime(const plan::Plan& plan, Progress& progress) {
  std::set<std::string> schemes;
  for (const plan::LayerPlan& layer : plan.layers)
    for (const Side side : {Side::kK, Side::kV})
      if (!kvrt::check_implemented(layer.unit(side).scheme).empty()) schemes.insert(kvrt::to_string(layer.unit(side).scheme));
  if (!schemes.empty())
    progress.warning(
        fmt::format("the runtime of this build keeps no cache in {}; kvsens can measure the plan, nothing here can run it", fmt::join(schemes, ", ")));
}

}  // namespace

const stats::LayerStats& LayerSource::of(int layer_index) {
  const std::vector<LayerGeometry>& geometry = header().model.layers;
  for (std::size_t i = 0; i < geometry.size(); ++i)
    if (geometry[i].index == layer_index) {
      if (!layers_[i]) layers_[i] = std::make_unique<stats::LayerStats>(reader_.layer(i));
      return *layers_[i];
    }
  fail(ErrorKind::kMismatch, "layer " + std::to_string(layer_index), "the statistics do not hold it");
}

plan::EvidenceByLayer LayerSource::evidence() {
  plan::EvidenceByLayer evidence;
  for (const LayerGeometry& g : header().model.layers) evidence[g.index] = quant::unit_evidence(of(g.index));
  return evidence;
}

ModelIdentity identity_of(const std::string& path, bool fast, const Invocation& call, Progress& progress) {
  model::ModelOptions options;
  options.n_threads = call.n_threads();
  options.fast_identity = fast;
  const model::StreamingModel model = model::StreamingModel::open(path, options, progress.sink());
  ModelIdentity identity = model.identity();
  identity.tokenizer_sha256 = model.load_tokenizer(progress.sink())->sha256();
  return identity;
}

plan::Accounting accounting_of(const KvplanOptions& o) {
  if (o.page_tokens != 32 && o.page_tokens != 64 && o.page_tokens != 128) fail(ErrorKind::kUsage, "--page-tokens", "is {}, expected 32, 64 or 128", o.page_tokens);
  plan::Accounting accounting;
  accounting.context_tokens = o.context;
  accounting.batch = o.batch;
  accounting.page_tokens = static_cast<int>(o.page_tokens);
  return accounting;
}

void check_plan_output(const KvplanOptions& o, const std::vector<std::string>& inputs) {
  check_output(o.output, inputs, kPlanOutput);
  constexpr std::string_view kTensorSuffix = ".safetensors";
  if (o.output.size() > kTensorSuffix.size() && std::string_view(o.output).substr(o.output.size() - kTensorSuffix.size()) == kTensorSuffix)
    fail(ErrorKind::kUsage, "--output", "ends in .safetensors, which is where the plan's constants go; name the plan, such as plan.json");
}

void finish_plan(plan::Plan& plan, const KvplanOptions& o, const Invocation& call, Parents parents, Progress& progress) {
  if (const std::vector<std::string> problems = plan::verify_plan(plan); !problems.empty())
    throw Error(ErrorKind::kInternal, "kvplan", "the plan does not hold when counted again", problems);
  warn_of_the_runtime(plan, progress);
  plan.provenance = {"kvplan", version(), call.argv, call.started_utc, call.seconds(), static_cast<std::uint64_t>(o.seed), "cpu", "fp64", std::move(parents)};
  if (!o.dry_run) artifacts::write_plan(plan, o.output);
}

}  // namespace calib::tools
