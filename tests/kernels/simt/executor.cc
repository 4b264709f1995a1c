#include "tests/kernels/simt/executor.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kernels/cuda/portable.h"
#include "tests/kernels/simt/fiber.h"
#include "tests/kernels/simt/matrix_product.h"

namespace kvrt::simt {
namespace {

constexpr int kWords = cuda::executor::kMaxWords;
constexpr unsigned char kPoison = 0xCD;

/// What ends a block early.
struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A place where `n_expected` threads wait for each other. All must come for the same operation. Whoever passes has synchronised with
/// those who arrived for the same generation and with nobody else, so that ThreadSanitizer sees what a missing barrier leaves open:
/// hence acquire and release on the generation, and nothing but relaxed counters around it.
struct Meeting {
  int n_expected = 0;
  std::atomic<int> n_arrived{0};
  std::atomic<std::uint64_t> generation{0};
  std::atomic<const char*> operation{nullptr};
};

/// Exchange words of one warp; two sets, so that one meeting an operation is enough.
struct WarpWords {
  std::uint32_t words[2][cuda::kWarp][kWords];
};

struct ThreadState {
  int index = 0;
  std::uint64_t n_exchanges = 0;
  int n_barriers = 0;
  const Meeting* meeting = nullptr;             ///< of a waiting fiber
  std::uint64_t generation = 0;                 ///< that must have passed
  std::atomic<const char*> waits_at{nullptr};   ///< operation
  Counts counts;
  std::unique_ptr<Fiber> fiber;
};

struct Block {
  const Settings* settings;
  int index;
  std::vector<ThreadState> threads;
  std::vector<Meeting> warps;
  Meeting all;
  std::vector<WarpWords> exchange;
  std::unique_ptr<unsigned char[]> shared;
  std::size_t shared_bytes = 0;
  std::unique_ptr<unsigned char[]> dynamic_shared;
  std::atomic<int> n_idle{0};  ///< threads that wait or have exited
  std::atomic<int> n_exited{0};
  std::atomic<bool> has_failed{false};
  std::mutex mutex;            ///< of error and shared
  std::string error;

