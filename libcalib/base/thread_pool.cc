#include "libcalib/base/thread_pool.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace calib {

struct ThreadPool::Impl {
  std::mutex mutex;
  std::condition_variable wake, done;
  const std::function<void(std::int64_t)>* body = nullptr;
  std::int64_t n = 0;
  std::atomic<std::int64_t> next{0};
  std::uint64_t generation = 0;
  int n_busy = 0;
  bool stop = false;
  std::exception_ptr error;
  std::vector<std::thread> workers;

  void drain(const std::function<void(std::int64_t)>& f, std::int64_t count) {
    try {
      for (std::int64_t i; (i = next.fetch_add(1)) < count;) f(i);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
      next = count;
    }
  }
  void work() {
    std::uint64_t seen = 0;
    for (;;) {
      std::unique_lock lock(mutex);
      wake.wait(lock, [&] { return stop || generation != seen; });
      if (stop) return;
      seen = generation;
      const auto* f = body;
      const std::int64_t count = n;
      lock.unlock();
      drain(*f, count);
      lock.lock();
      if (--n_busy == 0) done.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int n_threads) : n_threads_(n_threads < 1 ? 1 : n_threads), impl_(std::make_unique<Impl>()) {
  for (int i = 1; i < n_threads_; ++i) impl_->workers.emplace_back([this] { impl_->work(); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->wake.notify_all();
  for (auto& t : impl_->workers) t.join();
}

void ThreadPool::parallel_for(std::int64_t n, const std::function<void(std::int64_t)>& body) {
  if (n_threads_ == 1 || n <= 1) {
    for (std::int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->body = &body;
    impl_->n = n;
    impl_->next = 0;
    impl_->error = nullptr;
    impl_->n_busy = n_threads_ - 1;
    ++impl_->generation;
  }
  impl_->wake.notify_all();
  impl_->drain(body, n);
  std::unique_lock lock(impl_->mutex);
  impl_->done.wait(lock, [&] { return impl_->n_busy == 0; });
  if (impl_->error) std::rethrow_exception(impl_->error);
}

}  // namespace calib
