#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/plan_file.h"
#include "libcalib/base/plural.h"
#include "libcalib/base/utf8.h"
#include "libcalib/io/json.h"
#include "tools/kvplan/commands.h"
#include "tools/kvplan/plan_text.h"

namespace calib::tools {
namespace {

void print_json(const plan::Plan& plan) {
  nlohmann::ordered_json out = {{"model", plan.model.name}, {"effective_bits", plan.summary.effective_bits}, {"bytes", plan.summary.bytes},
                                {"context_tokens", plan.request.context_tokens}, {"batch", plan.request.batch}, {"sink_tokens", plan.sink_tokens},
                                {"window_tokens", plan.window_tokens}, {"constants_bytes", plan.summary.constants_bytes}};
  if (plan.summary.predicted) out["predicted_score"] = plan.summary.predicted->score;
  out["layers"] = nlohmann::ordered_json::array();
  for (const plan::LayerPlan& layer : plan.layers)
    out["layers"].push_back({{"index", layer.index},
                             {"window_tokens", plan.window_of(layer)},
                             {"salient_fraction", layer.salient_fraction},
                             {"k", kvrt::to_string(layer.k.scheme)},
                             {"v", kvrt::to_string(layer.v.scheme)}});
  fmt::print("{}", io::json_text(out, "standard output"));
}

}  // namespace

int run_show(const KvplanOptions& options, const Invocation& call, Progress& progress) {
  const plan::Plan plan = artifacts::read_plan(options.plan, progress.sink());
  if (call.json) {
    print_json(plan);
    return 0;
  }
  std::size_t width[2] = {8, 8};
  bool own_windows = false, tiers = false;
  for (const plan::LayerPlan& layer : plan.layers) {
    width[0] = std::max(width[0], kvrt::to_string(layer.k.scheme).size());
    width[1] = std::max(width[1], kvrt::to_string(layer.v.scheme).size());
    own_windows = own_windows || layer.window_tokens.has_value();
    tiers = tiers || layer.salient_fraction > 0;
  }
  fmt::print("{}\n", headline(plan));
  fmt::print("asked: {}\n", to_valid_utf8(limit_text(plan.request)));
  if (const std::string line = prediction_line(plan); !line.empty()) fmt::print("{}\n", line);
  fmt::print("constants shared by all sequences: {} bytes; fallback: {}\n\n", plan.summary.constants_bytes, counted(plan.fallback.size(), "rung"));
  fmt::print("{:>5}  {:<{}}  {:<8}  {:<{}}  {:<8}{}{}\n", "layer", "K", width[0], "bits", "V", width[1], "bits", own_windows ? "  window" : "",
             tiers ? "  salient" : "");
  std::int64_t bits[2] = {0, 0};
  for (const plan::LayerPlan& layer : plan.layers) {
    const int k = kvrt::code_bits(layer.k.scheme.format), v = kvrt::code_bits(layer.v.scheme.format);
    bits[0] += k;
    bits[1] += v;
    fmt::print("{:>5}  {:<{}}  {}  {:<{}}  {}{}{}\n", layer.index, kvrt::to_string(layer.k.scheme), width[0], bits_bar(k), kvrt::to_string(layer.v.scheme),
               width[1], bits_bar(v), own_windows ? fmt::format("  {:>6}", plan.window_of(layer)) : "",
               tiers ? fmt::format("  {:>7g}", layer.salient_fraction) : "");
  }
  const double n = static_cast<double>(plan.layers.size());
  fmt::print("\nmean code width: K {:.2f}, V {:.2f} bits; {:.1f} bytes per token; {:.3f} effective bits in all\n", static_cast<double>(bits[0]) / n,
             static_cast<double>(bits[1]) / n, plan.summary.bytes_per_token, plan.summary.effective_bits);
  return 0;
}

}  // namespace calib::tools
