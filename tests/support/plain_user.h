#pragma once
// Permissions hold for everybody but root: a test of them lets go of root first.

#include <unistd.h>

#include <exception>
#include <filesystem>
#include <stdexcept>

#include "tests/support/temp_folder.h"

namespace calib::test {

/// While it lives, a process of root is the user 65534 (nobody) to the file system, and may still enter `folder`. Others stay who they are.
class PlainUser {
 public:
  explicit PlainUser(const TempFolder& folder) {
    if (!root_) return;
    namespace fs = std::filesystem;
    fs::permissions(folder.path(), fs::perms::owner_all | fs::perms::others_read | fs::perms::others_exec);
    if (::seteuid(65534) != 0) throw std::runtime_error("cannot become the user 65534");
  }
  ~PlainUser() {
    if (root_ && ::seteuid(0) != 0) std::terminate();
  }
  PlainUser(const PlainUser&) = delete;
  PlainUser& operator=(const PlainUser&) = delete;

 private:
  bool root_ = ::geteuid() == 0;
};

}  // namespace calib::test
