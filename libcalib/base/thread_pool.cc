#include "libcalib/base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace calib {
namespace {

/// Runs `work` on `n` threads at once, the calling one among them.
template <typename F>
void on_team(int n, const F& work) {
#ifdef _OPENMP
#pragma omp parallel num_threads(n)
  work();
#else  // the thread sanitizer cannot see into OpenMP's barriers
  std::vector<std::jthread> others;
  for (int i = 1; i < n; ++i) others.emplace_back(work);
  work();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int n_threads) : n_threads_(std::max(1, n_threads)) {}

void ThreadPool::parallel_for(std::int64_t n, const std::function<void(std::int64_t)>& body) {
  if (n_threads_ == 1 || n <= 1) {
    for (std::int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  std::atomic<std::int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  on_team(n_threads_, [&] {
    try {
      for (std::int64_t i; (i = next.fetch_add(1)) < n;) body(i);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
      next = n;
    }
  });
  if (error) std::rethrow_exception(error);
}

}  // namespace calib
