#include "libcalib/sens/attention_backward.h"

#include <algorithm>
#include <limits>

#include <c10/core/GradMode.h>

#include "libcalib/base/error.h"

namespace calib::sens {
namespace {

// [T, heads, D] -> [H, G, T, D] (G = 1 for keys and values), dense.
at::Tensor head_major(const at::Tensor& x, std::int64_t n_kv_heads) {
  const std::int64_t t = x.size(0), heads = x.size(1), d = x.size(2);
  return x.to(at::kFloat).view({t, n_kv_heads, heads / n_kv_heads, d}).permute({1, 2, 0, 3}).contiguous();
}

// Rows [t0, t1) of a [H, G, T, D] tensor as [H, G*tq, D].
at::Tensor tile_rows(const at::Tensor& x, std::int64_t t0, std::int64_t t1) {
  return x.slice(2, t0, t1).reshape({x.size(0), x.size(1) * (t1 - t0), x.size(3)});
}

struct Tile {
  std::int64_t begin = 0, end = 0;  // query rows
  std::int64_t first_key = 0;       // first key that some row of the tile sees
  std::int64_t rows() const { return end - begin; }
  std::int64_t keys() const { return end - first_key; }
};

std::vector<Tile> tiles_of(std::int64_t n_tokens, const AttentionShape& shape) {
  std::vector<Tile> tiles;
  for (std::int64_t t = 0; t < n_tokens; t += shape.query_tile) {
    Tile tile{t, std::min(n_tokens, t + shape.query_tile), 0};
    if (shape.sliding_window > 0) tile.first_key = std::max<std::int64_t>(0, t - shape.sliding_window + 1);
    tiles.push_back(tile);
  }
  return tiles;
}

// Adds -inf where a row does not see a key: the diagonal square, and the far edge of a sliding window. scores: [H, G*tq, n].
void mask_unseen(at::Tensor& scores, const Tile& tile, std::int64_t group, std::int64_t sliding_window) {
  constexpr float kUnseen = -std::numeric_limits<float>::infinity();
  const std::int64_t h = scores.size(0), n = tile.keys();
  at::Tensor view = scores.view({h, group, tile.rows(), n});
  const auto options = scores.options().dtype(at::kLong);
  const at::Tensor rows = at::arange(tile.begin, tile.end, options).unsqueeze(1);
  at::Tensor diagonal = view.slice(3, tile.begin - tile.first_key, n);
  diagonal.masked_fill_(at::arange(tile.begin, tile.end, options).unsqueeze(0) > rows, kUnseen);
  if (sliding_window > 0) {
    const at::Tensor keys = at::arange(tile.first_key, tile.end, options).unsqueeze(0);
    view.masked_fill_(keys <= rows - sliding_window, kUnseen);
  }
}

// First key of the exact band of a tile: everything below (past the sinks) is coded for all of its rows.
std::int64_t band_begin(const Tile& tile, const kvrt::Tiers& tiers) {
  return std::max(tile.first_key, kvrt::coded_end(tiers, tile.begin + 1));
}

// [tq, keys in band]: whether the row reads the key exact.
at::Tensor exact_in_band(const Tile& tile, std::int64_t begin, const kvrt::Tiers& tiers, const at::TensorOptions& like) {
  std::vector<std::int64_t> ends;
  for (std::int64_t t = tile.begin; t < tile.end; ++t) ends.push_back(kvrt::coded_end(tiers, t + 1));
  const at::Tensor coded_end = at::tensor(ends, at::TensorOptions(at::kLong)).to(like.device()).unsqueeze(1);
  return at::arange(begin, tile.end, like.dtype(at::kLong)).unsqueeze(0) >= coded_end;
}

// True where no row of the document reads a non-sink key exact.
bool all_coded(const kvrt::Tiers& tiers) { return tiers.window == 0 && tiers.exit_block() == 1; }

struct ClassMasks {
  std::int64_t begin = 0;  // == tile.end: empty band
  at::Tensor exact;        // float [tq, band]
};

std::vector<ClassMasks> class_masks(const Tile& tile, const std::vector<kvrt::Tiers>& classes, const at::TensorOptions& like) {
  std::vector<ClassMasks> masks;
  for (const kvrt::Tiers& tiers : classes) {
    ClassMasks m{tile.end, {}};
    if (!all_coded(tiers)) m.begin = std::min(tile.end, band_begin(tile, tiers));
    if (m.begin < tile.end) m.exact = exact_in_band(tile, m.begin, tiers, like).to(at::kFloat);
    masks.push_back(std::move(m));
  }
  return masks;
}

// Adds (weights masked to the exact keys of the band)^T rows to target[:, band]. weights: [H, G*tq, n]; rows: [H, G*tq, D].
void add_exact(at::Tensor target_HTD, const at::Tensor& weights, const at::Tensor& rows, const Tile& tile, const ClassMasks& mask,
               std::int64_t group) {
  if (mask.begin >= tile.end) return;
  const std::int64_t h = weights.size(0), band = tile.end - mask.begin;
  at::Tensor part = weights.slice(2, mask.begin - tile.first_key, tile.keys()).reshape({h, group, tile.rows(), band});
  part = (part * mask.exact).view({h, group * tile.rows(), band});
  target_HTD.slice(1, mask.begin, tile.end).add_(at::bmm(part.transpose(1, 2), rows));
}

at::Tensor token_major(const at::Tensor& x_RHTD) { return x_RHTD.permute({2, 0, 1, 3}).contiguous(); }

}  // namespace

AttentionGradients attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& d_o,
                                      const AttentionShape& shape, const std::vector<kvrt::Tiers>& k_classes,
                                      const std::vector<kvrt::Tiers>& v_classes) {
  const c10::NoGradGuard no_grad;
  const std::int64_t n_tokens = q.size(0), n_heads = k.size(1), group = q.size(1) / n_heads, d = q.size(2), draws = d_o.size(1);
  const at::Tensor q_HGTD = head_major(q, n_heads) * shape.softmax_scale;
  const at::Tensor k_HTD = head_major(k, n_heads).squeeze(1), v_HTD = head_major(v, n_heads).squeeze(1);
  const at::Tensor d_o_RHGTD =
      d_o.to(at::kFloat).view({n_tokens, draws, n_heads, group, d}).permute({1, 2, 3, 0, 4}).contiguous();

  const auto options = k_HTD.options();
  at::Tensor d_q = at::empty({draws, n_heads, group, n_tokens, d}, options);
  at::Tensor d_k = at::zeros({draws, n_heads, n_tokens, d}, options), d_v = at::zeros_like(d_k);
  std::vector<at::Tensor> exact_k, exact_v;
  for (std::size_t c = 0; c < k_classes.size(); ++c) exact_k.push_back(at::zeros_like(d_k));
  for (std::size_t c = 0; c < v_classes.size(); ++c) exact_v.push_back(at::zeros_like(d_v));

  for (const Tile& tile : tiles_of(n_tokens, shape)) {
    const at::Tensor q_tile = tile_rows(q_HGTD, tile.begin, tile.end);
    const at::Tensor k_seen = k_HTD.slice(1, tile.first_key, tile.end), v_seen = v_HTD.slice(1, tile.first_key, tile.end);
    at::Tensor p = at::bmm(q_tile, k_seen.transpose(1, 2));
    mask_unseen(p, tile, group, shape.sliding_window);
    p = at::softmax(p, -1);
    const std::vector<ClassMasks> k_masks = class_masks(tile, k_classes, options), v_masks = class_masks(tile, v_classes, options);
    for (std::int64_t r = 0; r < draws; ++r) {
      const at::Tensor d_o_tile = tile_rows(d_o_RHGTD[r], tile.begin, tile.end);
      d_v[r].slice(1, tile.first_key, tile.end).add_(at::bmm(p.transpose(1, 2), d_o_tile));
      at::Tensor d_s = at::bmm(d_o_tile, v_seen.transpose(1, 2));
      d_s.sub_((p * d_s).sum(-1, true)).mul_(p);
      d_q[r].slice(2, tile.begin, tile.end).copy_(at::bmm(d_s, k_seen).view({n_heads, group, tile.rows(), d}));
      d_k[r].slice(1, tile.first_key, tile.end).add_(at::bmm(d_s.transpose(1, 2), q_tile));
      for (std::size_t c = 0; c < k_classes.size(); ++c) add_exact(exact_k[c][r], d_s, q_tile, tile, k_masks[c], group);
      for (std::size_t c = 0; c < v_classes.size(); ++c) add_exact(exact_v[c][r], p, d_o_tile, tile, v_masks[c], group);
    }
  }
  d_q.mul_(shape.softmax_scale);

  // Sinks are exact for every row.
  for (std::size_t c = 0; c < k_classes.size(); ++c) {
    const std::int64_t sinks = std::min(n_tokens, k_classes[c].n_sinks);
    exact_k[c].slice(2, 0, sinks).copy_(d_k.slice(2, 0, sinks));
  }
  for (std::size_t c = 0; c < v_classes.size(); ++c) {
    const std::int64_t sinks = std::min(n_tokens, v_classes[c].n_sinks);
    exact_v[c].slice(2, 0, sinks).copy_(d_v.slice(2, 0, sinks));
  }

  AttentionGradients out;
  out.d_q = d_q.permute({3, 0, 1, 2, 4}).reshape({n_tokens, draws, n_heads * group, d});
  out.d_k = token_major(d_k);
  out.d_v = token_major(d_v);
  for (const at::Tensor& x : exact_k) out.exact_k.push_back(token_major(x));
  for (const at::Tensor& x : exact_v) out.exact_v.push_back(token_major(x));
  return out;
}

