#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/saliency_file.h"
#include "libcalib/base/plural.h"
#include "libcalib/base/sha256.h"
#include "libcalib/base/thread_pool.h"
#include "libcalib/base/utf8.h"
#include "libcalib/quant/scheme.h"
#include "libcalib/sens/saliency_walk.h"
#include "tools/common/option_values.h"
#include "tools/kvsens/inputs.h"
#include "tools/kvsens/run.h"

namespace calib::tools {
namespace {

/// Bare forward passes that a run takes at most: 1 measured on SmolLM2-135M at 2,048 tokens (scripts/bench/RESULTS.md); probe and accumulated
/// scores by block grow with the square of the length.
constexpr double kPasses = 3;

double mean_of(const std::vector<double>& x) {
  double sum = 0;
  for (const double v : x) sum += v;
  return x.empty() ? 0.0 : sum / static_cast<double>(x.size());
}

std::string rate(const sens::MeanSe& x) { return fmt::format("{:.3f} ± {:.3f}", x.mean, x.se); }

/// "0-3,7".
std::string layer_ranges(const std::vector<int>& layers) {
  std::string out;
  for (std::size_t i = 0; i < layers.size();) {
    std::size_t end = i + 1;
    while (end < layers.size() && layers[end] == layers[end - 1] + 1) ++end;
    out += fmt::format("{}{}", out.empty() ? "" : ",", layers[i]);
    if (end - i > 1) out += fmt::format("-{}", layers[end - 1]);
    i = end;
  }
  return out;
}

void print_scores(const sens::SaliencyFraction& f) {
  fmt::print("{:<24}  {:>13}  {:>13}  {:>13}  {:>13}  {:>6}  {:>6}  {:>5}  {:>9}  {:>9}", "score", "hit rate ± SE", "whole prompt", "overlap", "gain", "layers",
             "worst", "fails", "E_out", "E_mass");
  for (const sens::SaliencyBucket& b : f.scores[0].buckets) fmt::print("  {:>8}", fmt::format("{}+", b.first_position));
  fmt::print("\n");
  const auto match_of = [](const std::vector<double>& out, const std::vector<double>& mass) {
    return fmt::format("{:>9.2e}  {:>9.2e}", mean_of(out), mean_of(mass));
  };
  for (std::size_t s = 0; s < sens::kTokenScores; ++s) {
    const sens::SaliencyScore& score = f.scores[s];
    double worst = 2, sum = 0;
    int failing = 0;
    std::vector<double> e_out, e_mass;
    for (const sens::SaliencyLayer& layer : score.layers) {
      worst = std::min(worst, layer.rates.hit.mean), sum += layer.rates.hit.mean, failing += layer.rates.hit.mean < sens::kLeastHitRate;
      if (layer.e_out) e_out.push_back(*layer.e_out), e_mass.push_back(*layer.e_mass);
    }
    fmt::print("{:<24}  {:>13}  {:>13}  {:>13}  {:>13}  {:>6.3f}  {:>6.3f}  {:>5}  {}", sens::kTokenScoreNames[s], rate(score.total.hit),
               rate(score.total.prompt_hit), rate(score.total.overlap), rate(score.total.gain), sum / static_cast<double>(score.layers.size()), worst, failing,
               e_out.empty() ? fmt::format("{:>9}  {:>9}", "", "") : match_of(e_out, e_mass));
    for (const sens::SaliencyBucket& b : score.buckets) fmt::print("  {:>8.3f}", b.rates.hit.mean);
    fmt::print("\n");
  }
  fmt::print("{:<106}  {}\n{:<106}  {}\n", "(no tier)", match_of(f.e_out_base, f.e_mass_base), "(all coded tokens in the tier)",
             match_of(f.e_out_salient, f.e_mass_salient));
}

void print_verdicts(const sens::SaliencyFraction& f, const sens::SaliencyResult& result) {
  const char* const best = sens::kTokenScoreNames[f.best];
  const bool clear = f.lead.mean > 2 * f.lead.se;
  fmt::print("{}: {}, {:.3f} ± {:.3f} ahead of {}\n", clear ? "wins" : "first, but not by more than 2 SE", best, f.lead.mean, f.lead.se,
             sens::kTokenScoreNames[f.runner_up]);
  for (std::size_t s = sens::kOwnScores; s < sens::kTokenScores; ++s) {
    const sens::LastLayerVerdict v = sens::last_layer_verdict(f, s);
    fmt::print("{}: {}, hit rate {:.3f} in layer {}\n", sens::kTokenScoreNames[s],
               v.allowed ? "may be reused in every layer; worst" : "may not be reused in every layer", v.worst_hit, result.layers[v.worst_layer].index);
  }
  std::vector<int> keeps;
  for (std::size_t l = 0; l < result.layers.size(); ++l)
    if (f.scores[f.best].layers[l].abstain.empty()) keeps.push_back(result.layers[l].index);
  fmt::print("layers that abstain with {}: {} of {}{}\n", best, result.layers.size() - keeps.size(), result.layers.size(),
             keeps.empty() || keeps.size() == result.layers.size() ? "" : fmt::format("; the tier stands in {}", layer_ranges(keeps)));
  for (std::size_t l = 0; l < result.layers.size(); ++l) {
    const std::vector<std::string>& reasons = f.scores[f.best].layers[l].abstain;
    if (!reasons.empty()) fmt::print("  layer {:>2}  {}\n", result.layers[l].index, fmt::join(reasons, "; "));
  }
}

void print_table(const sens::SaliencyResult& result, const std::string& output) {
  const sens::SaliencySettings& s = result.settings;
  fmt::print("{} of up to {}, base {}:{}, tier {}, sinks {}, window {}\n", counted(s.n_documents, "document"), counted(s.seq_len, "token"), s.base_k, s.base_v,
             s.salient, s.n_sinks, s.window);
  for (const sens::SaliencyFraction& f : result.fractions) {
    fmt::print("\nfraction {}: {} of every {} coded tokens ({:.3f}); the best set of that size catches {:.3f} of the attention\n", f.requested, f.block_salient,
               f.block_base + f.block_salient, f.achieved, f.scores[0].total.catchable);
    print_scores(f);
    print_verdicts(f, result);
  }
  fmt::print("{}\n", to_valid_utf8(output));
}

}  // namespace

int run_saliency(const SaliencyCommand& options, const Invocation& call) {
  require_model_and_data(options.run);
  if (options.stats.empty()) fail(ErrorKind::kUsage, "kvsens saliency", "needs --stats, the file of kvcalib that holds the queries' statistics");
  sens::SaliencyOptions settings;
  settings.fractions = parse_fractions(options.fraction);
  const std::size_t colon = options.base.find(':');
  if (colon == std::string::npos) fail(ErrorKind::kUsage, "--base", "is \"{}\", expected KSCHEME:VSCHEME such as int4.token.g:int4.token.g", options.base);
  settings.base_k = quant::parse_scheme(options.base.substr(0, colon)), settings.base_v = quant::parse_scheme(options.base.substr(colon + 1));
  settings.salient = quant::parse_scheme(options.salient);
  std::vector<std::string> files = inputs_of(options.run);
  files.push_back(options.stats);
  check_output(options.output, files, kSaliencyOutput);

  Progress progress(call.verbosity);
  const LogSink log = progress.sink();
  Inputs in = open_inputs(options.run, call, log);
  const Statistics statistics(options.stats, in.identity, options.run.model);
  const artifacts::StatsReader& reader = statistics.reader();
  settings.n_sinks = options.n_sinks < 0 ? reader.header().n_sinks : options.n_sinks;
  settings.window = options.window;
  settings.seed = static_cast<std::uint64_t>(options.run.seed), settings.hidden_memory_bytes = options.run.hidden_mem;
  sens::check_saliency(settings, in.identity, in.corpus.documents);
  if (options.run.dry_run) {
    fmt::print("text       {}, {}\nfractions  {}\ntime       about {}\nmemory     {} beside a forward pass\n", counted(in.corpus.identity.n_documents, "document"),
               counted(in.corpus.identity.n_tokens, "token"), fmt::join(settings.fractions, ", "), format_duration(kPasses * forward_seconds(in)),
               format_bytes(static_cast<double>(sens::saliency_bytes(in.identity, in.corpus.documents, call.n_threads()))));
    return 0;
  }

  sens::SaliencyResult result;
  const LogSink kept{[&](const std::string& text) { result.warnings.push_back(text), log.warning(text); }, log.note};
  result.provenance = in.provenance;
  result.provenance.parents.emplace_back("stats", sha256_of_file(options.stats));
  result.model = in.identity, result.data = in.corpus.identity, result.calibration_data = reader.header().data;
  result.same_text_as_calibration = same_text(result.data, result.calibration_data);
  if (result.same_text_as_calibration) kept.warning("measured on the text of the statistics; held-out text is needed for a verdict");
  if (result.data.n_documents < 2) kept.warning("one document has no standard error; give two or more (--num-samples)");
  progress.say(fmt::format("{}: {}, {}, {}", in.identity.name, counted(result.data.n_documents, "document"), counted(result.data.n_tokens, "token"),
                           counted(settings.fractions.size(), "fraction")));
  warn_untested_positions(in.identity, result.data, kept);
  ThreadPool pool(call.n_threads());
  PhaseProgress phases(progress, call, result.data.n_tokens);
  sens::measure_saliency(*in.model, in.corpus.documents, [&](std::size_t i) { return reader.layer(i); }, statistics.provider(), settings, pool, &result,
                         [&](const model::RunProgress& p) { phases.update("saliency", p.done, p.total); });
  progress.clear();
  result.provenance.seconds = call.seconds();
  artifacts::write_saliency_file(options.output, result);
  if (call.json) fmt::print("{}", artifacts::saliency_to_json(result));
  else print_table(result, options.output);
  return 0;
}

}  // namespace calib::tools
