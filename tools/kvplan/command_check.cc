#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "kernels/kvrt.h"
#include "libcalib/artifacts/plan_file.h"
#include "libcalib/base/plural.h"
#include "libcalib/io/json.h"
#include "libcalib/plan/verify.h"
#include "tools/kvplan/commands.h"
#include "tools/kvplan/plan_io.h"

namespace calib::tools {
namespace {

/// What keeps the runtime of this build from running the plan in these files, one sentence a unit.
std::vector<std::string> runtime_gaps(const std::string& path) {
  kvrt_plan* plan = nullptr;
  kvrt_error error{};
  if (kvrt_plan_load(path.c_str(), nullptr, &plan, &error) != KVRT_OK) return {error.text};
  std::vector<std::string> gaps;
  const kvrt_unit_report_fn add = [](void* user, const kvrt_unit_report* r) {
    if (r->path == KVRT_PATH_MISSING)
      static_cast<std::vector<std::string>*>(user)->push_back(fmt::format("layer {} {} {}: {}", r->layer, r->side == KVRT_K ? "K" : "V", r->scheme, r->reason));
  };
  if (kvrt_plan_check(plan, nullptr, add, &gaps, &error) != KVRT_OK && gaps.empty()) gaps.push_back(error.text);
  kvrt_plan_release(plan);
  return gaps;
}

}  // namespace

int run_check(const KvplanOptions& options, const Invocation& call, Progress& progress) {
  const plan::Plan plan = artifacts::read_plan(options.plan, progress.sink());
  std::vector<std::string> problems = plan::verify_plan(plan);
  for (const std::string& path : artifacts::plan_schema_problems(options.plan)) problems.push_back(fmt::format("{} breaks the plan schema", path));
  if (!options.stats.empty()) plan::check_same_model(artifacts::StatsReader(options.stats).header().model, options.stats, plan.model, options.plan);
  if (!options.model.empty()) plan::check_same_model(identity_of(options.model, plan.model.fast, call, progress), options.model, plan.model, options.plan);
  const std::vector<std::string> gaps = problems.empty() ? runtime_gaps(options.plan) : std::vector<std::string>();
  if (call.json) {
    fmt::print("{}", io::json_text({{"plan", options.plan}, {"ok", problems.empty()}, {"problems", problems}, {"runtime_gaps", gaps}}, "standard output"));
  } else if (problems.empty()) {
    fmt::print("{}: ok, {}, {} bytes, {:.3f} effective bits{}{}\n", options.plan, counted(plan.layers.size(), "layer"), plan.summary.bytes,
               plan.summary.effective_bits, options.stats.empty() ? "" : ", statistics are of the same model", options.model.empty() ? "" : ", model matches");
    if (!gaps.empty())
      fmt::print("the runtime of this build does not run it: {}{}\n", gaps.front(), gaps.size() > 1 ? fmt::format(", and {} more", gaps.size() - 1) : "");
  } else {
    fmt::print("{}: {}\n", options.plan, counted(problems.size(), "problem"));
    for (const std::string& problem : problems) fmt::print("  {}\n", problem);
  }
  return problems.empty() ? 0 : 1;
}

}  // namespace calib::tools
