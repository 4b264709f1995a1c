#pragma once
// What greedy replies look like: repetition, agreement, and the interval of a share. No Torch.

#include <cstdint>
#include <span>

namespace calib::sens {

/// rep-4 = 1 - unique / total 4-grams; 0 for fewer than four tokens. Source: METHODS.md 9 (G44).
double repeated_4grams(std::span<const std::int32_t> ids);

/// Tokens of the longest suffix that also ends earlier; the two may overlap, as they do in a loop. Cost: O(n).
std::int64_t longest_repeated_suffix(std::span<const std::int32_t> ids);

/// Tokens before the first difference.
std::int64_t agreeing_prefix(std::span<const std::int32_t> a, std::span<const std::int32_t> b);

struct Interval {
  double low = 0, high = 0;
};

/// Wilson's 95 % interval of a share of k among n. Requires: 0 <= k <= n, n > 0. Source: METHODS.md 9 (G47).
Interval wilson_interval(std::int64_t k, std::int64_t n);

}  // namespace calib::sens