  Block(const Settings& s, int block_index, int n_threads)
      : settings(&s), index(block_index), threads(static_cast<std::size_t>(n_threads)),
        warps(static_cast<std::size_t>(n_threads / cuda::kWarp)), exchange(warps.size()) {
    for (int i = 0; i < n_threads; ++i) threads[static_cast<std::size_t>(i)].index = i;
    for (Meeting& m : warps) m.n_expected = cuda::kWarp;
    all.n_expected = n_threads;
  }
};

Executor* g_executor = nullptr;
Block* g_block = nullptr;
thread_local ThreadState* t_thread = nullptr;

std::string name_of(const Block& block, const ThreadState& t) {
  return "block " + std::to_string(block.index) + " thread " + std::to_string(t.index);
}

void record_failure(Block& block, const std::string& text) {
  const std::lock_guard<std::mutex> lock(block.mutex);
  if (block.error.empty()) block.error = text;
  block.has_failed.store(true, std::memory_order_release);
}
/// Ends this thread; the others leave when they meet it.
[[noreturn]] void fail(Block& block, const std::string& text) {
  record_failure(block, text);
  throw KernelError(text);
}

std::string describe_deadlock(const Block& block) {
  std::string text = "deadlock:";
  int n_named = 0, n_waiting = 0;
  for (const ThreadState& t : block.threads) {
    const char* operation = t.waits_at.load(std::memory_order_relaxed);
    if (operation == nullptr) continue;
    ++n_waiting;
    if (n_named < 4) text += (n_named++ ? "; " : " ") + name_of(block, t) + " waits at " + operation;
  }
  return text + "; " + std::to_string(n_waiting) + " of " + std::to_string(block.threads.size()) + " threads wait, " +
         std::to_string(block.n_exited.load(std::memory_order_relaxed)) + " have exited";
}

void meet(Block& block, Meeting& m, const char* operation) {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  ThreadState& t = *t_thread;
  if (block.has_failed.load(kRelaxed)) throw KernelError("another thread failed");
  const char* first = nullptr;
  if (!m.operation.compare_exchange_strong(first, operation, kRelaxed) && std::strcmp(first, operation) != 0) {
    fail(block, "divergent warp: " + name_of(block, t) + " calls " + operation + ", another lane calls " + first);
  }
  const std::uint64_t generation = m.generation.load(kRelaxed);
  t.waits_at.store(operation, kRelaxed);
  if (m.n_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == m.n_expected) {
    t.waits_at.store(nullptr, kRelaxed);
    m.operation.store(nullptr, kRelaxed);
    m.n_arrived.store(0, kRelaxed);
    block.n_idle.fetch_sub(m.n_expected - 1, kRelaxed);
    m.generation.store(generation + 1, std::memory_order_release);
    return;
  }
  // The last to arrive may have counted this thread as idle already; the sum is right once both have counted.
  if (block.n_idle.fetch_add(1, kRelaxed) + 1 == static_cast<int>(block.threads.size())) fail(block, describe_deadlock(block));
  t.meeting = &m, t.generation = generation;
  while (m.generation.load(std::memory_order_acquire) == generation) {
    if (block.has_failed.load(kRelaxed)) throw KernelError("another thread failed");
    if (block.settings->mode == Mode::kFibers) t.fiber->suspend();
    else std::this_thread::yield();
  }
  t.meeting = nullptr;
  t.waits_at.store(nullptr, kRelaxed);
}

void leave(Block& block) {
  block.n_exited.fetch_add(1, std::memory_order_relaxed);
  const int n_idle = block.n_idle.fetch_add(1, std::memory_order_relaxed) + 1, n_threads = static_cast<int>(block.threads.size());
  if (n_idle == n_threads && block.n_exited.load(std::memory_order_relaxed) < n_threads && !block.has_failed.load(std::memory_order_relaxed)) {
    record_failure(block, describe_deadlock(block));
  }
}

void run_thread(Block& block, const std::function<void()>& kernel) {
  try {
    kernel();
  } catch (const std::exception& e) {
    record_failure(block, e.what());
  }
  leave(block);
}

bool can_run(const Block& block, const ThreadState& t) {
  return !t.fiber->is_done() && (t.meeting == nullptr || t.meeting->generation != t.generation || block.has_failed);
}

void run_fibers(Block& block, const std::function<void()>& kernel, std::mt19937_64* random) {
  static std::vector<std::unique_ptr<Fiber>> spare;  // of blocks that have ended; one thread runs fibers
  for (ThreadState& t : block.threads) {
    const auto body = [&block, &kernel] { run_thread(block, kernel); };
    if (spare.empty()) {
      t.fiber = std::make_unique<Fiber>(body);
      continue;
    }
    t.fiber = std::move(spare.back());
    spare.pop_back();
    t.fiber->restart(body);
  }
  // One warp runs as far as it can before the next: what a barrier is missed by is as large as it can be.
  const auto n_warps = static_cast<int>(block.warps.size());
  std::vector<int> warps(block.warps.size()), lanes(cuda::kWarp);
  std::iota(warps.begin(), warps.end(), 0);
  std::iota(lanes.begin(), lanes.end(), 0);
  if (block.settings->order == Order::kReverse) std::reverse(warps.begin(), warps.end()), std::reverse(lanes.begin(), lanes.end());
  for (int n_idle = 0, next = 0; n_idle < n_warps; next = (next + 1) % n_warps) {
    if (next == 0 && block.settings->order == Order::kShuffled) std::shuffle(warps.begin(), warps.end(), *random);
    bool has_run = false;
    for (bool has_progress = true; has_progress; has_run |= has_progress) {
      if (block.settings->order == Order::kShuffled) std::shuffle(lanes.begin(), lanes.end(), *random);
      has_progress = false;
      for (const int lane : lanes) {
        ThreadState& t = block.threads[static_cast<std::size_t>(warps[static_cast<std::size_t>(next)] * cuda::kWarp + lane)];
        if (!can_run(block, t)) continue;
        has_progress = true;
        t_thread = &t;
        t.fiber->resume();
      }
    }
    n_idle = has_run ? 0 : n_idle + 1;
  }
  t_thread = nullptr;
  for (ThreadState& t : block.threads) {
    if (t.fiber->is_done()) spare.push_back(std::move(t.fiber));
  }
}

void run_threads(Block& block, const std::function<void()>& kernel) {
  std::vector<std::thread> pool;
  for (ThreadState& t : block.threads) {
    pool.emplace_back([&block, &kernel, &t] {
      t_thread = &t;
      run_thread(block, kernel);
    });
  }
  for (std::thread& t : pool) t.join();
}

}  // namespace

Executor::Executor(Settings settings) : settings_(settings), outer_(g_executor) { g_executor = this; }
Executor::~Executor() { g_executor = outer_; }

struct Launcher {
  static Status run(std::int64_t n_blocks, int n_threads, std::size_t shared_bytes, const std::function<void()>& kernel) {
    if (g_executor == nullptr) return Status(Code::kInternal, "no executor");
    if (n_threads % cuda::kWarp != 0) return Status(Code::kInternal, "a block of " + std::to_string(n_threads) + " threads is not whole warps");
    const Settings& settings = g_executor->settings_;
    if (g_executor->counts_.launches++ == settings.failing_launch) return Status(Code::kCuda, "kernel launch: unspecified launch failure (719)");
    std::mt19937_64 random(settings.seed);
    for (std::int64_t b = 0; b < n_blocks; ++b) {
      Block block(settings, static_cast<int>(b), n_threads);
      block.dynamic_shared.reset(new unsigned char[shared_bytes]);
      std::memset(block.dynamic_shared.get(), kPoison, shared_bytes);
      g_block = &block;
      if (settings.mode == Mode::kFibers) run_fibers(block, kernel, &random);
      else run_threads(block, kernel);
      g_block = nullptr;
      add_counts(block);
      if (!block.error.empty()) return Status(Code::kInternal, block.error);
    }
    return Status();
  }

