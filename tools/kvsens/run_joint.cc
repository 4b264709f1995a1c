#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/sens_file.h"
#include "libcalib/base/plural.h"
#include "libcalib/base/sha256.h"
#include "libcalib/plan/joint.h"
#include "libcalib/plan/search.h"
#include "libcalib/plan/verify.h"
#include "tools/kvsens/inputs.h"
#include "tools/kvsens/joint_verifier.h"
#include "tools/kvsens/run.h"

namespace calib::tools {
namespace {

/// `n` combinations without a salient tier, shared out over the windows that were scored, the smallest first.
std::vector<std::vector<plan::LayerOption>> combinations(const plan::Candidates& candidates, std::size_t n, std::uint64_t seed) {
  std::vector<std::vector<plan::LayerOption>> out;
  const std::vector<std::vector<std::size_t>> windows = plan::class_sets(candidates, false, false);
  for (std::size_t w = 0; w < windows.size(); ++w)
    for (auto& choice : plan::joint_samples(candidates, windows[w].front(), n * (w + 1) / windows.size() - n * w / windows.size(), seed))
      out.push_back(std::move(choice));
  return out;
}

void print_fit(const sens::SensResult& sens, const std::string& output, bool as_json) {
  nlohmann::ordered_json json = {{"sens", output}, {"runs", sens.joint->size()}, {"fits", nlohmann::ordered_json::object()}};
  for (const auto& [metric, table] : sens.scores) {
    if (metric == "attn_kl" || metric == "attn_out" || metric == "lookahead") continue;  // not sums that predict nats
    if (sens.isolated && metric != sens.isolated->metric) continue;  // no plan can spend it
    const std::optional<plan::JointFit> fit = plan::Candidates(sens, plan::Accounting{}, metric).fit();
    if (!fit) continue;
    json["fits"][metric] = {
        {"slope", fit->slope},       {"kappa", fit->kappa}, {"spearman", fit->spearman},  {"r2", fit->r2}, {"worst_factor", fit->worst_factor},
        {"exponent", fit->exponent}, {"pivot", fit->pivot}, {"reliable", fit->reliable()}};
    std::string windows;
    for (const plan::WindowSlope& w : fit->windows) {
      json["fits"][metric]["windows"].push_back({{"window", w.window}, {"runs", w.n_runs}, {"slope", w.slope}});
      windows += fmt::format("{}{} x at {}", windows.empty() ? " (" : ", ", fmt::format("{:.2f}", w.slope), w.window);
    }
    if (!windows.empty()) windows += " tokens of window)";
    if (fit->exponent != 1) windows += fmt::format(" x (s / {:.1e})^{:+.2f}", fit->pivot, fit->exponent - 1);
    if (!as_json)
      fmt::print("{:<14} measured = {:.2f} x predicted{}, Spearman {:.3f}, R2 {:.3f}, worst factor {:.2f}, ln PPL ratio = {:.2f} x KL{}\n", metric, fit->slope,
                 windows, fit->spearman, fit->r2, fit->worst_factor, fit->kappa, fit->reliable() ? "" : "; unreliable, only measured plans count");
  }
  if (as_json) fmt::print("{}\n", json.dump(2));
  else fmt::print("{}\n", output);
}

}  // namespace

int run_joint(const JointCommand& options, const Invocation& call) {
  require_model_and_data(options.run);
  if (options.sens.empty()) fail(ErrorKind::kUsage, "kvsens joint", "needs --sens with the scores whose sums are to be tested");
  std::vector<std::string> files = inputs_of(options.run);
  if (options.output != options.sens) files.push_back(options.sens);
  check_output(options.output, files, kSensOutput);
  Progress progress(call.verbosity);
  const LogSink log = progress.sink();
  sens::SensResult sens = artifacts::read_sens_file(options.sens);
  const std::string sens_sha256 = sha256_of_file(options.sens);
  sens.joint.reset();
  Inputs in = open_inputs(options.run, call, log);
  plan::check_same_model(sens.model, options.sens, in.identity, options.run.model);
  check_disjoint(in, sens);
  const plan::Candidates candidates(sens, plan::Accounting{}, options.metric, log);
  if (!candidates.metric_in_nats())
    fail(ErrorKind::kUsage, "--metric " + candidates.metric(), "is not in nats and predicts no KL; use one of fisher_softmax, fisher_vec, fisher, logit_kl");
  const std::vector<std::vector<plan::LayerOption>> runs =
      combinations(candidates, static_cast<std::size_t>(options.n_runs), static_cast<std::uint64_t>(options.run.seed));
  if (runs.size() < plan::kLeastJointRuns)
    fail(ErrorKind::kInfeasible, options.sens, "holds {} combinations of undominated schemes, a fit needs {}; score more schemes", runs.size(),
         plan::kLeastJointRuns);
  for (const auto& run : runs) contender_of(candidates, run, "a combination", in.corpus);
  if (options.run.dry_run) {
    fmt::print("runs       {}\ntime       about {}\n", counted(runs.size(), "combination"),
               format_duration(1.2 * static_cast<double>(runs.size() + 3) * forward_seconds(in)));
    return 0;
  }
  progress.say(fmt::format("{}: {} on {}, {}", in.identity.name, counted(runs.size(), "combination"), counted(in.corpus.identity.n_documents, "document"),
                           counted(in.corpus.identity.n_tokens, "token")));
  JointVerifier verifier(in, candidates, options.run.hidden_mem, std::numeric_limits<double>::infinity(), call, progress,
                         static_cast<std::uint64_t>(options.run.seed), log);
  const std::vector<plan::Measured> results = verifier.measure(runs, "joint runs");
  sens::JointRuns joint;
  joint.n_layers = candidates.n_layers();
  for (std::size_t r = 0; r < runs.size(); ++r) {
    for (const plan::LayerOption& o : runs[r]) {
      joint.k.push_back(static_cast<std::int64_t>(o.k)), joint.v.push_back(static_cast<std::int64_t>(o.v));
      joint.tier_class.push_back(static_cast<std::int64_t>(o.tier_class));
    }
    joint.kld.push_back(results[r].kld), joint.kld_se.push_back(results[r].kld_se);
    joint.ln_ppl_ratio.push_back(std::log(results[r].ppl_ratio));
  }
  joint.data = in.corpus.identity;
  joint.provenance = in.provenance;
  joint.provenance.seconds = call.seconds();
  joint.provenance.parents.emplace_back("sens", sens_sha256);
  sens.joint = std::move(joint);
  artifacts::write_sens_file(options.output, sens);
  print_fit(sens, options.output, call.json);
  return 0;
}

}  // namespace calib::tools
