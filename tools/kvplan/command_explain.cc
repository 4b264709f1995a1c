#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/plan_file.h"
#include "libcalib/base/utf8.h"
#include "libcalib/io/json.h"
#include "tools/common/option_values.h"
#include "tools/kvplan/commands.h"
#include "tools/kvplan/plan_text.h"

namespace calib::tools {
namespace {

nlohmann::ordered_json reasons_json(const std::vector<plan::Reason>& reasons) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const plan::Reason& r : reasons) {
    nlohmann::ordered_json numbers = nlohmann::ordered_json::object();
    for (const auto& [name, value] : r.numbers) numbers[name] = value;
    list.push_back({{"rule", r.rule}, {"text", r.text}, {"numbers", numbers}});
  }
  return list;
}

nlohmann::ordered_json unit_json(const plan::UnitPlan& unit) { return {{"scheme", kvrt::to_string(unit.scheme)}, {"why", reasons_json(unit.why)}}; }

void print_reasons(const std::vector<plan::Reason>& reasons) {
  for (const plan::Reason& r : reasons) {
    // Alternatives stand on lines of their own.
    const std::string text = to_valid_utf8(r.text);
    std::string rule = to_valid_utf8(r.rule);
    for (std::size_t begin = 0; begin != std::string::npos; rule.clear()) {
      const std::size_t end = text.find("; ", begin);
      fmt::print("  {:<13} {}{}\n", rule, begin == 0 ? "" : "  ", text.substr(begin, end == std::string::npos ? end : end - begin));
      begin = end == std::string::npos ? end : end + 2;
    }
  }
}

/// One line a unit: the scheme, its share of the predicted loss, and the neighbours that were turned down.
void print_unit(const plan::LayerPlan& layer, Side side) {
  const plan::UnitPlan& unit = layer.unit(side);
  const std::string tier = layer.salient_fraction > 0 ? fmt::format(" salient {:g}", layer.salient_fraction) : "";
  std::string line = fmt::format("  {:>3} {}  {:<28}", layer.index, side_name(side), kvrt::to_string(unit.scheme) + tier);
  for (const plan::Reason& r : unit.why) {
    double share = -1, score = 0, bytes = 0;
    for (const auto& [name, value] : r.numbers) (name == "share" ? share : name == "score" ? score : bytes) = value;
    if (r.rule == "score" && share >= 0) line += fmt::format("  {:>5.1f} %", 100 * share);
    if (r.rule == "cheaper" || r.rule == "dearer") {
      const std::string text = to_valid_utf8(r.text);
      line += fmt::format("  {} {} ({:.1e})", r.rule == "cheaper" ? "not" : "nor", text.substr(0, text.find(' ')), score);
    }
  }
  fmt::print("{}\n", line);
}

}  // namespace

int run_explain(const KvplanOptions& options, const Invocation& call, Progress& progress) {
  const plan::Plan plan = artifacts::read_plan(options.plan, progress.sink());
  const bool whole = options.layer.empty();
  const std::int64_t asked = whole ? -1 : parse_integer("--layer", options.layer, 0, 1 << 20);
  nlohmann::ordered_json layers = nlohmann::ordered_json::array();
  if (whole && !call.json) {
    fmt::print("{}\n", headline(plan));
    if (plan.decision.empty()) fmt::print("{} was asked for: nothing was searched\n", to_valid_utf8(limit_text(plan.request)));
    print_reasons(plan.decision);
    for (const plan::Baseline& b : plan.baselines)
      fmt::print("  {:<13} {}: {:.3f} bits, {:.4e}{}\n", &b == &plan.baselines.front() ? "simpler" : "", to_valid_utf8(b.description), b.effective_bits,
                 b.score, b.feasible ? "" : ", over the budget");
    fmt::print("\nunits: scheme, share of the predicted loss, and what was turned down (its score); --layer N gives all of one layer's reasons\n");
  }
  bool found = false;
  for (const plan::LayerPlan& layer : plan.layers) {
    if (!whole && layer.index != asked) continue;
    found = true;
    if (call.json) {
      layers.push_back({{"index", layer.index}, {"salient_fraction", layer.salient_fraction}, {"k", unit_json(layer.k)}, {"v", unit_json(layer.v)}});
      continue;
    }
    for (const Side side : {Side::kK, Side::kV}) {
      if (whole) {
        print_unit(layer, side);
        continue;
      }
      fmt::print("layer {} {}: {}\n", layer.index, side_name(side), kvrt::to_string(layer.unit(side).scheme));
      print_reasons(layer.unit(side).why);
    }
  }
  if (!found)
    fail(ErrorKind::kUsage, "--layer", "is {}, but {} plans layers {} to {}", asked, options.plan, plan.layers.front().index, plan.layers.back().index);
  if (call.json)
    fmt::print("{}",
               io::json_text({{"decision", whole ? reasons_json(plan.decision) : nlohmann::ordered_json::array()}, {"layers", layers}}, "standard output"));
  return 0;
}

}  // namespace calib::tools
