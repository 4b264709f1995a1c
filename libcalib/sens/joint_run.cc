#include "libcalib/sens/joint_run.h"

#include <algorithm>
#include <cmath>

#include <c10/core/GradMode.h>

#include "libcalib/base/rng.h"
#include "libcalib/model/streaming_runner.h"
#include "libcalib/quant/carried_error.h"
#include "libcalib/quant/fake_quant.h"
#include "libcalib/quant/scale_refresh.h"
#include "libcalib/quant/token_tiers.h"
#include "libcalib/sens/attention_backward.h"

namespace calib::sens {
namespace {

std::vector<std::int64_t> first_rows(const std::vector<text::Document>& documents) {
  std::vector<std::int64_t> rows{0};
  for (const text::Document& d : documents) rows.push_back(rows.back() + static_cast<std::int64_t>(d.ids.size()));
  return rows;
}

// Coded and exact forms of one side in the scheme's frame; rows below n_sinks of the coded form are the exact ones. `map`: null without
// a salient tier; else base tokens alone are coded.
void change_side(const UnitCandidate& unit, Side side, const LayerGeometry& layer, const LayerChange& change, const quant::TierMap* map, const at::Tensor& x,
                 at::Tensor* coded, at::Tensor* exact, ThreadPool& pool) {
  const kvrt::Tiers& tiers = change.tiers;
  const std::int64_t n_tokens = x.size(0);
  *coded = at::empty_like(x);
  *exact = at::empty_like(x);
  quant::round_bf16(x.data_ptr<float>(), exact->data_ptr<float>(), x.numel());
  if (map != nullptr) {
    coded->copy_(*exact);
    quant::fake_quant_tier(unit.scheme, side, layer, unit.params, *map, false, x.data_ptr<float>(), coded->data_ptr<float>(), pool);
    return;
  }
  const quant::RowRotation* rotation = (side == Side::kK ? change.k_rotation : change.v_rotation).get();
  const bool bf16 = kvrt::encodes_bf16(tiers), bf16_input = bf16 && rotation == nullptr;
  at::Tensor rows = x;
  if (rotation != nullptr) {
    rows = at::empty_like(x);
    quant::rotate_rows(*rotation, layer, false, n_tokens, (bf16 ? *exact : x).data_ptr<float>(), rows.data_ptr<float>(), pool);
  }
  const float* from = rows.data_ptr<float>();
  float* to = coded->data_ptr<float>();
  if (change.scale_refresh > 0 && quant::can_refresh(unit.scheme))
    quant::fake_quant_refreshed(unit.scheme, side, layer, unit.params, change.scale_refresh, tiers.n_sinks, bf16_input, n_tokens, from, to, pool);
  else if (side == Side::kV && change.value_carry > 0)
    quant::fake_quant_carried(unit.scheme, side, layer, unit.params, change.value_carry, tiers.n_sinks, bf16_input, n_tokens, from, to);
  else
    quant::fake_quant_document(unit.scheme, side, layer, unit.params, tiers.n_sinks, bf16_input, n_tokens, from, to, pool);
  if (rotation != nullptr) quant::rotate_rows(*rotation, layer, true, n_tokens, to, to, pool);
  const std::int64_t sinks = std::min(n_tokens, tiers.n_sinks);
  coded->slice(0, 0, sinks).copy_(exact->slice(0, 0, sinks));
}

/// k: [T, H, D] post-RoPE -> the same with the noise of noise_contender().
at::Tensor noisy_keys(const at::Tensor& k, const LayerGeometry& layer, double sigma, std::uint64_t seed, ThreadPool& pool) {
  at::Tensor out = on_cpu(k).clone();
  float* const data = out.data_ptr<float>();
  const std::int64_t heads = layer.n_kv_heads, d = layer.head_dim;
  pool.parallel_for(out.size(0), [&](std::int64_t t) {
    Rng rng = Rng::for_item(seed, static_cast<std::uint64_t>(layer.index), static_cast<std::uint64_t>(t));
    for (std::int64_t h = 0; h < heads; ++h) {
      float* const x = data + (t * heads + h) * d;
      double norm2 = 0;
      for (std::int64_t c = 0; c < d; ++c) norm2 += static_cast<double>(x[c]) * x[c];
      const double scale = sigma * std::sqrt(norm2 / static_cast<double>(d));
      for (std::int64_t c = 0; c < d; ++c) x[c] = static_cast<float>(x[c] + scale * rng.normal());
    }
  });
  return out.to(k.device());
}

}  // namespace

at::Tensor on_cpu(const at::Tensor& x) { return x.to(at::kCPU, at::kFloat).contiguous(); }

DocumentStates::DocumentStates(const std::vector<text::Document>& documents, std::int64_t n_slots, std::int64_t hidden_size,
                               at::TensorOptions options, std::int64_t memory_limit_bytes)
    : first_row_(first_rows(documents)), hidden_size_(hidden_size), options_(options),
      store_(n_slots * first_row_.back(), hidden_size * static_cast<std::int64_t>(options.dtype().itemsize()), memory_limit_bytes) {}

void DocumentStates::put(std::int64_t slot, std::size_t document, const at::Tensor& x) {
  const at::Tensor dense = x.detach().to(options_.device(at::kCPU)).contiguous();
  store_.write(row(slot, document), dense.size(0), dense.data_ptr());
}

at::Tensor DocumentStates::get(std::int64_t slot, std::size_t document) const {
  at::Tensor x = at::empty({first_row_[document + 1] - first_row_[document], hidden_size_}, options_.device(at::kCPU));
  store_.read(row(slot, document), x.size(0), x.data_ptr());
  return x.to(options_.device());
}

ChangedCache change_cache(const model::Block& block, const at::Tensor& k_pre, const at::Tensor& k_post, const at::Tensor& v,
                          const LayerChange& change, ThreadPool& pool) {
  const c10::NoGradGuard no_grad;
  ChangedCache out;
  const auto device = k_post.device();
  const LayerGeometry& layer = block.geometry();
  std::optional<quant::TierMap> map;
  at::Tensor k_cpu, v_cpu;
  if (change.tiers.block_salient > 0) {
    CALIB_CHECK(change.salient);
    k_cpu = on_cpu(k_post), v_cpu = on_cpu(v);
    map = quant::place_tokens(layer, change.salient->factors, change.tiers, k_cpu.size(0), k_cpu.data_ptr<float>(), v_cpu.data_ptr<float>(), pool);
  }
  // Salient keys are coded after RoPE, whatever the base's frame.
  const auto code_salient = [&](Side side, const at::Tensor& x, at::Tensor* coded) {
    if (!map) return;
    *coded = on_cpu(*coded);
    quant::fake_quant_tier(change.salient->scheme, side, layer, {}, *map, true, x.data_ptr<float>(), coded->data_ptr<float>(), pool);
    *coded = coded->to(device);
  };
  if (change.key_noise > 0) {
    CALIB_CHECK(!change.k);
    out.k_coded = out.k_exact = noisy_keys(k_post, layer, change.key_noise, change.noise_seed, pool);
  } else if (change.k) {
    const bool pre = change.k->scheme.pre;
    change_side(*change.k, Side::kK, layer, change, map ? &*map : nullptr, on_cpu(pre ? k_pre : k_post), &out.k_coded, &out.k_exact, pool);
    for (at::Tensor* k : {&out.k_coded, &out.k_exact}) *k = pre ? block.rotate(k->to(device)) : k->to(device);
    code_salient(Side::kK, k_cpu, &out.k_coded);
  } else {
    out.k_coded = out.k_exact = k_post.to(at::kFloat);
  }
  if (change.v) {
    change_side(*change.v, Side::kV, layer, change, map ? &*map : nullptr, on_cpu(v), &out.v_coded, &out.v_exact, pool);
    for (at::Tensor* x : {&out.v_coded, &out.v_exact}) *x = x->to(device);
    code_salient(Side::kV, v_cpu, &out.v_coded);
  } else {
    out.v_coded = out.v_exact = v.to(at::kFloat);
  }
  return out;
}

at::Tensor run_block(const model::Block& block, const at::Tensor& x, const LayerChange* change, std::int64_t query_tile, ThreadPool& pool) {
  const c10::NoGradGuard no_grad;
  const model::Projected p = block.project(x);
  const at::Tensor q = block.rotate(p.q_pre), k = block.rotate(p.k_pre);
  const AttentionShape shape{block.geometry().softmax_scale, block.geometry().sliding_window, query_tile};
  at::Tensor o;
  if (change == nullptr) {
    o = tiled_attention(q, k, p.v, shape);
  } else {
    const ChangedCache c = change_cache(block, p.k_pre, k, p.v, *change, pool);
    o = mixed_attention(q, {c.k_coded, c.v_coded, c.k_exact, c.v_exact, change->tiers}, shape);
  }
  return block.finish(x, o.to(x.scalar_type()));
}

at::Tensor run_block_packed(const model::Block& block, const at::Tensor& x, std::size_t layer_idx, PackedCache& cache) {
  const c10::NoGradGuard no_grad;
  const model::Projected p = block.project(x);
  const at::Tensor q = on_cpu(p.q_pre), k = on_cpu(p.k_pre), v = on_cpu(p.v);
  const at::Tensor o = at::empty({x.size(0), q.size(1) * q.size(2)}, q.options());
  cache.attend(layer_idx, x.size(0), q.data_ptr<float>(), k.data_ptr<float>(), v.data_ptr<float>(), o.data_ptr<float>());
  return block.finish(x, o.to(x.options()));
}

JointWalk::JointWalk(const model::StreamingModel& model, const std::vector<text::Document>& documents, std::vector<WalkRun> runs,
                     std::int64_t hidden_memory_bytes, ThreadPool& pool, const EvaluateProgressFn& progress)
    : model_(model), documents_(documents), runs_(std::move(runs)), pool_(pool), progress_(progress),
      states_(documents, static_cast<std::int64_t>(runs_.size()), model.identity().hidden_size, model::tensor_options(model.device(), model.dtype()),
              hidden_memory_bytes) {
  CALIB_CHECK(!runs_.empty() && runs_.front().contender == nullptr);
  std::int64_t n_tokens = 0, longest = 0;
  for (const text::Document& d : documents) {
    n_tokens += static_cast<std::int64_t>(d.ids.size());
    longest = std::max(longest, static_cast<std::int64_t>(d.ids.size()));
  }
  for (const WalkRun& run : runs_) packed_.push_back(run.packed ? std::make_unique<PackedCache>(model.identity(), *run.contender, longest, pool) : nullptr);
  total_ = n_tokens * static_cast<std::int64_t>(runs_.size()) * (model.n_layers() + 1);
}

void JointWalk::through_blocks(const BeforeBlock& before) {
  const c10::NoGradGuard no_grad;
  const auto embedding = model_.load_embedding();
  for (std::size_t d = 0; d < documents_.size(); ++d) states_.put(0, d, embedding->lookup(documents_[d].ids));
  for (std::int64_t l = 0; l < model_.n_layers(); ++l) {
    const auto layer = static_cast<std::size_t>(l);
    const auto block = model_.load_block(l);
    for (std::size_t d = 0; d < documents_.size(); ++d) {
      const at::Tensor embedded = l == 0 ? states(0, d) : at::Tensor{};
      if (before) before(*block, layer, d);
      for (std::size_t r = 0; r < runs_.size(); ++r) {
        const WalkRun& run = runs_[r];
        const at::Tensor x = l == 0 ? embedded : states(r, d);
        states_.put(static_cast<std::int64_t>(r), d,
                    packed_[r] ? run_block_packed(*block, x, layer, *packed_[r])
                               : run_block(*block, x, run.contender == nullptr ? nullptr : &run.contender->layers[layer], run.query_tile, pool_));
        advance(static_cast<std::int64_t>(documents_[d].ids.size()));
      }
    }
  }
}

void JointWalk::advance(std::int64_t tokens) {
  done_ += tokens;
  if (progress_) progress_({done_, total_});
}

std::vector<std::vector<KldRow>> compare_final_states(const model::Head& head, const at::Tensor& reference, const std::vector<at::Tensor>& contenders,
                                                      const std::vector<std::string>& names, const std::vector<text::TokenId>& ids,
                                                      std::int32_t document, std::int64_t first, std::int64_t end, ThreadPool& pool) {
  const c10::NoGradGuard no_grad;
  const std::int64_t vocab = head.vocab_size(), tile = model::logit_tile_rows(vocab);
  std::vector<std::vector<KldRow>> out(contenders.size());
  for (auto& rows : out) rows.resize(static_cast<std::size_t>(std::max<std::int64_t>(0, end - first)));
  for (std::int64_t t0 = first; t0 < end; t0 += tile) {
    const std::int64_t t1 = std::min(end, t0 + tile);
    const at::Tensor log_p = on_cpu(at::log_softmax(head.logits(reference.slice(0, t0, t1)), -1)), p = at::exp(log_p);
    const float* log_p_data = log_p.data_ptr<float>();
    const float* p_data = p.data_ptr<float>();
    std::vector<ReferenceRow> reference_rows(static_cast<std::size_t>(t1 - t0));
    pool.parallel_for(t1 - t0, [&](std::int64_t r) {
      const std::int64_t label = ids[static_cast<std::size_t>(t0 + r + 1)];
      reference_rows[static_cast<std::size_t>(r)] = make_reference_row(log_p_data + r * vocab, p_data + r * vocab, vocab, label);
    });
    for (std::size_t c = 0; c < contenders.size(); ++c) {
      const at::Tensor log_q = on_cpu(at::log_softmax(head.logits(contenders[c].slice(0, t0, t1)), -1)), q = at::exp(log_q);
      const float* log_q_data = log_q.data_ptr<float>();
      const float* q_data = q.data_ptr<float>();
      pool.parallel_for(t1 - t0, [&](std::int64_t r) {
        KldRow row = compare_row(reference_rows[static_cast<std::size_t>(r)], log_q_data + r * vocab, q_data + r * vocab);
        row.document = document;
        row.position = t0 + r;
        if (!std::isfinite(row.kld) || !std::isfinite(row.nll) || !std::isfinite(row.entropy_shift))
          fail(ErrorKind::kNumeric, names[c], "non-finite logits in document {}, token {}", document, row.position);
        out[c][static_cast<std::size_t>(row.position - first)] = row;
      });
    }
  }
  return out;
}

std::vector<text::TokenId> greedy_choices(const model::Head& head, const at::Tensor& x, const std::string& run_name) {
  const at::Tensor logits = on_cpu(head.logits(x));
  std::vector<text::TokenId> out;
  for (std::int64_t r = 0; r < logits.size(0); ++r) {
    const float* row = logits.data_ptr<float>() + r * logits.size(1);
    const float* top = std::max_element(row, row + logits.size(1));
    if (!std::isfinite(*top)) fail(ErrorKind::kNumeric, run_name, "non-finite logits of a greedy reply");
    out.push_back(static_cast<text::TokenId>(top - row));
  }
  return out;
}

}  // namespace calib::sens
