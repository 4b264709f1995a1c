#pragma once
// Runs CUDA kernels on the CPU, one fiber or one std::thread per CUDA thread, and reports what a GPU would leave undefined:
// lanes that miss a warp operation, barriers in divergent code, misaligned vectors, reads of shared memory nobody wrote (poison).
// The kernels reach it through the declarations of kernels/cuda/portable.h.

#include <cstdint>
#include <string>

namespace kvrt::simt {

enum class Mode {
  kFibers,   ///< one CPU thread; fast, deterministic
  kThreads,  ///< one std::thread per CUDA thread, for ThreadSanitizer and AddressSanitizer
};
/// In which order the fibers of a block run between two meeting points. Results must not depend on it.
enum class Order { kForward, kReverse, kShuffled };
/// Sums inside one matrix product.
enum class Accumulation {
  kExact,       ///< all products and the addend in double, rounded once
  kTruncating,  ///< blocks of 8 products aligned to the largest term and cut to 24 bits, as tensor cores do at worst
};

struct Settings {
  Mode mode = Mode::kFibers;
  Order order = Order::kForward;
  std::uint64_t seed = 1;  ///< of kShuffled
  Accumulation accumulation = Accumulation::kExact;
  std::int64_t failing_launch = -1;  ///< the launch of this ordinal is refused by the driver (error 719)
  bool has_code = true;              ///< false: this build has no code for the device that contexts find
  int dropped_barrier = -1;  ///< the block barrier of this ordinal does nothing: shows that the tests see a missing one
};

/// Sums over all launches of one Executor.
struct Counts {
  std::int64_t launches = 0;
  std::int64_t matrix_products = 0;  ///< warp-wide
  std::int64_t exchanges = 0;        ///< warp-wide operations of any kind
  std::int64_t block_barriers = 0;
  std::int64_t load_bytes = 0, store_bytes = 0;  ///< of global memory, through kernels/cuda/memory.h
};

/// While it lives, kernels run under its settings. A later one takes over until its end; one thread at a time.
class Executor {
 public:
  explicit Executor(Settings settings);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;
  const Counts& counts() const noexcept { return counts_; }

 private:
  friend struct Launcher;
  Settings settings_;
  Counts counts_;
  Executor* outer_;
};

}  // namespace kvrt::simt
