#pragma once
// INTERNAL to io/: what the HDF5 writer and reader share, without the library's own header.

#include <cstdint>
#include <string>
#include <utility>

namespace calib::io {

/// Owns one library identifier.
class H5Handle {
 public:
  using Close = int (*)(std::int64_t);
  H5Handle() = default;
  H5Handle(std::int64_t id, Close close) : id_(id), close_(close) {}
  ~H5Handle() { reset(); }
  H5Handle(H5Handle&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
  H5Handle& operator=(H5Handle&& other) noexcept {
    reset();
    id_ = std::exchange(other.id_, -1);
    close_ = other.close_;
    return *this;
  }
  std::int64_t get() const noexcept { return id_; }
  bool valid() const noexcept { return id_ >= 0; }
  /// Closes now; false if the library reports a failure.
  bool reset() noexcept { return id_ < 0 || close_(std::exchange(id_, -1)) >= 0; }

 private:
  std::int64_t id_ = -1;
  Close close_ = nullptr;
};

/// Before the first call: no printing of error stacks, no work at exit. May be called any number of times.
void h5_start();
/// Why the last call failed, from the operating system ("No space left on device"); empty if that was not the cause.
std::string h5_system_cause();
/// Tries the lock that the library will take. Throws kIo naming `path`, the cause and HDF5_USE_FILE_LOCKING.
void h5_check_lock(int descriptor, bool exclusive, const std::string& path);
/// File access properties: locks as HDF5_USE_FILE_LOCKING says now; `newest_format` for files to be written.
H5Handle h5_file_access(bool newest_format);

}  // namespace calib::io
