#include "libcalib/sens/packed_cache.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "kernels/kvrt.h"

namespace calib::sens {
namespace {

[[noreturn]] void refused(const std::string& name, const kvrt_error& error) {
  const ErrorKind kind = error.status == KVRT_E_UNSUPPORTED ? ErrorKind::kUnsupported
                         : error.status == KVRT_E_NUMERIC   ? ErrorKind::kNumeric
                                                            : ErrorKind::kInternal;
  fail(kind, name + ", runtime", "{}", error.text);
}

kvrt_rope_style rope_style(RopeStyle style) {
  switch (style) {
    case RopeStyle::kNone: return KVRT_ROPE_NONE;
    case RopeStyle::kHalfSplit: return KVRT_ROPE_HALF_SPLIT;
    case RopeStyle::kInterleaved: return KVRT_ROPE_INTERLEAVED;
  }
  CALIB_CHECK(false);
}

const float* or_null(const std::vector<float>& v) { return v.empty() ? nullptr : v.data(); }

/// order: storage of what the view points at.
kvrt_unit_view unit_view(const UnitCandidate& unit, const std::string& scheme, Side side, const LayerGeometry& layer, std::vector<std::int32_t>* order) {
  kvrt_unit_view view{};
  view.scheme = scheme.c_str();
  if (!quant::llamacpp_block_order(unit.scheme, side, layer).empty()) view.block_order = "adjacent";
  view.mean = or_null(unit.params.mean);
  view.smooth = or_null(unit.params.smooth);
  view.clip_lo = or_null(unit.params.clip_lo);
  view.clip_hi = or_null(unit.params.clip_hi);
  view.clip_alpha = or_null(unit.params.clip_alpha);
  view.codebook = or_null(unit.params.codebook);
  view.basis_mean = or_null(unit.params.basis_mean);
  view.basis_in = or_null(unit.params.basis_in);
  view.basis = or_null(unit.params.basis);
  view.ef_u = or_null(unit.params.ef_u);
  order->assign(unit.params.ef_order.begin(), unit.params.ef_order.end());
  view.ef_order = order->empty() ? nullptr : order->data();
  return view;
}

void run_on_pool(void* user, std::int64_t n, void (*body)(void*, std::int64_t, std::int32_t), void* arg) {
  auto& pool = *static_cast<ThreadPool*>(user);
  const std::int64_t n_workers = std::min<std::int64_t>(n, pool.n_threads());
  // Worker w takes every n_workers-th piece, so that a worker number is never in use twice at once.
  pool.parallel_for(n_workers, [&](std::int64_t w) {
    for (std::int64_t i = w; i < n; i += n_workers) body(arg, i, static_cast<std::int32_t>(w));
  });
}

struct PlanDeleter {
  void operator()(kvrt_plan* p) const { kvrt_plan_release(p); }
};
struct ContextDeleter {
  void operator()(kvrt_context* c) const { kvrt_context_destroy(c); }
};

/// Memory of one pool per side, as large as any layer needs, and the ids of its pages.
struct Pages {
  std::array<std::vector<std::uint8_t>, KVRT_SIDES> bytes;
  std::vector<std::int32_t> ids;
};

}  // namespace

struct PackedCache::Sequence {
  std::size_t layer_idx = 0;
  std::int64_t length = 0;                    ///< tokens held
  std::int64_t needed[KVRT_SEGMENTS] = {};
  Pages exact, base;                          ///< sinks and ring; coded tokens
};

struct PackedCache::Impl {
  Impl(const ModelIdentity& model, const Contender& contender, std::int64_t longest, ThreadPool& pool) : name(contender.header.name), model(model) {
    std::vector<std::array<std::string, 2>> text;  // what the views point at
    for (const LayerChange& layer : contender.layers) {
      CALIB_CHECK(layer.k && layer.v);
      if (const std::string what = only_in_place(layer); !what.empty())
        fail(ErrorKind::kUnsupported, name + ", runtime", "{} is not offered by the runtime of this build; measure it with --backend fake", what);
      if (layer.tiers.block_salient > 0)
        fail(ErrorKind::kUnsupported, name + ", runtime", "a salient tier is not offered by the runtime of this build; measure it with --backend fake");
      text.push_back({kvrt::to_string(layer.k->scheme), kvrt::to_string(layer.v->scheme)});
    }
    std::vector<kvrt_layer_view> layers;
    std::vector<std::array<std::vector<std::int32_t>, 2>> orders(model.layers.size());
    for (std::size_t l = 0; l < model.layers.size(); ++l) {
      const LayerGeometry& g = model.layers[l];
      const LayerChange& change = contender.layers[l];
      kvrt_layer_view view{};
      view.index = g.index;
      view.n_q_heads = g.n_q_heads, view.n_kv_heads = g.n_kv_heads, view.head_dim = g.head_dim;
      view.rotary_dim = g.rope_style == RopeStyle::kNone ? 0 : g.rotary_dim;
      view.rope_style = rope_style(g.rope_style);
      view.attention_factor = g.attention_factor;
      view.inv_freq = g.inv_freq.data();
      view.softmax_scale = g.softmax_scale;
      view.sliding_window = g.sliding_window;
      view.sink_tokens = change.tiers.n_sinks, view.window_tokens = change.tiers.window;
      view.k = unit_view(*change.k, text[l][0], Side::kK, g, &orders[l][0]);
      view.v = unit_view(*change.v, text[l][1], Side::kV, g, &orders[l][1]);
      layers.push_back(view);
    }
    kvrt_plan_view view{};
    view.n_layers = static_cast<std::int32_t>(layers.size());
    view.layers = layers.data();
    view.page_tokens = 64;
    kvrt_error error{};
    kvrt_plan* adopted = nullptr;
    if (kvrt_plan_adopt(&view, &adopted, &error) != KVRT_OK) refused(name, error);
    plan.reset(adopted);
    if (kvrt_plan_check(adopted, nullptr, nullptr, nullptr, &error) != KVRT_OK) refused(name, error);
    kvrt_limits limits{};
    limits.max_batch = 1;
    limits.max_length = longest;
    limits.n_workers = pool.n_threads();
    limits.parallel_for = run_on_pool;
    limits.parallel_user = &pool;
    kvrt_context* created = nullptr;
    if (kvrt_context_create(adopted, nullptr, &limits, &created, &error) != KVRT_OK) refused(name, error);
    context.reset(created);
    workspace.resize(static_cast<std::size_t>(kvrt_workspace_bytes(created)));
  }

