#pragma once
// What the calls of the CUDA backend share: parts of the workspace, and sequences on their way to the device.

#include <cstdint>

#include "kernels/core/call.h"
#include "kernels/core/control.h"
#include "kernels/core/device_layer.h"

namespace kvrt {

inline constexpr std::int64_t kDeviceAlign = 256;

/// Hands out a workspace piece by piece; with a null start it only counts.
class DeviceRoom {
 public:
  explicit DeviceRoom(std::uint8_t* start) : start_(reinterpret_cast<std::uintptr_t>(start)), at_(start_) {}
  template <class T>
  T* take(std::int64_t n) {
    const std::uintptr_t here = at_;
    at_ += static_cast<std::uintptr_t>((n * static_cast<std::int64_t>(sizeof(T)) + kDeviceAlign - 1) / kDeviceAlign * kDeviceAlign);
    return reinterpret_cast<T*>(here);
  }
  std::int64_t used() const { return static_cast<std::int64_t>(at_ - start_); }

 private:
  std::uintptr_t start_, at_;
};

/// Pages [first, last) of a list.
struct PageSpan {
  std::int64_t first = 0, last = 0;
};
/// Pages of one segment that a call on this sequence touches: all live ones, or those that append reads or writes.
enum class Touches { kLive, kAppend };
PageSpan touched_pages(const LayerContext& layer, const Sequence& sequence, kvrt_segment which, Touches touches);

/// Room for the largest control arrays of a layer.
void take_control(const LayerContext& layer, const kvrt_limits& limits, DeviceRoom* room);

/// fill(index, DeviceSequence*) completes each sequence. first, n: of the batch. The device copy is in the room when the stream gets there.
template <class Fill>
Status send_sequences(const Call& call, const kvrt_batch& batch, std::int64_t first, std::int64_t n, Touches touches, void* stream, Fill fill,
                      DeviceRoom* room, const DeviceSequence** out);

/// Strides resolved.
void resolve_pools(const LayerContext& layer, const kvrt_pools& pools, PoolSide out[KVRT_SIDES]);

/// Keeps the first driver error of a context: every call after it fails with it.
Status keep_driver_error(const Context& context, Status status);

// ---- Templates ----

template <class Fill>
Status send_sequences(const Call& call, const kvrt_batch& batch, std::int64_t first, std::int64_t n, Touches touches, void* stream, Fill fill,
                      DeviceRoom* room, const DeviceSequence** out) {
  const LayerContext& layer = *call.layer;
  std::int64_t n_ids = 0;
  for (std::int64_t i = first; i < first + n; ++i) {
    const Sequence s = sequence_of(batch, i);
    for (int which = 0; which < KVRT_SALIENT; ++which) {
      const PageSpan span = touched_pages(layer, s, static_cast<kvrt_segment>(which), touches);
      n_ids += span.last - span.first;
    }
  }
  static_assert(sizeof(DeviceSequence) % sizeof(std::int32_t) == 0, "ids follow sequences in one run of bytes");
  auto* const sequences = reinterpret_cast<DeviceSequence*>(room->take<std::uint8_t>(n * static_cast<std::int64_t>(sizeof(DeviceSequence)) + n_ids * 4));
  const auto ids = reinterpret_cast<std::uintptr_t>(sequences + n);
  ControlWriter writer(sequences, stream);
  std::int64_t at = 0;
  for (std::int64_t i = first; i < first + n; ++i) {
    DeviceSequence d;
    d.sequence = sequence_of(batch, i);
    fill(i - first, &d);
    for (int which = 0; which < KVRT_SALIENT; ++which) {
      const PageSpan span = touched_pages(layer, d.sequence, static_cast<kvrt_segment>(which), touches);
      // Entry p of the list is where page p - first of the span is.
      d.sequence.pages[which] = reinterpret_cast<const std::int32_t*>(ids + static_cast<std::uintptr_t>((at - span.first) * 4));
      at += span.last - span.first;
    }
    if (Status status = writer.put(&d, sizeof d); !status.ok()) return status;
  }
  for (std::int64_t i = first; i < first + n; ++i) {
    const Sequence s = sequence_of(batch, i);
    for (int which = 0; which < KVRT_SALIENT; ++which) {
      const PageSpan span = touched_pages(layer, s, static_cast<kvrt_segment>(which), touches);
      if (span.last == span.first) continue;
      if (Status status = writer.put(s.pages[which] + span.first, (span.last - span.first) * 4); !status.ok()) return status;
    }
  }
  *out = sequences;
  return writer.finish();
}

}  // namespace kvrt
