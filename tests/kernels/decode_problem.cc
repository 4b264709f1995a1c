#include "tests/kernels/decode_problem.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <stdexcept>

namespace kvrt::testing {
namespace {

constexpr std::int64_t kAlignment = 128;
constexpr double kLog2e = 1.4426950408889634074;

std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Slot of live token i.
std::int64_t slot_of(const Segment& s, std::int64_t i) { return (s.first_slot + i) % s.n_slots; }

const std::uint8_t* block_of(const Segment& s, const SegmentSide& side, std::int64_t slot) {
  return side.pool + static_cast<std::int64_t>(s.pages[slot / side.codec.page_tokens]) * side.page_bytes + side.block_offset;
}

}  // namespace

Scheme scheme_of(const std::string& text) {
  Scheme s;
  std::string error;
  if (!parse_scheme(text, &s, &error)) throw std::invalid_argument(text + ": " + error);
  return s;
}

std::int64_t params_bytes(const PageCodec& c) {
  if (c.granularity == Granularity::kToken) return detail::param_stride(c.format) * std::int64_t{c.page_tokens} * (c.head_dim / c.group);
  if (c.granularity == Granularity::kChannel) return std::int64_t{4} * (c.page_tokens / c.group) * c.head_dim;
  return 0;
}

DecodeProblem::DecodeProblem(const DecodeSpec& spec) : spec_(spec) {
  for (std::size_t i = 0; i < spec_.sequences.size(); ++i) {
    for (const SegmentSpec& s : spec_.sequences[i]) add_segment(s, static_cast<int>(i));
  }
  fill_queries();
  unit_.head_dim = spec_.head_dim;
  std::string error;
  if (!choose_decode_path(unit_, &path_, &error)) throw std::invalid_argument(error);
  replan(spec_.tiles_a_chunk);
  if (spec_.has_reference) fill_reference();
}

void DecodeProblem::fill_queries() {
  std::mt19937_64 random(spec_.seed + 1);
  std::normal_distribution<double> normal;
  const double scale = spec_.query_scale * kLog2e / std::sqrt(spec_.head_dim);
  const std::int64_t dim = spec_.head_dim, n_heads = n_rows() * spec_.n_query_heads;
  q_.resize(index(2 * n_heads * dim));
  for (std::int64_t i = 0; i < n_heads * dim; ++i) q_[index(i)] = static_cast<float>(scale * normal(random));
  int spread = 0;
  for (const Segment& s : segments_) spread = std::max(spread, s.k.codec.spread);
  for (std::int64_t i = 0; i < n_heads * dim; ++i) {
    q_[index(n_heads * dim + i / dim * dim + stored_position(spread, spec_.head_dim, static_cast<int>(i % dim)))] = q_[index(i)];
  }
}

float DecodeProblem::soft_cap() const noexcept { return static_cast<float>(spec_.soft_cap * kLog2e); }

std::int32_t DecodeProblem::max_chunk_tiles() const noexcept {
  std::int64_t most = 1;
  for (const DecodeChunk& c : chunks_) most = std::max(most, c.tile_end - c.tile_begin);
  return static_cast<std::int32_t>(most);
}

/// What a plan holds for the scheme: ranges about four deviations wide, a codebook that is not uniform, a mean.
void DecodeProblem::add_constants(const SegmentSpec& s, int side, PageCodec* codec) {
  std::mt19937_64 random(spec_.seed + 500 + static_cast<std::uint64_t>(means_.size()));
  std::normal_distribution<double> normal;
  const double offset = side == 0 ? spec_.key_offset : spec_.value_offset;
  const auto range = [&](double wide) { return static_range(codec->format, static_cast<float>(offset - 4 * wide), static_cast<float>(offset + 3.5 * wide)); };
  codec->range = range(1);
  if (codec->granularity == Granularity::kChannelStatic) {
    ranges_.emplace_back();
    for (int d = 0; d < spec_.head_dim; ++d) ranges_.back().push_back(range(0.5 + 0.1 * (d % 17)));
    codec->channel_ranges = ranges_.back().data();
  }
  if (is_nuq(codec->format)) {
    std::int8_t levels[kMaxCodebook];
    const int size = 1 << codec->bits;
    for (int i = 0; i < size; ++i) levels[i] = static_cast<std::int8_t>(-127 + 254 * i / (size - 1) - (i > 0 && i + 1 < size ? (i % 3) * 5 : 0));
    codec->codebook = make_codebook(levels, size, 0.98f / 127.0f);
  }
  if (side == 0) codec->spread = s.spread;
  if (!s.is_centred) return;
  means_.emplace_back();
  for (int d = 0; d < spec_.head_dim; ++d) means_.back().push_back(static_cast<float>(0.5 * normal(random)));
}

void DecodeProblem::add_segment(const SegmentSpec& s, int sequence) {
  std::mt19937_64 random(spec_.seed + 100 + static_cast<std::uint64_t>(segments_.size()));
  std::normal_distribution<double> normal;
  const int dim = spec_.head_dim, heads = spec_.n_kv_heads;
  Segment base{};
  const std::string schemes[2] = {s.k, s.v};
  const std::int64_t first_slot = s.is_ring ? s.page_tokens / 2 + 3 : 0;
  // A ring with hardly more slots than tokens: its last tile holds both ends.
  const std::int64_t n_slots = std::max<std::int64_t>(round_up(s.n_tokens, s.page_tokens), s.is_ring ? 2 * s.page_tokens : s.page_tokens);
  const std::int64_t n_pages = n_slots / s.page_tokens;
  std::vector<std::int32_t> pages(index(n_pages));
  std::iota(pages.begin(), pages.end(), 1);
  std::reverse(pages.begin(), pages.end());
  page_lists_.push_back(std::move(pages));
  base.n_tokens = s.n_tokens, base.first_slot = first_slot, base.n_slots = n_slots;
  base.pages = page_lists_.back().data();

  const std::size_t first_segment = segments_.size();
  segments_.resize(first_segment + index(heads), base);
  for (int h = 0; h < heads; ++h) segment_rows_.push_back(sequence * heads + h);
  for (int side = 0; side < 2; ++side) {
    const Scheme scheme = scheme_of(schemes[side]);
    PageCodec codec = make_page_codec(scheme, code_bits(scheme.format), dim, s.page_tokens);
    add_constants(s, side, &codec);
    const float* const mean = s.is_centred ? means_.back().data() : nullptr;
    DecodeFamily family = DecodeFamily::kB16;
    std::string error;
    if (!decode_family(codec, &family, &error)) throw std::invalid_argument(error);
    (side == 0 ? unit_.k_general : unit_.v_general) |= has_any_groups(codec, side == 0);
    if (scheme.format != Format::kBf16) (side == 0 ? unit_.k : unit_.v) = family;
    else unit_roundoff_ = 0x1p-8;
    const std::int64_t block = round_up(codec.params + params_bytes(codec), kAlignment), page = heads * block;
    std::vector<std::uint8_t> pool;
    pool.assign(index((n_pages + 1) * page + kAlignment), 0xFF);
    auto address = reinterpret_cast<std::uintptr_t>(pool.data());
    std::uint8_t* start = pool.data() + (round_up(static_cast<std::int64_t>(address), kAlignment) - static_cast<std::int64_t>(address));
    for (int h = 0; h < heads; ++h) {
      Segment& segment = segments_[first_segment + index(h)];
      (side == 0 ? segment.k : segment.v) = SegmentSide{codec, start, page, h * block, mean};
    }
    const double offset = side == 0 ? spec_.key_offset : spec_.value_offset;
    const std::int64_t n_encoded = spec_.has_reference ? s.n_tokens : std::min<std::int64_t>(s.n_tokens, s.page_tokens);
    std::vector<float> rows(index(round_up(n_encoded, s.page_tokens) * dim));  // tokens come in whole groups
    for (int h = 0; h < heads; ++h) {
      const Segment& segment = segments_[first_segment + index(h)];
      const SegmentSide& out = side == 0 ? segment.k : segment.v;
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const double outlier = side == 0 && i % 37 == 0 ? 6 : 1;
        rows[i] = static_cast<float>(offset + outlier * normal(random));
      }
      EncodeCounters counters;
      for (std::int64_t t = 0; t < n_encoded; ++t) {
        const std::int64_t slot = slot_of(segment, t);
        auto* bytes = const_cast<std::uint8_t*>(block_of(segment, out, slot));
        const int in_page = static_cast<int>(slot % s.page_tokens);
        if (codec.granularity != Granularity::kChannel) {
          encode_row(codec, rows.data() + t * dim, in_page, bytes, &counters);
        } else if (in_page % codec.group == 0) {
          encode_channel_group(codec, rows.data() + t * dim, dim, in_page / codec.group, bytes, &counters);  // whole groups: see n_encoded
        }
      }
      cache_bytes_ += s.n_tokens * (codec.params + params_bytes(codec)) / s.page_tokens;
    }
    for (std::int64_t p = 1; n_encoded < s.n_tokens && p < n_pages; ++p) {
      std::copy_n(start + base.pages[0] * page, page, start + base.pages[p] * page);
    }
    pools_.push_back(std::move(pool));
  }
}

