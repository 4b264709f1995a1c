#pragma once
// Expectation that a call fails with one kind of error and names certain things.

#include <chrono>
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

/// Wall-clock seconds of f.
template <typename F>
double seconds_of(F&& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace calib::test
