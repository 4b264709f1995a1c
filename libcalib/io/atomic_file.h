#pragma once
// Files that appear under their final name only when they are complete.

#include <string>
#include <string_view>

namespace calib::io {

/// A new file under a temporary name ("<path>.<pid>.partial") in the target's folder. commit() flushes it to the device and
/// renames it over `path`; destruction without commit() removes it, so an older file under `path` stays as it was.
/// A symbolic link under `path` is followed. Sets SIGXFSZ to ignored if it has its default action: a file size limit is then
/// an error of write() instead of the end of the process.
class AtomicFile {
 public:
  /// Throws: kNotFound (the folder), kIo (target is a folder or no regular file, folder read-only …), naming `path`.
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  const std::string& path() const noexcept { return path_; }
  /// Where another library may write the content instead of write().
  const std::string& temporary_path() const noexcept { return temporary_; }
  int descriptor() const noexcept { return fd_; }

  /// Appends. Throws kIo with the cause (disk full, file size limit).
  void write(std::string_view bytes);
  /// fsync, rename, fsync of the folder. Throws kIo.
  void commit();

 private:
  std::string path_, target_, temporary_;
  int fd_ = -1;
};

/// Removes the temporary file of every AtomicFile that is open: for handlers of signals that end the process without destructors.
/// Async-signal-safe; the AtomicFiles cannot be used any more.
void remove_partial_files() noexcept;

/// Whole file in one call.
void write_file(const std::string& path, std::string_view bytes);

}  // namespace calib::io
