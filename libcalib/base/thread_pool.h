#pragma once
// A fixed set of worker threads and one parallel loop.

#include <cstdint>
#include <functional>
#include <memory>

namespace calib {

/// `body(i)` for i in [0, n). Which worker runs which i is unspecified: results must not depend on it.
class ThreadPool {
 public:
  /// n_threads >= 1 counts the calling thread, which works too.
  explicit ThreadPool(int n_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int n_threads() const noexcept { return n_threads_; }
  /// Returns when all are done; rethrows the first exception of a body. Not re-entrant from inside a body.
  void parallel_for(std::int64_t n, const std::function<void(std::int64_t)>& body);

 private:
  struct Impl;
  int n_threads_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace calib
