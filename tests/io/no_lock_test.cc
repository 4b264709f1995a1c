// CASES.md H5-01: a file system without locks. This program's own flock stands in for the system's.

#include <cerrno>
#include <cstdlib>
#include <filesystem>

#include <gtest/gtest.h>

#include "libcalib/io/h5.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

extern "C" int flock(int, int) {
  errno = ENOLCK;
  return -1;
}

namespace calib::io {
namespace {

using test::expect_error;

void write_one(const std::string& path) {
  H5Writer file(path, "kvcalib.stats", 1);
  file.write("/x", std::vector<float>{1}, {1});
  file.finish();
}

TEST(NoLocks, NamedWithTheWayOut) {
  const test::TempFolder folder;
  const std::string path = folder.file("x.h5");
  ::unsetenv("HDF5_USE_FILE_LOCKING");
  expect_error([&] { write_one(path); }, ErrorKind::kIo, {path, "No locks available", "HDF5_USE_FILE_LOCKING=FALSE"});
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  ::setenv("HDF5_USE_FILE_LOCKING", "FALSE", 1);
  write_one(path);
  EXPECT_EQ(H5Reader(path, "kvcalib.stats", 1).read<float>("/x", {1})[0], 1);
  ::unsetenv("HDF5_USE_FILE_LOCKING");
  expect_error([&] { H5Reader(path, "kvcalib.stats", 1); }, ErrorKind::kIo, {path, "No locks available", "HDF5_USE_FILE_LOCKING=FALSE"});
}

}  // namespace
}  // namespace calib::io
