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

std::string real_model(const char* variable, const std::string& file) {
  if (const char* named = std::getenv(variable)) return named;
  for (const char* folder : {"/models/", "/build/models/", "/demo-out/"})
    if (const std::string path = CALIB_SOURCE_DIR + std::string(folder) + file; std::filesystem::exists(path)) return path;
  return {};
}

std::string smollm2() { return real_model("KVCALIB_MODEL", "SmolLM2-135M-Instruct.Q4_1.gguf"); }

}  // namespace calib::test
