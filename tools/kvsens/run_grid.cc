#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "kernels/core/layout.h"
#include "libcalib/artifacts/sens_file.h"
#include "libcalib/base/plural.h"
#include "libcalib/base/sha256.h"
#include "libcalib/base/thread_pool.h"
#include "libcalib/base/utf8.h"
#include "libcalib/sens/sweep.h"
#include "tools/common/option_values.h"
#include "tools/kvsens/inputs.h"
#include "tools/kvsens/run.h"

namespace calib::tools {
namespace {

/// One line a scheme: its sum over the units of a side, per metric.
struct Line {
  std::string scheme;
  std::vector<double> k, v;  ///< per metric
};

std::vector<Line> lines_of(const sens::SensResult& result, const std::vector<std::string>& metrics, std::size_t tier_class) {
  std::vector<Line> lines;
  for (std::size_t s = 0; s < result.schemes.size(); ++s) {
    Line line{result.schemes[s], {}, {}};
    for (const std::string& metric : metrics)
      for (const Side side : {Side::kK, Side::kV}) {
        double sum = 0;
        bool any = false;
        for (std::size_t u = 0; u < result.units.size(); ++u) {
          const double mean = result.scores.at(metric).mean[result.index(u, s, tier_class)];
          if (result.units[u].side != side || std::isnan(mean)) continue;
          if (side == Side::kV && metric == "attn_kl") continue;  // 0 by definition: values do not enter the scores
          sum += mean;
          any = true;
        }
        (side == Side::kK ? line.k : line.v).push_back(any ? sum : std::nan(""));
      }
    lines.push_back(std::move(line));
  }
  return lines;
}

/// The first window, with every share of a salient tier; in JSON without one.
void print_summary(const sens::SensResult& result, const std::vector<std::string>& metrics, const std::string& output, double seconds, bool json) {
  if (json) {
    nlohmann::ordered_json j = {{"output", to_valid_utf8(output)}, {"seconds", seconds}, {"units", result.units.size()}, {"schemes", result.schemes.size()},
                                {"windows", result.windows}, {"tokens", result.data.n_tokens}, {"peak_memory_bytes", peak_memory_bytes()}};
    for (const Line& line : lines_of(result, metrics, 0))
      for (std::size_t m = 0; m < metrics.size(); ++m) {
        if (!std::isnan(line.k[m])) j["sum_over_units"][metrics[m]]["K"][line.scheme] = line.k[m];
        if (!std::isnan(line.v[m])) j["sum_over_units"][metrics[m]]["V"][line.scheme] = line.v[m];
      }
    fmt::print("{}\n", j.dump(2));
    return;
  }
  const auto cell = [](double x) { return std::isnan(x) ? std::string("-") : fmt::format("{:.3e}", x); };
  for (std::size_t w = 0; w < result.windows.size(); ++w) {
    if (result.windows[w] != result.windows.front()) continue;
    fmt::print("sum over units, window {}{}\n{:<28}", result.windows[w], quant::tier_text(result.salient_fraction(w), result.salient_scheme), "scheme");
    for (const std::string& metric : metrics) fmt::print("{:>17}{:>17}", metric + " K", metric + " V");
    fmt::print("\n");
    for (const Line& line : lines_of(result, metrics, w)) {
      fmt::print("{:<28}", line.scheme);
      for (std::size_t m = 0; m < metrics.size(); ++m) fmt::print("{:>17}{:>17}", cell(line.k[m]), cell(line.v[m]));
      fmt::print("\n");
    }
  }
  fmt::print("{}: {}, {}, {} in {}, peak memory {}\n", to_valid_utf8(output), counted(result.units.size(), "unit"), counted(result.schemes.size(), "scheme"),
             counted(result.data.n_tokens, "token"), format_duration(seconds), format_bytes(static_cast<double>(peak_memory_bytes())));
}

/// -1 is what the statistics keep apart. Ranges were fitted without those tokens, so only their number or none at all will do.
std::int64_t resolve_sinks(std::int64_t asked, const Statistics& statistics) {
  constexpr std::int64_t kDefaultSinks = 4;
  if (!statistics.given()) return asked < 0 ? kDefaultSinks : asked;
  const std::int64_t kept = statistics.header().n_sinks;
  if (asked > 0 && asked != kept)
    fail(ErrorKind::kMismatch, "--sinks", "is {}, but the statistics keep {} apart; leave it out, or run kvcalib with --sinks {}", asked,
         counted(kept, "token"), asked);
  return asked < 0 ? kept : asked;
}

/// A scheme that no token of any document ever reaches would score as free.
void check_something_is_coded(const sens::SensResult& result, const sens::SweepOptions& sweep, std::int64_t longest) {
  for (const std::string& scheme : result.schemes)
    for (const std::int64_t window : sweep.windows)
      for (const double fraction : sweep.salient_fractions) {
        const kvrt::Tiers tiers = sens::isolated_tiers(quant::parse_scheme(scheme), sweep.n_sinks, window, fraction);
        if (kvrt::blocks_out(tiers, longest) == 0)
          fail(ErrorKind::kInfeasible, "--data", "the longest document has {} tokens, too short for {}{} behind {} sinks and a window of {}: nothing of it "
               "would be coded before {} tokens; give longer text, a larger --seq-len, or a smaller --window", longest, scheme,
               quant::tier_text(fraction, result.salient_scheme), sweep.n_sinks, window, sweep.n_sinks + window + tiers.exit_block());
      }
}

/// 0 and the shares that were asked for.
std::vector<double> parse_salient(const GridOptions& options) {
  if (options.salient_score != quant::kTierScore)
    fail(ErrorKind::kUsage, "--salient-score", "is \"{}\"; this version places tokens by {}", to_valid_utf8(options.salient_score), quant::kTierScore);
  std::vector<double> out = {0.0};
  for (const std::string& part : split_list("--salient", options.salient)) {
    out.push_back(parse_number("--salient", part, 0.0, quant::kMostSalient));
    if (const kvrt::Tiers tiers = kvrt::finish_tiers({}, {}, 0, 0, out.back()); out.back() > 0 && tiers.block_salient == 0)
      fail(ErrorKind::kUsage, "--salient", "{} of an exit block of {} rounds to no token; give a larger share", part, counted(tiers.block_base, "token"));
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  if (out.size() == 1) return out;
  quant::parse_salient_scheme(options.salient_scheme, "--salient-scheme");
  if (options.stats.empty())
    fail(ErrorKind::kUsage, "--salient", "ranks tokens by the queries' statistics: give --stats with a file made by kvcalib for this model");
  return out;
}

/// Scheme of the tier, and by what every scored layer fills it.
void add_salient_tier(const GridOptions& options, const Statistics& statistics, sens::SensResult* result) {
  const kvrt::Scheme scheme = quant::parse_salient_scheme(options.salient_scheme, "--salient-scheme");
  result->salient_scheme = kvrt::to_string(scheme);
  result->salient_score = options.salient_score;
  for (const sens::UnitId& unit : result->units) {
    const std::size_t l = sens::layer_position(result->model, unit.layer);
    quant::check_scheme(scheme, result->model.layers[l], unit.side);
    if (!result->saliency.count(unit.layer)) result->saliency[unit.layer] = statistics.saliency()(l);
  }
}

/// Resolved options and what the run will take.
int dry_run(const GridOptions& options, const Invocation& call, const Inputs& in, const sens::SweepOptions& sweep, const sens::SensResult& result) {
  const sens::SweepEstimate e = sens::estimate_sweep(*in.model, in.corpus.documents, sweep, result);
  const double memory = static_cast<double>(e.hidden_memory_bytes + e.working_bytes + std::max(in.model->block_bytes(), in.model->head_bytes())) +
                        static_cast<double>(resident_memory_bytes());
  const double seconds = e.forward_passes * forward_seconds(in);
  if (call.json) {
    const nlohmann::ordered_json j = {{"model", to_valid_utf8(options.run.model)}, {"documents", in.corpus.documents.size()}, {"tokens", result.data.n_tokens},
                                      {"units", result.units.size()}, {"schemes", result.schemes.size()}, {"metrics", sweep.metrics},
                                      {"windows", sweep.windows}, {"salient", sweep.salient_fractions}, {"sinks", sweep.n_sinks}, {"draws", sweep.n_draws},
                                      {"predicted", {{"seconds", seconds}, {"forward_passes", e.forward_passes}, {"memory_bytes", memory},
                                                     {"hidden_bytes", e.hidden_memory_bytes}, {"spill_bytes", e.hidden_spill_bytes}}}};
    fmt::print("{}\n", j.dump(2));
  } else {
    fmt::print("model      {} ({}, {})\n", to_valid_utf8(options.run.model), in.identity.architecture, counted(in.identity.n_layers, "layer"));
    fmt::print("text       {}, {}\n", counted(in.corpus.documents.size(), "document"), counted(result.data.n_tokens, "token"));
    fmt::print("grid       {}, {} ({}), windows {}, salient {}, sinks {}\n", counted(result.units.size(), "unit"), counted(result.schemes.size(), "scheme"),
               result.candidate_list, fmt::join(sweep.windows, ","), fmt::join(sweep.salient_fractions, ","), sweep.n_sinks);
    fmt::print("metrics    {}, {}, seed {}\n", fmt::join(sweep.metrics, ","), counted(sweep.n_draws, "draw"), sweep.seed);
    fmt::print("time       about {} ({:.1f} bare forward passes)\n", format_duration(seconds), e.forward_passes);
    fmt::print("memory     about {}, hidden states {} of it\n", format_bytes(memory), format_bytes(static_cast<double>(e.hidden_memory_bytes)));
    fmt::print("disk       {} temporary for hidden states\n", format_bytes(static_cast<double>(e.hidden_spill_bytes)));
  }
  return 0;
}

}  // namespace

int run_grid(const GridOptions& options, const Invocation& call) {
  Progress progress(call.verbosity);
  const LogSink log = progress.sink();
  if (split_list("--candidates", options.candidates).empty())
    fail(ErrorKind::kUsage, "--candidates", "is empty, expected default, names of presets or scheme strings");
  const quant::CandidateList candidates = quant::resolve_candidates(options.candidates, log);
  sens::SweepOptions sweep;
  sweep.metrics = split_list("--metric", options.metric);
  for (const std::string& m : sweep.metrics)
    if (std::find(sens::known_metrics().begin(), sens::known_metrics().end(), m) == sens::known_metrics().end())
      fail(ErrorKind::kUsage, "--metric", "does not know \"{}\"; expected some of {}", m, fmt::join(sens::known_metrics(), ", "));
  if (sweep.metrics.empty()) fail(ErrorKind::kUsage, "--metric", "is empty, expected some of {}", fmt::join(sens::known_metrics(), ", "));
  sweep.windows = parse_windows(options.window);
  sweep.salient_fractions = parse_salient(options);
  sweep.n_draws = static_cast<int>(options.draws);
  sweep.rows_per_document = options.rows;
  sweep.seed = static_cast<std::uint64_t>(options.run.seed);
  sweep.hidden_memory_bytes = options.run.hidden_mem;
  const std::vector<int> layers = parse_layers("--layers", split_list("--layers", options.layers));
  require_model_and_data(options.run);
  std::vector<std::string> files = inputs_of(options.run);
  files.push_back(options.stats);
  check_output(options.output, files, kSensOutput);

  Inputs in = open_inputs(options.run, call, log);
  const Statistics statistics(options.stats, in.identity, options.run.model);
  ThreadPool pool(call.n_threads());
  sens::SensResult result;
  result.model = in.identity;
  result.data = in.corpus.identity;
  result.provenance = in.provenance;
  result.seq_len = in.corpus.identity.seq_len;
  result.candidate_list = candidates.name;
  result.n_sinks = sweep.n_sinks = resolve_sinks(options.n_sinks, statistics);
  if (statistics.given()) {
    result.calibration_data = statistics.header().data;
    result.provenance.parents.emplace_back("stats", sha256_of_file(options.stats));
  }
  LogSink shown = log;  // what drops out of the grid is said, also without -v
  shown.note = [&](const std::string& text) { progress.say(text); };
  sens::lay_out_grid(candidates, layers, &result, shown);
  if (sweep.salient_fractions.size() > 1) add_salient_tier(options, statistics, &result);
  check_something_is_coded(result, sweep, in.corpus.longest());
  const sens::ParamsProvider provider = statistics.provider();

  if (options.run.dry_run) return dry_run(options, call, in, sweep, result);

  progress.say(fmt::format("{}: {}, {}, {}; {}, {}, windows {}", in.identity.name, counted(in.identity.n_layers, "layer"),
                           counted(in.corpus.documents.size(), "document"), counted(result.data.n_tokens, "token"), counted(result.units.size(), "unit"),
                           counted(result.schemes.size(), "scheme"), fmt::join(sweep.windows, ",")) +
               (result.salient_scheme.empty() ? "" : fmt::format(", salient {} at {}", fmt::join(sweep.salient_fractions, ","), result.salient_scheme)));
  if (statistics.given() && same_text(result.data, result.calibration_data))
    log.warning("scores are measured on the text of the statistics; held-out text is the better judge of calibrated schemes");
  sweep.judge_codebooks = !statistics.given() || !same_text(result.data, result.calibration_data);
  warn_untested_positions(in.identity, result.data, log);
  PhaseProgress phases(progress, call, result.data.n_tokens);
  sens::run_sweep(*in.model, in.corpus.documents, sweep, provider, pool, &result, shown,
                  [&](const sens::SweepProgress& p) { phases.update(p.phase, p.done, p.total); });
  progress.clear();
  result.provenance.seconds = call.seconds();
  artifacts::write_sens_file(options.output, result);
  print_summary(result, sweep.metrics, options.output, call.seconds(), call.json);
  return 0;
}

}  // namespace calib::tools
