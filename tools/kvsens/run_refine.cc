#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/plan_file.h"
#include "libcalib/artifacts/sens_file.h"
#include "libcalib/base/plural.h"
#include "libcalib/base/sha256.h"
#include "libcalib/plan/joint.h"
#include "libcalib/plan/planner.h"
#include "libcalib/plan/verify.h"
#include "libcalib/sens/kld_block.h"
#include "tools/common/option_values.h"
#include "tools/kvsens/inputs.h"
#include "tools/kvsens/joint_verifier.h"
#include "tools/kvsens/run.h"

namespace calib::tools {
namespace {

constexpr int kMostRounds = 8;
/// A round that changes nothing asks for this much less the next time.
constexpr double kTighten = 0.9;
/// Within this share of the target there is nothing left to gain.
constexpr double kCloseEnough = 0.9;

plan::SearchRequest request_of(const plan::Plan& plan) {
  plan::SearchRequest request;
  const plan::Request& r = plan.request;
  request.metric = r.metric;
  request.accounting.context_tokens = r.context_tokens;
  request.accounting.batch = r.batch;
  request.accounting.page_tokens = plan.page_tokens;
  request.accounting.scale_refresh_tokens = plan.scale_refresh_tokens;
  request.limit_text = r.budget;
  request.limits.profile = r.profile;
  request.limits.window_per_layer = r.window_per_layer;
  request.limits.max_score = r.max_kl;
  request.restrictions = r.restrictions;
  request.tiers = plan::tier_rules(plan);
  return request;
}

struct Measurement {
  std::vector<plan::LayerOption> choice;
  std::optional<plan::Measured> measured;  ///< empty where the damage-curve gate rejected it
  sens::EvalDamage damage;
};

/// A plan that the damage-curve gate did not let be measured.
struct Rejection {
  std::string name, key;  ///< for people; for the names of numbers
  double bits = 0;
  sens::EvalDamage damage;
};

/// What the plan was asked to stay below, in the quantity that is measured.
struct Target {
  bool by_ppl = false;
  double limit = 0;  ///< nats, or ln of the perplexity ratio
  double kappa = 1;  ///< ln perplexity ratio over KL
  double of(const plan::Measured& m) const { return by_ppl ? std::log(m.ppl_ratio) : m.kld; }
  /// Of a rejected one what the gate predicts, and in any case a miss.
  double of(const Measurement& m) const {
    if (m.measured) return of(*m.measured);
    const double ln_ratio = std::log(m.damage.predicted_ppl_ratio);
    return std::max(by_ppl ? ln_ratio : ln_ratio / kappa, 2 * limit);
  }
};

std::string damage_text(const sens::EvalDamage& d) {
  return fmt::format("x {:.3g} in layer {}, predicted PPL ratio {:.2f}", d.x, d.worst_layer, d.predicted_ppl_ratio);
}

void reject(std::vector<Rejection>& rejections, Rejection rejection, Progress& progress) {
  progress.say(fmt::format("{} is rejected unmeasured: {}", rejection.name, damage_text(rejection.damage)));
  rejections.push_back(std::move(rejection));
}

bool same(const std::vector<plan::LayerOption>& a, const std::vector<plan::LayerOption>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const plan::LayerOption& x, const plan::LayerOption& y) { return x.k == y.k && x.v == y.v && x.tier_class == y.tier_class; });
}
std::int64_t bytes_of(const std::vector<plan::LayerOption>& choice) {
  std::int64_t sum = 0;
  for (const plan::LayerOption& o : choice) sum += o.bytes;
  return sum;
}

/// Empty where no candidates keep the limit.
std::optional<plan::Found> search_below(const plan::Candidates& candidates, const plan::Limits& limits) {
  try {
    return plan::search(candidates, limits);
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::kInfeasible) throw;
    return std::nullopt;
  }
}

