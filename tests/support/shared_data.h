#pragma once
// Real input files that are not part of the repository (../shared/data). A test that needs one skips visibly without it.

#include <string>

#include <gtest/gtest.h>

namespace calib::test {

/// Path of a file of ../shared/data ($KVCALIB_SHARED/data when that is set); empty if it is not there.
std::string shared_data(const std::string& file);

/// A model that is too large for the repository: the file that `variable` of the environment names, or `file` where scripts/fetch_model and
/// others leave it, below the source or build folder; empty if it is not there.
std::string real_model(const char* variable, const std::string& file);

/// real_model() of SmolLM2-135M-Instruct, the model of the demo.
std::string smollm2();

}  // namespace calib::test

/// Declares `var` as the path of SmolLM2, or skips the test saying how to get it. Only inside a TEST body.
#define CALIB_SMOLLM2(var)                                                                               \
  const std::string var = ::calib::test::smollm2();                                                      \
  if (var.empty())                                                                                       \
  GTEST_SKIP() << "SKIP " << ::testing::UnitTest::GetInstance()->current_test_info()->test_suite_name() \
               << "." << ::testing::UnitTest::GetInstance()->current_test_info()->name()                 \
               << ": SmolLM2-135M-Instruct.Q4_1.gguf not found; set KVCALIB_MODEL or run scripts/fetch_model smollm2"

/// Declares `var` as the path of a shared file, or skips the test saying which file is missing. Only inside a TEST body.
#define CALIB_SHARED_FILE(var, file)                                                                     \
  const std::string var = ::calib::test::shared_data(file);                                              \
  if (var.empty())                                                                                       \
  GTEST_SKIP() << "SKIP " << ::testing::UnitTest::GetInstance()->current_test_info()->test_suite_name() \
               << "." << ::testing::UnitTest::GetInstance()->current_test_info()->name()                 \
               << ": ../shared/data/" << (file) << " not found"
