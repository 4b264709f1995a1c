#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/plan_file.h"
#include "libcalib/io/json.h"
#include "libcalib/plan/verify.h"
#include "tools/kvplan/commands.h"
#include "tools/kvplan/plan_text.h"

namespace calib::tools {

int run_diff(const KvplanOptions& options, const Invocation& call, Progress& progress) {
  const plan::Plan a = artifacts::read_plan(options.plan, progress.sink()), b = artifacts::read_plan(options.other_plan, progress.sink());
  plan::check_same_model(a.model, options.plan, b.model, options.other_plan);
  nlohmann::ordered_json units = nlohmann::ordered_json::array();
  std::vector<std::string> lines;
  for (std::size_t l = 0; l < a.layers.size(); ++l)
    for (const Side side : {Side::kK, Side::kV}) {
      const plan::UnitPlan &x = a.layers[l].unit(side), &y = b.layers[l].unit(side);
      const bool same_window = a.window_of(a.layers[l]) == b.window_of(b.layers[l]);
      const double f = a.layers[l].salient_fraction, g = b.layers[l].salient_fraction;
      const bool same_tier = f == g && (f == 0 || (a.salient == b.salient && a.layers[l].saliency == b.layers[l].saliency));
      if (x.scheme == y.scheme && x.params == y.params && ((same_window && same_tier) || side == Side::kV)) continue;
      const std::string before = kvrt::to_string(x.scheme), after = kvrt::to_string(y.scheme);
      std::string what = x.scheme == y.scheme ? before : before + " -> " + after;
      if (x.scheme == y.scheme && x.params != y.params) what += ", other constants";
      if (!same_window && side == Side::kK) what += fmt::format(", window {} -> {}", a.window_of(a.layers[l]), b.window_of(b.layers[l]));
      if (!same_tier && side == Side::kK) what += f == g ? ", another salient tier" : fmt::format(", salient {:g} -> {:g}", f, g);
      lines.push_back(fmt::format("layer {:>3} {}: {}", a.layers[l].index, side_name(side), what));
      units.push_back({{"layer", a.layers[l].index}, {"side", side == Side::kK ? "k" : "v"}, {"before", before}, {"after", after}});
      if (f != g) units.back()["salient_fraction"] = {f, g};
    }
  if (call.json) {
    fmt::print("{}",
               io::json_text(
                   {{"effective_bits", {a.summary.effective_bits, b.summary.effective_bits}}, {"bytes", {a.summary.bytes, b.summary.bytes}}, {"units", units}},
                   "standard output"));
    return 0;
  }
  fmt::print("{}\n  {}\n{}\n  {}\n", options.plan, headline(a), options.other_plan, headline(b));
  for (const std::string& line : lines) fmt::print("{}\n", line);
  fmt::print("{} of {} units differ\n", lines.size(), 2 * a.layers.size());
  return 0;
}

}  // namespace calib::tools