/// The repair loop: the planner's own solver with a limit corrected by what was measured, until the smallest plan that keeps the target
/// is found. Adds all that was measured or rejected, in order. Requires: `tried` holds the plan's own measurement.
void repair(const plan::Candidates& candidates, const plan::SearchRequest& request, const Target& target, JointVerifier& verifier, std::vector<Measurement>& tried,
            std::vector<Rejection>& rejections, Progress& progress) {
  double margin = 1;
  for (int round = 0; round < kMostRounds; ++round) {
    const Measurement& last = tried.back();
    const double loss = target.of(last);
    if (loss <= target.limit && loss >= kCloseEnough * target.limit) return;
    plan::Limits limits = request.limits;
    limits.profile.clear();
    limits.max_score = margin * target.limit * plan::predicted_score(last.choice) / std::max(loss, 1e-12);
    std::optional<plan::Found> found = search_below(candidates, limits);
    // A rejected plan's loss is a guess, so that the cut may go too deep: halfway back, as long as that is below what was rejected.
    if (const double rejected = plan::predicted_score(last.choice); !last.measured)
      while (!found && limits.max_score < kTighten * rejected) limits.max_score = std::sqrt(limits.max_score * rejected), found = search_below(candidates, limits);
    if (!found) {
      progress.say(fmt::format("round {}: no candidate predicts less than {:.4e}; nothing left to raise", round + 1, limits.max_score));
      return;
    }
    const plan::Found& next = *found;
    const bool seen = std::any_of(tried.begin(), tried.end(), [&](const Measurement& m) { return same(m.choice, next.choice); });
    if (seen && loss <= target.limit) return;
    if (seen) {
      margin *= kTighten;
      continue;
    }
    const double bits = plan::effective_bits(next.bytes, candidates.elements());
    tried.push_back({next.choice, std::nullopt, verifier.judge({next.choice}).front()});
    if (Measurement& now = tried.back(); now.damage.rejected) {
      reject(rejections, {fmt::format("round {}", round + 1), fmt::format("round_{}", round + 1), bits, now.damage}, progress);
    } else {
      now.measured = verifier.measure({next.choice}, fmt::format("round {}", round + 1)).front();
      progress.say(fmt::format("round {}: {:.3f} effective bits, measured {:.4e} against {:.4e}", round + 1, bits, target.of(now), target.limit));
    }
  }
}

/// The smallest that keeps the target, else null.
const Measurement* best_of(const std::vector<Measurement>& tried, const Target& target) {
  const Measurement* best = nullptr;
  for (const Measurement& m : tried)
    if (target.of(m) <= target.limit && (!best || bytes_of(m.choice) < bytes_of(best->choice))) best = &m;
  return best;
}

[[noreturn]] void fail_target(const std::string& plan, const std::vector<Measurement>& tried, const Target& target, const plan::Candidates& candidates) {
  const Measurement* lowest = nullptr;
  for (const Measurement& m : tried)
    if (m.measured && (!lowest || target.of(m) < target.of(*lowest))) lowest = &m;
  if (!lowest)
    fail(
        ErrorKind::kInfeasible, plan,
        "asked for at most {:.4e} nats; the damage-curve gate rejects each of {} that were tried ({}); score wider schemes (kvsens --candidates) or allow more",
        target.limit, counted(tried.size(), "plan"), damage_text(tried.back().damage));
  fail(ErrorKind::kInfeasible, plan,
       "asked for at most {:.4e} nats; the lowest of {} measured {:.4e} at {:.3f} effective bits; score wider schemes (kvsens --candidates) or allow more",
       target.limit, counted(tried.size(), "plan"), target.of(*lowest), plan::effective_bits(bytes_of(lowest->choice), candidates.elements()));
}