void DecodeProblem::fill_reference() {
  const int dim = spec_.head_dim, heads = spec_.n_query_heads;
  reference_.out.assign(index(n_rows() * heads * dim), 0);
  reference_.tolerance = reference_.out;
  reference_.log_sum_exp.assign(index(n_rows() * heads), -INFINITY);
  for (std::int64_t row = 0; row < n_rows(); ++row) {
    std::vector<std::vector<float>> keys, values;
    std::vector<std::vector<double>> parts, key_parts;  // |v| + |minimum|: scale times code and minimum are summed apart and may cancel
    std::vector<double> roundoff;  // of the products' operands: bf16 for exact pages, else fp16
    for (std::size_t i = 0; i < segments_.size(); ++i) {
      if (segment_rows_[i] != row) continue;
      const Segment& s = segments_[i];
      for (std::int64_t t = 0; t < s.n_tokens; ++t) {
        const std::int64_t slot = slot_of(s, t);
        std::vector<float> k(index(dim)), v(index(dim));
        decode_row(s.k.codec, block_of(s, s.k, slot), static_cast<int>(slot % s.k.codec.page_tokens), k.data());
        decode_row(s.v.codec, block_of(s, s.v, slot), static_cast<int>(slot % s.v.codec.page_tokens), v.data());
        std::vector<double> part(index(dim)), key_part(index(dim));
        const auto offset_of = [&](const SegmentSide& side, int d) {
          const int in_page = static_cast<int>(slot % side.codec.page_tokens);
          const bool has_lo = side.codec.granularity != Granularity::kNone;
          const double lo = has_lo ? detail::grid_at(side.codec, block_of(s, side, slot), in_page, d).lo : 0;
          return std::fabs(lo);
        };
        // Means are added in fp32, after the products.
        for (int d = 0; d < dim; ++d) {
          part[index(d)] = std::fabs(v[index(d)]) + offset_of(s.v, d);
          const bool is_apart = s.k.codec.granularity == Granularity::kChannelStatic || is_nuq(s.k.codec.format);
          key_part[index(d)] = std::fabs(k[index(d)]) + (is_apart ? offset_of(s.k, d) : 0);
          if (s.k.mean) k[index(d)] += s.k.mean[stored_position(s.k.codec.spread, dim, d)];
          if (s.v.mean) v[index(d)] += s.v.mean[d];
        }
        parts.push_back(std::move(part)), key_parts.push_back(std::move(key_part));
        keys.push_back(std::move(k)), values.push_back(std::move(v));
        roundoff.push_back(s.k.codec.format == Format::kBf16 ? 0x1p-8 : 0x1p-11);
      }
    }
    const std::size_t n = keys.size();
    for (int a = 0; a < heads && n > 0; ++a) {
      const float* q = q_.data() + (row * heads + a) * dim;
      std::vector<double> score(n), magnitude(n);
      double top = -INFINITY, sum = 0;
      for (std::size_t t = 0; t < n; ++t) {
        for (int d = 0; d < dim; ++d) {
          score[t] += static_cast<double>(q[d]) * keys[t][index(d)], magnitude[t] += std::fabs(q[d]) * key_parts[t][index(d)];
        }
        const double cap = spec_.soft_cap * kLog2e;
        if (cap > 0) score[t] = cap * std::tanh(score[t] / cap);
        magnitude[t] /= kLog2e;  // of the natural score
        top = std::max(top, score[t]);
      }
      for (double& s : score) s = std::exp2(s - top), sum += s;
      double* out = reference_.out.data() + (row * heads + a) * dim;
      double* tolerance = reference_.tolerance.data() + (row * heads + a) * dim;
      for (int d = 0; d < dim; ++d) {
        double moved = 0, values_moved = 0;
        for (std::size_t t = 0; t < n; ++t) out[d] += score[t] / sum * values[t][index(d)];
        for (std::size_t t = 0; t < n; ++t) {
          const double p = score[t] / sum, v = parts[t][index(d)];
          values_moved += p * v;
          moved += roundoff[t] * p * (v + std::fabs(values[t][index(d)] - out[d]) * magnitude[t]);
        }
        tolerance[d] = 4 * moved + 0x1p-22 * values_moved;
      }
      reference_.log_sum_exp[index(row * heads + a)] = top / kLog2e + std::log(sum);
    }
  }
}

