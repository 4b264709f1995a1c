#pragma once
// RoPE angles of any position from two fp32 tables, computed in double, joined by one complex product: position = 64 a + b.
// Keys of a tile are rotated by their offset inside it, queries back by the position of its first slot.

#include <cstdint>
#include <vector>

#include "kernels/core/status.h"

namespace kvrt {

inline constexpr int kRotaryStep = 64;   ///< distance of two positions of the coarse table; positions of the fine one
inline constexpr int kRotaryTile = 32;   ///< offsets inside a tile of tokens

/// Angle of pair i at position p: p * inv_freq[i]. Pairs: channels (i, i + width/2), or (2i, 2i + 1) if interleaved; channels from
/// `width` on are not rotated.
struct RotaryView {
  int pairs = 0;
  bool interleaved = false;
  std::int64_t max_position = 0;
  const float* coarse = nullptr;   ///< [max_position/64 + 1][2][pairs]: cosines, then sines, of positions 0, 64, 128 ...
  const float* fine = nullptr;     ///< [64][2][pairs] of positions 0..63
  const float* by_pair = nullptr;  ///< [pairs][2][32] of positions 0..31, position fastest
};

class RotaryTables {
 public:
  /// max_position: the largest position of a key. Codes: kArgument.
  static Status make(const std::vector<double>& inv_freq, bool interleaved, std::int64_t max_position, RotaryTables* out);

  /// Valid as long as the tables.
  RotaryView view() const {
    return {pairs_, interleaved_, max_position_, coarse_.data(), fine_.data(), by_pair_.data()};
  }

 private:
  int pairs_ = 0;
  bool interleaved_ = false;
  std::int64_t max_position_ = 0;
  std::vector<float> coarse_, fine_, by_pair_;
};

}  // namespace kvrt
