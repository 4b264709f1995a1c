#pragma once
// The vector encoders of append, compiled once per instruction set (write_cpu_*.cc): levels and parameters as fake_quant's
// vector path computes them, packed into pages. The bytes are those of kernels/codec/page_codec.h.
// No std:: and no shared inline function may be called here, as in fake_quant_lanes.h.

#include "kernels/cpu/pack.h"
#include "kernels/write/fake_quant_lanes.h"
#include "kernels/write/write_path.h"

namespace kvrt {
namespace {

// --- grids whose results are codes, as numbers ---

struct AffineCodes : AffineGrid {};
template <class V>
KVRT_INLINE V result_of(const AffineCodes&, V level, V, V) { return level; }

struct SymmetricCodes : SymmetricGrid {};
template <class V>
KVRT_INLINE V result_of(const SymmetricCodes& grid, V level, V, V) { return level + (grid.m + 1.0f); }

template <class V>
KVRT_INLINE V index_of(const Codebook& book, V y) {
  return of_nearest(book, y, [](int i) { return static_cast<float>(i); });
}
struct CodebookCodes {
  const Codebook* book;
  template <class V>
  V level(V x, V scale, V lo) const { return index_of<V>(*book, (x - lo) / scale - 1.0f); }
  template <class V>
  V value(V level, V, V) const { return level; }
};

/// Code of fp8 as a number: kernels/codec/fp8_codec.h.
template <int kMantissa, class V>
KVRT_INLINE V float_code(V y) {
  using Int = IntOf<V>;
  constexpr int kDrop = 23 - kMantissa, kBias = kMantissa == 3 ? 7 : 15;
  constexpr float kMax = kMantissa == 3 ? 448.0f : 57344.0f, kMinNormal = kMantissa == 3 ? 0x1p-6f : 0x1p-14f, kStep = kMinNormal / (1 << kMantissa);
  const V a = minimum(magnitude(y), splat<V>(kMax));
  const Int u = bits_as<Int>(a);
  const Int normal = ((u + ((1 << (kDrop - 1)) - 1) + ((u >> kDrop) & 1)) >> kDrop) - ((127 - kBias) << kMantissa);
  const Int small = bits_as<Int>(a * (1.0f / kStep) + 0x1p23f) & 0xFF;
  const Int sign = (bits_as<Int>(y) >> 24) & 0x80, code = (a < kMinNormal ? small : normal) | sign;
  if constexpr (LanesOf<sizeof(V)>::n == 1) return static_cast<float>(code);
  else return __builtin_convertvector(code, V);
}
struct FloatCodes {
  Format format;
  template <class V>
  V operator()(V x, V scale) const { return format == Format::kFp8E4m3 ? float_code<3>(x / scale) : float_code<2>(x / scale); }
};

/// Rows to codes as numbers, parameters to run->lo and run->scale.
static void find_codes(Run* run) {
  const FakeQuantJob& job = *run->job;
  const float qmax = static_cast<float>((1 << job.bits) - 1), m = static_cast<float>((1 << (job.bits - 1)) - 1);
  if (is_llamacpp_block(job.scheme.format)) return llamacpp_blocks<BlockCodes>(run);
  switch (job.scheme.format) {
    case Format::kBf16: case Format::kFp16: return exact16(run);
    case Format::kLm4: case Format::kLm3: case Format::kLm2:
      norm_levels(run);
      return for_lanes(run->n * run->d, [&](auto tag, int i) {  // entries lie apart: the midpoints below one count to its index
        using V = decltype(tag);
        store(run->rows + i, index_of<V>(job.codebook, load<V>(run->rows + i)));
      });
    case Format::kNuq4: case Format::kNuq3: case Format::kNuq2: return affine_or_static(run, 2.0f, CodebookCodes{&job.codebook});
    case Format::kSint8: case Format::kSint4: return symmetric(run, SymmetricCodes{{m}});
    case Format::kFp8E4m3:
    case Format::kFp8E5m2:
      return run->grids.lo ? fp8_static(run, FloatCodes{job.scheme.format}) : fp8_token(run, FloatCodes{job.scheme.format});
    default:
      return job.scheme.granularity == Granularity::kChannel ? int_channel(run, AffineCodes{{qmax}}) : affine_or_static(run, qmax, AffineCodes{{qmax}});
  }
}

/// Parameters of the run to the block. pairs: [D] words of scratch.
static void store_params(const Run& run, const PageCodec& c, int slot, std::uint8_t* block, std::uint8_t* pairs) {
  const bool by_channel = c.granularity == Granularity::kChannel, has_lo = is_int(c.format) || is_nuq(c.format);
  if (run.grids.lo || is_exact(c.format) || is_llamacpp_block(c.format)) return;
  const int per_row = by_channel ? run.d : run.d / c.group, n = by_channel ? run.d : per_row * run.n, width = has_lo ? 4 : 2;
  std::uint8_t* const target = block + c.params + static_cast<std::int64_t>(by_channel ? slot / c.group : slot) * per_row * width;
  std::uint8_t* const out = by_channel && c.spread != 0 ? pairs : target;
  for_lanes(n, [&](auto tag, int i) {
    using V = decltype(tag);
    const IntOf<V> scale = f16_bits<V>(load<V>(run.scale + i));
    if (has_lo) write_as(out + 4 * i, scale | f16_bits<V>(load<V>(run.lo + i)) << 16);
    else store_halves(out + 2 * i, scale);
  });
  if (out != target) to_stored_order<4>(c.spread, run.d, pairs, target);
}

/// Rows of 16-bit values to the block. halves: [D] of scratch.
static void store_exact_rows(const Run& run, const PageCodec& c, int slot, std::uint8_t* block, std::uint8_t* halves) {
  for (int t = 0; t < run.n; ++t) {
    std::uint8_t* const target = block + (slot + t) * c.row_bytes;
    std::uint8_t* const out = c.spread != 0 ? halves : target;
    for_lanes(run.d, [&](auto tag, int i) {
      using V = decltype(tag);
      const V v = load<V>(run.rows + static_cast<std::int64_t>(t) * run.d + i);
      store_halves(out + 2 * i, c.format == Format::kBf16 ? bits_as<IntOf<V>>(v) >> 16 : f16_bits<V>(v));
    });
    if (c.spread != 0) to_stored_order<2>(c.spread, run.d, halves, target);
  }
}

/// Rows of llama.cpp's blocks to the block of a page. codes: [32] of scratch.
static void store_llamacpp_rows(const Run& run, const PageCodec& c, int slot, std::uint8_t* block, std::uint8_t* codes) {
  const bool has_lo = c.format == Format::kQ4_1 || c.format == Format::kQ5_1;
  std::uint8_t* out = block + slot * c.row_bytes;
  for (int b = 0; b < run.n * run.d / 32; ++b) {  // rows lie one behind the other
    for_lanes(32, [&](auto tag, int i) { store_bytes(codes + i, load<decltype(tag)>(run.rows + 32 * b + i)); });
    store_halves(out, f16_bits<float>(run.scale[b])), out += 2;
    if (has_lo) store_halves(out, f16_bits<float>(run.lo[b])), out += 2;
    out = pack_llamacpp_codes(c.bits, codes, out);
  }
}

static void store_code_rows(const Run& run, const PageCodec& c, int slot, std::uint8_t* block, std::uint8_t* scratch) {
  const int padded = padded_codes(run.d);
  std::uint8_t *const codes = scratch, *const ordered = scratch + padded;
  for (int i = 0; i < 2 * padded; ++i) scratch[i] = 0;
  for (int t = 0; t < run.n; ++t) {
    for_lanes(run.d, [&](auto tag, int i) { store_bytes(codes + i, load<decltype(tag)>(run.rows + static_cast<std::int64_t>(t) * run.d + i)); });
    if (c.spread != 0) to_stored_order<1>(c.spread, run.d, codes, ordered);
    pack_codes(c.bits, !is_int(c.format), run.d, c.spread != 0 ? ordered : codes, block + (slot + t) * c.row_bytes,
               block + c.plane_b + (slot + t) * (c.row_bytes / 2));
  }
}

static void encode_rows(const FakeQuantJob& job, const StaticGrids& grids, const PageCodec& c, int head, const float* x, int n, int slot,
                        std::uint8_t* block, float* scratch, std::uint8_t* bytes, EncodeCounters* counters) {
  Run run{};
  run.job = &job, run.grids = grids, run.n = n, run.d = job.head_dim;
  const std::int64_t d = job.head_dim, size = n * d;
  run.rows = scratch, run.lo = scratch + size, run.scale = scratch + 2 * size, run.lanes = scratch + 3 * size;
  run.ranged = run.rows;
  if (job.ef_u) run.ef_u = job.ef_u + head * (d * (d + 1) / 2), run.ef_order = job.ef_order + head * d;
  for (int t = 0; t < n; ++t) to_frame(&run, head, x + t * d, run.rows + t * d, nullptr);
  std::uint16_t picks[kMaxGroupOutliers];
  float rests[kMaxGroupOutliers];
  if (job.scheme.outlier_per_mille > 0) pick_outliers(&run, slot, picks, rests);
  find_codes(&run);
  store_params(run, c, slot, block, bytes);
  if (is_exact(c.format)) store_exact_rows(run, c, slot, block, bytes);
  else if (is_llamacpp_block(c.format)) store_llamacpp_rows(run, c, slot, block, bytes);
  else store_code_rows(run, c, slot, block, bytes);
  if (job.scheme.outlier_per_mille > 0) store_outlier_entries(c, slot, n, picks, rests, run.n_picks, block, counters);
  counters->non_finite += run.counts.non_finite.total();
  counters->saturated += run.counts.saturated.total();
  counters->floored += run.counts.floored.total();
}

// --- rows of the caller, and exact pages ---

/// 16-bit floats as fp32, infinities and NaN included. p: the element's bytes.
template <class V>
KVRT_INLINE V load_16bit(const std::uint8_t* p, bool is_f16) {
  using Int = IntOf<V>;
  Int h;
  if constexpr (LanesOf<sizeof(V)>::n == 1) h = read_as<std::uint16_t>(p);
  else h = load_halves(p);
  if (!is_f16) return bits_as<V>(h << 16);
  V v;
  if constexpr (LanesOf<sizeof(V)>::n == 1) v = f16_scalar(p);
  else v = f16_lanes(h);
  return (h & 0x7C00) == 0x7C00 ? bits_as<V>((h & 0) + 0x7F800000) : v;
}

/// x <- R x at a position: rope_rotate() of kernels/codec/rope.h. angles: [2, n_pairs].
static void rotate_row_at(const RopeTables& r, std::int64_t position, float* x, float* angles) {
  const float* coarse = r.coarse + position / kRopeCoarse * 2 * r.n_pairs;
  const float* fine = r.fine + position % kRopeCoarse * 2 * r.n_pairs;
  const int n = r.n_pairs;
  for_lanes(n, [&](auto tag, int i) {
    using V = decltype(tag);
    const V c1 = load<V>(coarse + i), s1 = load<V>(coarse + n + i), c2 = load<V>(fine + i), s2 = load<V>(fine + n + i);
    store(angles + i, c1 * c2 - s1 * s2);
    store(angles + n + i, s1 * c2 + c1 * s2);
  });
  if (r.interleaved) {
    for (int i = 0; i < n; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1], c = angles[i], s = angles[n + i];
      x[2 * i] = a * c - b * s, x[2 * i + 1] = a * s + b * c;
    }
    return;
  }
  for_lanes(n, [&](auto tag, int i) {
    using V = decltype(tag);
    const V a = load<V>(x + i), b = load<V>(x + n + i), c = load<V>(angles + i), s = load<V>(angles + n + i);
    store(x + i, a * c - b * s);
    store(x + n + i, a * s + b * c);
  });
}

static void take_rows(const IntakeRows& in, std::int64_t first, int n, float* out, float* angles, EncodeCounters* counters) {
  Counts counts{};
  const int d = in.head_dim;
  for (int t = 0; t < n; ++t) {
    const std::uint8_t* from = in.data + (first + t) * in.row_bytes;
    float* const row = out + static_cast<std::int64_t>(t) * d;
    const auto settle = [&](auto tag, int i, auto v) {  // what is stored is finite
      using V = decltype(tag);
      v = finite_or_zero_lanes<V>(v, &counts);
      store(row + i, v);
    };
    for_lanes(d, [&](auto tag, int i) {
      using V = decltype(tag);
      settle(tag, i, in.dtype == IntakeType::kF32 ? read_as<V>(from + 4 * i) : load_16bit<V>(from + 2 * i, in.dtype == IntakeType::kF16));
    });
    if (in.rope) {
      rotate_row_at(*in.rope, in.first_position + first + t, row, angles);
      for_lanes(d, [&](auto tag, int i) { settle(tag, i, load<decltype(tag)>(row + i)); });
    }
    for_lanes(in.round_to_bf16 ? d : 0, [&](auto tag, int i) { store(row + i, bf16_nearest(load<decltype(tag)>(row + i))); });
  }
  counters->non_finite += counts.non_finite.total();
}

static void store_bf16_row(const float* x, int d, std::uint8_t* out) {  // x: bf16 values
  for_lanes(d, [&](auto tag, int i) {
    using V = decltype(tag);
    store_halves(out + 2 * i, bits_as<IntOf<V>>(bf16_nearest(load<V>(x + i))) >> 16);
  });
}
static void load_bf16_row(const std::uint8_t* bytes, int d, float* out) {
  for_lanes(d, [&](auto tag, int i) { store(out + i, load_16bit<decltype(tag)>(bytes + 2 * i, false)); });
}

static WritePath lanes_path(const char* name) { return {name, fake_quant_run, take_rows, store_bf16_row, load_bf16_row, encode_rows}; }

}  // namespace
}  // namespace kvrt
