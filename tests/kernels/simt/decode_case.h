#pragma once
// A decode problem run by the CUDA sources on the executor.

#include <functional>
#include <ostream>
#include <string>
#include <tuple>

#include "gtest/gtest.h"
#include "tests/kernels/decode_problem.h"
#include "tests/kernels/simt/executor.h"

namespace kvrt::simt {

using testing::DecodeSpec;

struct DecodeOutput : testing::DecodeResult {
  Counts counts;
  std::string error;  ///< of the launch; empty if it ran
};

/// decode + combine under the settings. Outputs, partials and scores, which args need not name, start as NaN.
DecodeOutput run_decode(DecodeArgs args, const DecodeUnit& unit, DecodePath path, const std::vector<std::int64_t>& first_chunk, int n_kv_heads,
                        const Settings& settings);
/// run() in three fiber orders, which must agree bit for bit; returns the forward one.
DecodeOutput run_in_all_orders(Accumulation accumulation, const std::function<DecodeOutput(const Settings&)>& run);
/// Fails the current test unless the launch succeeded and neither error, in units of its tolerance, is above 1.
void expect_within(const DecodeOutput& output, double ratio, double log_sum_exp_ratio, const std::string& what);

class DecodeCase : public testing::DecodeProblem {
 public:
  using DecodeProblem::DecodeProblem;

  DecodeOutput run(const Settings& settings) const { return run(settings, path()); }
  DecodeOutput run(const Settings& settings, DecodePath taken) const;
  DecodeOutput run_in_all_orders(Accumulation accumulation) const { return run_in_all_orders(accumulation, path()); }
  DecodeOutput run_in_all_orders(Accumulation accumulation, DecodePath taken) const {
    return simt::run_in_all_orders(accumulation, [&](const Settings& s) { return run(s, taken); });
  }
  void expect_close(const DecodeOutput& output, const std::string& what) const {
    expect_within(output, worst_ratio(output), worst_log_sum_exp_ratio(output), what);
  }
};

/// Parameters of tests: schemes of keys and values, head_dim.
struct SchemePair {
  const char *k, *v;
};
void PrintTo(const SchemePair& pair, std::ostream* out);
std::string name_of_pair(const ::testing::TestParamInfo<std::tuple<SchemePair, int>>& info);

}  // namespace kvrt::simt