  static bool has_code() { return g_executor != nullptr && g_executor->settings_.has_code; }

  static void add_counts(const Block& block) {
    Counts& sum = g_executor->counts_;
    for (const ThreadState& t : block.threads) {
      if (t.index % cuda::kWarp == 0) sum.matrix_products += t.counts.matrix_products, sum.exchanges += t.counts.exchanges;
      if (t.index == 0) sum.block_barriers += t.counts.block_barriers;
      sum.load_bytes += t.counts.load_bytes, sum.store_bytes += t.counts.store_bytes;
    }
  }

  static void multiply(float c[4], const std::uint32_t a[4], const std::uint32_t b[2], OperandType type) {
    const std::uint32_t words[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    const std::uint32_t* all = cuda::executor::exchange(type == OperandType::kF16 ? "mma_f16" : "mma_bf16", words, 6);
    ++t_thread->counts.matrix_products;
    multiply_fragments(all, kWords, t_thread->index % cuda::kWarp, type, g_block->settings->accumulation, c);
  }
};

}  // namespace kvrt::simt

namespace kvrt::cuda::executor {

using simt::g_block;
using simt::t_thread;

int thread() { return t_thread->index; }
int block() { return g_block->index; }

void* shared(std::size_t bytes) {
  std::unique_lock<std::mutex> lock(g_block->mutex);
  if (!g_block->shared) {
    g_block->shared.reset(new unsigned char[bytes]);
    std::memset(g_block->shared.get(), simt::kPoison, bytes);
    g_block->shared_bytes = bytes;
  } else if (g_block->shared_bytes != bytes) {
    lock.unlock();
    simt::fail(*g_block, "a kernel declares two shared objects");
  }
  return g_block->shared.get();
}

void* dynamic_shared() { return g_block->dynamic_shared.get(); }

void block_barrier() {
  ++t_thread->counts.block_barriers;
  if (t_thread->n_barriers++ == g_block->settings->dropped_barrier) return;
  simt::meet(*g_block, g_block->all, "block_barrier");
}

const std::uint32_t* exchange(const char* operation, const std::uint32_t* words, int n) {
  const int lane = t_thread->index % kWarp;
  const auto warp = static_cast<std::size_t>(t_thread->index / kWarp);
  auto& set = g_block->exchange[warp].words[t_thread->n_exchanges++ % 2];
  if (n > 0) std::memcpy(set[lane], words, sizeof(std::uint32_t) * static_cast<std::size_t>(n));
  ++t_thread->counts.exchanges;
  simt::meet(*g_block, g_block->warps[warp], operation);
  return &set[0][0];
}

void mma_f16(float c[4], const std::uint32_t a[4], const std::uint32_t b[2]) { simt::Launcher::multiply(c, a, b, simt::OperandType::kF16); }
void mma_bf16(float c[4], const std::uint32_t a[4], const std::uint32_t b[2]) { simt::Launcher::multiply(c, a, b, simt::OperandType::kBf16); }

void access(const void* address, int bytes, bool is_store) {
  if (reinterpret_cast<std::uintptr_t>(address) % static_cast<std::uintptr_t>(bytes) != 0) {
    simt::fail(*g_block, "misaligned access of " + std::to_string(bytes) + " bytes by " + simt::name_of(*g_block, *t_thread));
  }
  (is_store ? t_thread->counts.store_bytes : t_thread->counts.load_bytes) += bytes;
}

bool has_code_for_device() { return simt::Launcher::has_code(); }
void* allocate(std::size_t bytes) {
  void* const memory = std::malloc(bytes);
  if (memory) std::memset(memory, 0xFF, bytes);
  return memory;
}
void release(void* memory) { std::free(memory); }

Status run(std::int64_t n_blocks, int n_threads, std::size_t shared_bytes, const std::function<void()>& kernel) {
  return simt::Launcher::run(n_blocks, n_threads, shared_bytes, kernel);
}

}  // namespace kvrt::cuda::executor
