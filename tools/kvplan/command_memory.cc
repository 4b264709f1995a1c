#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/artifacts/plan_file.h"
#include "libcalib/io/json.h"
#include "libcalib/plan/budget.h"
#include "libcalib/plan/cost_model.h"
#include "tools/common/option_values.h"
#include "tools/kvplan/commands.h"

namespace calib::tools {

int run_memory(const KvplanOptions& options, const Invocation& call, Progress& progress) {
  const int n_given = !options.plan.empty() + !options.model.empty() + !options.stats.empty();
  if (n_given != 1) fail(ErrorKind::kUsage, "kvplan memory", "needs one of PLAN, --model and --stats");
  if (options.plan.empty()) return run_memory_of_model(options, call, progress);
  const plan::Plan plan = artifacts::read_plan(options.plan, progress.sink());
  std::vector<std::int64_t> contexts;
  for (const std::string& text : split_lists("--contexts", options.contexts)) contexts.push_back(parse_integer("--contexts", text, 1, std::int64_t{1} << 32));
  if (contexts.empty()) contexts = {1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072};
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  std::string table = fmt::format("batch {}, constants shared by all sequences {} bytes\n{:>9}  {:>14}  {:>12}  {:>14}  {:>6}\n", options.batch,
                                  plan.summary.constants_bytes, "tokens", "bytes", "", "bf16 bytes", "bits");
  for (const std::int64_t tokens : contexts) {
    plan::Accounting accounting;
    accounting.context_tokens = tokens;
    accounting.batch = options.batch;
    accounting.sink_tokens = plan.sink_tokens;
    accounting.page_tokens = plan.page_tokens;
    accounting.scale_refresh_tokens = plan.scale_refresh_tokens;
    for (const plan::LayerPlan& layer : plan.layers)
      if (!plan::countable(plan.model.layers, plan.window_of(layer), accounting))
        fail(ErrorKind::kUsage, "--contexts, --batch", "{} tokens x batch {} is beyond what can be counted", tokens, options.batch);
    std::int64_t bytes = 0;
    for (std::size_t l = 0; l < plan.layers.size(); ++l)
      bytes += plan::layer_bytes(plan.model.layers[l], plan.layers[l].k.scheme, plan.layers[l].v.scheme, plan.tiers_of(plan.layers[l]), accounting);
    const std::int64_t elements = plan::cache_elements(plan.model.layers, accounting);
    const double bits = plan::effective_bits(bytes, elements);
    rows.push_back({{"context_tokens", tokens}, {"bytes", bytes}, {"bf16_bytes", 2 * elements}, {"effective_bits", bits}});
    table += fmt::format("{:>9}  {:>14}  {:>12}  {:>14}  {:>6.3f}\n", tokens, bytes, plan::format_bytes(bytes), 2 * elements, bits);
  }
  fmt::print("{}", call.json
                       ? io::json_text({{"batch", options.batch}, {"constants_bytes", plan.summary.constants_bytes}, {"contexts", rows}}, "standard output")
                       : table);
  return 0;
}

}  // namespace calib::tools
