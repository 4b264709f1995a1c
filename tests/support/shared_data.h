#pragma once
// Real input files that are not part of the repository (../shared/data). A test that needs one skips visibly without it.

#include <string>

#include <gtest/gtest.h>

namespace calib::test {

/// Path of a file of ../shared/data ($KVCALIB_SHARED/data when that is set); empty if it is not there.
std::string shared_data(const std::string& file);

}  // namespace calib::test

/// Declares `var` as the path of a shared file, or skips the test saying which file is missing. Only inside a TEST body.
#define CALIB_SHARED_FILE(var, file)                                                                     \
  const std::string var = ::calib::test::shared_data(file);                                              \
  if (var.empty())                                                                                       \
  GTEST_SKIP() << "SKIP " << ::testing::UnitTest::GetInstance()->current_test_info()->test_suite_name() \
               << "." << ::testing::UnitTest::GetInstance()->current_test_info()->name()                 \
               << ": ../shared/data/" << (file) << " not found"
