#include "libcalib/model/hidden_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "libcalib/base/error.h"

namespace calib::model {
namespace {

/// A file without a name: it is gone with the process, however that ends.
int open_unlinked(const std::string& folder) {
  const int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return fd;
  std::string name = folder + "/kvcalib-hidden-XXXXXX";
  const int named = ::mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) ::unlink(name.c_str());
  return named;
}

}  // namespace

HiddenStore::HiddenStore(std::int64_t n_rows, std::int64_t row_bytes, std::int64_t memory_limit_bytes, const std::string& folder)
    : n_rows_(n_rows), row_bytes_(row_bytes), n_memory_rows_(0) {
  CALIB_CHECK(n_rows >= 0 && row_bytes > 0 && n_rows <= std::numeric_limits<std::int64_t>::max() / row_bytes);
  n_memory_rows_ = std::min(n_rows, std::max<std::int64_t>(0, memory_limit_bytes) / row_bytes);
  if (n_memory_rows_ > 0) {
    void* p = ::mmap(nullptr, static_cast<std::size_t>(memory_bytes()), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
      fail(ErrorKind::kIo, "hidden states", "{} bytes of memory are not available; lower --hidden-mem", memory_bytes());
    memory_ = static_cast<char*>(p);
  }
  if (spilled_bytes() == 0) return;
  const char* from_environment = std::getenv("TMPDIR");
  folder_ = !folder.empty() ? folder : from_environment && *from_environment ? from_environment : "/tmp";
  struct statvfs space{};
  if (::statvfs(folder_.c_str(), &space) == 0) {
    const double free_bytes = static_cast<double>(space.f_bavail) * static_cast<double>(space.f_frsize);
    if (free_bytes < static_cast<double>(spilled_bytes())) {
      if (memory_) ::munmap(memory_, static_cast<std::size_t>(memory_bytes()));
      fail(ErrorKind::kIo, folder_, "{:.0f} bytes free, {} needed for hidden states; set TMPDIR to a larger disk or raise --hidden-mem",
           free_bytes, spilled_bytes());
    }
  }
  fd_ = open_unlinked(folder_);
  if (fd_ < 0) {
    const std::string reason = std::strerror(errno);
    if (memory_) ::munmap(memory_, static_cast<std::size_t>(memory_bytes()));
    fail(ErrorKind::kIo, folder_, "cannot create a temporary file for hidden states: {}", reason);
  }
}

HiddenStore::~HiddenStore() {
  if (memory_) ::munmap(memory_, static_cast<std::size_t>(memory_bytes()));
  if (fd_ >= 0) ::close(fd_);
}

void HiddenStore::write(std::int64_t first_row, std::int64_t n_rows, const void* data) {
  CALIB_CHECK(first_row >= 0 && n_rows >= 0 && first_row + n_rows <= n_rows_);
  const char* from = static_cast<const char*>(data);
  const std::int64_t in_memory = std::clamp<std::int64_t>(n_memory_rows_ - first_row, 0, n_rows);
  if (in_memory > 0) std::memcpy(memory_ + first_row * row_bytes_, from, static_cast<std::size_t>(in_memory * row_bytes_));
  std::int64_t at = (first_row + in_memory - n_memory_rows_) * row_bytes_, left = (n_rows - in_memory) * row_bytes_;
  from += in_memory * row_bytes_;
  while (left > 0) {
    const ssize_t n = ::pwrite(fd_, from, static_cast<std::size_t>(left), at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail(ErrorKind::kIo, folder_, "writing hidden states failed: {}", n == 0 ? "no progress" : std::strerror(errno));
    from += n, at += n, left -= n;
  }
}

void HiddenStore::read(std::int64_t first_row, std::int64_t n_rows, void* data) const {
  CALIB_CHECK(first_row >= 0 && n_rows >= 0 && first_row + n_rows <= n_rows_);
  char* to = static_cast<char*>(data);
  const std::int64_t in_memory = std::clamp<std::int64_t>(n_memory_rows_ - first_row, 0, n_rows);
  if (in_memory > 0) std::memcpy(to, memory_ + first_row * row_bytes_, static_cast<std::size_t>(in_memory * row_bytes_));
  std::int64_t at = (first_row + in_memory - n_memory_rows_) * row_bytes_, left = (n_rows - in_memory) * row_bytes_;
  to += in_memory * row_bytes_;
  while (left > 0) {
    const ssize_t n = ::pread(fd_, to, static_cast<std::size_t>(left), at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail(ErrorKind::kIo, folder_, "reading hidden states back failed: {}", n == 0 ? "end of file" : std::strerror(errno));
    to += n, at += n, left -= n;
  }
}

}  // namespace calib::model
