#pragma once
// A scratch folder that is gone when the test ends, and whole-file reads and writes.

#include <string>
#include <string_view>

namespace calib::test {

/// A new empty folder under the system's temporary folder; removed with everything in it by the destructor.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const noexcept { return path_; }
  /// path() + "/" + name.
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

/// Creates parent folders as needed. Throws std::runtime_error naming the path.
void write_file(const std::string& path, std::string_view bytes);
std::string read_file(const std::string& path);

}  // namespace calib::test
