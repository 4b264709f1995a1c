#pragma once
// Read-only memory map of one regular file.

#include <cstddef>
#include <string>
#include <string_view>

namespace calib {

/// Maps a whole file for reading. An empty file maps to an empty view.
/// Throws: kNotFound (absent, dangling link: names link and target), kIo (unreadable, a folder), naming the path.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const noexcept { return path_; }
  std::size_t size() const noexcept { return size_; }
  std::string_view bytes() const noexcept { return {static_cast<const char*>(data_), size_}; }
  /// Throws kIo if the file has become shorter since it was mapped: reading past its end would raise SIGBUS.
  void check_not_shrunk() const;
  /// Drops the resident pages of a range (madvise); the data stay readable and come back from disk.
  void release(std::size_t offset, std::size_t size) const noexcept;

 private:
  std::string path_;
  void* data_ = nullptr;
  std::size_t size_ = 0;
  int fd_ = -1;
};

/// Throws kNotFound with `advice`, what to do then, if nothing stands under `path`. What else may be wrong is left to MappedFile.
void require_file(const std::string& path, const std::string& advice);

}  // namespace calib
