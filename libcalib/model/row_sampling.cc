#include "libcalib/model/row_sampling.h"

#include <algorithm>
#include <numeric>

#include "libcalib/base/rng.h"
#include "libcalib/stats/attention_stats.h"

namespace calib::model {

RowSample sample_rows(const LayerGeometry& layer, std::int64_t n_tokens, std::int64_t n_rows, std::uint64_t seed,
                      std::int64_t document_idx) {
  RowSample sample;
  if (layer.sliding_window != 0 && layer.sliding_window < stats::kMinVisibleKeys) return sample;
  const std::int64_t first = stats::kMinVisibleKeys - 1;  // row t sees t + 1 keys
  if (n_tokens <= first || n_rows <= 0) return sample;
  Rng rng = Rng::for_item(seed, static_cast<std::uint64_t>(document_idx), static_cast<std::uint64_t>(layer.index));
  const int n_buckets = position_bucket(n_tokens - 1) + 1;
  for (int b = 0; b < n_buckets; ++b) {
    const std::int64_t begin = b == 0 ? first : std::int64_t{256} << (b - 1);
    const std::int64_t end = std::min(n_tokens, std::int64_t{256} << b);
    const std::int64_t quota = std::min(n_rows / n_buckets + (b < n_rows % n_buckets ? 1 : 0), end - begin);
    if (quota == 0) continue;
    std::vector<std::int64_t> rows(static_cast<std::size_t>(end - begin));
    std::iota(rows.begin(), rows.end(), begin);
    for (std::int64_t i = 0; i < quota; ++i)
      std::swap(rows[static_cast<std::size_t>(i)],
                rows[static_cast<std::size_t>(i) + rng.below(static_cast<std::uint64_t>(end - begin - i))]);
    std::sort(rows.begin(), rows.begin() + quota);
    sample.rows.insert(sample.rows.end(), rows.begin(), rows.begin() + quota);
    sample.row_weight.insert(sample.row_weight.end(), static_cast<std::size_t>(quota),
                             static_cast<double>(end - begin) / static_cast<double>(quota));
  }
  return sample;
}

}  // namespace calib::model