/// What the gate found, for the plan's decision.
plan::Reason damage_reason(const std::optional<sens::DamageGate>& gate, const std::vector<Rejection>& rejections) {
  if (!gate) return {"damage", fmt::format("no document has {}: the damage-curve gate rejects nothing", counted(sens::kLeastScores, "token")), {}};
  const sens::DamageCurve& curve = gate->curve();
  plan::Reason out{"damage", "", {{"curve_ppl_ratio", curve.points.back().ppl_ratio}, {"curve_x", curve.points.back().x}}};
  if (curve.rejects_from) {
    out.text =
        fmt::format("damage-curve gate on {}: a perplexity ratio of {:g} is predicted from x = {:.3g} on; {} rejected", counted(curve.n_documents, "document"),
                    sens::kRuinedPplRatio, *curve.rejects_from, rejections.empty() ? "nothing" : counted(rejections.size(), "plan"));
    out.numbers.emplace_back("rejects_from", *curve.rejects_from);
  } else {
    out.text = fmt::format(
        "damage-curve gate on {}: noise on every key never raises perplexity {:g} times (at most {:.2f} times, x = {:.3g}): it rejects nothing",
        counted(curve.n_documents, "document"), sens::kRuinedPplRatio, sens::predicted_ppl_ratio(curve.points, curve.points.back().x), curve.points.back().x);
  }
  for (const Rejection& r : rejections) {
    out.text += fmt::format("; unmeasured: {} ({})", r.name, damage_text(r.damage));
    out.numbers.emplace_back(r.key + "_x", r.damage.x), out.numbers.emplace_back(r.key + "_ppl_ratio", r.damage.predicted_ppl_ratio);
  }
  return out;
}

/// In place of what an earlier run said by the same rule.
void put_reason(plan::Plan& plan, plan::Reason reason) {
  std::erase_if(plan.decision, [&](const plan::Reason& r) { return r.rule == reason.rule; });
  plan.decision.push_back(std::move(reason));
}

/// Layers' options of a uniform baseline; empty for one that is not a single pair.
std::vector<plan::LayerOption> uniform_choice(const plan::Candidates& candidates, const plan::Baseline& baseline) {
  const std::size_t colon = baseline.pair.find(':');
  if (colon == std::string::npos) return {};
  const sens::SensResult& sens = candidates.sens();
  const auto find = [](const auto& list, const auto& value) { return static_cast<std::size_t>(std::find(list.begin(), list.end(), value) - list.begin()); };
  const std::size_t k = find(sens.schemes, baseline.pair.substr(0, colon)), v = find(sens.schemes, baseline.pair.substr(colon + 1));
  std::size_t w = 0;
  while (w < sens.windows.size() && (sens.windows[w] != baseline.window_tokens || sens.salient_fraction(w) > 0)) ++w;
  if (k == sens.schemes.size() || v == sens.schemes.size() || w == sens.windows.size()) return {};
  std::vector<plan::LayerOption> choice;
  for (std::size_t l = 0; l < candidates.n_layers(); ++l) choice.push_back(candidates.option(l, k, v, w));
  return choice;
}

/// Whether static ranges that are raised as a sequence grows lose less than those of calibration, document by document.
struct RefreshVerdict {
  std::int64_t interval = 0;              ///< 0: calibration's ranges are as good
  std::optional<plan::Measured> measured; ///< with this interval; empty if there was nothing to compare
  plan::Reason reason;
};

