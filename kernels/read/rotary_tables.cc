#include "kernels/read/rotary_tables.h"

#include <cmath>
#include <string>

namespace kvrt {

Status RotaryTables::make(const std::vector<double>& inv_freq, bool interleaved, std::int64_t max_position, RotaryTables* out) {
  if (inv_freq.empty()) return Status(Code::kArgument, "rotary tables: inv_freq is empty; expected one frequency for each pair of channels");
  if (max_position < 0) return Status(Code::kArgument, "rotary tables: max_position is " + std::to_string(max_position) + "; expected >= 0");
  for (std::size_t i = 0; i < inv_freq.size(); ++i) {
    if (!std::isfinite(inv_freq[i])) return Status(Code::kArgument, "rotary tables: inv_freq[" + std::to_string(i) + "] is not finite");
  }
  RotaryTables t;
  const std::size_t n = inv_freq.size();
  t.pairs_ = static_cast<int>(n), t.interleaved_ = interleaved, t.max_position_ = max_position;
  const auto fill = [&](double position, float* row) {
    for (std::size_t i = 0; i < n; ++i) {
      row[i] = static_cast<float>(std::cos(position * inv_freq[i])), row[n + i] = static_cast<float>(std::sin(position * inv_freq[i]));
    }
  };
  const auto n_coarse = static_cast<std::size_t>(max_position / kRotaryStep + 1);
  t.coarse_.resize(n_coarse * 2 * n);
  for (std::size_t a = 0; a < n_coarse; ++a) fill(static_cast<double>(a) * kRotaryStep, &t.coarse_[a * 2 * n]);
  t.fine_.resize(kRotaryStep * 2 * n);
  for (std::size_t b = 0; b < kRotaryStep; ++b) fill(static_cast<double>(b), &t.fine_[b * 2 * n]);
  t.by_pair_.resize(n * 2 * kRotaryTile);
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t part = 0; part < 2; ++part) {
      for (std::size_t b = 0; b < kRotaryTile; ++b) t.by_pair_[(i * 2 + part) * kRotaryTile + b] = t.fine_[(b * 2 + part) * n + i];
    }
  }
  *out = std::move(t);
  return {};
}

}  // namespace kvrt