  /// Poisoned pages for a document of n tokens: what was never written must not matter.
  Pages pages_for(std::int32_t layer, kvrt_segment segment, std::int64_t n_pages) {
    Pages pages;
    for (const kvrt_side side : {KVRT_K, KVRT_V}) {
      kvrt_layout layout{};
      kvrt_error error{};
      if (kvrt_page_layout(context.get(), layer, side, segment, &layout, &error) != KVRT_OK) refused(name, error);
      pages.bytes[side].assign(static_cast<std::size_t>(n_pages * layout.page_bytes), 0xFF);
    }
    pages.ids.resize(static_cast<std::size_t>(n_pages));
    std::iota(pages.ids.begin(), pages.ids.end(), 0);
    return pages;
  }

  std::shared_ptr<Sequence> begin(std::size_t layer_idx, std::int64_t capacity) {
    const std::int32_t layer = model.layers[layer_idx].index;
    auto s = std::make_shared<Sequence>();
    s->layer_idx = layer_idx;
    kvrt_error error{};
    if (kvrt_pages_needed(context.get(), layer, capacity, s->needed, &error) != KVRT_OK) refused(name, error);
    s->exact = pages_for(layer, KVRT_SINK, s->needed[KVRT_SINK] + s->needed[KVRT_WINDOW]);
    s->base = pages_for(layer, KVRT_BASE, s->needed[KVRT_BASE]);
    return s;
  }

