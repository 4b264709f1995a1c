#pragma once
// Options of kvplan and its sub-commands.

#include <cstdint>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace calib::tools {

struct KvplanOptions {
  enum class Command { kPlan, kShow, kExplain, kCheck, kDiff, kMemory, kList, kImport };
  Command command = Command::kPlan;

  // plan
  std::string stats, sens, saliency, output = "plan.json";
  std::string budget, max_kl, max_ppl_ratio, profile, uniform;
  std::string metric, target = "native", arch;
  std::int64_t context = 8192, batch = 1, page_tokens = 64, seed = 0;
  std::int64_t sinks = -1, window = -1;  ///< of KSCHEME:VSCHEME pairs; -1 = default
  bool window_per_layer = false, dry_run = false;
  std::vector<std::string> allow_k, allow_v, skip_layers;
  bool same_kv = false, one_pair = false;

  // show, explain, check, diff, memory
  std::string plan, other_plan;
  std::string model, layer;
  std::vector<std::string> contexts;

  // import
  std::string from, source, mode;
  bool fast_identity = false;

  // list
  std::string what = "all";
};

void declare_kvplan(CLI::App& app, KvplanOptions& options);

}  // namespace calib::tools
