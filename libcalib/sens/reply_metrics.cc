#include "libcalib/sens/reply_metrics.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <vector>

#include "libcalib/base/error.h"

namespace calib::sens {

double repeated_4grams(std::span<const std::int32_t> ids) {
  constexpr std::size_t kGram = 4;
  if (ids.size() < kGram) return 0;
  std::set<std::array<std::int32_t, kGram>> unique;
  const std::size_t total = ids.size() - kGram + 1;
  for (std::size_t i = 0; i < total; ++i) unique.insert({ids[i], ids[i + 1], ids[i + 2], ids[i + 3]});
  return 1 - static_cast<double>(unique.size()) / static_cast<double>(total);
}

std::int64_t longest_repeated_suffix(std::span<const std::int32_t> ids) {
  // Z function of the reversed reply: z[i] = common prefix of it and of its part from i on.
  const std::vector<std::int32_t> reversed(ids.rbegin(), ids.rend());
  const std::size_t n = reversed.size();
  std::vector<std::size_t> z(n, 0);
  std::size_t begin = 0, end = 0, longest = 0;
  for (std::size_t i = 1; i < n; ++i) {
    if (i < end) z[i] = std::min(end - i, z[i - begin]);
    while (i + z[i] < n && reversed[z[i]] == reversed[i + z[i]]) ++z[i];
    if (i + z[i] > end) begin = i, end = i + z[i];
    longest = std::max(longest, z[i]);
  }
  return static_cast<std::int64_t>(longest);
}

std::int64_t agreeing_prefix(std::span<const std::int32_t> a, std::span<const std::int32_t> b) {
  const std::size_t n = std::min(a.size(), b.size());
  return std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(n), b.begin()).first - a.begin();
}

Interval wilson_interval(std::int64_t k, std::int64_t n) {
  CALIB_CHECK(n > 0 && k >= 0 && k <= n);
  constexpr double z = 1.959963984540054;  // of 95 %
  const double count = static_cast<double>(n), share = static_cast<double>(k) / count, scale = 1 + z * z / count;
  const double centre = (share + z * z / (2 * count)) / scale;
  const double half = z / scale * std::sqrt(share * (1 - share) / count + z * z / (4 * count * count));
  return {k == 0 ? 0.0 : centre - half, k == n ? 1.0 : centre + half};
}

}  // namespace calib::sens