RefreshVerdict choose_refresh(const plan::Candidates& candidates, const std::vector<plan::LayerOption>& choice, const std::vector<std::int64_t>& intervals,
                              const Inputs& in, JointVerifier& verifier) {
  std::vector<sens::Contender> runs = {contender_of(candidates, choice, "the plan", in.corpus)};
  for (sens::LayerChange& layer : runs.front().layers) layer.scale_refresh = 0;
  std::vector<std::int64_t> tried;
  for (const std::int64_t interval : intervals)
    if (std::optional<sens::Contender> refreshed = sens::refreshed_contender(runs.front(), in.identity, interval); refreshed && interval < in.corpus.longest())
      runs.push_back(std::move(*refreshed)), tried.push_back(interval);
  if (tried.empty())
    return {0,
            {},
            {"scale_refresh",
             "nothing to refresh: no unit has one static range a unit or KV head without center, smooth or had, or no document is longer than the interval",
             {}}};
  const std::vector<sens::EvalContender> results = verifier.measure(runs, "scale refresh");
  const std::vector<double>& fixed = results.front().document_kld;
  RefreshVerdict out{0, verifier.measured(results.front()), {"scale_refresh", "", {{"static", results.front().total.kld.mean}}}};
  double best = 0;
  for (std::size_t i = 0; i < tried.size(); ++i) {
    const sens::EvalContender& raised = results[i + 1];
    std::vector<double> less;
    for (std::size_t d = 0; d < fixed.size(); ++d) less.push_back(fixed[d] - raised.document_kld[d]);
    const sens::MeanSe gain = sens::over_documents(less);
    out.reason.numbers.emplace_back(fmt::format("refresh_{}", tried[i]), raised.total.kld.mean);
    out.reason.text += fmt::format("{}every {}: mean KL {:.3e}, {:.1e} +- {:.1e} less than with calibration's ranges", i == 0 ? "" : "; ",
                                   counted(tried[i], "token"), raised.total.kld.mean, gain.mean, gain.se);
    if (less.size() > 1 && gain.mean > 2 * gain.se && gain.mean > best) best = gain.mean, out.interval = tried[i], out.measured = verifier.measured(raised);
  }
  out.reason.text +=
      out.interval > 0 ? fmt::format("; raised every {}", counted(out.interval, "token")) : "; none is better by more than 2 SE: calibration's ranges stay";
  return out;
}

void print_result(const plan::Plan& plan, const std::vector<Rejection>& rejections, const std::string& note, const std::string& output) {
  if (const auto& p = plan.summary.predicted; p && p->joint)
    fmt::print("{} joint runs: measured = {:.2f} x predicted, Spearman {:.3f}, R2 {:.3f}, worst factor {:.2f}, ln PPL ratio = {:.2f} x KL{}\n",
               p->joint->n_runs, p->joint->slope, p->joint->spearman, p->joint->r2, p->joint->worst_factor, p->joint->kappa,
               p->joint->reliable() ? "" : "; predictions are unreliable, only measured plans count");
  fmt::print("{:>8}  {:>24}  plan\n", "bits", "measured KL ± SE");
  const bool has_error = plan.summary.measured->has_error();
  const auto line = [&](double bits, double kld, double se, const std::string& name) {
    fmt::print("{:>8.3f}  {:>11.4e} ± {:>9}  {}\n", bits, kld, has_error ? fmt::format("{:.2e}", se) : "-", name);
  };
  line(plan.summary.effective_bits, plan.summary.measured->kld, plan.summary.measured->kld_se, "this plan");
  for (const plan::Baseline& b : plan.baselines)
    if (b.measured_kld) line(b.effective_bits, *b.measured_kld, b.measured_se.value_or(0), b.description);
  for (const Rejection& r : rejections) fmt::print("{:>8.3f}  {:>24}  {} ({})\n", r.bits, "rejected", r.name, damage_text(r.damage));
  for (const plan::Reason& r : plan.decision)
    if (r.rule == "damage") fmt::print("{}\n", r.text.substr(0, r.text.find("; unmeasured")));
  if (!note.empty()) fmt::print("{}\n", note);
  fmt::print("{}\n", output);
}

}  // namespace

