#include "libcalib/base/mapped_file.h"

#include <filesystem>

#include <sys/stat.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"
#include "tests/support/plain_user.h"
#include "tests/support/temp_folder.h"

namespace calib {
namespace {

namespace fs = std::filesystem;
using test::expect_error;

TEST(MappedFile, ShowsTheBytes) {
  test::TempFolder folder;
  test::write_file(folder.file("f"), std::string("a\0b", 3));
  MappedFile f(folder.file("f"));
  EXPECT_EQ(f.size(), 3u);
  EXPECT_EQ(f.bytes(), std::string_view("a\0b", 3));
  MappedFile moved(std::move(f));
  EXPECT_EQ(moved.bytes(), std::string_view("a\0b", 3));
  EXPECT_EQ(moved.path(), folder.file("f"));
  test::write_file(folder.file("g"), "g");
  MappedFile other(folder.file("g"));
  other = std::move(moved);
  EXPECT_EQ(other.size(), 3u);
}

TEST(MappedFile, EmptyFileIsAnEmptyView) {
  test::TempFolder folder;
  test::write_file(folder.file("f"), "");
  const MappedFile f(folder.file("f"));
  EXPECT_TRUE(f.bytes().empty());
  f.check_not_shrunk();
  f.release(0, 0);
}

TEST(MappedFile, WhatCannotBeReadIsNamed) {
  test::TempFolder folder;
  expect_error([&] { MappedFile(folder.file("none")); }, ErrorKind::kNotFound, {folder.file("none")});
  expect_error([&] { MappedFile(""); }, ErrorKind::kNotFound, {});
  expect_error([&] { MappedFile{folder.path()}; }, ErrorKind::kIo, {folder.path(), "folder"});
  fs::create_symlink("gone", folder.file("link"));
  expect_error([&] { MappedFile(folder.file("link")); }, ErrorKind::kNotFound, {"link", "gone"});
  fs::create_symlink("loop", folder.file("loop"));
  expect_error([&] { MappedFile(folder.file("loop")); }, ErrorKind::kIo, {"loop"});
  test::write_file(folder.file("f"), "x");
  expect_error([&] { MappedFile(folder.file("f/inside")); }, ErrorKind::kNotFound, {"inside"});
  ASSERT_EQ(::mkfifo(folder.file("pipe").c_str(), 0600), 0);
  expect_error([&] { MappedFile(folder.file("pipe")); }, ErrorKind::kIo, {"pipe", "regular"});  // and does not wait for a writer
}

TEST(MappedFile, UnreadableFile) {
  test::TempFolder folder;
  test::write_file(folder.file("f"), "x");
  fs::permissions(folder.file("f"), fs::perms::none);
  const test::PlainUser user(folder);
  expect_error([&] { MappedFile(folder.file("f")); }, ErrorKind::kIo, {folder.file("f"), "Permission denied"});
}

TEST(MappedFile, ShrinkingIsNoticed) {
  test::TempFolder folder;
  test::write_file(folder.file("f"), std::string(10'000, 'x'));
  const MappedFile f(folder.file("f"));
  f.check_not_shrunk();
  fs::resize_file(folder.file("f"), 20'000);
  f.check_not_shrunk();
  fs::resize_file(folder.file("f"), 100);
  expect_error([&] { f.check_not_shrunk(); }, ErrorKind::kIo, {folder.file("f"), "10000", "100"});
}

TEST(MappedFile, ReleasedPagesComeBack) {
  test::TempFolder folder;
  std::string bytes(100'000, '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7);
  test::write_file(folder.file("f"), bytes);
  const MappedFile f(folder.file("f"));
  f.release(0, bytes.size());
  f.release(4000, 200);
  f.release(99'999, 1);
  EXPECT_EQ(f.bytes(), bytes);
}

}  // namespace
}  // namespace calib
