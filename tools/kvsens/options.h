#pragma once
// Command lines of kvsens and its sub-commands.

#include <cstdint>
#include <string>
#include <vector>

#include "tools/common/run_options.h"

namespace calib::tools {

/// kvsens: the whole grid.
struct GridOptions {
  RunOptions run;
  std::string stats, output = "sens.h5", candidates = "default", metric = "fisher_softmax,fisher_vec,fisher,attn_kl,attn_out", window = "128", layers;
  std::string salient = "0", salient_scheme = "fp8e4m3.token.g", salient_score = "expected_attention";
  std::int64_t n_sinks = -1, draws = 2, rows = 128;
};

struct EvaluateCommand {
  RunOptions run;
  std::vector<std::string> plans;
  std::string uniform, stats, output = "eval.json", backend = "fake", objective = "logits", scale_refresh, rotate, value_carry, retrieval;
  std::int64_t n_sinks = 4, window = 128, generate = 0, depth = 0;
  bool second_half = false, damage_curve = false;
};

/// kvsens drift: fresh text against the statistics of a calibration.
struct DriftCommand {
  RunOptions run;
  std::string stats, plan;
};

/// kvsens refine: a plan measured, its predictions fitted, and repaired where it misses what it was asked for.
struct RefineCommand {
  RunOptions run;
  std::string plan, sens, output = "plan.json", scale_refresh;
  std::int64_t joint = 32;
};

/// kvsens joint: whether the scores of sens.h5 add up.
struct JointCommand {
  RunOptions run;
  std::string sens, output = "sens.h5", metric;
  std::int64_t n_runs = 32;
};

/// kvsens isolate: single units run on to the logits where their scores fail.
struct IsolateCommand {
  RunOptions run;
  std::string sens, output = "sens.h5", metric = "fisher_softmax", above = "0.02", layers;
};

/// kvsens saliency: which scores find the tokens that later queries need.
struct SaliencyCommand {
  RunOptions run;
  std::string stats, fraction = "0.1,0.2", base = "int4.token.g:int4.token.g", salient = "fp8e4m3.token.g", output = "saliency.json";
  std::int64_t n_sinks = -1, window = 128;
};

struct KvsensOptions {
  GridOptions grid;
  EvaluateCommand evaluate;
  DriftCommand drift;
  RefineCommand refine;
  JointCommand joint;
  IsolateCommand isolate;
  SaliencyCommand saliency;
  bool evaluate_chosen = false, refine_chosen = false, joint_chosen = false, isolate_chosen = false, drift_chosen = false, saliency_chosen = false;
};

void declare_kvsens(CLI::App& app, KvsensOptions& options);

/// "0.1,0.2" -> ascending, each once, above 0 and at most 0.5. Throws kUsage naming the option.
std::vector<double> parse_fractions(const std::string& text);

/// The same of --carry-value-error, at most 1; empty text: none.
std::vector<double> parse_carry(const std::string& text);

/// "512,1024" -> ascending, each once, at least 1; empty text: none. Throws kUsage naming the option.
std::vector<std::int64_t> parse_intervals(const std::string& text);

/// "1024,4096" of --retrieval -> ascending, two or more; empty text: none. Throws kUsage naming the option.
std::vector<std::int64_t> parse_lengths(const std::string& text);

/// "0,32,128" -> ascending, each once. Throws kUsage naming the option.
std::vector<std::int64_t> parse_windows(const std::string& text);

}  // namespace calib::tools