void DecodeProblem::replan(std::int64_t tiles_a_chunk) {
  spec_.tiles_a_chunk = tiles_a_chunk;
  chunks_.clear(), first_chunk_.clear();
  for (std::int64_t row = 0; row < n_rows(); ++row) {
    first_chunk_.push_back(static_cast<std::int64_t>(chunks_.size()));
    for (std::size_t i = 0; i < segments_.size(); ++i) {
      if (segment_rows_[i] != row) continue;
      const std::int64_t n = live_tiles(segments_[i]);
      for (std::int64_t t = 0; t < n || (t == 0 && n == 0); t += spec_.tiles_a_chunk) {  // an empty segment is an empty chunk
        const std::int64_t query = (segments_[i].k.codec.spread != 0 ? n_rows() : 0) + row;
        chunks_.push_back({static_cast<std::int32_t>(i), static_cast<std::int32_t>(query), t, std::min(n, t + spec_.tiles_a_chunk)});
      }
    }
  }
  first_chunk_.push_back(static_cast<std::int64_t>(chunks_.size()));
}

std::vector<DecodeProblem::Region> DecodeProblem::regions() const {
  std::vector<Region> regions;
  for (const auto& p : pools_) regions.push_back({p.data(), p.size()});
  for (const auto& p : page_lists_) regions.push_back({p.data(), p.size() * sizeof(p[0])});
  for (const auto& p : ranges_) regions.push_back({p.data(), p.size() * sizeof(p[0])});
  for (const auto& p : means_) regions.push_back({p.data(), p.size() * sizeof(p[0])});
  return regions;
}

double DecodeProblem::worst_ratio(const DecodeResult& result) const {
  return testing::worst_ratio(result.out, reference_.out, [&](std::size_t i) { return reference_.tolerance[i]; });
}

double DecodeProblem::worst_log_sum_exp_ratio(const DecodeResult& result) const {
  return testing::worst_ratio(result.log_sum_exp, reference_.log_sum_exp,
                              [&](std::size_t i) { return 16 * unit_roundoff_ * (1 + std::fabs(reference_.log_sum_exp[i])); });
}

}  // namespace kvrt::testing