int run_refine(const RefineCommand& options, const Invocation& call) {
  require_model_and_data(options.run);
  if (options.plan.empty() || options.sens.empty()) fail(ErrorKind::kUsage, "kvsens refine", "needs --plan and the --sens that it was made from");
  std::vector<std::string> files = inputs_of(options.run);
  files.push_back(options.sens);
  if (options.output != options.plan) files.push_back(options.plan);
  for (std::string& file : artifacts::plan_input_files(options.plan))
    if (file != options.plan) files.push_back(std::move(file));
  check_output(options.output, files, kPlanOutput);
  Progress progress(call.verbosity);
  const LogSink log = progress.sink();
  const plan::Plan original = artifacts::read_plan(options.plan, log);
  if (!original.request.imported.empty())
    fail(ErrorKind::kUsage, options.plan, "was imported, not searched: there is nothing to refine; measure it with kvsens evaluate");
  if (!original.request.uniform.empty()) fail(ErrorKind::kUsage, options.plan, "is a uniform plan: there is nothing to refine; measure it with kvsens evaluate");
  const sens::SensResult sens = artifacts::read_sens_file(options.sens);
  if (!sens.params.empty()) artifacts::check_tensor_path(options.output);
  plan::check_same_model(sens.model, options.sens, original.model, options.plan);
  Inputs in = open_inputs(options.run, call, log);
  plan::check_same_model(original.model, options.plan, in.identity, options.run.model);
  check_disjoint(in, sens);
  const plan::SearchRequest request = request_of(original);
  plan::Candidates candidates = plan::candidates_of(sens, request, log);
  if (!candidates.metric_in_nats()) fail(ErrorKind::kUsage, options.plan, "spends {}, which is not in nats and predicts no KL", candidates.metric());
  const std::vector<plan::LayerOption> choice = plan::choice_of(candidates, original);

  std::vector<std::vector<plan::LayerOption>> runs = {choice};
  std::vector<std::size_t> measured_baselines;
  for (std::size_t b = 0; b < original.baselines.size(); ++b) {
    std::vector<plan::LayerOption> uniform = uniform_choice(candidates, original.baselines[b]);
    if (uniform.empty() || !original.baselines[b].feasible) continue;
    measured_baselines.push_back(b), runs.push_back(std::move(uniform));
  }
  const std::size_t first_sample = runs.size();
  for (auto& sample :
       plan::joint_samples(candidates, choice.front().tier_class, static_cast<std::size_t>(options.joint), static_cast<std::uint64_t>(options.run.seed)))
    runs.push_back(std::move(sample));
  for (std::size_t i = 0; i < first_sample; ++i)
    contender_of(candidates, runs[i],
                 i == 0 ? "the plan" : fmt::format("the {} that it is compared with", original.baselines[measured_baselines[i - 1]].description), in.corpus);
  if (options.run.dry_run) {
    fmt::print("runs       {}, the plan, {}\ntime       about {}\n", counted(runs.size() - first_sample, "joint run"),
               counted(measured_baselines.size(), "baseline"),
               format_duration(1.2 * (static_cast<double>(runs.size() + 3) + damage_passes(in, sens.n_sinks)) * forward_seconds(in)));
    return 0;
  }

  progress.say(fmt::format("{}: the plan, {} and {} on {}, {}", in.identity.name, counted(measured_baselines.size(), "baseline"),
                           counted(runs.size() - first_sample, "combination"), counted(in.corpus.identity.n_documents, "document"),
                           counted(in.corpus.identity.n_tokens, "token")));
  JointVerifier verifier(in, candidates, options.run.hidden_mem, original.monitor.ppl_ratio_max, call, progress, static_cast<std::uint64_t>(options.run.seed), log);
  const std::vector<sens::EvalDamage> damage = verifier.judge({runs.begin(), runs.begin() + static_cast<std::ptrdiff_t>(first_sample)});
  std::vector<Rejection> rejections;
  std::vector<std::optional<plan::Measured>> results(runs.size());
  std::vector<std::vector<plan::LayerOption>> admitted;
  std::vector<std::size_t> admitted_at;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (i < first_sample && damage[i].rejected) {
      const plan::Baseline* const baseline = i == 0 ? nullptr : &original.baselines[measured_baselines[i - 1]];
      reject(rejections,
             {baseline ? baseline->description : "the plan", baseline ? baseline->name : "plan", plan::effective_bits(bytes_of(runs[i]), candidates.elements()),
              damage[i]},
             progress);
      continue;
    }
    admitted.push_back(runs[i]), admitted_at.push_back(i);
  }
  if (!admitted.empty()) {
    const std::vector<plan::Measured> measured = verifier.measure(admitted, "joint runs");
    for (std::size_t i = 0; i < measured.size(); ++i) results[admitted_at[i]] = measured[i];
  }
  std::optional<plan::JointFit> fit;
  std::vector<plan::JointRun> joint;
  for (std::size_t i = first_sample; i < runs.size(); ++i)
    if (const double predicted = plan::unfitted_score(candidates, runs[i]); predicted > 0 && results[i]->kld > 0)
      joint.push_back({predicted, results[i]->kld, std::log(results[i]->ppl_ratio), 0, results[i]->kld_se});
  if (joint.size() >= plan::kLeastJointRuns) fit = plan::fit_joint(joint);

  plan::Plan refined = original;
  std::optional<plan::Measured> loss = results.front();
  std::string note;
  const Target target{original.request.budget.rfind("max-ppl-ratio", 0) == 0, original.request.max_kl, candidates.kappa()};
  if (target.limit > 0) {
    std::vector<Measurement> tried = {{choice, loss, damage.front()}};
    repair(candidates, request, target, verifier, tried, rejections, progress);
    const Measurement* best = best_of(tried, target);
    if (!best) fail_target(options.plan, tried, target, candidates);
    loss = best->measured;
    if (!same(best->choice, choice)) {
      refined = plan::plan_of(candidates, plan::found_of(candidates, best->choice), {}, request);
      refined.request = original.request;
      note =
          fmt::format("the plan now takes {:.3f} effective bits instead of {:.3f}, by {}{}", refined.summary.effective_bits, original.summary.effective_bits,
                      counted(static_cast<std::size_t>(std::count_if(tried.begin(), tried.end(), [](const Measurement& m) { return m.measured.has_value(); })),
                              "measurement"),
                      damage.front().rejected ? ": the damage-curve gate rejected the searched one" : "");
    }
  }
  const bool comparable = loss && loss->has_error();
  if (loss && !comparable && target.limit == 0 && !measured_baselines.empty())
    note = fmt::format("the searched plan is kept unjudged: {} has no standard error to compare simpler plans by; give two or more (--num-samples)",
                       counted(loss->n_documents, "document"));
  // Errors of both are taken as independent; on the same rows they are not, so the plan has to be better by more than it would need to be.
  // A rejected plan gives way to the best that fits its budget.
  const std::int64_t most_bytes = loss ? refined.summary.bytes : std::max(refined.summary.bytes, original.request.budget_bytes);
  std::optional<std::size_t> simpler;
  for (std::size_t i = 0; (comparable || !loss) && target.limit == 0 && i < measured_baselines.size(); ++i) {
    const std::optional<plan::Measured>& b = results[1 + i];
    if (!b || bytes_of(runs[1 + i]) > most_bytes || (simpler && b->kld >= results[1 + *simpler]->kld)) continue;
    if (!loss || loss->kld + 2 * std::hypot(loss->kld_se, b->kld_se) >= b->kld) simpler = i;
  }
  if (!loss && !simpler)
    fail(ErrorKind::kInfeasible, options.plan,
         "the damage-curve gate rejects the plan ({}), and no baseline that fits the budget passes it; give a larger budget, or score wider schemes (kvsens "
         "--candidates)",
         damage_text(damage.front()));
  if (simpler) {
    loss = results[1 + *simpler];
    refined = plan::plan_of(candidates, plan::found_of(candidates, runs[1 + *simpler]), {}, request);
    refined.request = original.request;
    const std::string& name = original.baselines[measured_baselines[*simpler]].description;
    note = damage.front().rejected ? fmt::format("the damage-curve gate rejects the searched plan: the {} is written", name)
                                   : fmt::format("the searched plan is not better than the {} by more than 2 standard errors: the simpler one is written", name);
  }
  put_reason(refined, damage_reason(verifier.gate(), rejections));
  if (const std::vector<std::int64_t> intervals = parse_intervals(options.scale_refresh); !intervals.empty()) {
    RefreshVerdict verdict = choose_refresh(candidates, plan::choice_of(candidates, refined), intervals, in, verifier);
    if (verdict.measured) {
      plan::SearchRequest raised = request;
      raised.accounting.scale_refresh_tokens = static_cast<int>(verdict.interval);
      const plan::Candidates counted_anew = plan::candidates_of(sens, raised, log);
      plan::Plan with_refresh = plan::plan_of(counted_anew, plan::found_of(counted_anew, plan::choice_of(counted_anew, refined)), {}, raised);
      with_refresh.request = original.request;
      if (original.request.budget_bytes > 0 && with_refresh.summary.bytes > original.request.budget_bytes)
        verdict.reason.text += fmt::format(", but its ranges by page take {} bytes more than the budget leaves: not recorded",
                                           with_refresh.summary.bytes - original.request.budget_bytes);
      else
        with_refresh.decision.push_back(refined.decision.back()), refined = std::move(with_refresh), loss = *verdict.measured;
    }
    if (!note.empty()) note += "\n";
    note += "scale refresh: " + verdict.reason.text;
    put_reason(refined, std::move(verdict.reason));
  }
  refined.baselines = original.baselines;
  for (std::size_t i = 0; i < measured_baselines.size(); ++i) {
    plan::Baseline& b = refined.baselines[measured_baselines[i]];
    b.measured_kld.reset(), b.measured_se.reset();
    if (const std::optional<plan::Measured>& m = results[1 + i]) b.measured_kld = m->kld, b.measured_se = m->kld_se;
  }
  refined.summary.measured = loss;
  refined.monitor.length_limit = loss->length_limit;
  if (refined.summary.predicted && fit) {
    refined.summary.predicted->joint = fit;
    refined.summary.predicted->joint->slope *= fit->level(fit->slope * refined.summary.predicted->score);
    refined.summary.predicted->unfitted = false;
  }
  refined.provenance = in.provenance;
  refined.provenance.seconds = call.seconds();
  refined.provenance.parents = original.provenance.parents;
  refined.provenance.parents.emplace_back("plan", sha256_of_file(options.plan));
  refined.provenance.parents.emplace_back("sens", sha256_of_file(options.sens));
  if (const std::vector<std::string> problems = plan::verify_plan(refined); !problems.empty())
    throw Error(ErrorKind::kInternal, "kvsens refine", "the plan does not hold when counted again", problems);
  artifacts::write_plan(refined, options.output);
  if (call.json) {
    nlohmann::ordered_json j = {{"plan", options.output},
                                {"effective_bits", refined.summary.effective_bits},
                                {"measured", {{"kl", loss->kld}, {"kl_se", loss->kld_se}, {"ppl_ratio", loss->ppl_ratio}}},
                                {"note", note}};
    if (verifier.gate() && verifier.gate()->curve().rejects_from) j["rejects_from"] = *verifier.gate()->curve().rejects_from;
    j["rejected"] = nlohmann::ordered_json::array();
    for (const Rejection& r : rejections)
      j["rejected"].push_back({{"name", r.name},
                               {"effective_bits", r.bits},
                               {"x", r.damage.x},
                               {"worst_layer", r.damage.worst_layer},
                               {"predicted_ppl_ratio", r.damage.predicted_ppl_ratio}});
    if (fit)
      j["joint"] = {{"runs", fit->n_runs},        {"slope", fit->slope}, {"kappa", fit->kappa},
                    {"spearman", fit->spearman},  {"r2", fit->r2},       {"worst_factor", fit->worst_factor},
                    {"reliable", fit->reliable()}};
    fmt::print("{}\n", j.dump(2));
  } else {
    print_result(refined, rejections, note, options.output);
  }
  return 0;
}

}  // namespace calib::tools
