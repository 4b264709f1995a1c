#pragma once
// RoPE angles of any position from two fp32 tables, computed in double, joined by one complex product: position = 64 a + b.

#include <cstdint>
#include <vector>

#include "kernels/core/status.h"

namespace kvrt {

inline constexpr int kRotaryFine = 128;    ///< offsets of the fine table: those inside one page
inline constexpr int kRotaryCoarse = 64;   ///< distance of two positions of the coarse table

/// Angle of pair i at position p: p * inv_freq[i]. Pairs: channels (i, i + width/2), or (2i, 2i + 1) if interleaved; channels from
/// `width` on are not rotated.
struct RotaryView {
  int pairs = 0;
  bool interleaved = false;
  std::int64_t max_position = 0;
  const float* coarse = nullptr;        ///< [max_position/64 + 1][2][pairs]: cosines, then sines, of positions 0, 64, 128 ...
  const float* fine = nullptr;          ///< [128][2][pairs] of positions 0..127
  const float* fine_by_pair = nullptr;  ///< [pairs][2][128]: the fine table, position fastest
};

class RotaryTables {
 public:
  /// max_position: the largest position of a key. Codes: kArgument.
  static Status make(const std::vector<double>& inv_freq, bool interleaved, std::int64_t max_position, RotaryTables* out);

  /// Valid as long as the tables.
  RotaryView view() const {
    return {pairs_, interleaved_, max_position_, coarse_.data(), fine_.data(), fine_by_pair_.data()};
  }

 private:
  int pairs_ = 0;
  bool interleaved_ = false;
  std::int64_t max_position_ = 0;
  std::vector<float> coarse_, fine_, fine_by_pair_;
};

}  // namespace kvrt
