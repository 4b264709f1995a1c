#include "tools/kvsens/options.h"

#include <algorithm>

#include <CLI/CLI.hpp>

#include "libcalib/quant/token_tiers.h"
#include "tools/common/option_values.h"

namespace calib::tools {
namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 24;

void declare_evaluate(CLI::App& app, EvaluateCommand& o) {
  add_run_options(app, o.run);
  add_text(app, "--stats", o.stats, "Statistics of kvcalib, for schemes that need calibrated numbers", "Input", "FILE");
  app.add_option("--plan", o.plans, "Plans to measure; several allowed")->type_name("FILE...")->group("Input");
  add_text(app, "--uniform", o.uniform, "Presets or KSCHEME:VSCHEME pairs to measure, separated by commas", "Input", "LIST");
  add_text(app, "-o,--output", o.output, "Measurement to write", "Output", "FILE");
  add_integer(app, "--sinks", o.n_sinks, 0, kMostTokens, "Exact first tokens of KSCHEME:VSCHEME pairs; presets and plans bring their own", "Calibration");
  add_integer(app, "--window", o.window, 0, kMostTokens, "Exact newest tokens of KSCHEME:VSCHEME pairs; presets and plans bring their own", "Calibration");
  add_flag(app, "--second-half", o.second_half, "Score rows n/2 ... n - 2 of each window only, as llama-perplexity does", "Calibration");
  add_text(app, "--objective", o.objective, "logits, or attention: compare attention layer by layer too, and rank by its output error", "Calibration", "NAME");
  add_flag(app, "--damage-curve", o.damage_curve,
           "Also measure noise on the keys of the first two documents, and what it predicts for each contender's keys: the gate of kvsens refine",
           "Calibration");
  add_text(app, "--scale-refresh", o.scale_refresh, "Measure contenders with static ranges once more, the ranges raised every so many tokens", "Calibration",
           "N[,N...]");
  add_text(app, "--rotate", o.rotate, "Measure contenders with had once more, its place taken by a calibrated rotation: query, grouped2 or grouped4",
           "Calibration", "NAME");
  add_text(app, "--carry-value-error", o.value_carry,
           "Measure contenders with values in token groups once more, each row taking over this share of the error before it", "Calibration", "F[,F...]");
  add_integer(app, "--generate", o.generate, 0, kMostTokens,
              "Greedy tokens that the reference and every contender write after a prompt; 0 = none, 1024 show loops", "Calibration");
  add_integer(app, "--depth", o.depth, 0, kMostTokens, "Tokens of that prompt, the first of each window; 0 = the whole window", "Calibration");
  add_text(app, "--retrieval", o.retrieval,
           "Tokens of texts in which the reference and every contender have to find 5-digit numbers: a smoke test, two lengths or more", "Calibration",
           "N,N[,N...]");
  add_text(app, "--backend", o.backend, "fake: decode(encode(x)) of the page codecs in place; kvrt: the runtime's packed pages, token by token", "Diagnostics",
           "NAME");
}

/// Numbers of `least` and more, ascending, each once; empty for an empty text.
std::vector<std::int64_t> parse_ascending(const char* option, const std::string& text, std::int64_t least) {
  std::vector<std::int64_t> out;
  for (const std::string& part : split_list(option, text)) out.push_back(parse_integer(option, part, least, kMostTokens));
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

/// Shares above 0, ascending, each once; empty for an empty text.
std::vector<double> parse_shares(const char* option, const std::string& text, double most, const char* zero) {
  std::vector<double> out;
  for (const std::string& part : split_list(option, text)) {
    out.push_back(parse_number(option, part, 0.0, most));
    if (out.back() == 0.0) fail(ErrorKind::kUsage, option, "is 0, which is {}; give a share above 0, at most {}", zero, most);
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

}  // namespace

void declare_kvsens(CLI::App& app, KvsensOptions& o) {
  GridOptions& g = o.grid;
  g.run.default_samples = o.evaluate.run.default_samples = 16;
  o.drift.run.default_samples = 128;
  o.refine.run.default_samples = o.joint.run.default_samples = o.isolate.run.default_samples = o.saliency.run.default_samples = 8;
  add_run_options(app, g.run);
  add_text(app, "--stats", g.stats, "Statistics of kvcalib", "Input", "FILE");
  add_text(app, "-o,--output", g.output, "Scores to write", "Output", "FILE");
  add_text(app, "--candidates", g.candidates, "default, names of presets or scheme strings, separated by commas", "Calibration", "LIST");
  add_text(app, "--metric", g.metric, "Of fisher_softmax, fisher_vec, fisher, fisher_dir, attn_kl, attn_out, lookahead, logit_kl", "Calibration", "LIST");
  add_integer(app, "--sinks", g.n_sinks, -1, kMostTokens, "First tokens of every document, kept exact; -1 = as the statistics (4 without)", "Calibration");
  add_text(app, "--window", g.window, "Window lengths to score, newest tokens kept exact", "Calibration", "W[,W...]");
  add_text(app, "--salient", g.salient, "Shares of the coded tokens in an 8-bit tier to score each window with; 0 = no tier, always scored", "Calibration",
           "F[,F...]");
  add_text(app, "--salient-scheme", g.salient_scheme, "How such tokens are stored, keys and values", "Calibration", "SCHEME");
  add_text(app, "--salient-score", g.salient_score, "By what they are chosen: expected_attention", "Calibration", "NAME");
  add_integer(app, "--draws", g.draws, 1, 1024, "Label draws of the Fisher metrics", "Calibration");
  add_integer(app, "--rows", g.rows, 1, 1 << 20, "Sampled attention rows per document and layer", "Calibration");
  add_text(app, "--layers", g.layers, "Layers to score, as 0,3,5-8; empty = all", "Calibration", "LIST");

  CLI::App* evaluate = app.add_subcommand("evaluate", "Joint effect of plans and presets on held-out text");
  declare_evaluate(*evaluate, o.evaluate);
  evaluate->callback([&o] { o.evaluate_chosen = true; });
  CLI::App* refine = app.add_subcommand("refine", "A plan measured as a whole on text that nothing was fitted on, and repaired where it misses its target");
  add_run_options(*refine, o.refine.run);
  add_text(*refine, "--plan", o.refine.plan, "Plan of kvplan to measure", "Input", "FILE");
  add_text(*refine, "--sens", o.refine.sens, "Scores that the plan was made from", "Input", "FILE");
  add_text(*refine, "-o,--output", o.refine.output, "Plan to write, with what was measured; may be the same file", "Output", "FILE");
  add_integer(*refine, "--joint", o.refine.joint, 0, 1024, "Combinations of units to measure, from which predictions are fitted; 0 = none", "Calibration");
  add_text(*refine, "--scale-refresh", o.refine.scale_refresh,
           "Also measure static ranges that are raised every so many tokens, and record the interval that pays", "Calibration", "N[,N...]");
  refine->callback([&o] { o.refine_chosen = true; });
  CLI::App* isolate =
      app.add_subcommand("isolate", "Single units run on to the logits where their scores are too large to be trusted; those losses take the scores' place");
  add_run_options(*isolate, o.isolate.run);
  add_text(*isolate, "--sens", o.isolate.sens, "Scores of kvsens", "Input", "FILE");
  add_text(*isolate, "-o,--output", o.isolate.output, "The same scores with the measurements; may be the same file. Joint runs are left out", "Output", "FILE");
  add_text(*isolate, "--metric", o.isolate.metric, "Score that is replaced: fisher_softmax, fisher_vec, fisher or fisher_dir", "Calibration", "NAME");
  add_text(*isolate, "--above", o.isolate.above,
           "Nats of that score: a unit with an undominated scheme above them is measured with all of its undominated schemes", "Calibration", "NATS");
  add_text(*isolate, "--layers", o.isolate.layers, "Layers whose units may be replaced, as 0,3,5-8; empty = all", "Calibration", "LIST");
  isolate->callback([&o] { o.isolate_chosen = true; });
  CLI::App* joint = app.add_subcommand("joint", "Combinations of units measured as a whole, so that kvplan can say how far sums of scores are off");
  add_run_options(*joint, o.joint.run);
  add_text(*joint, "--sens", o.joint.sens, "Scores whose sums are tested", "Input", "FILE");
  add_text(*joint, "-o,--output", o.joint.output, "The same scores with the measurements; may be the same file", "Output", "FILE");
  add_integer(*joint, "--runs", o.joint.n_runs, static_cast<std::int64_t>(3), 1024, "Combinations to measure, shared out over the scored windows", "Calibration");
  add_text(*joint, "--metric", o.joint.metric, "Score by which they are chosen; unset: the one that kvplan spends", "Calibration", "NAME");
  joint->callback([&o] { o.joint_chosen = true; });
  CLI::App* drift = app.add_subcommand("drift", "Whether fresh text still fits the statistics, and the plan its limits; exit 1 if something must be done");
  add_run_options(*drift, o.drift.run);
  add_text(*drift, "--stats", o.drift.stats, "Statistics of kvcalib that the plan was made from", "Input", "FILE");
  add_text(*drift, "--plan", o.drift.plan, "Plan in service: its loss on the fresh text is measured against its monitor limits", "Input", "FILE");
  drift->callback([&o] { o.drift_chosen = true; });
  CLI::App* saliency =
      app.add_subcommand("saliency", "Which token scores find what later queries attend to, and in which layers an 8-bit tier for such tokens pays");
  SaliencyCommand& s = o.saliency;
  add_run_options(*saliency, s.run);
  add_text(*saliency, "--stats", s.stats, "Statistics of kvcalib: the queries that future rows are expected to bring", "Input", "FILE");
  add_text(*saliency, "-o,--output", s.output, "Measurement to write", "Output", "FILE");
  add_text(*saliency, "--fraction", s.fraction, "Shares of the coded tokens to put into the tier", "Calibration", "F[,F...]");
  add_text(*saliency, "--base", s.base, "How the other coded tokens are stored", "Calibration", "KSCHEME:VSCHEME");
  add_text(*saliency, "--salient", s.salient, "How the tier's tokens are stored, keys and values", "Calibration", "SCHEME");
  add_integer(*saliency, "--sinks", s.n_sinks, -1, kMostTokens, "First tokens of every document, kept exact; -1 = as the statistics", "Calibration");
  add_integer(*saliency, "--window", s.window, 0, kMostTokens, "Newest tokens, kept exact until their exit block leaves", "Calibration");
  saliency->callback([&o] { o.saliency_chosen = true; });
}

std::vector<double> parse_fractions(const std::string& text) {
  std::vector<double> out = parse_shares("--fraction", text, quant::kMostSalient, "no tier");
  if (out.empty()) fail(ErrorKind::kUsage, "--fraction", "is empty, expected shares such as 0.1,0.2");
  return out;
}

std::vector<double> parse_carry(const std::string& text) { return parse_shares("--carry-value-error", text, 1.0, "no carry"); }

std::vector<std::int64_t> parse_intervals(const std::string& text) { return parse_ascending("--scale-refresh", text, 1); }

std::vector<std::int64_t> parse_lengths(const std::string& text) {
  std::vector<std::int64_t> out = parse_ascending("--retrieval", text, 1);
  if (out.size() == 1)
    fail(ErrorKind::kUsage, "--retrieval", "is \"{}\", one length, expected two or more, such as 1024,4096: what one length finds says nothing of another",
         text);
  return out;
}

std::vector<std::int64_t> parse_windows(const std::string& text) {
  std::vector<std::int64_t> out = parse_ascending("--window", text, 0);
  if (out.empty()) fail(ErrorKind::kUsage, "--window", "is empty, expected window lengths such as 0,32,128");
  return out;
}

}  // namespace calib::tools
