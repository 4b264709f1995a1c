#pragma once
// Expectation that a call fails with one kind of error and names certain things.

#include <ctime>
#include <source_location>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "libcalib/base/error.h"

namespace calib::test {

/// Runs f, which must throw calib::Error of this kind whose text contains every part.
template <typename F>
void expect_error(F&& f, ErrorKind kind, const std::vector<std::string>& parts,
                  std::source_location at = std::source_location::current()) {
  const ::testing::ScopedTrace trace(at.file_name(), static_cast<int>(at.line()), "expect_error");
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(static_cast<int>(e.kind()), static_cast<int>(kind)) << e.what();
    for (const std::string& part : parts) EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << "'" << part << "' is not in: " << e.what();
    return;
  } catch (const std::exception& e) {
    ADD_FAILURE() << "not a calib::Error: " << e.what();
    return;
  }
  ADD_FAILURE() << "nothing was thrown";
}

/// Processor seconds of f in this process: bounds on work, which a busy machine does not move.
template <typename F>
double seconds_of(F&& f) {
  const std::clock_t start = std::clock();
  f();
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

}  // namespace calib::test
