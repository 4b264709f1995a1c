#pragma once
// The bytes of one fuzzing input as a mapped file.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

#include "libcalib/base/error.h"
#include "libcalib/base/mapped_file.h"

namespace calib::fuzz {

/// Calls parse(file). Every calib::Error but an internal one is a right answer; anything else ends the process.
template <typename F>
void with_file(const std::uint8_t* data, std::size_t size, F&& parse) {
  const int fd = ::memfd_create("input", 0);
  if (fd < 0 || ::write(fd, data, size) != static_cast<ssize_t>(size)) std::abort();
  try {
    parse(MappedFile("/proc/self/fd/" + std::to_string(fd)));
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::kInternal) std::abort();
  }
  ::close(fd);
}

}  // namespace calib::fuzz
