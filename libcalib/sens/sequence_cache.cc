#include "libcalib/sens/sequence_cache.h"

#include <algorithm>

#include "libcalib/quant/fake_quant.h"
#include "libcalib/quant/token_tiers.h"
#include "libcalib/sens/attention_backward.h"
#include "libcalib/sens/joint_run.h"

namespace calib::sens {
namespace {

/// K or V as the next row reads them: coded up to coded_end(), then exact.
class SideCache {
 public:
  SideCache(const UnitCandidate* unit, Side side, const kvrt::Tiers& tiers, std::int64_t capacity, ThreadPool& pool)
      : unit_(unit), side_(side), tiers_(tiers), capacity_(capacity), pool_(pool) {}

  bool pre() const { return unit_ != nullptr && unit_->scheme.pre; }

  /// A prompt: coded and exact forms and the values they were made from, the latter in the scheme's frame. All [T, H, D].
  void fill(const at::Tensor& coded, const at::Tensor& exact, const at::Tensor& raw) {
    length_ = coded.size(0);
    coded_end_ = unit_ == nullptr ? length_ : kvrt::coded_end(tiers_, length_);
    CALIB_CHECK(coded_end_ <= length_);
    read_HTD_ = at::empty({coded.size(1), capacity_, coded.size(2)}, coded.options());
    write(0, coded.slice(0, 0, coded_end_));
    if (unit_ == nullptr) return;
    write(coded_end_, exact.slice(0, coded_end_, length_));
    pending_ = on_cpu(raw).slice(0, coded_end_).clone();
  }

  /// One more token, [1, H, D] in the scheme's frame; as yet exact.
  void append(const model::Block& block, const at::Tensor& raw) {
    CALIB_CHECK(length_ < capacity_);
    const std::int64_t position = length_++;
    if (unit_ == nullptr) return write(position, raw);
    const at::Tensor x = on_cpu(raw);
    at::Tensor exact = at::empty_like(x);
    quant::round_bf16(x.data_ptr<float>(), exact.data_ptr<float>(), x.numel());
    write(position, post_rope(block, position, exact));
    pending_ = at::cat({pending_, x});
  }

  /// Codes the n oldest exact tokens, which leave the window. With a salient tier: one exit block with its map, and its rows after RoPE.
  void code(const model::Block& block, std::int64_t n, const quant::SalientTier* salient, const quant::TierMap* map, const at::Tensor& rows_post) {
    if (unit_ == nullptr) return;
    const at::Tensor raw = pending_.slice(0, 0, n).contiguous();
    at::Tensor coded = at::empty_like(raw);
    if (map == nullptr) {
      quant::fake_quant_document(unit_->scheme, side_, block.geometry(), unit_->params, 0, kvrt::encodes_bf16(tiers_), n, raw.data_ptr<float>(),
                                 coded.data_ptr<float>(), pool_);
      coded = post_rope(block, coded_end_, coded);
    } else {
      quant::fake_quant_tier(unit_->scheme, side_, block.geometry(), unit_->params, *map, false, raw.data_ptr<float>(), coded.data_ptr<float>(), pool_);
      coded = on_cpu(post_rope(block, coded_end_, coded));
      quant::fake_quant_tier(salient->scheme, side_, block.geometry(), {}, *map, true, rows_post.data_ptr<float>(), coded.data_ptr<float>(), pool_);
    }
    write(coded_end_, coded);
    pending_ = pending_.slice(0, n).clone();
    coded_end_ += n;
  }

  /// [H, n, D]: tokens from `first` on.
  at::Tensor read_from(std::int64_t first) const { return read_HTD_.slice(1, first, length_); }
  std::int64_t length() const { return length_; }

 private:
  void write(std::int64_t first, const at::Tensor& x_THD) { read_HTD_.slice(1, first, first + x_THD.size(0)).copy_(x_THD.transpose(0, 1)); }
  at::Tensor post_rope(const model::Block& block, std::int64_t first, const at::Tensor& x) const {
    return pre() ? block.rotate_from(first, x.to(read_HTD_.device())) : x;
  }

  const UnitCandidate* unit_;  ///< null: exact
  Side side_;
  kvrt::Tiers tiers_;
  std::int64_t capacity_;
  ThreadPool& pool_;
  std::int64_t length_ = 0, coded_end_ = 0;
  at::Tensor read_HTD_, pending_;
};

class TensorSequence final : public SequenceCache {
 public:
  TensorSequence(const LayerChange* change, std::int64_t capacity, std::int64_t query_tile, ThreadPool& pool)
      : change_(change != nullptr ? *change : LayerChange{}), exact_(change == nullptr), query_tile_(query_tile), pool_(pool),
        k_(change_.k ? &*change_.k : nullptr, Side::kK, change_.tiers, capacity, pool),
        v_(change_.v ? &*change_.v : nullptr, Side::kV, change_.tiers, capacity, pool) {}

  at::Tensor extend(const model::Block& block, const model::Projected& p) override { return k_.length() == 0 ? prompt(block, p) : token(block, p); }

