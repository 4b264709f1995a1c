#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/plan_file.h"
#include "libcalib/base/utf8.h"
#include "libcalib/io/json.h"
#include "tools/kvplan/commands.h"
#include "tools/kvplan/plan_text.h"

namespace calib::tools {
namespace {

nlohmann::ordered_json unit_json(const plan::UnitPlan& unit) {
  nlohmann::ordered_json why = nlohmann::ordered_json::array();
  for (const plan::Reason& r : unit.why) {
    nlohmann::ordered_json numbers = nlohmann::ordered_json::object();
    for (const auto& [name, value] : r.numbers) numbers[name] = value;
    why.push_back({{"rule", r.rule}, {"text", r.text}, {"numbers", numbers}});
  }
  return {{"scheme", kvrt::to_string(unit.scheme)}, {"why", why}};
}

}  // namespace

int run_explain(const KvplanOptions& options, const Invocation& call, Progress& progress) {
  const plan::Plan plan = artifacts::read_plan(options.plan, progress.sink());
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  bool found = false;
  for (const plan::LayerPlan& layer : plan.layers) {
    if (options.layer >= 0 && layer.index != options.layer) continue;
    found = true;
    if (call.json) {
      out.push_back({{"index", layer.index}, {"k", unit_json(layer.k)}, {"v", unit_json(layer.v)}});
      continue;
    }
    for (const Side side : {Side::kK, Side::kV}) {
      const plan::UnitPlan& unit = layer.unit(side);
      fmt::print("layer {} {}: {}\n", layer.index, side_name(side), kvrt::to_string(unit.scheme));
      for (const plan::Reason& r : unit.why) fmt::print("  {:<13} {}\n", to_valid_utf8(r.rule), to_valid_utf8(r.text));
    }
  }
  if (!found)
    fail(ErrorKind::kUsage, "--layer", "is {}, but {} plans layers {} to {}", options.layer, options.plan, plan.layers.front().index, plan.layers.back().index);
  if (call.json) fmt::print("{}", io::json_text(out, "standard output"));
  return 0;
}

}  // namespace calib::tools
