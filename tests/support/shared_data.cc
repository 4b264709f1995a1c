#include "tests/support/shared_data.h"

#include <cstdlib>
#include <filesystem>

namespace calib::test {

std::string shared_data(const std::string& file) {
  const char* given = std::getenv("KVCALIB_SHARED");
  const std::string root = given != nullptr ? std::string(given) : std::string(CALIB_SOURCE_DIR "/../shared");
  const std::string path = root + "/data/" + file;
  return std::filesystem::exists(path) ? path : std::string();
}

}  // namespace calib::test
