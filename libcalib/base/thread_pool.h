#pragma once
// A number of threads and one parallel loop.

#include <cstdint>
#include <functional>

namespace calib {

/// `body(i)` for i in [0, n). Which thread runs which i is unspecified: results must not depend on it. The threads are those
/// of OpenMP, which libtorch uses too: two teams would spend the cores on waiting for each other.
class ThreadPool {
 public:
  /// n_threads >= 1 counts the calling thread, which works too.
  explicit ThreadPool(int n_threads);
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int n_threads() const noexcept { return n_threads_; }
  /// Returns when all are done; rethrows the first exception of a body. Not re-entrant from inside a body.
  void parallel_for(std::int64_t n, const std::function<void(std::int64_t)>& body);

 private:
  int n_threads_;
};

}  // namespace calib
