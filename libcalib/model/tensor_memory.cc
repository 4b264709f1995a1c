#include "libcalib/model/tensor_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace calib::model {
namespace {

constexpr std::size_t kSmallestBlock = std::size_t{1} << 20, kGranule = std::size_t{64} << 10, kHugePage = std::size_t{2} << 20;

/// One reserved range of addresses. Blocks take the lowest free place that holds them, so that the same pages serve again and
/// again and all of them lie close together; neighbours that become free merge.
class Arena {
 public:
  Arena() {
    const std::size_t wanted = 2 * static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const std::size_t size = (wanted + kHugePage - 1) / kHugePage * kHugePage;
    void* const data = ::mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) return;  // limited address space: libtorch's own allocator does
    base_ = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage);
    ::madvise(base_, size, MADV_HUGEPAGE);
    size_ = size;
    free_.emplace(0, size);
  }

  /// nullptr if no place is large enough.
  void* take(std::size_t n) {
    const std::size_t size = (n + kGranule - 1) / kGranule * kGranule;
    const std::lock_guard lock(mutex_);
    const auto place = std::find_if(free_.begin(), free_.end(), [&](const auto& range) { return range.second >= size; });
    if (place == free_.end()) return nullptr;
    const auto [offset, room] = *place;
    free_.erase(place);
    if (room > size) free_.emplace(offset + size, room - size);
    live_.emplace(offset, size);
    bytes_.live += static_cast<std::int64_t>(size);
    bytes_.peak_live = std::max(bytes_.peak_live, bytes_.live);
    bytes_.touched = std::max(bytes_.touched, static_cast<std::int64_t>(offset + size));
    return base_ + offset;
  }
  /// False if the block is not one of ours.
  bool give_back(void* data) {
    if (data < base_ || data >= base_ + size_) return false;
    const std::lock_guard lock(mutex_);
    const auto block = live_.find(static_cast<std::size_t>(static_cast<char*>(data) - base_));
    auto [offset, size] = *block;
    live_.erase(block);
    bytes_.live -= static_cast<std::int64_t>(size);
    auto next = free_.upper_bound(offset);
    if (next != free_.end() && offset + size == next->first) {
      size += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin())
      if (const auto before = std::prev(next); before->first + before->second == offset) {
        before->second += size;
        return true;
      }
    free_.emplace(offset, size);
    return true;
  }
  TensorMemory bytes() const {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }

 private:
  mutable std::mutex mutex_;
  char* base_ = nullptr;
  std::size_t size_ = 0;
  std::map<std::size_t, std::size_t> free_;  // offset -> size
  std::unordered_map<std::size_t, std::size_t> live_;
  TensorMemory bytes_;
};

/// Never destroyed: tensors in static storage may outlive every other object.
Arena& arena() {
  static auto* const instance = new Arena;
  return *instance;
}

c10::Allocator* g_small = nullptr;  // libtorch's own, for everything else

/// Some callers allocate with one call and free with another: the address alone says whose block it is.
void release(void* data) {
  if (!arena().give_back(data)) g_small->raw_deallocate(data);
}

class ReusingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t n) override {
    void* const data = n < kSmallestBlock ? nullptr : arena().take(n);
    if (!data) return g_small->allocate(n);
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

TensorMemory tensor_memory() { return arena().bytes(); }

}  // namespace calib::model
