#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/sens_file.h"
#include "libcalib/base/plural.h"
#include "libcalib/base/sha256.h"
#include "libcalib/base/thread_pool.h"
#include "libcalib/base/utf8.h"
#include "libcalib/plan/budget.h"
#include "libcalib/plan/two_stage.h"
#include "libcalib/plan/verify.h"
#include "libcalib/sens/sweep.h"
#include "tools/common/option_values.h"
#include "tools/kvsens/inputs.h"
#include "tools/kvsens/run.h"

namespace calib::tools {
namespace {

using nlohmann::ordered_json;

/// A run that never reaches a coded token would measure its scheme as free.
void check_something_is_coded(const sens::SensResult& sens, const std::vector<std::uint8_t>& cells, std::int64_t longest) {
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (!cells[i]) continue;
    const std::size_t w = i % sens.windows.size(), s = i / sens.windows.size() % sens.schemes.size();
    const kvrt::Tiers tiers = sens::isolated_tiers(quant::parse_scheme(sens.schemes[s]), sens.n_sinks, sens.windows[w], sens.salient_fraction(w));
    if (kvrt::blocks_out(tiers, longest) == 0)
      fail(ErrorKind::kInfeasible, "--data",
           "the longest document has {}, too short for {} behind {} and a window of {}: nothing of it would be coded before {}; give "
           "longer text or a larger --seq-len",
           counted(longest, "token"), sens.schemes[s], counted(sens.n_sinks, "sink"), sens.windows[w],
           counted(sens.n_sinks + sens.windows[w] + tiers.exit_block(), "token"));
  }
}

std::string cell_text(const sens::SensResult& sens, std::size_t cell) {
  const std::size_t w = cell % sens.windows.size(), s = cell / sens.windows.size() % sens.schemes.size();
  const sens::UnitId& unit = sens.units[cell / (sens.windows.size() * sens.schemes.size())];
  return fmt::format("layer {} {} {}, window {}{}", unit.layer, side_name(unit.side), sens.schemes[s], sens.windows[w],
                     quant::tier_text(sens.salient_fraction(w), sens.salient_scheme));
}

/// The lowest decade of a side in which estimates stop being true, and all above it that were measured say no better; empty if the highest one holds.
std::optional<double> stops_at(const std::vector<plan::TruthBucket>& buckets, Side side) {
  std::optional<double> stop;
  for (auto b = buckets.rbegin(); b != buckets.rend(); ++b) {
    if (b->side != side) continue;
    if (b->holds) break;
    stop = std::pow(10.0, b->decade);
  }
  return stop;
}

void print_result(const sens::SensResult& sens, std::size_t n_runs, const std::string& output, bool as_json) {
  const sens::IsolatedRuns& runs = *sens.isolated;
  const std::vector<double>& estimate = sens.scores.at(runs.metric).mean;
  const std::vector<plan::TruthBucket> buckets = plan::truth_by_decade(sens, runs);
  const std::int64_t farthest = plan::farthest_cell(sens, runs);
  const auto cell = static_cast<std::size_t>(std::max<std::int64_t>(farthest, 0));
  const auto n_taken = std::count(runs.taken_up.begin(), runs.taken_up.end(), 1);
  if (as_json) {
    ordered_json j = {{"sens", to_valid_utf8(output)}, {"metric", runs.metric}, {"above", runs.above}, {"runs", n_runs}, {"units", ordered_json::array()}};
    for (std::size_t u = 0; u < sens.units.size(); ++u)
      if (runs.taken_up[u]) j["units"].push_back({{"layer", sens.units[u].layer}, {"side", side_name(sens.units[u].side)}});
    for (const Side side : {Side::kK, Side::kV}) {
      const sens::IsolatedRuns::Slope& slope = runs.slope(side);
      const std::optional<double> stop = stops_at(buckets, side);
      j["slope"][side_name(side)] = {{"value", slope.value}, {"se_ln", slope.se_ln}, {"pairs", slope.n_pairs}};
      j["stops_at"][side_name(side)] = stop ? ordered_json(*stop) : ordered_json();
    }
    j["decades"] = ordered_json::array();
    for (const plan::TruthBucket& b : buckets)
      j["decades"].push_back(
          {{"side", side_name(b.side)}, {"from", std::pow(10.0, b.decade)}, {"pairs", b.n}, {"ratio", b.ratio}, {"sd_ln", b.sd}, {"holds", b.holds}});
    if (farthest >= 0) j["farthest"] = {{"option", cell_text(sens, cell)}, {"estimate", estimate[cell]}, {"logit_kl", runs.mean[cell]}};
    fmt::print("{}\n", j.dump(2));
    return;
  }
  fmt::print("{:<20}{:>6}{:>24}{:>10}\n", runs.metric + ", nats", "pairs", "logit_kl / estimate", "sd ln");
  for (const plan::TruthBucket& b : buckets)
    fmt::print("{} {:<18}{:>6}{:>24.2f}{:>10.2f}{}\n", side_name(b.side), fmt::format("1e{} to 1e{}", b.decade, b.decade + 1), b.n, b.ratio, b.sd,
               b.holds ? "" : "  not true");
  for (const Side side : {Side::kK, Side::kV}) {
    const sens::IsolatedRuns::Slope& slope = runs.slope(side);
    const std::optional<double> stop = stops_at(buckets, side);
    fmt::print("{}: logit_kl = {:.2f} x {} (+- {:.0f} %, {} from {:g} to {:g} nats); {}\n", side_name(side), slope.value, runs.metric, 100 * slope.se_ln,
               counted(slope.n_pairs, "pair"), runs.above / plan::kTrustedSpan, runs.above,
               stop ? fmt::format("stops being true at {:g} nats", *stop) : std::string("true as far as it was measured"));
  }
  if (farthest >= 0) fmt::print("farthest off: {}, {:.3e} estimated, {:.3e} measured\n", cell_text(sens, cell), estimate[cell], runs.mean[cell]);
  if (n_taken == 0) fmt::print("no surviving option scores above {:g} nats: no score is replaced\n", runs.above);
  else fmt::print("{} of {} replaced: {}\n", n_taken, counted(sens.units.size(), "unit"), plan::units_taken_up(sens, runs));
  fmt::print("{}\n", to_valid_utf8(output));
}

}  // namespace

