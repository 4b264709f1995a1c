#include "libcalib/quant/fake_quant.h"

#include <algorithm>

#include "kernels/codec/half.h"
#include "kernels/core/plan_constants.h"
#include "kernels/write/fake_quant.h"
#include "libcalib/base/error.h"

namespace calib::quant {
namespace {

ErrorKind kind_of(kvrt::Code code) {
  switch (code) {
    case kvrt::Code::kNumeric: return ErrorKind::kNumeric;
    case kvrt::Code::kUnsupported: return ErrorKind::kUnsupported;
    default: return ErrorKind::kInternal;
  }
}

const float* or_null(const std::vector<float>& v) { return v.empty() ? nullptr : v.data(); }

/// kvrt trusts its pointers; the sizes are checked here.
void check_sizes(const SchemeParams& params, const kvrt::Scheme& scheme, const LayerGeometry& layer, const std::string& where) {
  const std::vector<kvrt::PlanConstant> needed = kvrt::plan_constants(scheme, layer.n_kv_heads, layer.head_dim);
  for (const auto& [name, values] : params.arrays())
    for (const kvrt::PlanConstant& constant : needed)
      if (constant.name == name && values->size() != static_cast<std::size_t>(constant.count()))
        fail(ErrorKind::kInternal, where, "`{}` holds {} values, expected {}", name, values->size(), constant.count());
}

}  // namespace

void fake_quant_document(const kvrt::Scheme& scheme, Side side, const LayerGeometry& layer, const SchemeParams& params,
                         std::int64_t n_sinks, bool bf16_input, std::int64_t n_tokens, const float* x, float* out, ThreadPool& pool,
                         std::int64_t* n_saturated) {
  const std::string where = fmt::format("layer {} {} {}", layer.index, side_name(side), kvrt::to_string(scheme));
  check_sizes(params, scheme, layer, where);
  const std::int64_t row = static_cast<std::int64_t>(layer.n_kv_heads) * layer.head_dim;
  const std::int64_t group = scheme.granularity == kvrt::Granularity::kChannel ? scheme.group : 1;
  const std::int64_t begin = std::min(n_sinks, n_tokens);
  const std::int64_t coded = (n_tokens - begin) / group * group;
  const std::int64_t end = begin + coded;
  if (x != out) {
    std::copy(x, x + begin * row, out);
    std::copy(x + end * row, x + n_tokens * row, out + end * row);
  }
  if (n_saturated) *n_saturated = 0;
  if (coded == 0) return;

  const std::vector<std::int32_t> order = llamacpp_block_order(scheme, side, layer);
  const std::function<void(std::int64_t, const std::function<void(std::int64_t)>&)> parallel =
      [&pool](std::int64_t n, const std::function<void(std::int64_t)>& body) { pool.parallel_for(n, body); };
  kvrt::FakeQuantArgs args;
  args.scheme = scheme;
  args.is_key = side == Side::kK;
  args.n_tokens = coded;
  args.n_heads = layer.n_kv_heads;
  args.head_dim = layer.head_dim;
  args.x = x + begin * row;
  args.out = out + begin * row;
  args.round_input_to_bf16 = bf16_input;
  args.block_order = order.empty() ? nullptr : order.data();
  args.mean = or_null(params.mean);
  args.clip_lo = or_null(params.clip_lo);
  args.clip_hi = or_null(params.clip_hi);
  args.smooth = or_null(params.smooth);
  args.clip_alpha = or_null(params.clip_alpha);
  args.rotary_dim = layer.rope_style == RopeStyle::kNone ? 0 : layer.rotary_dim;
  args.interleaved = layer.rope_style == RopeStyle::kInterleaved;
  args.codebook = or_null(params.codebook);
  const std::vector<std::int32_t> ef_order(params.ef_order.begin(), params.ef_order.end());
  args.basis_mean = or_null(params.basis_mean);
  args.basis_in = or_null(params.basis_in);
  args.basis = or_null(params.basis);
  args.ef_u = or_null(params.ef_u);
  args.ef_order = ef_order.empty() ? nullptr : ef_order.data();
  args.parallel_for = &parallel;
  kvrt::FakeQuantCounters counters;
  const kvrt::Status status = kvrt::fake_quant(args, &counters);
  if (!status.ok()) fail(kind_of(status.code()), where, "{}", status.text());
  if (counters.non_finite > 0)
    fail(ErrorKind::kNumeric, where, "{} values to be stored are NaN or infinite", counters.non_finite);
  if (n_saturated) *n_saturated = counters.saturated;
}

void round_bf16(const float* x, float* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = kvrt::bf16_to_f32(kvrt::f32_to_bf16(x[i]));
}

std::vector<std::int32_t> llamacpp_block_order(const kvrt::Scheme& scheme, Side side, const LayerGeometry& layer) {
  if (side != Side::kK || !kvrt::is_llamacpp_block(scheme.format) || !layer.llamacpp_adjacent_pairs ||
      layer.rope_style != RopeStyle::kHalfSplit)
    return {};
  // Stored positions 2i and 2i + 1 hold the half-split pair (i, i + rotary_dim / 2); channels past rotary_dim stay.
  std::vector<std::int32_t> order(static_cast<std::size_t>(layer.head_dim));
  for (int c = 0; c < layer.head_dim; ++c) order[static_cast<std::size_t>(c)] = c;
  for (int i = 0; 2 * i + 1 < layer.rotary_dim; ++i) {
    order[static_cast<std::size_t>(2 * i)] = i;
    order[static_cast<std::size_t>(2 * i + 1)] = i + layer.rotary_dim / 2;
  }
  return order;
}

}  // namespace calib::quant
