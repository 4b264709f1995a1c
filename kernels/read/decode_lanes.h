#pragma once
// The vector path of decode attention, compiled once per instruction set (decode_cpu.cc, _avx2.cc, _avx512.cc): walks the pages of one
// segment tile by tile. No std:: and no shared inline function may be called here: the linker could merge a copy compiled for a wider
// instruction set.

#include "kernels/cpu/attend.h"
#include "kernels/cpu/unpack.h"
#include "kernels/read/decode_cpu.h"

namespace kvrt {
namespace {

KVRT_INLINE int padded_width(int d) { return (d + 15) / 16 * 16; }
KVRT_INLINE int padded_queries(int n) {
  int total = 0;
  for (int g = 0; g < n; g += query_block(n - g)) total += query_block(n - g);
  return total;
}

/// Scratch of one call; every part starts at a multiple of 64 bytes.
struct Workspace {
  float* columns;       ///< [width][kTile]: keys
  float* rows;          ///< [kTile][width]: values, and keys without a column unpacker
  std::int32_t* words;  ///< [width][kTile]
  float* params;        ///< 2 * param_floats(width)
  float* q;             ///< blocks of query heads, each [width][block]
  float* q_rotated;     ///< same, rotated back by the position of the page
  float* scores;        ///< [queries][kTile]
  float* o;             ///< [queries][width]
  float* softmax;       ///< [queries] of Softmax
  float* q_sum;         ///< [queries]
  float* bias;          ///< [queries]
  float* angles;        ///< [2][pairs]
};
static_assert(kRopeTile == kTile, "one tile's offsets");
constexpr std::int64_t kSoftmaxFloats = 48;
static_assert(sizeof(Softmax) <= kSoftmaxFloats * sizeof(float), "a state fits its place");

/// Returns the floats needed; base may be null.
static std::int64_t lay_out(int head_dim, int n_queries, float* base, Workspace* w) {
  const std::int64_t width = padded_width(head_dim), queries = padded_queries(n_queries);
  std::int64_t used = 0;
  const auto take = [&](std::int64_t n) {
    float* const p = base + used;
    used += (n + 15) / 16 * 16;
    return p;
  };
  w->columns = take(width * kTile), w->rows = take(width * kTile);
  w->words = reinterpret_cast<std::int32_t*>(take(width * kTile));
  w->params = take(2 * param_floats(static_cast<int>(width)));
  w->q = take(queries * width), w->q_rotated = take(queries * width);
  w->scores = take(queries * kTile), w->o = take(queries * width);
  w->softmax = take(queries * kSoftmaxFloats), w->q_sum = take(queries), w->bias = take(queries), w->angles = take(width);
  return used;
}
KVRT_INLINE Softmax* softmax_of(const Workspace& w, int g) { return reinterpret_cast<Softmax*>(w.softmax + g * kSoftmaxFloats); }

// --- unpacking: which unpacker a codec has ---

enum class Unpacker { kScalar, kLlama, kVector };

static Unpacker unpacker_of(const PageCodec& c) {
  if (c.head_dim % 16 != 0 || is_fp4(c.format)) return Unpacker::kScalar;
  if (is_llamacpp_block(c.format)) return Unpacker::kLlama;
  if (c.granularity == Granularity::kChannel && c.group % kTile != 0) return Unpacker::kScalar;
  // Parameters of channels in model order, codes in stored order.
  const bool by_model_channel = c.granularity == Granularity::kChannelStatic || (c.granularity == Granularity::kToken && c.group < c.head_dim);
  if (c.spread != 0 && by_model_channel) return Unpacker::kScalar;
  return c.granularity == Granularity::kToken && c.group % kLanes != 0 ? Unpacker::kScalar : Unpacker::kVector;
}

template <Base kB, int kN>
struct CodeType {
  static constexpr Base base = kB;
  static constexpr int bits = kN;
};
template <ParamKind kK>
struct KindOf {
  static constexpr ParamKind kind = kK;
};
template <class Body>
KVRT_INLINE void with_param_kind(ParamKind kind, Body body) {
  if (kind == ParamKind::kToken) body(KindOf<ParamKind::kToken>{});
  else if (kind == ParamKind::kChannel) body(KindOf<ParamKind::kChannel>{});
  else body(KindOf<ParamKind::kNone>{});
}
template <class Body>
KVRT_INLINE void with_code_type(Format f, Body body) {
  switch (f) {
    case Format::kBf16: return body(CodeType<Base::kBf16, 16>{});
    case Format::kFp16: return body(CodeType<Base::kFp16, 16>{});
    case Format::kFp8E4m3: return body(CodeType<Base::kE4m3, 8>{});
    case Format::kFp8E5m2: return body(CodeType<Base::kE5m2, 8>{});
    case Format::kSint8: return body(CodeType<Base::kSymmetric, 8>{});
    case Format::kSint4: return body(CodeType<Base::kSymmetric, 4>{});
    case Format::kInt8: return body(CodeType<Base::kUnsigned, 8>{});
    case Format::kInt4: return body(CodeType<Base::kUnsigned, 4>{});
    case Format::kInt3: return body(CodeType<Base::kUnsigned, 3>{});
    case Format::kNuq4: case Format::kLm4: return body(CodeType<Base::kBook, 4>{});
    case Format::kNuq3: case Format::kLm3: return body(CodeType<Base::kBook, 3>{});
    case Format::kNuq2: case Format::kLm2: return body(CodeType<Base::kBook, 2>{});
    default: return body(CodeType<Base::kUnsigned, 2>{});
  }
}

/// Rows [begin, end) to w.rows, for formats whose rows do not need params.
static void unpack_other_rows(const TileRef& tile, Unpacker unpacker, int begin, int end, float* out) {
  const PageCodec& c = *tile.codec;
  if (unpacker == Unpacker::kScalar) return decode_rows_scalar(c, tile.block, tile.slot, begin, end, padded_width(c.head_dim), out);
  switch (c.format) {
    case Format::kQ8_0: return unpack_llama_rows<Format::kQ8_0>(tile, begin, end, out);
    case Format::kQ4_0: return unpack_llama_rows<Format::kQ4_0>(tile, begin, end, out);
    case Format::kQ4_1: return unpack_llama_rows<Format::kQ4_1>(tile, begin, end, out);
    case Format::kIq4Nl: return unpack_llama_rows<Format::kIq4Nl>(tile, begin, end, out);
    case Format::kQ5_0: return unpack_llama_rows<Format::kQ5_0>(tile, begin, end, out);
    default: return unpack_llama_rows<Format::kQ5_1>(tile, begin, end, out);
  }
}

static void unpack_value_rows(const TileRef& tile, Unpacker unpacker, int begin, int end, const Workspace& w) {
  if (unpacker != Unpacker::kVector) return unpack_other_rows(tile, unpacker, begin, end, w.rows);
  const TileParams p = load_params(*tile.codec, tile.block, tile.slot, tile.n_rows, w.params, w.words);
  with_code_type(tile.codec->format, [&](auto type) {
    with_param_kind(p.kind, [&](auto kind) {
      unpack_rows<decltype(type)::base, decltype(type)::bits, decltype(kind)::kind>(tile, p, begin, end, w.rows);
    });
  });
  if (tile.codec->out_per_mille > 0) add_outliers(*tile.codec, tile.block, tile.slot, begin, end, tile.codec->head_dim, 1, w.rows);
}

/// Keys to w.columns. Returns the parameters that the scores still need, kind kNone if none.
static TileParams unpack_key_columns(const TileRef& tile, Unpacker unpacker, bool rotated, int begin, int end, const Workspace& w) {
  if (unpacker != Unpacker::kVector) {
    unpack_other_rows(tile, unpacker, begin, end, w.rows);
    transpose_tile(w.rows, padded_width(tile.codec->head_dim), tile.n_rows, w.columns);
    return {};
  }
  TileParams p = load_params(*tile.codec, tile.block, tile.slot, tile.n_rows, w.params, w.words);
  const bool raw = !rotated && p.kind == ParamKind::kToken && p.n_groups == 1 && tile.codec->out_per_mille == 0;
  with_code_type(tile.codec->format, [&](auto type) {
    with_param_kind(raw ? ParamKind::kNone : p.kind, [&](auto kind) {
      unpack_columns<decltype(type)::base, decltype(type)::bits, decltype(kind)::kind>(tile, p, w.columns, w.words);
    });
  });
  if (tile.codec->out_per_mille > 0) add_outliers(*tile.codec, tile.block, tile.slot, begin, end, 1, kTile, w.columns);
  if (!raw) p.kind = ParamKind::kNone;
  return p;
}

/// Whether values are summed as codes, unpacked in registers: one scale and minimum a token join its p, and no query head asks twice.
KVRT_INLINE bool sums_codes(const PageCodec& c, Unpacker unpacker, int n_queries) {
  const int most = c.bits > 4 ? 4 : 8;  // eight heads read wide codes faster than they unpack them
  if (unpacker != Unpacker::kVector || c.out_per_mille > 0 || n_queries > most) return false;
  const bool whole_row = c.granularity == Granularity::kTensor || c.granularity == Granularity::kHead || c.group == c.head_dim;
  return is_exact(c.format) || (whole_row && c.granularity != Granularity::kChannel && c.granularity != Granularity::kChannelStatic);
}

/// o += p times code for tokens [begin, end) and columns [c, c + kC vectors). p: [kB][kTile]; o: [kB][d].
template <int kB, int kC, Base kBase, int kBits>
KVRT_INLINE void accumulate_codes(const TileRef& tile, const float* book, int d, int c, int begin, int end, const float* p, float* o) {
  const PageCodec& codec = *tile.codec;
  F sum[kB][kC];
  for (int g = 0; g < kB; ++g) {
    for (int i = 0; i < kC; ++i) sum[g][i] = load<F>(o + static_cast<std::int64_t>(g) * d + c + i * kLanes);
  }
  const std::uint8_t* row = tile.block + static_cast<std::int64_t>(tile.slot + begin) * codec.row_bytes;
  const std::uint8_t* plane_b = tile.block + codec.plane_b + static_cast<std::int64_t>(tile.slot + begin) * (codec.row_bytes / 2);
  for (int t = begin; t < end; ++t, row += codec.row_bytes, plane_b += codec.row_bytes / 2) {
    F v[kC];
    for (int i = 0; i < kC; ++i) v[i] = base_value<kBase, kBits>(book, row_codes<kBase, kBits>(row, plane_b, c + i * kLanes));
    for (int g = 0; g < kB; ++g) {
      const F b = splat<F>(p[g * kTile + t]);
      for (int i = 0; i < kC; ++i) sum[g][i] += b * v[i];
    }
  }
  for (int g = 0; g < kB; ++g) {
    for (int i = 0; i < kC; ++i) store(o + static_cast<std::int64_t>(g) * d + c + i * kLanes, sum[g][i]);
  }
}

/// accumulate_tile() of a side that sums_codes(). p becomes p times scale.
template <int kB>
static void accumulate_code_tile(const TileRef& tile, int begin, int end, int first, const Workspace& w) {
  constexpr int kC = kLanes == 16 ? (kB == 8 ? 2 : 4) : kB == 8 ? 1 : kB == 4 ? 2 : 4;
  const int d = tile.codec->head_dim;
  const TileParams params = load_params(*tile.codec, tile.block, tile.slot, tile.n_rows, w.params, w.words);
  float* const p = w.scores + first * kTile;
  for (int g = 0; params.kind == ParamKind::kToken && g < kB; ++g) {
    for (int t = 0; t < tile.n_rows; t += kLanes) {
      const F weight = load<F>(p + g * kTile + t);  // 0 where the token is not live, and its parameters anything
      store(p + g * kTile + t, weight == 0.0f ? F{} : weight * load<F>(params.scale + t));
      softmax_of(w, first + g)->lo += weight == 0.0f ? F{} : weight * load<F>(params.lo + t);
    }
  }
  float* const o = w.o + static_cast<std::int64_t>(first) * d;
  with_code_type(tile.codec->format, [&](auto type) {
    constexpr Base kBase = decltype(type)::base;
    constexpr int kBits = decltype(type)::bits;
    int c = 0;
    for (; c + kC * kLanes <= d; c += kC * kLanes) accumulate_codes<kB, kC, kBase, kBits>(tile, params.book, d, c, begin, end, p, o);
    for (; c < d; c += kLanes) accumulate_codes<kB, 1, kBase, kBits>(tile, params.book, d, c, begin, end, p, o);
  });
}

// --- queries ---

/// [G, D] to blocks [width][block], absent channels and query heads 0; sums of each query head.
static void load_queries(const HeadAttention& job, const Workspace& w) {
  const int d = job.segment.k.codec.head_dim;
  const std::int64_t width = padded_width(d);
  for_query_blocks(job.n_queries, [&](auto size, int first) {
    constexpr int kB = decltype(size)::n;
    float* block = w.q + first * width;
    for (int g = 0; g < kB; ++g) {
      float sum = 0;
      for (int c = 0; c < width; ++c) {
        const float v = c < d && first + g < job.n_queries ? job.q[static_cast<std::int64_t>(first + g) * d + c] : 0.0f;
        block[static_cast<std::int64_t>(c) * kB + g] = v, sum += v;
      }
      float bias = 0;  // of the mean of keys, the same for every token of the segment
      for (int c = 0; job.k_mean && !job.segment.pre && c < d; ++c) bias += block[static_cast<std::int64_t>(c) * kB + g] * job.k_mean[c];
      w.q_sum[first + g] = sum, w.bias[first + g] = bias;
    }
  });
}

struct Pair {
  int x, y;
};
KVRT_INLINE Pair pair_channels(const HeadAttention& job, int i) {
  if (job.pair_places) return {job.pair_places[2 * i], job.pair_places[2 * i + 1]};
  return job.rope->interleaved ? Pair{2 * i, 2 * i + 1} : Pair{i, i + job.rope->n_pairs};
}

/// Rotates queries by -position, that of the tile's first slot: (R_p k) . q = k . (R_-p q). A ring's tile may begin before position 0.
static void rotate_queries(const HeadAttention& job, std::int64_t position, const Workspace& w) {
  const RopeTables& r = *job.rope;
  const std::int64_t width = padded_width(job.segment.k.codec.head_dim), at = position < 0 ? -position : position;
  const float* coarse = r.coarse + at / kRopeCoarse * 2 * r.n_pairs;
  const float* fine = r.fine + at % kRopeCoarse * 2 * r.n_pairs;
  float* const angles = w.angles;
  for_lanes(r.n_pairs, [&](auto tag, int i) {
    using V = decltype(tag);
    const V c1 = load<V>(coarse + i), s1 = load<V>(coarse + r.n_pairs + i), c2 = load<V>(fine + i), s2 = load<V>(fine + r.n_pairs + i);
    const V sine = s1 * c2 + c1 * s2;
    store(angles + i, c1 * c2 - s1 * s2);
    store(angles + r.n_pairs + i, position < 0 ? -sine : sine);
  });
  for_query_blocks(job.n_queries, [&](auto size, int first) {
    constexpr int kB = decltype(size)::n;
    const float* __restrict from = w.q + first * width;
    float* __restrict to = w.q_rotated + first * width;
    const bool partial = 2 * r.n_pairs < job.segment.k.codec.head_dim;
    for (std::int64_t i = partial ? 0 : 2 * r.n_pairs * kB; i < width * kB; ++i) to[i] = from[i];
    for (int i = 0; i < r.n_pairs; ++i) {
      const float c = angles[i], s = angles[r.n_pairs + i];
      const Pair p = pair_channels(job, i);
      const float *x = from + p.x * kB, *y = from + p.y * kB;
      float *x_out = to + p.x * kB, *y_out = to + p.y * kB;
      float rotated[2][kB];  // x and y first: the compiler then keeps a block in one vector
      for (int g = 0; g < kB; ++g) rotated[0][g] = x[g] * c + y[g] * s;
      for (int g = 0; g < kB; ++g) rotated[1][g] = y[g] * c - x[g] * s;
      for (int g = 0; g < kB; ++g) x_out[g] = rotated[0][g];
      for (int g = 0; g < kB; ++g) y_out[g] = rotated[1][g];
    }
  });
}

static void rotate_columns(const HeadAttention& job, const TileRef& tile, const Workspace& w) {
  const RopeTables& r = *job.rope;
  if (job.k_mean) {
    for (int c = 0; c < tile.codec->head_dim; ++c) {
      float* column = w.columns + static_cast<std::int64_t>(c) * kTile;
      for (int t = 0; t < tile.n_rows; t += kLanes) store(column + t, load<F>(column + t) + job.k_mean[c]);
    }
  }
  const auto rotate = [&](auto size) {
    for (int i = 0; i < r.n_pairs; ++i) {
      const Pair p = pair_channels(job, i);
      const float* angles = job.rope_tile + static_cast<std::int64_t>(i) * 2 * kRopeTile;
      rotate_pair<decltype(size)::n>(w.columns + static_cast<std::int64_t>(p.x) * kTile, w.columns + static_cast<std::int64_t>(p.y) * kTile,
                                     angles, angles + kRopeTile);
    }
  };
  if (tile.n_rows == kTile) rotate(Size<kTileVectors>{});
  else rotate(Size<kTileVectors / 2>{});
}

// --- the segment ---

KVRT_INLINE const std::uint8_t* head_block(const SegmentSide& side, std::int64_t page) {
  return side.pool + page * side.page_bytes + side.block_offset;
}

/// Asks for the bytes of one tile's rows and parameters, which the arithmetic of the tile before hides. A hint: any address will do.
KVRT_INLINE void prefetch_tile(const PageCodec& c, const std::uint8_t* block, int slot) {
  const auto lines = [](const std::uint8_t* p, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i += 64) __builtin_prefetch(p + i);
  };
  lines(block + slot * c.row_bytes, kTile * c.row_bytes);
  if (c.bits == 3) lines(block + c.plane_b + slot * (c.row_bytes / 2), kTile * c.row_bytes / 2);
  if (c.granularity == Granularity::kToken)
    lines(block + c.params + 4 * static_cast<std::int64_t>(slot) * (c.head_dim / c.group), 4 * kTile * (c.head_dim / c.group));
  if (c.granularity == Granularity::kChannel && slot % c.group == 0)
    lines(block + c.params + 4 * static_cast<std::int64_t>(slot / c.group) * c.head_dim, 4 * c.head_dim);
}

/// Blocks and slot of the tile after the present one.
struct NextTile {
  const std::uint8_t *k = nullptr, *v = nullptr;
  int slot = 0;
};

/// Live slots [begin, end) of one tile.
static void attend_tile(const HeadAttention& job, const TileRef& key, const TileRef& value, const NextTile& next, Unpacker k_unpacker,
                        Unpacker v_unpacker, int begin, int end, const Workspace& w) {
  if (next.k) prefetch_tile(*key.codec, next.k, next.slot);
  const std::int64_t width = padded_width(key.codec->head_dim);
  const bool pre = job.segment.pre;
  const TileParams p = unpack_key_columns(key, k_unpacker, pre, begin, end, w);
  if (pre) rotate_columns(job, key, w);
  for_query_blocks(job.n_queries, [&](auto size, int first) {
    constexpr int kB = decltype(size)::n;
    float* scores = w.scores + first * kTile;
    dot_tile<kB>(w.columns, static_cast<int>(width), key.n_rows, (pre ? w.q_rotated : w.q) + first * width, scores);
    for (int g = 0; g < kB; ++g) {
      float* row = scores + g * kTile;
      if (p.kind == ParamKind::kToken) {
        for (int t = 0; t < key.n_rows; t += kLanes) {
          store(row + t, load<F>(row + t) * load<F>(p.scale + t) + load<F>(p.lo + t) * w.q_sum[first + g]);
        }
      }
      const float bias = w.bias[first + g];
      if (bias != 0.0f || job.soft_cap > 0.0f) {
        for (int t = 0; t < key.n_rows; t += kLanes) {
          const F score = load<F>(row + t) + bias;
          store(row + t, job.soft_cap > 0.0f ? capped(score, job.soft_cap) : score);
        }
      }
      const float factor = softmax_tile(softmax_of(w, first + g), begin, end, key.n_rows, row);
      float* o = w.o + (first + g) * width;
      if (factor != 1.0f) for_lanes(static_cast<int>(width), [&](auto tag, int c) { store(o + c, load<decltype(tag)>(o + c) * factor); });
    }
  });
  if (next.v) prefetch_tile(*value.codec, next.v, next.slot);
  const bool codes = sums_codes(*value.codec, v_unpacker, job.n_queries);
  if (!codes) unpack_value_rows(value, v_unpacker, begin, end, w);
  for_query_blocks(job.n_queries, [&](auto size, int first) {
    constexpr int kB = decltype(size)::n;
    if (codes) accumulate_code_tile<kB>(value, begin, end, first, w);
    else accumulate_tile<kB>(w.rows, static_cast<int>(width), begin, end, w.scores + first * kTile, w.o + first * width);
  });
}

/// Adds the sums of this segment to the caller's partial.
static void add_to_partial(const HeadAttention& job, const Workspace& w) {
  const int d = job.segment.k.codec.head_dim;
  for (int g = 0; g < job.n_queries; ++g) {
    const Softmax* s = softmax_of(w, g);
    float l = 0, lo = 0;
    for (int i = 0; i < kLanes; ++i) l += s->l[i], lo += s->lo[i];
    const float top = maximum(s->m, job.out.m[g]), ours = exp2_lanes(splat<F>(s->m - top))[0];
    const float theirs = exp2_lanes(splat<F>(job.out.m[g] - top))[0];
    job.out.m[g] = top, job.out.l[g] = job.out.l[g] * theirs + l * ours;
    const float* o = w.o + static_cast<std::int64_t>(g) * padded_width(d);
    float* target = job.out.o + static_cast<std::int64_t>(g) * d;
    for (int c = 0; c < d; ++c) {
      const float v = o[c] + (job.v_mean ? lo + job.v_mean[c] * l : lo);
      target[c] = target[c] * theirs + v * ours;
    }
  }
}

static void attend_head(const HeadAttention& job, float* workspace) {
  const Segment& s = job.segment;
  if (s.n_tokens <= 0) return;
  Workspace w;
  lay_out(s.k.codec.head_dim, job.n_queries, workspace, &w);
  const std::int64_t queries = padded_queries(job.n_queries), width = padded_width(s.k.codec.head_dim);
  for (std::int64_t i = 0; i < queries * width; ++i) w.o[i] = 0.0f;
  for (std::int64_t g = 0; g < queries; ++g) *softmax_of(w, static_cast<int>(g)) = {kNoScore, F{}, F{}};
  load_queries(job, w);
  const Unpacker k_unpacker = unpacker_of(s.k.codec), v_unpacker = unpacker_of(s.v.codec);
  const int page_tokens = s.k.codec.page_tokens;
  for (std::int64_t i = 0; i < s.n_tokens;) {  // runs of tokens inside one page
    const std::int64_t slot = (s.first_slot + i) % s.n_slots, page = s.pages[slot / page_tokens];
    const int first = static_cast<int>(slot % page_tokens);
    const std::int64_t left = s.n_tokens - i;
    const int last = left < page_tokens - first ? first + static_cast<int>(left) : page_tokens;
    for (int t = first / kTile * kTile; t < last; t += kTile) {
      const int n_rows = page_tokens - t < kTile ? page_tokens - t : kTile;
      if (s.pre) rotate_queries(job, s.first_position + i - first + t, w);
      const TileRef key{&s.k.codec, head_block(s.k, page), t, n_rows}, value{&s.v.codec, head_block(s.v, page), t, n_rows};
      NextTile next{key.block, value.block, t + kTile};
      if (next.slot >= page_tokens) {
        const std::int64_t at = (s.first_slot + i + last - first) % s.n_slots / page_tokens;
        next = {head_block(s.k, s.pages[at]), head_block(s.v, s.pages[at]), 0};
      }
      attend_tile(job, key, value, next, k_unpacker, v_unpacker, first > t ? first - t : 0, last - t < n_rows ? last - t : n_rows, w);
    }
    i += last - first;
  }
  add_to_partial(job, w);
}

}  // namespace
}  // namespace kvrt
