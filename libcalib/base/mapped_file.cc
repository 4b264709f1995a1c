#include "libcalib/base/mapped_file.h"

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "libcalib/base/error.h"

namespace calib {

MappedFile::MappedFile(const std::string& path) : path_(path) {
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a named pipe is refused below instead of waited for
  if (fd_ < 0) {
    const int why = errno;
    std::error_code ignored;
    if (why == ENOENT && std::filesystem::is_symlink(path, ignored))
      fail(ErrorKind::kNotFound, path, "symbolic link to {}, which does not exist", std::filesystem::read_symlink(path, ignored).string());
    if (why == ENOENT || why == ENOTDIR) fail(ErrorKind::kNotFound, path, "file not found");
    fail(ErrorKind::kIo, path, "cannot be read: {}", std::strerror(why));
  }
  struct stat info {};
  if (::fstat(fd_, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd_);
    fail(ErrorKind::kIo, path, "is {}, expected a regular file", S_ISDIR(info.st_mode) ? "a folder" : "no regular file");
  }
  size_ = static_cast<std::size_t>(info.st_size);
  if (size_ == 0) return;
  data_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd_, 0);
  if (data_ == MAP_FAILED) {
    const int why = errno;
    ::close(fd_);
    fail(ErrorKind::kIo, path, "cannot be mapped ({} bytes): {}", size_, std::strerror(why));
  }
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
  if (fd_ >= 0) ::close(fd_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)),
      fd_(std::exchange(other.fd_, -1)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(fd_, other.fd_);
  return *this;
}

void require_file(const std::string& path, const std::string& advice) {
  std::error_code ignored;
  if (std::filesystem::symlink_status(path, ignored).type() == std::filesystem::file_type::not_found) fail(ErrorKind::kNotFound, path, "file not found; {}", advice);
}

void MappedFile::check_not_shrunk() const {
  struct stat info {};
  if (fd_ >= 0 && ::fstat(fd_, &info) == 0 && static_cast<std::size_t>(info.st_size) < size_)
    fail(ErrorKind::kIo, path_, "shrank while it was in use: had {} bytes, now {}", size_, static_cast<std::size_t>(info.st_size));
}

void MappedFile::release(std::size_t offset, std::size_t size) const noexcept {
  if (data_ == nullptr || size == 0) return;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(data_) + offset;
  const auto first = (begin + page - 1) / page * page;   // pages shared with a neighbour stay
  const auto last = (begin + size) / page * page;
  if (last > first) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace calib
