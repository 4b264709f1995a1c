#include <algorithm>
#include <cmath>
#include <map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/plan_file.h"
#include "libcalib/base/plural.h"
#include "libcalib/base/sha256.h"
#include "libcalib/base/thread_pool.h"
#include "libcalib/base/utf8.h"
#include "libcalib/sens/drift_walk.h"
#include "libcalib/sens/evaluate.h"
#include "tools/kvsens/inputs.h"
#include "tools/kvsens/run.h"

namespace calib::tools {
namespace {

/// Fewer fresh tokens than this in fewer documents say little about a distribution (METHODS.md 10).
constexpr std::int64_t kLeastDocuments = 8, kLeastTokens = 16384;
/// A monitor warns at this share of the way to its limit.
constexpr double kNearLimit = 0.9;

void check_enough_text(const text::Corpus& corpus, std::int64_t n_sinks) {
  if (corpus.identity.n_documents < kLeastDocuments && corpus.identity.n_tokens < kLeastTokens)
    fail(ErrorKind::kInfeasible, "--data", "{} with {} are too few to tell drift from chance; give {} documents or {} tokens, for example by a smaller "
         "--seq-len", counted(corpus.identity.n_documents, "document"), counted(corpus.identity.n_tokens, "token"), kLeastDocuments, kLeastTokens);
  if (corpus.longest() <= n_sinks)
    fail(ErrorKind::kInfeasible, "--data", "the longest document has {}, and the first {} are sinks, which count apart: nothing is left to compare",
         counted(corpus.longest(), "token"), n_sinks);
}

/// Mean KLD and perplexity ratio of the plan on the fresh text.
std::vector<stats::MonitorSignal> measure_monitor(const Inputs& in, const sens::Contender& plan, const plan::Monitor& limits, const RunOptions& run,
                                                  ThreadPool& pool, const LogSink& log, const sens::EvaluateProgressFn& progress) {
  sens::EvaluateOptions settings;
  settings.hidden_memory_bytes = run.hidden_mem;
  sens::EvalResult result;
  sens::evaluate(*in.model, in.corpus.documents, {plan}, settings, pool, &result, log, progress);
  const sens::EvalContender& measured = result.contenders.front();
  stats::MonitorSignal kld{"mean_kld", measured.total.kld.mean, measured.total.kld.se, kNearLimit * limits.kl_max, limits.kl_max, {}};
  stats::MonitorSignal ppl{
      "ppl_ratio", measured.total.ppl_ratio.mean, measured.total.ppl_ratio.se, 1 + kNearLimit * (limits.ppl_ratio_max - 1), limits.ppl_ratio_max, {}};
  for (const sens::EvalBucket& b : measured.buckets) kld.buckets.push_back(b.block.kld.mean), ppl.buckets.push_back(b.block.ppl_ratio.mean);
  return {std::move(kld), std::move(ppl)};
}

/// Rows by position bucket that the calibration had.
std::vector<std::int64_t> calibrated_rows(const artifacts::StatsReader& statistics) {
  const std::vector<std::int64_t>& scored = statistics.reference().nll_count;
  if (!scored.empty()) return scored;
  return std::vector<std::int64_t>(static_cast<std::size_t>(position_bucket(std::max<std::int64_t>(1, statistics.header().data.seq_len) - 1)) + 1, 1);
}

/// What the plan offers next, "" without one.
std::string next_rung(const plan::Plan& plan) {
  if (plan.fallback.empty()) return "";
  const plan::Rung& rung = plan.fallback.front();
  return fmt::format("raise {} to {:.3f} effective bits (first rung of the plan's fallback)", counted(rung.changes.size(), "unit"), rung.effective_bits);
}

nlohmann::ordered_json number(double x) { return std::isfinite(x) ? nlohmann::ordered_json(x) : nlohmann::ordered_json(nullptr); }

void print_json(const stats::DriftReport& report, const Inputs& in, const Provenance& provenance, const std::string& rung) {
  nlohmann::ordered_json j = {{"schema", {{"name", "kvcalib.drift"}, {"version", 1}}},
                              {"decision", stats::drift_decision_name(report.decision)},
                              {"reasons", report.reasons},
                              {"documents", in.corpus.identity.n_documents},
                              {"tokens", in.corpus.identity.n_tokens},
                              {"unseen_share", report.unseen_share}};
  if (!rung.empty()) j["next_rung"] = rung;
  j["monitor"] = nlohmann::ordered_json::array();
  for (const stats::MonitorSignal& m : report.monitor)
    j["monitor"].push_back({{"name", m.name}, {"value", m.value}, {"se", m.se}, {"warn", m.warn}, {"limit", m.limit}, {"level", stats::drift_level_name(m.level())},
                            {"by_bucket", m.buckets}});
  j["units"] = nlohmann::ordered_json::array();
  for (const stats::UnitDrift& unit : report.units) {
    nlohmann::ordered_json signals = nlohmann::ordered_json::array();
    for (const stats::DriftSignal& s : unit.signals)
      signals.push_back({{"name", s.name}, {"head", s.head}, {"value", number(s.value)}, {"se", s.se}, {"warn", s.warn}, {"limit", s.limit},
                         {"level", stats::drift_level_name(s.level())}});
    j["units"].push_back({{"layer", unit.layer}, {"side", side_name(unit.side)}, {"level", stats::drift_level_name(unit.level())}, {"signals", signals}});
  }
  nlohmann::ordered_json parents = nlohmann::ordered_json::object();
  for (const auto& [role, sha] : provenance.parents) parents[role] = sha;
  j["provenance"] = {{"tool", provenance.tool},
                     {"version", provenance.version},
                     {"started_utc", provenance.started_utc},
                     {"seconds", provenance.seconds},
                     {"parents", parents}};
  fmt::print("{}\n", j.dump(2));
}

void print_table(const stats::DriftReport& report, const Inputs& in, const std::string& rung) {
  fmt::print("{}, {} against the calibration, {}\n", counted(in.corpus.identity.n_documents, "document"), counted(in.corpus.identity.n_tokens, "token"),
             counted(report.units.size(), "unit"));
  fmt::print("{:<18}  {:>5}  {:>5}  {:>10}  {:>10}  {:>22}  at\n", "signal", "warn", "out", "warn above", "out above", "worst ± SE");
  struct Row {
    int n_warn = 0, n_out = 0;
    const stats::DriftSignal* worst = nullptr;
    const stats::UnitDrift* unit = nullptr;
  };
  std::vector<std::string> order;
  std::map<std::string, Row> rows;
  for (const stats::UnitDrift& unit : report.units) {
    for (const stats::DriftSignal& s : unit.signals) {
      Row& row = rows[s.name];
      if (!row.worst) order.push_back(s.name);
      row.n_warn += s.level() == stats::DriftLevel::kWarn, row.n_out += s.level() == stats::DriftLevel::kOut;
      if (!row.worst || s.value > row.worst->value) row.worst = &s, row.unit = &unit;
    }
  }
  for (const std::string& name : order) {
    const Row& row = rows[name];
    const std::string head = row.worst->head < 0 ? "" : fmt::format(" {} {}", name == "query_shift" ? "query head" : "head", row.worst->head);
    fmt::print("{:<18}  {:>5}  {:>5}  {:>10.3g}  {:>10.3g}  {:>11.4g} ± {:>8.2g}  layer {} {}{}\n", name, row.n_warn, row.n_out, row.worst->warn, row.worst->limit,
               row.worst->value, row.worst->se, row.unit->layer, side_name(row.unit->side), head);
  }
  for (const stats::MonitorSignal& m : report.monitor)
    fmt::print("{:<18}  {:>5}  {:>5}  {:>10.3g}  {:>10.3g}  {:>11.4g} ± {:>8.2g}  the plan\n", m.name, m.level() == stats::DriftLevel::kWarn ? 1 : 0,
               m.level() == stats::DriftLevel::kOut ? 1 : 0, m.warn, m.limit, m.value, m.se);
  fmt::print("{:<18}  {:>5}  {:>5}  {:>10.3g}  {:>10.3g}  {:>11.4g}\n", "unseen_positions",
             report.unseen_share > stats::kUnseenWarn && report.unseen_share <= stats::kUnseenLimit ? 1 : 0, report.unseen_share > stats::kUnseenLimit ? 1 : 0,
             stats::kUnseenWarn, stats::kUnseenLimit, report.unseen_share);
  fmt::print("\ndecision: {}\n", stats::drift_decision_name(report.decision));
  for (const std::string& reason : report.reasons) fmt::print("  {}\n", reason);
  if (!rung.empty()) fmt::print("  next: {}\n", rung);
  if (report.decision == stats::DriftDecision::kRecalibrate) fmt::print("  next: run kvcalib, kvsens and kvplan on text like this\n");
}

}  // namespace

int run_drift(const DriftCommand& options, const Invocation& call) {
  require_model_and_data(options.run);
  if (options.stats.empty()) fail(ErrorKind::kUsage, "kvsens drift", "needs --stats, the file of kvcalib that fresh text is compared with");
  Progress progress(call.verbosity);
  const LogSink log = progress.sink();
  Inputs in = open_inputs(options.run, call, log);
  const Statistics statistics(options.stats, in.identity, options.run.model);
  const artifacts::StatsReader& reader = statistics.reader();
  check_enough_text(in.corpus, reader.header().n_sinks);
  std::optional<plan::Plan> plan;
  std::optional<sens::Contender> contender;
  if (!options.plan.empty()) {
    plan = artifacts::read_plan(options.plan, log);
    contender = plan_contender(options.plan, *plan, in.identity, options.run.model);
    in.provenance.parents.emplace_back("plan", contender->header.plan_sha256);
  }
  in.provenance.parents.emplace_back("stats", sha256_of_file(options.stats));
  if (same_text(in.corpus.identity, reader.header().data)) log.warning("compared with its own text: nothing can have drifted");
  model::RunnerOptions runner;
  runner.hidden_memory_bytes = options.run.hidden_mem;
  runner.seed = static_cast<std::uint64_t>(options.run.seed);
  if (options.run.dry_run) {
    const double passes = 1.5 + (contender ? 4.0 : 0.0);  // the walk with its counts; plan, reference, noise floor and negative control
    fmt::print("text       {}, {}\ntime       about {} ({:.1f} bare forward passes)\n", counted(in.corpus.identity.n_documents, "document"),
               counted(in.corpus.identity.n_tokens, "token"), format_duration(passes * forward_seconds(in)), passes);
    return 0;
  }

  progress.say(fmt::format("{}: {} fresh, {}, calibrated on {}, {}{}", in.identity.name, counted(in.corpus.identity.n_documents, "document"),
                           counted(in.corpus.identity.n_tokens, "token"), counted(reader.header().data.n_documents, "document"),
                           counted(reader.header().data.n_tokens, "token"), contender ? "; plan and its limits" : ""));
  ThreadPool pool(call.n_threads());
  PhaseProgress phases(progress, call, in.corpus.identity.n_tokens);
  stats::DriftReport report;
  report.unseen_share = sens::unseen_share(in.corpus.documents, calibrated_rows(reader));
  report.units = sens::measure_drift(*in.model, in.corpus.documents, [&](std::size_t i) { return reader.layer(i); }, contender ? &*contender : nullptr, runner, pool,
                                     [&](const model::RunProgress& p) { phases.update("compare", p.done, p.total); });
  if (contender)
    report.monitor = measure_monitor(in, *contender, plan->monitor, options.run, pool, log,
                                     [&](const sens::EvaluateProgress& p) { phases.update("plan", p.done, p.total); });
  progress.clear();
  stats::decide_drift(report);
  in.provenance.seconds = call.seconds();
  const std::string rung = plan && report.decision == stats::DriftDecision::kStepUp ? next_rung(*plan) : "";
  if (call.json) print_json(report, in, in.provenance, rung);
  else print_table(report, in, rung);
  return report.decision == stats::DriftDecision::kStepUp || report.decision == stats::DriftDecision::kRecalibrate ? 1 : 0;
}

}  // namespace calib::tools
