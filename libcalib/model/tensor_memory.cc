#include "libcalib/model/tensor_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <list>
#include <mutex>
#include <new>
#include <unordered_map>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace calib::model {
namespace {

constexpr std::size_t kSmallestBlock = std::size_t{1} << 20;

/// Sizes are rounded up to eighths of a power of two, so that nearly equal tensors share blocks.
std::size_t block_size(std::size_t n) {
  const std::size_t step = std::max<std::size_t>(std::bit_floor(n) / 8, 4096);
  return (n + step - 1) / step * step;
}

class BlockCache {
 public:
  /// nullptr if the system has no more.
  void* take(std::size_t n) {
    const std::size_t size = block_size(n);
    const std::lock_guard lock(mutex_);
    const auto it = std::find_if(kept_.rbegin(), kept_.rend(), [&](const Block& b) { return b.size == size; });
    void* data = nullptr;
    if (it != kept_.rend()) {
      data = it->data;
      kept_.erase(std::next(it).base());
      bytes_.kept -= static_cast<std::int64_t>(size);
    }
    bytes_.live += static_cast<std::int64_t>(size);
    bytes_.peak_live = std::max(bytes_.peak_live, bytes_.live);
    while (!kept_.empty() && bytes_.live + bytes_.kept > bytes_.peak_live) drop_oldest();
    if (!data) data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      bytes_.live -= static_cast<std::int64_t>(size);
      return nullptr;
    }
    live_.emplace(data, size);
    return data;
  }
  /// False if the block is not one of ours.
  bool give_back(void* data) {
    const std::lock_guard lock(mutex_);
    const auto it = live_.find(data);
    if (it == live_.end()) return false;
    bytes_.live -= static_cast<std::int64_t>(it->second);
    bytes_.kept += static_cast<std::int64_t>(it->second);
    kept_.push_back({data, it->second});
    live_.erase(it);
    return true;
  }
  TensorMemory bytes() const {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }

 private:
  struct Block {
    void* data;
    std::size_t size;
  };
  void drop_oldest() {
    const Block block = kept_.front();
    kept_.pop_front();
    bytes_.kept -= static_cast<std::int64_t>(block.size);
    ::munmap(block.data, block.size);
  }

  mutable std::mutex mutex_;
  std::list<Block> kept_;  // oldest first
  std::unordered_map<void*, std::size_t> live_;
  TensorMemory bytes_;
};

/// Never destroyed: tensors in static storage may outlive every other object.
BlockCache& cache() {
  static auto* const instance = new BlockCache;
  return *instance;
}

c10::Allocator* g_small = nullptr;  // libtorch's own, for everything else

/// Some callers allocate with one call and free with another: the address alone says whose block it is.
void release(void* data) {
  if (!cache().give_back(data)) g_small->raw_deallocate(data);
}

class ReusingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t n) override {
    if (n < kSmallestBlock) return g_small->allocate(n);
    void* data = cache().take(n);
    if (!data) throw std::bad_alloc();
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};

}  // namespace

void reuse_tensor_memory() {
  static std::once_flag once;
  std::call_once(once, [] {
    g_small = c10::GetDefaultCPUAllocator();
    c10::SetCPUAllocator(new ReusingAllocator, /*priority=*/1);
  });
}

TensorMemory tensor_memory() { return cache().bytes(); }

}  // namespace calib::model
