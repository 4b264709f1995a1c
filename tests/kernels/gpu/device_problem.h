#pragma once
// A decode problem on the device: its memory copied, its segments pointed at the copies, launches timed.

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/kernels/decode_problem.h"

namespace kvrt::gpu {

/// Throws std::runtime_error naming the call.
void check(cudaError_t error, const char* call);
void check(const Status& status);

/// Device memory, freed with the object.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes);
  Buffer(const void* host, std::size_t bytes);
  Buffer(Buffer&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() { cudaFree(data_); }
  template <class T>
  T* as() const { return static_cast<T*>(data_); }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

class DeviceProblem {
 public:
  /// n_copies: how often the problem is laid out in memory of its own and run in one launch; rows and chunks multiply.
  explicit DeviceProblem(const testing::DecodeProblem& problem, int n_copies = 1);
  void launch(cudaStream_t stream) const;  ///< decode + combine
  testing::DecodeResult result() const;    ///< of the first copy, after the device is idle
  std::int64_t cache_bytes() const noexcept { return problem_.cache_bytes() * n_copies_; }
  /// Plain read of as many bytes as the launch reads of the cache.
  void launch_stream(cudaStream_t stream, int n_blocks) const;

 private:
  const testing::DecodeProblem& problem_;
  int n_copies_;
  std::vector<Buffer> memory_;
  std::vector<Buffer> arrays_;
  DecodeArgs decode_{};
  CombineArgs combine_{};
  Buffer stream_data_, stream_sums_;
};

}  // namespace kvrt::gpu
