#include "libcalib/model/hidden_store.h"

#include <filesystem>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace calib::model {
namespace {

std::vector<float> rows(std::int64_t first, std::int64_t n) {
  std::vector<float> out;
  for (std::int64_t i = first * 4; i < (first + n) * 4; ++i) out.push_back(static_cast<float>(i));
  return out;
}

class HiddenStoreTest : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(HiddenStoreTest, ReturnsWhatWasWrittenAcrossTheEdge) {
  const test::TempFolder folder;
  HiddenStore store(10, 16, GetParam(), folder.path());
  EXPECT_EQ(store.memory_bytes() + store.spilled_bytes(), 160);
  EXPECT_LE(store.memory_bytes(), GetParam());
  store.write(0, 3, rows(0, 3).data());
  store.write(3, 6, rows(3, 6).data());
  store.write(9, 1, rows(9, 1).data());
  store.write(4, 2, rows(40, 2).data());
  std::vector<float> out(40);
  store.read(0, 10, out.data());
  std::vector<float> expected = rows(0, 10), patch = rows(40, 2);
  std::copy(patch.begin(), patch.end(), expected.begin() + 16);
  EXPECT_EQ(out, expected);
  std::vector<float> one(4);
  store.read(5, 1, one.data());
  EXPECT_EQ(one, rows(41, 1));
  // The file has no name while it is in use.
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

INSTANTIATE_TEST_SUITE_P(Limits, HiddenStoreTest, ::testing::Values(0, 15, 16, 70, 159, 160, 1 << 20));

TEST(HiddenStore, NamesAFolderThatCannotHoldIt) {
  test::expect_error([] { HiddenStore(10, 16, 0, "/nonexistent/folder"); }, ErrorKind::kIo, {"/nonexistent/folder"});
  test::expect_error([] { HiddenStore(std::int64_t{1} << 40, 1 << 20, 0, "/tmp"); }, ErrorKind::kIo, {"/tmp", "--hidden-mem"});
}

}  // namespace
}  // namespace calib::model