at::Tensor coded_gradient(const at::Tensor& full, const at::Tensor& exact, const kvrt::Tiers& tiers) {
  const c10::NoGradGuard no_grad;
  at::Tensor coded = full - exact;
  const std::int64_t n_tokens = full.size(0), end = std::min(n_tokens, kvrt::coded_end(tiers, n_tokens));
  coded.slice(0, 0, std::min(n_tokens, tiers.n_sinks)).zero_();
  if (end < n_tokens) coded.slice(0, end, n_tokens).zero_();  // full - exact would leave rounding noise there
  return coded;
}

at::Tensor mixed_attention(const at::Tensor& q, const MixedCache& cache, const AttentionShape& shape) {
  const c10::NoGradGuard no_grad;
  const std::int64_t n_tokens = q.size(0), n_heads = cache.k_coded.size(1), group = q.size(1) / n_heads, d = q.size(2);
  const at::Tensor q_HGTD = head_major(q, n_heads) * shape.softmax_scale;
  const at::Tensor k_HTD = head_major(cache.k_coded, n_heads).squeeze(1), v_HTD = head_major(cache.v_coded, n_heads).squeeze(1);
  const bool has_band = !all_coded(cache.tiers);
  at::Tensor exact_k_HTD, value_change_HTD;
  if (has_band) {
    exact_k_HTD = head_major(cache.k_exact, n_heads).squeeze(1);
    value_change_HTD = head_major(cache.v_exact, n_heads).squeeze(1) - v_HTD;
  }
  at::Tensor o = at::empty({n_tokens, n_heads, group, d}, k_HTD.options());
  for (const Tile& tile : tiles_of(n_tokens, shape)) {
    const at::Tensor q_tile = tile_rows(q_HGTD, tile.begin, tile.end);
    at::Tensor p = at::bmm(q_tile, k_HTD.slice(1, tile.first_key, tile.end).transpose(1, 2));
    const std::int64_t band = has_band ? std::min(tile.end, band_begin(tile, cache.tiers)) : tile.end;
    at::Tensor exact;
    if (band < tile.end) {
      exact = exact_in_band(tile, band, cache.tiers, p.options());
      at::Tensor scores = p.slice(2, band - tile.first_key, tile.keys());
      const at::Tensor exact_scores = at::bmm(q_tile, exact_k_HTD.slice(1, band, tile.end).transpose(1, 2));
      at::Tensor view = scores.view({n_heads, group, tile.rows(), tile.end - band});
      view.copy_(at::where(exact, exact_scores.view(view.sizes()), view));
    }
    mask_unseen(p, tile, group, shape.sliding_window);
    p = at::softmax(p, -1);
    at::Tensor o_tile = at::bmm(p, v_HTD.slice(1, tile.first_key, tile.end));
    if (band < tile.end) {
      at::Tensor part = p.slice(2, band - tile.first_key, tile.keys()).view({n_heads, group, tile.rows(), tile.end - band});
      part = (part * exact).view({n_heads, group * tile.rows(), tile.end - band});
      o_tile.add_(at::bmm(part, value_change_HTD.slice(1, band, tile.end)));
    }
    o.slice(0, tile.begin, tile.end).copy_(o_tile.view({n_heads, group, tile.rows(), d}).permute({2, 0, 1, 3}));
  }
  return o.view({n_tokens, n_heads * group * d});
}

at::Tensor tiled_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionShape& shape) {
  return mixed_attention(q, {k, v, {}, {}, kvrt::Tiers{0, 0, 1, 0}}, shape);
}

}  // namespace calib::sens
