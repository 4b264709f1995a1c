#include "libcalib/io/atomic_file.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "libcalib/base/error.h"

namespace calib::io {
namespace {

void ignore_file_size_signal() {
  struct sigaction current = {};
  if (::sigaction(SIGXFSZ, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) {
    current.sa_handler = SIG_IGN;
    ::sigaction(SIGXFSZ, &current, nullptr);
  }
}

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

/// Temporary names of the files that are open; a file beyond their number is not removed by a signal.
std::array<std::atomic<const char*>, 16> g_open = {};

void replace_open(const char* from, const char* to) {
  for (std::atomic<const char*>& entry : g_open) {
    const char* expected = from;
    if (entry.compare_exchange_strong(expected, to)) return;
  }
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path) : path_(path), target_(path) {
  ignore_file_size_signal();
  if (path.empty() || path.back() == '/') fail(ErrorKind::kIo, path, "is not a file name");
  std::error_code absent, error;
  if (std::filesystem::is_symlink(path, absent)) target_ = std::filesystem::weakly_canonical(path, error).string();
  if (error) fail(ErrorKind::kIo, path, "symbolic link cannot be followed: {}", std::strerror(error.value()));

  struct stat old = {};
  const bool exists = ::stat(target_.c_str(), &old) == 0;
  if (exists && S_ISDIR(old.st_mode)) fail(ErrorKind::kIo, path, "is a folder, expected a file name to write to");
  if (exists && !S_ISREG(old.st_mode)) fail(ErrorKind::kIo, path, "exists and is not a regular file");

  const std::string folder = folder_of(target_);
  for (int attempt = 0; fd_ < 0; ++attempt) {
    // A file of that name can only be debris of a killed process with the same id.
    temporary_ = fmt::format("{}.{}{}.partial", target_, ::getpid(), attempt == 0 ? "" : fmt::format("-{}", attempt));
    fd_ = ::open(temporary_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ >= 0 || (errno == EEXIST && attempt < 100)) continue;
    const int why = errno;
    if (why == ENOENT) fail(ErrorKind::kNotFound, path, "cannot be written: folder {} does not exist", folder);
    if (why == ENOTDIR) fail(ErrorKind::kNotFound, path, "cannot be written: {} is not a folder", folder);
    fail(ErrorKind::kIo, path, "cannot be written in folder {}: {}", folder, std::strerror(why));
  }
  replace_open(nullptr, temporary_.c_str());
  if (exists) (void)::fchmod(fd_, old.st_mode & 07777);
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
  replace_open(temporary_.c_str(), nullptr);
}

void AtomicFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(ErrorKind::kIo, path_, "cannot be written: {}", std::strerror(errno));
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
}

void AtomicFile::commit() {
  if (::fsync(fd_) != 0) fail(ErrorKind::kIo, path_, "cannot be flushed: {}", std::strerror(errno));
  if (::rename(temporary_.c_str(), target_.c_str()) != 0)
    fail(ErrorKind::kIo, path_, "cannot be put in place: {}", std::strerror(errno));
  replace_open(temporary_.c_str(), nullptr);
  ::close(fd_);
  fd_ = -1;
  // The rename itself must survive a power cut; file systems that cannot sync a folder have nothing to flush here.
  const int folder = ::open(folder_of(target_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    (void)::fsync(folder);
    ::close(folder);
  }
}

void remove_partial_files() noexcept {
  for (const std::atomic<const char*>& entry : g_open)
    if (const char* const path = entry.load()) ::unlink(path);
}

void write_file(const std::string& path, std::string_view bytes) {
  AtomicFile file(path);
  file.write(bytes);
  file.commit();
}

}  // namespace calib::io
