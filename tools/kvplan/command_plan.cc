#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/plan_file.h"
#include "libcalib/artifacts/saliency_file.h"
#include "libcalib/artifacts/sens_file.h"
#include "libcalib/base/sha256.h"
#include "libcalib/base/utf8.h"
#include "libcalib/io/json.h"
#include "libcalib/plan/planner.h"
#include "libcalib/plan/verify.h"
#include "libcalib/quant/calibrated_params.h"
#include "libcalib/quant/expected_attention.h"
#include "tools/kvplan/commands.h"
#include "tools/common/option_values.h"
#include "tools/kvplan/plan_io.h"
#include "tools/kvplan/plan_text.h"

namespace calib::tools {
namespace {

constexpr const char* kOtherTargets[] = {"vllm",         "sglang", "trtllm",    "lmdeploy",   "llamacpp", "ik_llamacpp",
                                         "transformers", "mlx",    "ort-genai", "executorch", "kvtuner"};

void check_target(const KvplanOptions& o) {
  if (o.target != "native") {
    for (const char* name : kOtherTargets)
      if (o.target == name) fail(ErrorKind::kUnsupported, "--target " + o.target, "planning for this runtime is not offered by this version; use native");
    fail(ErrorKind::kUsage, "--target " + to_valid_utf8(o.target), "unknown; known: native, {}", fmt::join(kOtherTargets, ", "));
  }
  plan::check_arch(o.arch);
}

/// Exactly one way to say how large the plan may be.
void check_limits(const KvplanOptions& o) {
  const std::pair<const char*, const std::string*> ways[] = {
      {"--budget", &o.budget}, {"--max-kl", &o.max_kl}, {"--max-ppl-ratio", &o.max_ppl_ratio}, {"--profile", &o.profile}, {"--uniform", &o.uniform}};
  std::string given;
  int n = 0;
  for (const auto& [name, value] : ways)
    if (!value->empty()) ++n, given += std::string(given.empty() ? "" : " and ") + name;
  if (n == 0) fail(ErrorKind::kUsage, "kvplan", "needs one of --budget, --max-kl, --max-ppl-ratio, --profile or --uniform; try --budget 4.5");
  if (n > 1) fail(ErrorKind::kUsage, "kvplan", "{} contradict each other; give one of them", given);
}

plan::Restrictions restrictions_of(const KvplanOptions& o) {
  plan::Restrictions r;
  r.k = plan::scheme_list(split_lists("--allow-k", o.allow_k), "--allow-k");
  r.v = plan::scheme_list(split_lists("--allow-v", o.allow_v), "--allow-v");
  r.same_kv = o.same_kv;
  r.one_pair = o.one_pair;
  r.skip_layers = parse_layers("--skip-layers", split_lists("--skip-layers", o.skip_layers));
  r.arch = o.arch;
  return r;
}

/// Tokens that stay exact must leave some to compress.
void check_exact_tokens(std::int64_t sinks, std::int64_t window, std::int64_t context) {
  if (sinks + window >= context)
    fail(ErrorKind::kUsage, "--sinks, --window",
         "{} sinks and a window of {} cover all {} tokens of --context: nothing would be compressed; take fewer, or a longer --context", sinks, window,
         context);
}

plan::Plan make_uniform(const KvplanOptions& o, Progress& progress, Parents& parents) {
  if (o.stats.empty())
    fail(ErrorKind::kUsage, "--uniform " + to_valid_utf8(o.uniform),
         "needs --stats with a file made by kvcalib: it names the model and holds the numbers to calibrate with");
  for (const auto& [name, file] : {std::pair{"--sens", &o.sens}, std::pair{"--saliency", &o.saliency}})
    if (!file->empty()) fail(ErrorKind::kUsage, name, "is not used by --uniform; leave it out");
  LayerSource source(o.stats);
  parents.emplace_back("stats", sha256_of_file(o.stats));
  if (source.header().model.layers.empty()) fail(ErrorKind::kMismatch, o.stats, "names a model without layers");
  quant::Preset preset = quant::resolve_preset(o.uniform, source.header().model.layers.front().head_dim, progress.sink());
  const bool pair = o.uniform.find(':') != std::string::npos;
  if (!pair && (o.sinks >= 0 || o.window >= 0))
    fail(ErrorKind::kUsage, "--sinks, --window", "preset {} brings its own ({} and {}); write {}:{} to choose", preset.name, preset.n_sinks, preset.window,
         preset.k, preset.v);
  if (o.sinks >= 0) preset.n_sinks = o.sinks;
  if (o.window >= 0) preset.window = o.window;
  check_exact_tokens(preset.n_sinks, preset.window, o.context);
  plan::Restrictions restrictions = restrictions_of(o);
  restrictions.arch.clear();
  if (restrictions.any()) fail(ErrorKind::kUsage, plan::restrictions_text(restrictions), "restricts a search; --uniform says what every layer takes, leave it out");
  for (const std::string* scheme : {&preset.k, &preset.v})
    if (const std::string missing = plan::missing_on_arch(o.arch, quant::parse_scheme(*scheme).format); !missing.empty()) {
      progress.warning(fmt::format("{}: {} asked for all the same; {}", o.uniform, *scheme, missing));
      break;
    }
  const plan::FitUnit fit = [&](const LayerGeometry& layer, Side side, const kvrt::Scheme& scheme, std::vector<std::string>* why) {
    return quant::fit_params(scheme, side, source.of(layer.index), preset.n_sinks, why, std::max<std::int64_t>(source.header().data.seq_len, 1));
  };
  return plan::uniform_plan(source.header().model, preset, accounting_of(o), source.evidence(), fit,
                            [&](const LayerGeometry& layer) { return quant::saliency_factors(source.of(layer.index)); });
}

plan::SearchRequest search_request(const KvplanOptions& o) {
  plan::SearchRequest request;
  request.metric = o.metric;
  request.accounting = accounting_of(o);
  request.seed = static_cast<std::uint64_t>(o.seed);
  request.limits.window_per_layer = o.window_per_layer;
  request.restrictions = restrictions_of(o);
  if (!o.budget.empty()) {
    request.limits.budget = plan::parse_budget(o.budget);
    request.limit_text = o.budget;
  } else if (!o.max_kl.empty()) {
    request.limits.max_score = plan::parse_above(0, o.max_kl, "--max-kl", "0.05");
    request.limits.asked = o.max_kl;
    request.limit_text = "max-kl " + o.max_kl;
  } else if (!o.max_ppl_ratio.empty()) {
    request.limits.max_score = std::log(plan::parse_above(1, o.max_ppl_ratio, "--max-ppl-ratio", "1.02"));
    request.limits.as_ppl_ratio = true;
    request.limits.asked = o.max_ppl_ratio;
    request.limit_text = "max-ppl-ratio " + o.max_ppl_ratio;
  } else {
    plan::profile_of(o.profile);
    request.limits.profile = o.profile;
  }
  return request;
}

/// Where the tiers that were scored may stand. Without evidence nowhere, and the user is told so.
plan::TierRules read_tier_rules(const KvplanOptions& o, const sens::SensResult& sens, Progress& progress, Parents& parents) {
  const bool scored = !sens.salient_scheme.empty();
  if (o.saliency.empty()) {
    if (scored) progress.say("the salient tiers that were scored are left out: --saliency with a file of `kvsens saliency` says in which layers they pay");
    return {};
  }
  if (!scored) fail(ErrorKind::kUsage, "--saliency", "{} holds no scores of a salient tier; run kvsens with --salient 0.1,0.2, or leave it out", o.sens);
  const sens::SaliencyVerdicts verdicts = artifacts::read_saliency_file(o.saliency);
  plan::check_same_model(verdicts.model, o.saliency, sens.model, o.sens);
  if (verdicts.same_text_as_calibration)
    progress.warning(fmt::format("{} was measured on the text of the statistics; held-out text is needed for a verdict", o.saliency));
  parents.emplace_back("saliency", sha256_of_file(o.saliency));
  LogSink shown = progress.sink();  // what drops out is said, also without -v
  shown.note = [&](const std::string& text) { progress.say(text); };
  return plan::tier_rules(sens, verdicts, shown);
}

plan::Plan make_searched(const KvplanOptions& o, Progress& progress, Parents& parents) {
  if (o.sens.empty()) fail(ErrorKind::kUsage, "kvplan", "needs --sens with a file made by kvsens (or --uniform with --stats)");
  if (o.sinks >= 0 || o.window >= 0) fail(ErrorKind::kUsage, "--sinks, --window", "belong to --uniform; a searched plan takes both from the scores");
  plan::SearchRequest request = search_request(o);
  const sens::SensResult sens = artifacts::read_sens_file(o.sens);
  if (!sens.windows.empty()) check_exact_tokens(sens.n_sinks, *std::min_element(sens.windows.begin(), sens.windows.end()), o.context);
  plan::EvidenceByLayer evidence;
  if (!o.stats.empty()) {
    LayerSource source(o.stats);
    plan::check_same_model(source.header().model, o.stats, sens.model, o.sens);
    if (!sens.calibration_data.documents_sha256.empty() && source.header().data.documents_sha256 != sens.calibration_data.documents_sha256)
      progress.warning(fmt::format("{} was not the input of {}: its text differs; constants come from the scores, reasons from the statistics", o.stats, o.sens));
    evidence = source.evidence();
    parents.emplace_back("stats", sha256_of_file(o.stats));
  }
  parents.emplace_back("sens", sha256_of_file(o.sens));
  request.tiers = read_tier_rules(o, sens, progress, parents);
  if (!sens.data.documents_sha256.empty() && sens.data.documents_sha256 == sens.calibration_data.documents_sha256)
    progress.warning("calibration and scores used the same text; measure the plan on another one");
  return plan::search_plan(sens, evidence, request, progress.sink());
}

void print_plan(const plan::Plan& plan, const std::string& output, const Invocation& call) {
  if (call.json) {
    nlohmann::ordered_json out = {{"plan", output.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(output)},
                                  {"effective_bits", plan.summary.effective_bits}, {"bytes", plan.summary.bytes}, {"proven", plan.summary.proven},
                                  {"gap", plan.summary.gap}, {"sink_tokens", plan.sink_tokens}, {"window_tokens", plan.window_tokens}};
    if (plan.summary.predicted)
      out["predicted"] = {{"metric", plan.summary.predicted->metric}, {"score", plan.summary.predicted->score}, {"se", plan.summary.predicted->se}};
    out["baselines"] = nlohmann::ordered_json::array();
    for (const plan::Baseline& b : plan.baselines)
      out["baselines"].push_back({{"name", b.name}, {"description", b.description}, {"feasible", b.feasible}, {"effective_bits", b.effective_bits},
                                  {"score", b.score}, {"pair", b.pair}, {"window_tokens", b.window_tokens}});
    fmt::print("{}", io::json_text(out, "standard output"));
    return;
  }
  fmt::print("{}\n", headline(plan));
  if (const std::string line = prediction_line(plan); !line.empty()) fmt::print("{}\n", line);
  for (const plan::Reason& step : plan.decision)
    if (step.rule == "bf16" || step.rule == "margin" || step.rule == "tier" || step.rule == "isolated") fmt::print("{}\n", to_valid_utf8(step.text));
  if (!plan.baselines.empty()) {
    fmt::print("\nthe same budget spent more simply (predictions of the same score)\n{:>8}  {:>11}  {}\n", "bits", "predicted", "plan");
    fmt::print("{:>8.3f}  {:>11.4e}  this plan\n", plan.summary.effective_bits,
               plan.summary.predicted->in_nats ? plan.summary.predicted->kl() : plan.summary.predicted->score);
    for (const plan::Baseline& b : plan.baselines)
      fmt::print("{:>8.3f}  {:>11}  {}{}\n", b.effective_bits, b.feasible || b.score > 0 ? fmt::format("{:.4e}", b.score) : "-", b.description,
                 b.feasible ? "" : " (over the budget: none of its kind fits)");
    fmt::print("\n");
  }
  if (output.empty()) {
    fmt::print("nothing written (--dry-run)\n");
    return;
  }
  fmt::print("{}\n", to_valid_utf8(output));
  if (const std::string tensors = artifacts::plan_tensor_path(output); plan.summary.constants_bytes > 0) fmt::print("{}\n", to_valid_utf8(tensors));
}

}  // namespace

int run_plan(const KvplanOptions& o, const Invocation& call, Progress& progress) {
  check_limits(o);
  check_target(o);
  check_plan_output(o, {o.stats, o.sens, o.saliency});
  Parents parents;
  plan::Plan plan = o.uniform.empty() ? make_searched(o, progress, parents) : make_uniform(o, progress, parents);
  finish_plan(plan, o, call, std::move(parents), progress);
  print_plan(plan, o.dry_run ? "" : o.output, call);
  return 0;
}

int run_kvplan(const KvplanOptions& o, const Invocation& call) {
  Progress progress(call.verbosity);
  switch (o.command) {
    case KvplanOptions::Command::kPlan: return run_plan(o, call, progress);
    case KvplanOptions::Command::kShow: return run_show(o, call, progress);
    case KvplanOptions::Command::kExplain: return run_explain(o, call, progress);
    case KvplanOptions::Command::kCheck: return run_check(o, call, progress);
    case KvplanOptions::Command::kDiff: return run_diff(o, call, progress);
    case KvplanOptions::Command::kMemory: return run_memory(o, call, progress);
    case KvplanOptions::Command::kImport: return run_import(o, call, progress);
    case KvplanOptions::Command::kList: return run_list(o, call, progress);
  }
  CALIB_CHECK(false);
}

}  // namespace calib::tools
