#include "libcalib/sens/forward_metrics.h"

#include <algorithm>
#include <cstring>

#include <c10/core/GradMode.h>

#include "libcalib/base/error.h"
#include "libcalib/base/rng.h"

namespace calib::sens {
namespace {

constexpr std::size_t kRowsPerTile = 32;

at::Tensor head_first(const at::Tensor& x_THD) { return x_THD.permute({1, 0, 2}).contiguous(); }

}  // namespace

SampledPositions sample_positions(std::uint64_t seed, std::uint64_t document, std::uint64_t layer, std::int64_t n_tokens,
                                  std::int64_t n_sinks, std::int64_t n_rows) {
  SampledPositions out;
  std::vector<std::vector<std::int64_t>> buckets;
  for (std::int64_t t = n_sinks; t < n_tokens; ++t) {
    const auto b = static_cast<std::size_t>(position_bucket(t));
    if (buckets.size() <= b) buckets.resize(b + 1);
    buckets[b].push_back(t);
  }
  // Small buckets give all they have; what they lack goes to the others.
  std::vector<std::size_t> order;
  for (std::size_t b = 0; b < buckets.size(); ++b)
    if (!buckets[b].empty()) order.push_back(b);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return buckets[a].size() < buckets[b].size(); });
  std::vector<std::pair<std::int64_t, double>> picked;
  auto left = static_cast<std::size_t>(n_rows);
  for (std::size_t i = 0; i < order.size(); ++i) {
    std::vector<std::int64_t>& rows = buckets[order[i]];
    const std::size_t take = std::min(rows.size(), (left + order.size() - i - 1) / (order.size() - i));
    left -= take;
    Rng rng = Rng::for_item(seed, document, layer * 64 + order[i]);
    for (std::size_t k = 0; k < take; ++k) std::swap(rows[k], rows[k + rng.below(rows.size() - k)]);
    for (std::size_t k = 0; k < take; ++k)
      picked.emplace_back(rows[k], static_cast<double>(rows.size()) / static_cast<double>(take));
  }
  std::sort(picked.begin(), picked.end());
  for (const auto& [row, weight] : picked) {
    out.rows.push_back(row);
    out.weight.push_back(weight);
  }
  return out;
}

AttentionProbe::AttentionProbe(const at::Tensor& q_post, const at::Tensor& k_post, const at::Tensor& v, const at::Tensor& w_o,
                               const LayerGeometry& layer, const std::vector<std::int64_t>& rows, ThreadPool& pool)
    : layer_(layer), group_(layer.n_q_heads / layer.n_kv_heads), rows_(rows), v_HTD_(head_first(v)), w_o_(w_o), pool_(pool) {
  const c10::NoGradGuard no_grad;
  const std::int64_t h = layer.n_kv_heads, d = layer.head_dim;
  const at::Tensor k_HTD = head_first(k_post);
  std::vector<at::Tensor> o_tiles;
  for (std::size_t first = 0; first < rows_.size(); first += kRowsPerTile) {
    Tile tile;
    tile.first = first;
    tile.end = std::min(rows_.size(), first + kRowsPerTile);
    tile.n_keys = rows_[tile.end - 1] + 1;
    const auto n_tile = static_cast<std::int64_t>(tile.end - tile.first);
    const at::Tensor index = at::tensor(std::vector<std::int64_t>(rows_.begin() + static_cast<std::ptrdiff_t>(tile.first),
                                                                  rows_.begin() + static_cast<std::ptrdiff_t>(tile.end)));
    tile.q = (q_post.index_select(0, index) * layer.softmax_scale)
                 .view({n_tile, h, group_, d}).permute({1, 2, 0, 3}).reshape({h, group_ * n_tile, d});
    at::Tensor s = at::bmm(tile.q, k_HTD.slice(1, 0, tile.n_keys).transpose(1, 2));
    const at::Tensor keys = at::arange(tile.n_keys, at::kLong).unsqueeze(0), at_row = index.unsqueeze(1);
    at::Tensor unseen = keys > at_row;
    if (layer.sliding_window > 0) unseen = unseen.logical_or(keys <= at_row - layer.sliding_window);
    s.view({h, group_, n_tile, tile.n_keys}).masked_fill_(unseen, -std::numeric_limits<float>::infinity());
    tile.p = at::softmax(s, -1);
    o_tiles.push_back(at::bmm(tile.p, v_HTD_.slice(1, 0, tile.n_keys)));
    tiles_.push_back(std::move(tile));
  }
  std::vector<float> norm(rows_.size());
  project_norm2(o_tiles, norm.data());
  output_norm2_.assign(norm.begin(), norm.end());
}

std::int64_t AttentionProbe::first_key(std::int64_t row) const {
  return layer_.sliding_window > 0 ? std::max<std::int64_t>(0, row - layer_.sliding_window + 1) : 0;
}

std::vector<at::Tensor> AttentionProbe::score_changes(const at::Tensor& k_error_THD) const {
  const c10::NoGradGuard no_grad;
  const at::Tensor error_HDT = k_error_THD.permute({1, 2, 0}).contiguous();
  std::vector<at::Tensor> out;
  for (const Tile& tile : tiles_) out.push_back(at::bmm(tile.q, error_HDT.slice(2, 0, tile.n_keys)));
  return out;
}

