// Times the planner's solver on a problem read from a file: setup (pruning and the dual sweep), then every budget.
// Usage: solver_bench PROBLEM BUDGET…   PROBLEM holds int64 n_groups, int64 n_options, then per option int64 bytes, double score.
// Prints one JSON object; scripts/bench/solver gives the same problem to other solvers.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <vector>

#include "libcalib/plan/solver.h"

namespace {

template <typename T>
T next(std::ifstream& in) {
  T value{};
  if (!in.read(reinterpret_cast<char*>(&value), sizeof value)) {
    std::fprintf(stderr, "error: the problem file ends early\n");
    std::exit(4);
  }
  return value;
}

/// CPU time: on a machine with other work, the clock on the wall measures that too.
double now_ms() { return 1000.0 * static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: solver_bench PROBLEM BUDGET...\n");
    return 2;
  }
  std::ifstream in(argv[1], std::ios::binary);
  const auto n_groups = next<std::int64_t>(in), n_options = next<std::int64_t>(in);
  std::vector<calib::plan::OptionGroup> groups(static_cast<std::size_t>(n_groups));
  for (calib::plan::OptionGroup& group : groups)
    for (std::int64_t i = 0; i < n_options; ++i) {
      const auto bytes = next<std::int64_t>(in);
      group.push_back({bytes, next<double>(in)});
    }

  const double start = now_ms();
  const calib::plan::Knapsack problem(groups);
  std::printf("{\"setup_ms\": %.4f, \"budgets\": [", now_ms() - start);
  for (int i = 2; i < argc; ++i) {
    const double begin = now_ms();
    const std::optional<calib::plan::Solution> s = problem.solve(std::strtoll(argv[i], nullptr, 10));
    const double ms = now_ms() - begin;
    std::printf("%s{\"ms\": %.4f, ", i > 2 ? ", " : "", ms);
    if (s)
      std::printf("\"score\": %.17g, \"bound\": %.17g, \"bytes\": %lld, \"proven\": %s}", s->score, s->bound, static_cast<long long>(s->bytes),
                  s->proven ? "true" : "false");
    else std::printf("\"score\": null}");
  }
  std::printf("]}\n");
}
