#pragma once
// Rows of fixed size (hidden states) in memory up to a limit, the rest in a temporary file that no other process can see.

#include <cstdint>
#include <string>

namespace calib::model {

/// Row-addressed storage; rows [0, memory rows) live in memory, the others in an unlinked file. Memory is touched only where
/// written. Calls on disjoint rows may run at the same time.
class HiddenStore {
 public:
  /// folder: where the spill file is made ("" = $TMPDIR or /tmp). Nothing is created unless n_rows * row_bytes > memory_limit.
  /// Throws: kIo naming the folder, with the size needed, if it has less free space or cannot be written.
  HiddenStore(std::int64_t n_rows, std::int64_t row_bytes, std::int64_t memory_limit_bytes, const std::string& folder = "");
  ~HiddenStore();
  HiddenStore(const HiddenStore&) = delete;
  HiddenStore& operator=(const HiddenStore&) = delete;

  void write(std::int64_t first_row, std::int64_t n_rows, const void* data);
  void read(std::int64_t first_row, std::int64_t n_rows, void* data) const;

  std::int64_t n_rows() const noexcept { return n_rows_; }
  std::int64_t memory_bytes() const noexcept { return n_memory_rows_ * row_bytes_; }
  std::int64_t spilled_bytes() const noexcept { return (n_rows_ - n_memory_rows_) * row_bytes_; }

 private:
  std::int64_t n_rows_, row_bytes_, n_memory_rows_;
  char* memory_ = nullptr;
  int fd_ = -1;
  std::string folder_;
};

}  // namespace calib::model
