#include "kernels/core/device_tables.h"

#include <cstring>
#include <map>

namespace kvrt {
namespace {

/// Bytes that will lie at an address. Arrays that several layers share are stored once.
class Image {
 public:
  explicit Image(std::uintptr_t base) : base_(base) {}

  template <class T>
  const T* put(const T* values, std::int64_t n) {
    if (!values || n == 0) return nullptr;
    const auto [it, is_new] = places_.try_emplace(values, 0);
    if (is_new) it->second = append(values, n * static_cast<std::int64_t>(sizeof(T)));
    return reinterpret_cast<const T*>(it->second);
  }
  /// For values that go out of scope.
  template <class T>
  const T* put_copy(const std::vector<T>& values) {
    return values.empty() ? nullptr : reinterpret_cast<const T*>(append(values.data(), static_cast<std::int64_t>(values.size() * sizeof(T))));
  }
  const std::vector<std::uint8_t>& bytes() const { return bytes_; }

 private:
  std::uintptr_t append(const void* values, std::int64_t n) {
    constexpr std::size_t kAlign = 256;
    bytes_.resize((bytes_.size() + kAlign - 1) / kAlign * kAlign);
    const std::size_t at = bytes_.size();
    bytes_.resize(at + static_cast<std::size_t>(n));
    std::memcpy(bytes_.data() + at, values, static_cast<std::size_t>(n));
    return base_ + at;
  }
  std::uintptr_t base_;
  std::vector<std::uint8_t> bytes_;
  std::map<const void*, std::uintptr_t> places_;
};

DeviceUnit put_unit(const UnitContext& unit, Image* image) {
  const FakeQuantJob& job = unit.job;
  const std::int64_t heads = job.n_heads, width = job.head_dim;
  std::vector<PageCodec> codecs = unit.codecs;
  for (PageCodec& c : codecs) {
    c.channel_ranges = image->put(c.channel_ranges, width);
    c.ef_u = image->put(c.ef_u, width * (width + 1) / 2);
    c.ef_order = image->put(c.ef_order, width);
  }
  DeviceUnit u = {};
  u.frame.head_dim = job.head_dim, u.frame.round_input_to_bf16 = job.round_input_to_bf16;
  u.frame.block_order = image->put(job.block_order, width);
  u.frame.mean = image->put(job.mean, heads * width), u.frame.smooth = image->put(job.smooth, heads * width);
  u.frame.had = job.had, u.frame.had_scale = job.had_scale;
  if (job.had.size) u.frame.paley = image->put(job.paley, kMaxPaley), u.frame.paley_transposed = image->put(job.paley_transposed, kMaxPaley);
  u.codecs = image->put_copy(codecs);
  u.exact = unit.exact;
  u.base_page = {unit.base_page.header, unit.base_page.block}, u.exact_page = {unit.exact_page.header, unit.exact_page.block};
  u.page_tokens = unit.base_page.page_tokens;
  u.pre = unit.pre;
  u.stored_mean = image->put(unit.stored_mean.data(), static_cast<std::int64_t>(unit.stored_mean.size()));
  return u;
}

}  // namespace

Status DeviceTables::make(int device, const std::vector<LayerContext>& layers, std::unique_ptr<DeviceTables>* out) {
  auto tables = std::make_unique<DeviceTables>(device, layers.size());
  const auto build = [&](Image* image) {
    const std::vector<DeviceCounters> counters(layers.size(), DeviceCounters{});
    tables->counters_ = image->put_copy(counters);
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const LayerContext& l = layers[i];
      std::vector<DeviceLayer> d(1);
      for (int side = 0; side < KVRT_SIDES; ++side) d[0].units[side] = put_unit(l.units[side], image);
      d[0].tiers = l.tiers();
      d[0].rope = l.rope;
      d[0].rope.coarse = image->put(l.rope.coarse, l.n_coarse * 2 * l.rope.n_pairs);
      d[0].rope.fine = image->put(l.rope.fine, kRopeFine * 2 * l.rope.n_pairs);
      d[0].n_heads = l.layout.n_kv_heads, d[0].group = l.group, d[0].head_dim = l.layout.head_dim;
      d[0].counters = const_cast<DeviceCounters*>(tables->counters_) + i;
      tables->layers_[i] = image->put_copy(d);
    }
  };
  Image sized(0);
  build(&sized);
  const auto n = static_cast<std::int64_t>(sized.bytes().size());
  if (Status status = allocate_device(device, n, &tables->memory_); !status.ok()) return status;
  Image image(reinterpret_cast<std::uintptr_t>(tables->memory_));
  build(&image);
  if (Status status = copy_to_device(device, tables->memory_, image.bytes().data(), n); !status.ok()) return status;
  *out = std::move(tables);
  return {};
}

DeviceTables::~DeviceTables() {
  if (memory_) release_device(device_, memory_);
}

Status DeviceTables::read_counters(std::size_t index, DeviceCounters* out) const {
  return copy_to_host(out, counters_ + index, sizeof *out, nullptr);
}

}  // namespace kvrt