void AttentionProbe::compare_keys(const std::vector<at::Tensor>& coded, const std::vector<at::Tensor>& exact, const kvrt::Tiers& tiers,
                                  float* kl, float* out, ProbabilityChange* probabilities) const {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> o_tiles;
  for (std::size_t i = 0; i < tiles_.size(); ++i) {
    const Tile& tile = tiles_[i];
    const auto n_tile = static_cast<std::int64_t>(tile.end - tile.first);
    const std::int64_t n = tile.n_keys, heads = layer_.n_kv_heads * group_;
    at::Tensor change = coded[i].clone();
    float* change_data = change.data_ptr<float>();
    const float* exact_data = exact[i].data_ptr<float>();
    const float* p_data = tile.p.data_ptr<float>();
    std::vector<double> head_kl(static_cast<std::size_t>(heads * n_tile));
    std::vector<ProbabilityChange> head_change(head_kl.size());
    pool_.parallel_for(heads * n_tile, [&](std::int64_t line) {
      const std::int64_t row = rows_[tile.first + static_cast<std::size_t>(line % n_tile)], n_seen = row + 1, begin = first_key(row);
      float* delta = change_data + line * n;
      const float* rounding = exact_data + line * n;
      const std::int64_t sinks = std::min(tiers.n_sinks, n_seen), coded_end = std::min(n_seen, kvrt::coded_end(tiers, n_seen));
      std::copy(rounding, rounding + sinks, delta);
      std::copy(rounding + coded_end, rounding + n_seen, delta + coded_end);
      std::fill(delta, delta + begin, 0.0f);
      std::fill(delta + n_seen, delta + n, 0.0f);
      ProbabilityChange& moved = head_change[static_cast<std::size_t>(line)];
      moved.linear = linear_change_norm2(p_data + line * n + begin, delta + begin, n_seen - begin);
      head_kl[static_cast<std::size_t>(line)] = attention_kl_row(p_data + line * n + begin, delta + begin, n_seen - begin);
      moved.exact = row_norm2(delta + begin, n_seen - begin);
    });
    for (std::int64_t r = 0; r < n_tile; ++r) {
      double sum = 0;
      ProbabilityChange& row = probabilities[tile.first + static_cast<std::size_t>(r)] = {};
      for (std::int64_t h = 0; h < heads; ++h) {
        const auto line = static_cast<std::size_t>(h * n_tile + r);
        sum += head_kl[line];
        row.exact += head_change[line].exact;
        row.linear += head_change[line].linear;
      }
      kl[tile.first + static_cast<std::size_t>(r)] = static_cast<float>(sum / static_cast<double>(heads));
    }
    o_tiles.push_back(at::bmm(change, v_HTD_.slice(1, 0, n)));
  }
  project_norm2(o_tiles, out);
}

AttentionProbe::ValueClass AttentionProbe::split_values(const at::Tensor& exact_error_THD, const kvrt::Tiers& tiers) const {
  const c10::NoGradGuard no_grad;
  const at::Tensor error_HTD = head_first(exact_error_THD);
  ValueClass out;
  for (const Tile& tile : tiles_) {
    const auto n_tile = static_cast<std::int64_t>(tile.end - tile.first);
    at::Tensor coded = tile.p.clone(), exact = tile.p.clone();
    float* coded_data = coded.data_ptr<float>();
    float* exact_data = exact.data_ptr<float>();
    for (std::int64_t line = 0; line < layer_.n_q_heads * n_tile; ++line) {
      const std::int64_t n_seen = rows_[tile.first + static_cast<std::size_t>(line % n_tile)] + 1;
      const std::int64_t sinks = std::min(tiers.n_sinks, n_seen), coded_end = std::min(n_seen, kvrt::coded_end(tiers, n_seen));
      float* c = coded_data + line * tile.n_keys;
      float* e = exact_data + line * tile.n_keys;
      std::fill(c, c + sinks, 0.0f);
      std::fill(c + coded_end, c + tile.n_keys, 0.0f);
      std::fill(e + sinks, e + coded_end, 0.0f);
    }
    out.coded_p.push_back(coded);
    out.exact_o.push_back(at::bmm(exact, error_HTD.slice(1, 0, tile.n_keys)));
  }
  return out;
}

void AttentionProbe::compare_values(const at::Tensor& coded_error_THD, const ValueClass& values, float* out) const {
  const c10::NoGradGuard no_grad;
  const at::Tensor error_HTD = head_first(coded_error_THD);
  std::vector<at::Tensor> o_tiles;
  for (std::size_t i = 0; i < tiles_.size(); ++i)
    o_tiles.push_back(at::bmm(values.coded_p[i], error_HTD.slice(1, 0, tiles_[i].n_keys)).add_(values.exact_o[i]));
  project_norm2(o_tiles, out);
}

at::Tensor AttentionProbe::row_major(const std::vector<at::Tensor>& o_tiles) const {
  std::vector<at::Tensor> parts;
  for (std::size_t i = 0; i < tiles_.size(); ++i) {
    const auto n_tile = static_cast<std::int64_t>(tiles_[i].end - tiles_[i].first);
    parts.push_back(o_tiles[i].view({layer_.n_kv_heads, group_, n_tile, layer_.head_dim}).permute({2, 0, 1, 3})
                        .reshape({n_tile, static_cast<std::int64_t>(layer_.n_q_heads) * layer_.head_dim}));
  }
  return at::cat(parts, 0);
}

void AttentionProbe::project_norm2(const std::vector<at::Tensor>& o_tiles, float* out) const {
  if (o_tiles.empty()) return;
  const at::Tensor u = at::matmul(row_major(o_tiles), w_o_.t()).contiguous();
  const float* data = u.data_ptr<float>();
  const std::int64_t width = u.size(1);
  pool_.parallel_for(u.size(0), [&](std::int64_t r) { out[r] = static_cast<float>(row_norm2(data + r * width, width)); });
}

}  // namespace calib::sens