  void extend(Sequence& s, std::int64_t n_tokens, const float* q_pre, const float* k_pre, const float* v, float* o) {
    const LayerGeometry& g = model.layers[s.layer_idx];
    kvrt_error error{};
    kvrt_pools pools{};
    for (const kvrt_side side : {KVRT_K, KVRT_V}) {
      pools.exact[side] = {s.exact.bytes[side].data(), 0, static_cast<std::int64_t>(s.exact.ids.size())};
      pools.base[side] = {s.base.bytes[side].data(), 0, static_cast<std::int64_t>(s.base.ids.size())};
    }
    kvrt_batch batch{};
    std::int64_t length = 0, position = 0;
    const std::int64_t rows[2] = {0, 1};
    const std::int64_t sink_pages[2] = {0, s.needed[KVRT_SINK]}, window_pages[2] = {0, s.needed[KVRT_WINDOW]};
    const std::int64_t base_pages[2] = {0, s.needed[KVRT_BASE]};
    batch.n_seqs = 1;
    batch.seq_len = &length;
    batch.row_offsets = rows;
    batch.positions = &position;
    batch.pages[KVRT_SINK] = {s.exact.ids.data(), sink_pages};
    batch.pages[KVRT_WINDOW] = {s.exact.ids.data() + s.needed[KVRT_SINK], window_pages};
    batch.pages[KVRT_BASE] = {s.base.ids.data(), base_pages};
    const kvrt_workspace space = {workspace.data(), static_cast<std::int64_t>(workspace.size())};
    const std::int64_t q_row = std::int64_t{g.n_q_heads} * g.head_dim, kv_row = std::int64_t{g.n_kv_heads} * g.head_dim;
    for (std::int64_t t = 0; t < n_tokens; ++t, ++s.length) {
      length = position = s.length;
      kvrt_qkv qkv{};
      qkv.k.data = k_pre + t * kv_row;
      qkv.v.data = v + t * kv_row;
      qkv.k_frame = KVRT_PRE_ROPE;
      if (kvrt_append(context.get(), g.index, &batch, &qkv, &pools, &space, nullptr, &error) != KVRT_OK) refused(name, error);
      kvrt_attn attn{};
      attn.q.data = q_pre + t * q_row;
      attn.q_frame = KVRT_PRE_ROPE;
      attn.out.data = o + t * q_row;
      if (kvrt_decode(context.get(), g.index, &batch, &attn, &pools, &space, nullptr, &error) != KVRT_OK) refused(name, error);
    }
    check_health(g.index);
  }

  void check_health(std::int32_t layer) {
    for (const kvrt_side side : {KVRT_K, KVRT_V}) {
      kvrt_health health{};
      kvrt_error error{};
      if (kvrt_monitor_read(context.get(), layer, side, &health, &error) != KVRT_OK) refused(name, error);
      if (health.non_finite > 0)
        fail(ErrorKind::kNumeric, fmt::format("{}, layer {} {}", name, layer, side == KVRT_K ? "K" : "V"),
             "{} values to be stored are NaN or infinite", health.non_finite);
    }
  }

  std::string name;
  const ModelIdentity& model;
  std::unique_ptr<kvrt_plan, PlanDeleter> plan;
  std::unique_ptr<kvrt_context, ContextDeleter> context;
  std::vector<std::uint8_t> workspace;
};

PackedCache::PackedCache(const ModelIdentity& model, const Contender& contender, std::int64_t longest, ThreadPool& pool)
    : impl_(std::make_unique<Impl>(model, contender, longest, pool)) {}
PackedCache::~PackedCache() = default;
PackedCache::PackedCache(PackedCache&&) noexcept = default;

void PackedCache::attend(std::size_t layer_idx, std::int64_t n_tokens, const float* q_pre, const float* k_pre, const float* v, float* o) {
  impl_->extend(*impl_->begin(layer_idx, n_tokens), n_tokens, q_pre, k_pre, v, o);
}

std::shared_ptr<PackedCache::Sequence> PackedCache::begin(std::size_t layer_idx, std::int64_t capacity) { return impl_->begin(layer_idx, capacity); }

void PackedCache::extend(Sequence& sequence, std::int64_t n_tokens, const float* q_pre, const float* k_pre, const float* v, float* o) {
  impl_->extend(sequence, n_tokens, q_pre, k_pre, v, o);
}

}  // namespace calib::sens
