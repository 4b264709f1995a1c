#pragma once
// append and decode through contexts, the same on any backend: what scripts/gpu_check.sh runs on a GPU against the reference and the
// committed goldens, and the unit tests on the executor. Standard library only.

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "kernels/kvrt.hpp"

namespace kvrt::testing {

/// One layer: two sequences, a prefill, then single steps over window borders, then a decode of both.
struct ContextSpec {
  const char *k, *v;
  int head_dim, n_kv_heads, group;
  std::int64_t window;
};
const std::vector<ContextSpec>& context_specs();
std::string name_of(const ContextSpec& spec);

struct ContextResult {
  std::vector<std::uint8_t> pages[2][KVRT_SIDES];  ///< exact, base; whole pools
  std::vector<float> out, log_sum_exp;             ///< [2, H G, D], [2, H G]
  std::vector<float> tolerance;                    ///< of `out` on backends with 16-bit operands; filled by ref alone
};

/// Runs calls(stream): the last append and decode. Default: at once, in the null stream.
using RunCalls = std::function<Status(const std::function<Status(void* stream)>& calls)>;
Status run_context(const ContextSpec& spec, kvrt_backend backend, ContextResult* out, const RunCalls& run = {});
/// The same for a layer of any plan.
Status run_layer(const PlanHandle& plan, int layer, kvrt_backend backend, ContextResult* out, const RunCalls& run = {});

/// Empty, or what differs: any byte of a page, any output beyond its tolerance. reference: of ref. worst: largest error / tolerance.
std::string compare_contexts(const ContextResult& reference, const ContextResult& result, double* worst);

/// All results of ref, in the order of context_specs().
void write_goldens(std::ostream& file, const std::vector<ContextResult>& results);
/// Empty if the file is not theirs.
std::vector<ContextResult> read_goldens(std::istream& file);

}  // namespace kvrt::testing
