#pragma once
// Header of a K page whose keys are before RoPE: int64 position of its first slot, then one unsigned offset a slot from it, 1 byte in
// base pages, 2 bytes in exact pages; all ones = dead slot. A page of the ring is rewritten slot by slot: until its turn comes a slot
// holds the token one turn of the ring before the one that its offset names.

#include <cstdint>

#include "kernels/codec/int_codec.h"

namespace kvrt {

inline constexpr int kSlotOffsets = 8;  ///< where the offsets begin

KVRT_HOST_DEVICE inline void store_le64(std::uint8_t* p, std::uint64_t x) {
  store_le32(p, static_cast<std::uint32_t>(x));
  store_le32(p + 4, static_cast<std::uint32_t>(x >> 32));
}
KVRT_HOST_DEVICE inline std::uint64_t load_le64(const std::uint8_t* p) { return load_le32(p) | static_cast<std::uint64_t>(load_le32(p + 4)) << 32; }

/// Writes what the header says of one slot; the slot 0 of a page is written before the others. Positions of a page are consecutive.
KVRT_HOST_DEVICE inline void store_slot_position(std::uint8_t* header, int offset_bytes, int slot, std::int64_t position) {
  if (slot == 0) store_le64(header, static_cast<std::uint64_t>(position));
  std::uint8_t* const offset = header + kSlotOffsets + static_cast<std::int64_t>(slot) * offset_bytes;
  if (offset_bytes == 1) *offset = static_cast<std::uint8_t>(slot);
  else store_le16(offset, static_cast<std::uint16_t>(slot));
}

/// Position of a slot as the header says, -1 for a dead one.
KVRT_HOST_DEVICE inline std::int64_t load_slot_position(const std::uint8_t* header, int offset_bytes, int slot) {
  const std::uint8_t* const offset = header + kSlotOffsets + static_cast<std::int64_t>(slot) * offset_bytes;
  const std::int64_t value = offset_bytes == 1 ? *offset : load_le16(offset);
  return value == (offset_bytes == 1 ? 0xFF : 0xFFFF) ? -1 : static_cast<std::int64_t>(load_le64(header)) + value;
}

}  // namespace kvrt