 private:
  at::Tensor prompt(const model::Block& block, const model::Projected& p) {
    const at::Tensor q = block.rotate(p.q_pre), k = block.rotate(p.k_pre), v = p.v.to(at::kFloat);
    const AttentionShape shape{block.geometry().softmax_scale, block.geometry().sliding_window, query_tile_};
    if (exact_) {
      k_.fill(k.to(at::kFloat), {}, {});
      v_.fill(v, {}, {});
      return tiled_attention(q, k, v, shape);
    }
    const ChangedCache c = change_cache(block, p.k_pre, k, p.v, change_, pool_);
    k_.fill(c.k_coded, c.k_exact, k_.pre() ? p.k_pre : k);
    v_.fill(c.v_coded, c.v_exact, p.v);
    coded_end_ = kvrt::coded_end(change_.tiers, k_.length());
    if (change_.salient) leaving_k_ = on_cpu(k).slice(0, coded_end_).clone(), leaving_v_ = on_cpu(p.v).slice(0, coded_end_).clone();
    return mixed_attention(q, {c.k_coded, c.v_coded, c.k_exact, c.v_exact, change_.tiers}, shape);
  }

  at::Tensor token(const model::Block& block, const model::Projected& p) {
    const LayerGeometry& g = block.geometry();
    const std::int64_t position = k_.length(), h = g.n_kv_heads, d = g.head_dim;
    const at::Tensor k_post = block.rotate_from(position, p.k_pre);
    k_.append(block, k_.pre() ? p.k_pre : k_post);
    v_.append(block, p.v);
    if (!exact_) code_leaving(block, k_post, p.v);
    const std::int64_t first = g.sliding_window > 0 ? std::max<std::int64_t>(0, position - g.sliding_window + 1) : 0;
    const at::Tensor q = block.rotate_from(position, p.q_pre).to(at::kFloat).view({h, g.n_q_heads / h, d}) * g.softmax_scale;
    const at::Tensor weights = at::softmax(at::bmm(q, k_.read_from(first).transpose(1, 2)), -1);
    return at::bmm(weights, v_.read_from(first)).view({1, g.n_q_heads * d});
  }

  /// Tokens that the newest one has pushed out of the window: at most one exit block.
  void code_leaving(const model::Block& block, const at::Tensor& k_post, const at::Tensor& v) {
    const kvrt::Tiers& tiers = change_.tiers;
    const std::int64_t n = std::min(kvrt::coded_end(tiers, k_.length()), k_.length()) - coded_end_;
    if (change_.salient) leaving_k_ = at::cat({leaving_k_, on_cpu(k_post)}), leaving_v_ = at::cat({leaving_v_, on_cpu(v)});
    if (n <= 0) return;
    if (!change_.salient) {
      k_.code(block, n, nullptr, nullptr, {});
      v_.code(block, n, nullptr, nullptr, {});
    } else {
      CALIB_CHECK(n == tiers.exit_block());
      const at::Tensor k_rows = leaving_k_.slice(0, 0, n).contiguous(), v_rows = leaving_v_.slice(0, 0, n).contiguous();
      quant::TierMap map = quant::place_block(block.geometry(), change_.salient->factors, tiers, coded_end_, k_rows.data_ptr<float>(), v_rows.data_ptr<float>());
      map.first = 0;  // rows of the block
      k_.code(block, n, &*change_.salient, &map, k_rows);
      v_.code(block, n, &*change_.salient, &map, v_rows);
      leaving_k_ = leaving_k_.slice(0, n).clone(), leaving_v_ = leaving_v_.slice(0, n).clone();
    }
    coded_end_ += n;
  }

  LayerChange change_;
  bool exact_;
  std::int64_t query_tile_;
  ThreadPool& pool_;
  SideCache k_, v_;  ///< point into change_
  std::int64_t coded_end_ = 0;
  at::Tensor leaving_k_, leaving_v_;  ///< [n, H, D] after RoPE: tokens yet to be placed, where there is a salient tier
};

class PackedSequence final : public SequenceCache {
 public:
  PackedSequence(PackedCache& cache, std::size_t layer_idx, std::int64_t capacity) : cache_(cache), pages_(cache.begin(layer_idx, capacity)) {}

  at::Tensor extend(const model::Block&, const model::Projected& p) override {
    const at::Tensor q = on_cpu(p.q_pre), k = on_cpu(p.k_pre), v = on_cpu(p.v);
    const at::Tensor o = at::empty({q.size(0), q.size(1) * q.size(2)}, q.options());
    cache_.extend(*pages_, q.size(0), q.data_ptr<float>(), k.data_ptr<float>(), v.data_ptr<float>(), o.data_ptr<float>());
    return o;
  }

 private:
  PackedCache& cache_;
  std::shared_ptr<PackedCache::Sequence> pages_;
};

}  // namespace

std::unique_ptr<SequenceCache> make_sequence_cache(const LayerChange* change, std::int64_t capacity, std::int64_t query_tile, ThreadPool& pool) {
  return std::make_unique<TensorSequence>(change, capacity, query_tile, pool);
}

std::unique_ptr<SequenceCache> make_packed_sequence(PackedCache& cache, std::size_t layer_idx, std::int64_t capacity) {
  return std::make_unique<PackedSequence>(cache, layer_idx, capacity);
}

}  // namespace calib::sens
