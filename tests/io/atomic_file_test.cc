#include "libcalib/io/atomic_file.h"

#include <csignal>
#include <filesystem>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"
#include "tests/support/plain_user.h"
#include "tests/support/temp_folder.h"

namespace calib::io {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::TempFolder;

std::size_t n_files(const TempFolder& folder) {
  std::size_t n = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(folder.path())) ++n;
  return n;
}

TEST(AtomicFile, AppearsOnlyWhenCommitted) {
  const TempFolder folder;
  const std::string path = folder.file("a.json");
  {
    AtomicFile file(path);
    file.write("half");
    EXPECT_FALSE(fs::exists(path));
    EXPECT_TRUE(file.temporary_path().ends_with(".partial"));
    EXPECT_EQ(fs::path(file.temporary_path()).parent_path(), folder.path());
    file.write(" whole");
    file.commit();
    EXPECT_EQ(test::read_file(path), "half whole");
  }
  EXPECT_EQ(n_files(folder), 1u);
}

TEST(AtomicFile, AbandonedWritingLeavesTheOldFile) {
  const TempFolder folder;
  const std::string path = folder.file("a.json");
  test::write_file(path, "old");
  ::chmod(path.c_str(), 0640);
  { AtomicFile(path).write("new"); }
  EXPECT_EQ(test::read_file(path), "old");
  EXPECT_EQ(n_files(folder), 1u);
  write_file(path, "new");
  EXPECT_EQ(test::read_file(path), "new");
  EXPECT_EQ(fs::status(path).permissions(), static_cast<fs::perms>(0640));
}

TEST(AtomicFile, ASignalThatEndsTheProcessLeavesNoPartialFile) {
  const TempFolder folder;
  const pid_t child = ::fork();
  if (child == 0) {
    AtomicFile kept(folder.file("kept"));
    kept.write("whole");
    AtomicFile* const lost = new AtomicFile(folder.file("lost"));
    lost->write("half");
    kept.commit();
    AtomicFile* const other = new AtomicFile(folder.file("other"));
    other->write("half");
    remove_partial_files();
    ::_exit(0);
  }
  int status = 1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_EQ(test::read_file(folder.file("kept")), "whole");
  EXPECT_EQ(n_files(folder), 1u);
}

TEST(AtomicFile, FollowsASymbolicLink) {
  const TempFolder folder;
  fs::create_directory(folder.file("real"));
  test::write_file(folder.file("real/target"), "old");
  fs::create_symlink("real/target", folder.file("link"));
  write_file(folder.file("link"), "new");
  EXPECT_TRUE(fs::is_symlink(folder.file("link")));
  EXPECT_EQ(test::read_file(folder.file("real/target")), "new");
}

TEST(AtomicFile, NamesWhatCannotBeWritten) {
  const TempFolder folder;
  fs::create_directory(folder.file("sub"));
  test::write_file(folder.file("plain"), "x");
  expect_error([&] { AtomicFile(folder.file("absent/a.json")); }, ErrorKind::kNotFound, {"absent/a.json", folder.file("absent"), "does not exist"});
  expect_error([&] { AtomicFile(folder.file("plain/a.json")); }, ErrorKind::kNotFound, {"not a folder"});
  expect_error([&] { AtomicFile(folder.file("sub")); }, ErrorKind::kIo, {"is a folder"});
  expect_error([&] { AtomicFile(folder.file("sub/")); }, ErrorKind::kIo, {"not a file name"});
  expect_error([&] { AtomicFile(""); }, ErrorKind::kIo, {"not a file name"});
  ASSERT_EQ(::mkfifo(folder.file("pipe").c_str(), 0600), 0);
  expect_error([&] { AtomicFile(folder.file("pipe")); }, ErrorKind::kIo, {"not a regular file"});
}

TEST(AtomicFile, ReadOnlyFolder) {
  const TempFolder folder;
  fs::create_directory(folder.file("sub"));
  fs::permissions(folder.file("sub"), fs::perms::owner_read | fs::perms::owner_exec | fs::perms::others_read | fs::perms::others_exec);
  {
    const test::PlainUser user(folder);
    expect_error([&] { AtomicFile(folder.file("sub/a.json")); }, ErrorKind::kIo, {"sub", "Permission denied"});
  }
  fs::permissions(folder.file("sub"), fs::perms::owner_all);
}

TEST(AtomicFile, FileSizeLimitIsAnErrorAndLeavesNothing) {
  const TempFolder folder;
  test::write_file(folder.file("a"), "old");
  // In a child process: the limit holds for the whole process.
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_DFL);
    const rlimit limit = {4096, 4096};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      write_file(folder.file("a"), std::string(10000, 'x'));
      ::_exit(1);
    } catch (const Error& e) {
      ::_exit(e.kind() == ErrorKind::kIo && e.message().find("File too large") != std::string::npos ? 0 : 2);
    }
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(test::read_file(folder.file("a")), "old");
  EXPECT_EQ(n_files(folder), 1u);
}

}  // namespace
}  // namespace calib::io