int run_isolate(const IsolateCommand& options, const Invocation& call) {
  require_model_and_data(options.run);
  if (options.sens.empty()) fail(ErrorKind::kUsage, "kvsens isolate", "needs --sens with the scores that are to be replaced where they fail");
  const double above = plan::parse_above(0, options.above, "--above", "0.02");
  const std::vector<int> layers = parse_layers("--layers", split_list("--layers", options.layers));
  std::vector<std::string> files = inputs_of(options.run);
  if (options.output != options.sens) files.push_back(options.sens);
  check_output(options.output, files, kSensOutput);
  Progress progress(call.verbosity);
  const LogSink log = progress.sink();
  sens::SensResult sens = artifacts::read_sens_file(options.sens);
  const std::string sens_sha256 = sha256_of_file(options.sens);
  if (sens.joint)
    log.warning(fmt::format("the {} of {} are left out: their combinations were chosen by the scores that are replaced; run kvsens joint on the result",
                            counted(sens.joint->size(), "joint run"), to_valid_utf8(options.sens)));
  sens.joint.reset();
  sens.isolated.reset();
  Inputs in = open_inputs(options.run, call, log);
  plan::check_same_model(sens.model, options.sens, in.identity, options.run.model);
  const plan::Candidates candidates(sens, plan::Accounting{}, options.metric, log);
  if (!candidates.metric_in_nats() || candidates.metric() == "logit_kl")
    fail(ErrorKind::kUsage, "--metric " + candidates.metric(), "{}; use one of fisher_softmax, fisher_vec, fisher, fisher_dir",
         candidates.metric() == "logit_kl" ? "is what isolated runs measure, there is nothing to replace"
                                           : "is not in nats, so no slope brings logit_kl to its scale");
  // As for kvsens itself any text will do, that of the scores best: what differs from them then is the estimator alone.
  if (same_text(in.corpus.identity, sens.calibration_data))
    log.warning("isolated runs are measured on the text of the statistics; held-out text is the better judge of calibrated schemes");
  const plan::IsolatedChoice choice = plan::choose_isolated(candidates, above, layers);
  const std::size_t n_runs = choice.n_replacing + choice.n_fitting;
  if (n_runs == 0)
    fail(ErrorKind::kInfeasible, "--above",
         "no surviving option is estimated above {:g} nats of {}, nor within a factor {:g} below: nothing to measure; give a lower limit", above,
         candidates.metric(), plan::kTrustedSpan);
  check_something_is_coded(sens, choice.cells, in.corpus.longest());

  sens::IsolatedRuns runs;
  runs.metric = candidates.metric();
  runs.above = above;
  runs.taken_up = choice.taken_up;
  const auto n_taken = std::count(runs.taken_up.begin(), runs.taken_up.end(), 1);
  const std::string work =
      fmt::format("{} for {} of {}, {} for the slope", counted(choice.n_replacing, "run"), n_taken, counted(sens.units.size(), "unit"), choice.n_fitting);
  if (options.run.dry_run) {
    const double passes = sens::isolated_forward_passes(sens, choice.cells), seconds = passes * forward_seconds(in);
    if (call.json)
      fmt::print("{}\n", ordered_json({{"runs", n_runs}, {"replacing", choice.n_replacing}, {"fitting", choice.n_fitting}, {"units", n_taken},
                                       {"predicted", {{"seconds", seconds}, {"forward_passes", passes}}}}).dump(2));
    else
      fmt::print("runs       {}\nunits      {}\ntime       about {} ({:.1f} bare forward passes)\n", work,
                 n_taken == 0 ? "none above the limit" : plan::units_taken_up(sens, runs), format_duration(seconds), passes);
    return 0;
  }

  progress.say(fmt::format("{}: {} on {}, {}", in.identity.name, work, counted(in.corpus.identity.n_documents, "document"),
                           counted(in.corpus.identity.n_tokens, "token")));
  warn_untested_positions(in.identity, in.corpus.identity, log);
  PhaseProgress phases(progress, call, in.corpus.identity.n_tokens);
  ThreadPool pool(call.n_threads());
  sens::ScoreTable measured = sens::measure_isolated(*in.model, in.corpus.documents, sens, choice.cells, options.run.hidden_mem, pool, log,
                                                     [&](const sens::SweepProgress& p) { phases.update(p.phase, p.done, p.total); });
  progress.clear();
  runs.mean = std::move(measured.mean), runs.se = std::move(measured.se);
  plan::fit_slopes(sens, &runs);
  runs.data = in.corpus.identity;
  runs.provenance = in.provenance;
  runs.provenance.seconds = call.seconds();
  runs.provenance.parents.emplace_back("sens", sens_sha256);
  sens.isolated = std::move(runs);
  artifacts::write_sens_file(options.output, sens);
  print_result(sens, n_runs, options.output, call.json);
  return 0;
}

}  // namespace calib::tools
