#include "libcalib/io/h5.h"

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <locale>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace calib::io {
namespace {

using test::expect_error;
using test::TempFolder;

void write_example(const std::string& path, const std::string& schema = "kvcalib.example", int version = 1) {
  H5Writer file(path, schema, version);
  file.write("/a/b/floats", std::vector<float>{1.5f, -2, 3, 4, 5, 6}, {2, 3});
  file.write("/a/doubles", std::vector<double>{0.1, std::numeric_limits<double>::infinity()}, {2});
  file.write("/a/i32", std::vector<std::int32_t>{-1, 2}, {2});
  file.write("/a/i64", std::vector<std::int64_t>{-(std::int64_t{1} << 60)}, {1});
  file.write("/a/u8", std::vector<std::uint8_t>{255}, {1});
  file.write("/a/u16", std::vector<std::uint16_t>{65535}, {1});
  file.write("/a/u32", std::vector<std::uint32_t>{4294967295u}, {1});
  file.write("/a/u64", std::vector<std::uint64_t>{std::numeric_limits<std::uint64_t>::max()}, {1});
  file.write("/a/empty", std::vector<float>{}, {0, 3});
  file.write_strings("/a/strings", {"", "plain", "Δp", std::string("nul\0inside", 10), "\xFF"});
  file.write_strings("/a/no_strings", {});
  file.attribute("/a", "name", std::string("Grüße"));
  file.attribute("/a", "empty", std::string());
  file.attribute("/a", "i", std::int64_t{-5});
  file.attribute("/a", "u", std::numeric_limits<std::uint64_t>::max());
  file.attribute("/a", "d", 0.1);
  file.attribute("/a/doubles", "p", std::vector<double>{0.5, 0.9});
  file.finish();
}

TEST(H5, RoundTripOfEveryType) {
  const TempFolder folder;
  const std::string path = folder.file("x.h5");
  write_example(path);
  const H5Reader file(path, "kvcalib.example", 1);
  EXPECT_EQ(file.schema_version(), 1);
  EXPECT_EQ(file.read<float>("/a/b/floats", {2, 3}), (std::vector<float>{1.5f, -2, 3, 4, 5, 6}));
  EXPECT_EQ(file.read<double>("/a/doubles", {kAnySize}), (std::vector<double>{0.1, std::numeric_limits<double>::infinity()}));
  EXPECT_EQ(file.read<std::int32_t>("/a/i32", {2}), (std::vector<std::int32_t>{-1, 2}));
  EXPECT_EQ(file.read<std::int64_t>("/a/i64", {1})[0], -(std::int64_t{1} << 60));
  EXPECT_EQ(file.read<std::uint8_t>("/a/u8", {1})[0], 255);
  EXPECT_EQ(file.read<std::uint16_t>("/a/u16", {1})[0], 65535);
  EXPECT_EQ(file.read<std::uint32_t>("/a/u32", {1})[0], 4294967295u);
  EXPECT_EQ(file.read<std::uint64_t>("/a/u64", {1})[0], std::numeric_limits<std::uint64_t>::max());
  EXPECT_TRUE(file.read<float>("/a/empty", {kAnySize, 3}).empty());
  EXPECT_EQ(file.read_strings("/a/strings"), (std::vector<std::string>{"", "plain", "Δp", "nul\xEF\xBF\xBDinside", "\xEF\xBF\xBD"}));
  EXPECT_TRUE(file.read_strings("/a/no_strings").empty());
  EXPECT_EQ(file.string_attribute("/a", "name"), "Grüße");
  EXPECT_EQ(file.string_attribute("/a", "empty"), "");
  EXPECT_EQ(file.integer_attribute("/a", "i"), -5);
  EXPECT_EQ(file.unsigned_attribute("/a", "u"), std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(file.number_attribute("/a", "d"), 0.1);
  EXPECT_EQ(file.shape("/a/b/floats"), (Shape{2, 3}));
  EXPECT_TRUE(file.has("/a/b"));
  EXPECT_FALSE(file.has("/a/c/d"));
  EXPECT_EQ(file.children("/a/b"), std::vector<std::string>{"floats"});
}

TEST(H5, WideningIsFineNarrowingIsNot) {
  const TempFolder folder;
  write_example(folder.file("x.h5"));
  const H5Reader file(folder.file("x.h5"), "kvcalib.example", 1);
  EXPECT_EQ(file.read<double>("/a/b/floats", {2, 3})[0], 1.5);
  EXPECT_EQ(file.read<std::uint32_t>("/a/u8", {1})[0], 255u);
  EXPECT_EQ(file.read<std::int64_t>("/a/u32", {1})[0], 4294967295);
  expect_error([&] { file.read<float>("/a/doubles", {2}); }, ErrorKind::kFormat, {"/a/doubles", "float64", "expected float32"});
  expect_error([&] { file.read<std::int64_t>("/a/u64", {1}); }, ErrorKind::kFormat, {"/a/u64", "uint64", "expected int64"});
  expect_error([&] { file.read<std::uint64_t>("/a/i32", {2}); }, ErrorKind::kFormat, {"/a/i32"});
  expect_error([&] { file.read<double>("/a/i32", {2}); }, ErrorKind::kFormat, {"int32"});
  expect_error([&] { file.read_strings("/a/i32"); }, ErrorKind::kFormat, {"expected strings"});
}

TEST(H5, WhatIsMissingOrOfAnotherShapeIsNamed) {
  const TempFolder folder;
  const std::string path = folder.file("x.h5");
  write_example(path);
  const H5Reader file(path, "kvcalib.example", 1);
  expect_error([&] { file.read<float>("/a/none", {1}); }, ErrorKind::kFormat, {path, "/a/none", "missing"});
  expect_error([&] { file.read<float>("/none/none", {1}); }, ErrorKind::kFormat, {"/none/none", "missing"});
  expect_error([&] { file.read<float>("/a/b/floats", {3, 2}); }, ErrorKind::kFormat, {"(2, 3)", "(3, 2)"});
  expect_error([&] { file.read<float>("/a/b/floats", {6}); }, ErrorKind::kFormat, {"(2, 3)", "(6)"});
  expect_error([&] { file.read<float>("/a/b", {6}); }, ErrorKind::kFormat, {"/a/b"});
  expect_error([&] { file.integer_attribute("/a", "none"); }, ErrorKind::kFormat, {"`none`"});
  expect_error([&] { file.integer_attribute("/a", "name"); }, ErrorKind::kFormat, {"`name`", "string"});
  expect_error([&] { file.string_attribute("/a", "i"); }, ErrorKind::kFormat, {"`i`"});
  expect_error([&] { file.number_attribute("/a/doubles", "p"); }, ErrorKind::kFormat, {"`p`", "single"});
  expect_error([&] { file.children("/a/c"); }, ErrorKind::kFormat, {"/a/c"});
}

TEST(H5, SchemaVersionAndCompletenessAreChecked) {
  const TempFolder folder;
  const std::string path = folder.file("x.h5");
  write_example(path, "kvcalib.stats", 2);
  expect_error([&] { H5Reader(path, "kvcalib.sens", 1); }, ErrorKind::kFormat, {path, "kvcalib.stats", "kvcalib.sens"});
  expect_error([&] { H5Reader(path, "kvcalib.stats", 1); }, ErrorKind::kVersion, {path, "version 2", "1 to 1"});
  expect_error([&] { H5Reader(folder.file("none"), "kvcalib.stats", 1); }, ErrorKind::kNotFound, {"none"});
  expect_error([&] { H5Reader(folder.path(), "kvcalib.stats", 1); }, ErrorKind::kIo, {"folder"});
  test::write_file(folder.file("t"), "GGUF....");
  expect_error([&] { H5Reader(folder.file("t"), "kvcalib.stats", 1); }, ErrorKind::kFormat, {"not a stats file", "GGUF"});
  test::write_file(folder.file("t"), "");
  expect_error([&] { H5Reader(folder.file("t"), "kvcalib.stats", 1); }, ErrorKind::kFormat, {"not a stats file", "empty"});

  // The temporary file of a writer that has not finished is never taken for a result.
  H5Writer unfinished(folder.file("y.h5"), "kvcalib.stats", 1);
  unfinished.write("/x", std::vector<float>{1}, {1});
  std::string temporary;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    if (entry.path().string().ends_with(".partial")) temporary = entry.path().string();
  ASSERT_FALSE(temporary.empty());
  ::setenv("HDF5_USE_FILE_LOCKING", "FALSE", 1);
  EXPECT_THROW(H5Reader(temporary, "kvcalib.stats", 1), Error);
  ::unsetenv("HDF5_USE_FILE_LOCKING");
}

TEST(H5, UnfinishedWriterLeavesNothing) {
  const TempFolder folder;
  test::write_file(folder.file("x.h5"), "old");
  {
    H5Writer file(folder.file("x.h5"), "kvcalib.stats", 1);
    file.write("/x", std::vector<float>(100000, 1.0f), {100000});
  }
  EXPECT_EQ(test::read_file(folder.file("x.h5")), "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(H5, SameContentGivesTheSameBytes) {
  const TempFolder folder;
  write_example(folder.file("a.h5"));
  ::usleep(1'100'000);  // a time stamp of seconds would differ
  write_example(folder.file("b.h5"));
  EXPECT_EQ(test::read_file(folder.file("a.h5")), test::read_file(folder.file("b.h5")));
}

struct CommaAndGroups : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(H5, GlobalLocaleChangesNothing) {  // CASES.md PJ-03
  const TempFolder folder;
  write_example(folder.file("a.h5"));
  const std::locale old = std::locale::global(std::locale(std::locale::classic(), new CommaAndGroups));
  write_example(folder.file("b.h5"));
  EXPECT_EQ(shape_text({1024, 65536}), "(1024, 65536)");
  std::locale::global(old);
  EXPECT_EQ(test::read_file(folder.file("a.h5")), test::read_file(folder.file("b.h5")));
}

TEST(H5, LongListsAndLimits) {  // CASES.md H5-05
  const TempFolder folder;
  const std::string path = folder.file("x.h5");
  std::vector<std::string> words, wasteful(10000, "w");
  for (int i = 0; i < 20000; ++i) words.push_back(fmt::format("model.layers.{}.self_attn.k_proj.weight", i));
  wasteful[5] = std::string(100000, 'x');  // padding all words to this length would take a gigabyte
  std::vector<std::int32_t> tokens(200000);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>(i * 7919 % 50000);
  {
    H5Writer file(path, "kvcalib.stats", 1);
    file.write_strings("/words", words);
    file.write_strings("/wasteful", wasteful);
    file.write("/tokens", tokens, {200000});
    file.attribute("/", "long", std::string(kMaxAttributeBytes, 'a'));
    expect_error([&] { file.attribute("/", "longer", std::string(kMaxAttributeBytes + 1, 'a')); }, ErrorKind::kInternal, {"longer"});
    file.finish();
  }
  EXPECT_LT(std::filesystem::file_size(path), 8u << 20);
  const H5Reader file(path, "kvcalib.stats", 1);
  EXPECT_EQ(file.read_strings("/words"), words);
  EXPECT_EQ(file.read_strings("/wasteful"), wasteful);
  EXPECT_EQ(file.read<std::int32_t>("/tokens", {kAnySize}), tokens);
  EXPECT_EQ(file.string_attribute("/", "long").size(), kMaxAttributeBytes);
}

TEST(H5, LargeArraysAreChunkedAndExact) {
  const TempFolder folder;
  std::vector<double> values(5 * 997 * 101);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i) * 0.1;
  {
    H5Writer file(folder.file("x.h5"), "kvcalib.stats", 1);
    file.write("/x", values, {5, 997, 101});
    file.finish();
  }
  EXPECT_EQ(H5Reader(folder.file("x.h5"), "kvcalib.stats", 1).read<double>("/x", {5, 997, 101}), values);
}

TEST(H5, DeflatedCountsAreSmallAndExact) {
  const TempFolder folder;
  std::vector<std::uint16_t> values(300000);
  for (std::size_t i = 0; i < values.size(); i += 100) values[i] = static_cast<std::uint16_t>(i);
  {
    H5Writer file(folder.file("x.h5"), "kvcalib.stats", 1);
    file.write("/x", values, {3000, 100}, Packing::kDeflate);
    file.finish();
  }
  EXPECT_LT(std::filesystem::file_size(folder.file("x.h5")), 50000u);
  EXPECT_EQ(H5Reader(folder.file("x.h5"), "kvcalib.stats", 1).read<std::uint16_t>("/x", {3000, 100}), values);
}

// Runs f in a child process under a limit on file size; the child's result must be kIo naming the cause.
void expect_size_limit_error(const std::string& path, rlim_t bytes) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_DFL);
    const rlimit limit = {bytes, bytes};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    int code = 1;
    try {
      H5Writer file(path, "kvcalib.stats", 1);
      file.write("/x", std::vector<float>(200000, 1.0f), {200000});
      file.finish();
    } catch (const Error& e) {
      code = e.kind() == ErrorKind::kIo && std::string(e.what()).find("File too large") != std::string::npos ? 0 : 2;
    }
    std::exit(code);  // the exit handlers run too: nothing may be printed or retried there
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << bytes;
}

TEST(H5, FileSizeLimitIsAnErrorAndLeavesTheOldFile) {  // CASES.md H5-01
  const TempFolder folder;
  test::write_file(folder.file("x.h5"), "old");
  testing::internal::CaptureStderr();
  for (const rlim_t bytes : {1u, 100u, 4096u, 300000u, 799000u}) expect_size_limit_error(folder.file("x.h5"), bytes);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(test::read_file(folder.file("x.h5")), "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(H5, LockedFilesNameTheVariable) {  // CASES.md H5-01
  const TempFolder folder;
  const std::string path = folder.file("x.h5");
  write_example(path);
  const std::string before = test::read_file(path);
  const int fd = ::open(path.c_str(), O_RDONLY);
  ASSERT_EQ(::flock(fd, LOCK_EX), 0);
  expect_error([&] { H5Reader(path, "kvcalib.example", 1); }, ErrorKind::kIo, {path, "lock", "HDF5_USE_FILE_LOCKING"});
  expect_error([&] { H5Writer(path, "kvcalib.example", 1); }, ErrorKind::kIo, {path, "lock", "HDF5_USE_FILE_LOCKING"});
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
  ::setenv("HDF5_USE_FILE_LOCKING", "FALSE", 1);
  EXPECT_EQ(H5Reader(path, "kvcalib.example", 1).integer_attribute("/a", "i"), -5);
  write_example(path);
  ::unsetenv("HDF5_USE_FILE_LOCKING");
  EXPECT_EQ(test::read_file(path), before);
  ::close(fd);
}

TEST(H5, FolderAndNameProblems) {
  const TempFolder folder;
  expect_error([&] { H5Writer(folder.file("none/x.h5"), "kvcalib.stats", 1); }, ErrorKind::kNotFound, {"none"});
  expect_error([&] { H5Writer(folder.path(), "kvcalib.stats", 1); }, ErrorKind::kIo, {"folder"});
  H5Writer file(folder.file("x.h5"), "kvcalib.stats", 1);
  expect_error([&] { file.write("/x", std::vector<float>{1}, {2}); }, ErrorKind::kInternal, {"/x", "(2)"});
  file.write("/x", std::vector<float>{1}, {1});
  expect_error([&] { file.write("/x", std::vector<float>{1}, {1}); }, ErrorKind::kInternal, {"/x", "twice"});
}

}  // namespace
}  // namespace calib::io
