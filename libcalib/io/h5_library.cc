#include "libcalib/io/h5_library.h"

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <type_traits>

#include <hdf5.h>
#include <sys/file.h>

#include "libcalib/base/error.h"

namespace calib::io {

static_assert(std::is_same_v<hid_t, std::int64_t> || sizeof(hid_t) == sizeof(std::int64_t));

void h5_start() {
  static const bool started = [] {
    // A file that could not be flushed (disk full) must not be tried again while the process exits.
    H5dont_atexit();
    H5open();
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
    return true;
  }();
  (void)started;
}

std::string h5_system_cause() {
  int cause = 0;
  const auto visit = [](unsigned, const H5E_error2_t* entry, void* out) -> herr_t {
    constexpr std::string_view kKey = "errno = ";
    const std::string_view text = entry->desc != nullptr ? entry->desc : "";
    const std::size_t at = text.find(kKey);
    if (at != std::string_view::npos)
      std::from_chars(text.data() + at + kKey.size(), text.data() + text.size(), *static_cast<int*>(out));
    return 0;
  };
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, visit, &cause);
  return cause != 0 ? std::strerror(cause) : "";
}

namespace {

std::string_view locking_setting() {
  const char* setting = std::getenv("HDF5_USE_FILE_LOCKING");
  return setting != nullptr ? setting : "";
}
bool locking_is_off() { return locking_setting() == "FALSE" || locking_setting() == "0"; }

}  // namespace

H5Handle h5_file_access(bool newest_format) {
  H5Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  // The 1.10 format has checksums on its metadata and needs no index for small arrays.
  if (newest_format) H5Pset_libver_bounds(access.get(), H5F_LIBVER_V110, H5F_LIBVER_V110);
  // The cache of metadata counts bytes on disk, some ten times less than it takes in memory, and grows with the number of
  // arrays up to 32 MiB of them. A file that is written front to back never needs old entries again.
  H5AC_cache_config_t cache = {};
  cache.version = H5AC__CURR_CACHE_CONFIG_VERSION;
  if (newest_format && H5Pget_mdc_config(access.get(), &cache) >= 0) {
    cache.initial_size = cache.min_size = cache.max_size = std::size_t{256} << 10;
    H5Pset_mdc_config(access.get(), &cache);
  }
  H5Pset_file_locking(access.get(), !locking_is_off(), locking_setting() == "BEST_EFFORT");
  return access;
}

void h5_check_lock(int descriptor, bool exclusive, const std::string& path) {
  if (locking_is_off()) return;
  if (::flock(descriptor, (exclusive ? LOCK_EX : LOCK_SH) | LOCK_NB) == 0) {
    ::flock(descriptor, LOCK_UN);
    return;
  }
  if (errno == EWOULDBLOCK)
    fail(ErrorKind::kIo, path, "another process holds a lock on it; wait for that process, or set HDF5_USE_FILE_LOCKING=FALSE to ignore locks");
  if (errno == ENOSYS && locking_setting() == "BEST_EFFORT") return;
  fail(ErrorKind::kIo, path, "cannot be locked ({}); on a file system without locks set HDF5_USE_FILE_LOCKING=FALSE", std::strerror(errno));
}

}  // namespace calib::io
