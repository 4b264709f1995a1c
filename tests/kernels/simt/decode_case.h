#pragma once
// A decode problem run by the CUDA sources on the executor.

#include <string>

#include "tests/kernels/decode_problem.h"
#include "tests/kernels/simt/executor.h"

namespace kvrt::simt {

using testing::DecodeSpec;

class DecodeCase : public testing::DecodeProblem {
 public:
  using DecodeProblem::DecodeProblem;

  struct Output : testing::DecodeResult {
    Counts counts;
    std::string error;  ///< of the launch; empty if it ran
  };
  /// decode + combine under the settings. Outputs and partials start as NaN.
  Output run(const Settings& settings) const { return run(settings, path()); }
  Output run(const Settings& settings, DecodePath taken) const;
  /// Fails the current test unless the run succeeded and every output is inside its tolerance.
  void expect_close(const Output& output, const std::string& what) const;
};

/// Three fiber orders must agree bit for bit; returns the forward one.
DecodeCase::Output run_in_all_orders(const DecodeCase& decode, Accumulation accumulation);
DecodeCase::Output run_in_all_orders(const DecodeCase& decode, Accumulation accumulation, DecodePath taken);

}  // namespace kvrt::simt
