// Error allowed of a score, u = 2^-11, all sums over the pairs (1, 2) of a query at the page's position, q, and a key before its
// rotation by the offset, (c, s) cosine and sine of it; with M[x] = sum |q1| (|x1 c| + |x2 s|) + |q2| (|x1 s| + |x2 c|):
//   u M[P]        values in fp16: P = |scale code| + |offset| + |mean|, since the parameters may be constants of the plan, and scale
//                 and offset of codebooks and `center` are combined, all rounded to fp16, before the value is
//   3 u M[|v|]    table of offsets, product, sum of the rotation
//   u M[|v|]      query
//   6 2^-24 |q|_1 roundings below fp16's normal range: 3 of the value, 3 of the rotation, 2^-25 each and doubled, as values are halved
//   2^-18 M[|v|]  fp32: rotation of the query by two tables, sums of products that truncate
// Exact pages: 2 2^-9 M[|v|] (key and query in bf16) and the fp32 part, (c, s) of the position.
// The output moves by at most sum p |v - o| e^d d with d the largest of the errors to first order, doubled here for the second; its
// own roundings are those of KERNELS.md 7, 4 u sum p (|v| + |offset|), u = 2^-8 where bf16 weights meet bf16 values.

#include "tests/kernels/simt/pre_case.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <stdexcept>

#include "gtest/gtest.h"
#include "kernels/codec/page_header.h"

namespace kvrt::simt {
namespace {

constexpr std::int64_t kAlignment = 128, kExactTokens = 16;
constexpr double kLog2e = 1.4426950408889634074;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }
std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

PreCase::PreCase(const PreSpec& spec) : spec_(spec), schemes_{testing::scheme_of(spec.k), testing::scheme_of(spec.v)} {
  const int n = spec_.n_pairs;
  std::int64_t end = 1;
  for (const PreSequence& s : spec_.sequences) end = std::max(end, s.first_position + 2 * (s.n_sinks + s.n_base + s.n_window) + 256);
  for (int i = 0; i < n; ++i) inv_freq_.push_back(std::pow(10000.0, -static_cast<double>(i) / n));
  const auto fill = [&](std::int64_t rows, std::int64_t step, double factor, std::vector<float>* table) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (const bool is_sine : {false, true}) {
        for (const double f : inv_freq_) {
          const double angle = static_cast<double>(r * step) * f;
          table->push_back(static_cast<float>(factor * (is_sine ? std::sin(angle) : std::cos(angle))));
        }
      }
    }
  };
  fill(end / kRopeCoarse + 1, kRopeCoarse, spec_.attention_factor, &coarse_);
  fill(kRopeFine, 1, 1, &fine_);
  rope_ = {coarse_.data(), fine_.data(), n, spec_.interleaved};

  const PageCodec k = codec_of(true, false, 0), v = codec_of(false, false, 0);
  std::string error;
  if (!decode_family(k, &unit_.k, &error) || !decode_family(v, &unit_.v, &error) || !key_pairs(k, rope_, &unit_.pairs, &error)) throw std::invalid_argument(error);
  unit_.head_dim = spec_.head_dim;

  const std::int64_t heads = spec_.n_kv_heads, dim = spec_.head_dim, group = spec_.n_query_heads;
  tokens_.resize(spec_.sequences.size() * index(heads));
  for (std::size_t i = 0; i < spec_.sequences.size(); ++i) {
    const PreSequence& s = spec_.sequences[i];
    const int row = static_cast<int>(i) * spec_.n_kv_heads;
    if (s.n_sinks > 0) add_segment(s, 0, s.n_sinks, true, false, row);
    add_segment(s, s.n_sinks, s.n_base, false, false, row);
    if (s.n_window > 0) add_segment(s, s.n_sinks + s.n_base, s.n_window, true, true, row);
  }
  std::mt19937_64 random(spec_.seed);
  std::normal_distribution<double> normal;
  q_exact_.resize(tokens_.size() * index(group * dim));
  for (float& x : q_exact_) x = static_cast<float>(spec_.query_scale * kLog2e / std::sqrt(spec_.head_dim) * normal(random));
  q_ = q_exact_;  // rows of the exact pages' coordinates, then those of stored keys
  for (std::size_t i = 0; i < q_exact_.size(); ++i) {
    q_.push_back(q_exact_[i / index(dim) * index(dim) + index(stored_channel(spec_.spread, spec_.head_dim, static_cast<int>(i % index(dim))))]);
  }
  for (std::size_t row = 0; row < tokens_.size(); ++row) {
    first_chunk_.push_back(static_cast<std::int64_t>(chunks_.size()));
    for (std::size_t i = 0; i < segments_.size(); ++i) {
      const std::int64_t tiles = live_tiles(segments_[i]);
      for (std::int64_t t = 0; segment_rows_[i] == static_cast<int>(row) && t < tiles; t += spec_.tiles_a_chunk) {
        const bool is_exact = segments_[i].k.codec.format == Format::kBf16;
        chunks_.push_back(
            {static_cast<std::int32_t>(i), static_cast<std::int32_t>(row + (is_exact ? 0 : tokens_.size())), t, std::min(tiles, t + spec_.tiles_a_chunk)});
      }
    }
  }
  first_chunk_.push_back(static_cast<std::int64_t>(chunks_.size()));
  fill_reference();
}

/// Constants of the plan come from the head's number: nothing here depends on what they are.
PageCodec PreCase::codec_of(bool is_key, bool is_exact, int head) {
  if (is_exact) return make_page_codec(Scheme{}, 16, spec_.head_dim, static_cast<int>(kExactTokens));
  const Scheme& scheme = schemes_[is_key ? 0 : 1];
  PageCodec codec = make_page_codec(scheme, code_bits(scheme.format), spec_.head_dim, spec_.page_tokens);
  if (is_key) codec.spread = spec_.spread;
  if (is_nuq(scheme.format)) {
    constexpr std::int8_t kLevels[] = {-127, -101, -80, -66, -52, -40, -22, -9, 5, 17, 33, 47, 60, 83, 104, 127};
    std::int8_t levels[kMaxCodebook];
    const int size = 1 << codec.bits;
    for (int i = 0; i < size; ++i) levels[i] = kLevels[i * 15 / (size - 1)];
    codec.codebook = make_codebook(levels, size, 1.0f / 127.0f);
  }
  if (codec.granularity == Granularity::kChannelStatic) {
    ranges_.emplace_back();
    for (int d = 0; d < spec_.head_dim; ++d)
      ranges_.back().push_back(static_range(scheme.format, -2.5f - 0.01f * static_cast<float>(d + head), 2.0f + 0.03f * static_cast<float>(d)));
    codec.channel_ranges = ranges_.back().data();
  }
  return codec;
}

/// One segment of every KV head: the same pages, a block a head.
void PreCase::add_segment(const PreSequence& sequence, std::int64_t first_token, std::int64_t n_tokens, bool is_exact, bool is_ring, int row) {
  const std::int64_t dim = spec_.head_dim, heads = spec_.n_kv_heads, page_tokens = is_exact ? kExactTokens : spec_.page_tokens;
  // A ring with hardly more slots than tokens: its last tile holds both ends.
  const std::int64_t n_slots = std::max(round_up(n_tokens, page_tokens), (is_ring ? 2 : 1) * page_tokens);
  const std::int64_t first_slot = is_ring ? page_tokens / 2 + 3 : 0, n_pages = n_slots / page_tokens;
  std::vector<std::int32_t> pages(index(n_pages));
  std::iota(pages.begin(), pages.end(), 1);
  std::reverse(pages.begin(), pages.end());
  page_lists_.push_back(std::move(pages));
  const std::int32_t* const list = page_lists_.back().data();
  // Positions: consecutive in exact pages; in coded ones with gaps, pages begin where the one before them could end.
  const int gap = is_exact ? 0 : spec_.gap;
  const auto offset_of = [&](std::int64_t slot) { return slot % page_tokens + (gap > 0 ? slot % page_tokens / gap : 0); };
  const std::int64_t page_span = offset_of(page_tokens - 1) + 1;
  const auto position_of = [&](std::int64_t slot) { return sequence.first_position + first_token + slot / page_tokens * page_span + offset_of(slot); };

  std::mt19937_64 random(spec_.seed + 100 * segments_.size() + 1);
  std::normal_distribution<double> normal;
  const std::size_t first_segment = segments_.size();
  segments_.resize(first_segment + index(heads));
  for (const bool is_key : {true, false}) {
    const PageCodec shape = codec_of(is_key, is_exact, 0);
    const std::int64_t header = is_key ? round_up(8 + page_tokens * (is_exact ? 2 : 1), kAlignment) : 0;
    const std::int64_t block = round_up(shape.params + testing::params_bytes(shape), kAlignment), page = header + heads * block;
    pools_.emplace_back(index((n_pages + 1) * page + kAlignment), std::uint8_t{0xFF});
    const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pools_.back().data()));
    std::uint8_t* const pool = pools_.back().data() + (round_up(address, kAlignment) - address);
    for (std::int64_t t = 0; is_key && t < n_tokens; ++t) {
      const std::int64_t slot = (first_slot + t) % n_slots;
      std::uint8_t* const at = pool + list[slot / page_tokens] * page;
      if (is_exact) {  // in order of time, as append writes them: the first slot of a page names the newest turn of the ring
        const std::int64_t position = sequence.first_position + first_token + t;
        store_slot_position(at, 2, static_cast<int>(slot % page_tokens), position);
        if (slot % page_tokens != 0 && slot / page_tokens == first_slot / page_tokens && t < page_tokens)
          store_le64(at, static_cast<std::uint64_t>(position - slot % page_tokens));
      } else {
        store_le64(at, static_cast<std::uint64_t>(position_of(slot / page_tokens * page_tokens) + spec_.header_error));
        at[kSlotOffsets + slot % page_tokens] = static_cast<std::uint8_t>(offset_of(slot));
      }
    }
    for (std::int64_t h = 0; h < heads; ++h) {
      Segment& segment = segments_[first_segment + index(h)];
      if (is_key) {
        segment_rows_.push_back(row + static_cast<int>(h));
        segment.pages = list, segment.n_tokens = n_tokens, segment.first_slot = first_slot, segment.n_slots = n_slots;
        segment.first_position = sequence.first_position + first_token, segment.pre = true;
      }
      SegmentSide& side = is_key ? segment.k : segment.v;
      side.codec = codec_of(is_key, is_exact, static_cast<int>(h));
      side.pool = pool, side.page_bytes = page, side.block_offset = header + h * block;
      const bool is_centred = !is_exact && schemes_[is_key ? 0 : 1].center;
      if (is_centred) {
        means_.emplace_back();
        for (int d = 0; d < dim; ++d) means_.back().push_back(static_cast<float>(0.7 * std::sin(1.3 * d + static_cast<double>(h))));
        side.mean = means_.back().data();
      }
      const auto mean_of = [&](std::int64_t d) { return is_centred ? side.mean[stored_position(side.codec.spread, spec_.head_dim, static_cast<int>(d))] : 0.0f; };
      std::vector<float> rows(index(n_tokens * dim));
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const double channel = is_key ? 1 + 2 * (i % index(dim) % 7 == 3) : 1;  // keys have channels that stand out
        rows[i] = static_cast<float>(channel * normal(random) + (is_key ? spec_.key_offset : 0.3));
      }
      std::vector<Token>& tokens = tokens_[index(row + h)];
      if (is_key) tokens.resize(tokens.size() + index(n_tokens));
      Token* const first = tokens.data() + tokens.size() - n_tokens;
      EncodeCounters counters;
      for (std::int64_t t = 0; t < n_tokens; ++t) {
        const std::int64_t slot = (first_slot + t) % n_slots;
        auto* const bytes = pool + list[slot / page_tokens] * page + side.block_offset;
        const int in_page = static_cast<int>(slot % page_tokens);
        if (side.codec.granularity != Granularity::kChannel) encode_row(side.codec, rows.data() + t * dim, in_page, bytes, &counters);
        else if (in_page % side.codec.group == 0) encode_channel_group(side.codec, rows.data() + t * dim, dim, in_page / side.codec.group, bytes, &counters);
      }
      for (std::int64_t t = 0; t < n_tokens; ++t) {
        const std::int64_t slot = (first_slot + t) % n_slots;
        const auto* const bytes = pool + list[slot / page_tokens] * page + side.block_offset;
        const int in_page = static_cast<int>(slot % page_tokens);
        Token& token = first[t];
        std::vector<float>& x = is_key ? token.k : token.v;
        std::vector<double>& parts = is_key ? token.k_parts : token.v_parts;
        x.resize(index(dim)), parts.resize(index(dim));
        decode_row(side.codec, bytes, in_page, x.data());
        for (std::int64_t d = 0; d < dim; ++d) {
          const float mean = mean_of(d);
          Grid grid{0, 0};
          if (!is_exact && side.codec.granularity != Granularity::kNone) grid = detail::grid_at(side.codec, bytes, in_page, static_cast<int>(d));
          const double offset = std::fabs(grid.lo) + (is_nuq(side.codec.format) ? std::fabs(grid.scale) : 0);
          parts[index(d)] = std::fabs(x[index(d)]) + (is_exact ? 0 : 2 * offset + std::fabs(mean));
          x[index(d)] += mean;
        }
        if (!is_key) continue;
        token.position = is_exact ? sequence.first_position + first_token + t : position_of(slot);
        token.page_position = is_exact ? -1 : position_of(slot / page_tokens * page_tokens);
      }
    }
  }
}

void PreCase::rotate(std::int64_t position, double* x) const {
  const double factor = position < 0 ? 1 / spec_.attention_factor : spec_.attention_factor;
  for (int i = 0; i < rope_.n_pairs; ++i) {
    const double angle = static_cast<double>(position) * inv_freq_[index(i)], c = std::cos(angle), s = std::sin(angle);
    double& a = x[rope_first(rope_, i)];
    double& b = x[rope_second(rope_, i)];
    const double first = a * c - b * s, second = a * s + b * c;
    a = factor * first, b = factor * second;
  }
}

void PreCase::fill_reference() {
  const std::size_t n = tokens_.size() * index(spec_.n_query_heads);
  out_.assign(n * index(spec_.head_dim), 0);
  tolerance_ = out_;
  log_sum_exp_.assign(n, -INFINITY), log_sum_exp_tolerance_.assign(n, 0);
  for (std::size_t row = 0; row < tokens_.size(); ++row) add_row_reference(static_cast<std::int64_t>(row));
}

void PreCase::add_row_reference(std::int64_t row) {
  const std::vector<Token>& tokens = tokens_[index(row)];
  const std::size_t dim = index(spec_.head_dim), n = tokens.size();
  const double u = 0x1p-11;
  for (std::int64_t head = 0; head < spec_.n_query_heads && n > 0; ++head) {
    const std::size_t at = index(row * spec_.n_query_heads + head);
    const float* const q = q_exact_.data() + at * dim;
    std::vector<double> score(n), error(n);
    double top = -INFINITY, sum = 0;
    for (std::size_t t = 0; t < n; ++t) {
      const Token& token = tokens[t];
      std::vector<double> k(token.k.begin(), token.k.end()), turned(q, q + dim);
      rotate(token.position, k.data());
      for (std::size_t d = 0; d < dim; ++d) score[t] += q[d] * k[d];
      top = std::max(top, score[t]);
      // The parts of the error, at the page's position.
      const bool is_exact = token.page_position < 0;
      const std::int64_t offset = is_exact ? token.position : token.page_position < 0 ? 0 : token.position - token.page_position;
      if (!is_exact) {  // R^T at the page's position
        std::vector<double> back(turned);
        for (int i = 0; i < rope_.n_pairs; ++i) {
          const double angle = static_cast<double>(token.page_position) * inv_freq_[index(i)];
          const double c = spec_.attention_factor * std::cos(angle), s = spec_.attention_factor * std::sin(angle);
          const std::size_t a = index(rope_first(rope_, i)), b = index(rope_second(rope_, i));
          back[a] = turned[a] * c + turned[b] * s, back[b] = turned[b] * c - turned[a] * s;
        }
        turned = back;
      }
      const auto magnitude = [&](auto value) {
        std::vector<double> m(dim);
        for (std::size_t d = 0; d < dim; ++d) m[d] = std::fabs(value(d));
        for (int i = 0; i < rope_.n_pairs; ++i) {
          const double angle = static_cast<double>(offset) * inv_freq_[index(i)], factor = is_exact ? spec_.attention_factor : 1;
          const double c = factor * std::fabs(std::cos(angle)), s = factor * std::fabs(std::sin(angle));
          const std::size_t a = index(rope_first(rope_, i)), b = index(rope_second(rope_, i));
          const double first = m[a] * c + m[b] * s, second = m[a] * s + m[b] * c;
          m[a] = first, m[b] = second;
        }
        double total = 0;
        for (std::size_t d = 0; d < dim; ++d) total += std::fabs(turned[d]) * m[d];
        return total;
      };
      const double of_values = magnitude([&](std::size_t d) { return static_cast<double>(token.k[d]); });
      const double of_parts = magnitude([&](std::size_t d) { return token.k_parts[d]; });
      double q_sum = 0;
      for (const double x : turned) q_sum += std::fabs(x);
      error[t] = is_exact ? 2 * 0x1p-9 * of_values : u * of_parts + 4 * u * of_values + 6 * 0x1p-24 * q_sum;
      error[t] = (error[t] + 0x1p-18 * of_values) / kLog2e;  // of the natural score
    }
    for (double& s : score) s = std::exp2(s - top), sum += s;
    double moved = 0;
    for (std::size_t t = 0; t < n; ++t) moved += score[t] / sum * error[t];
    log_sum_exp_[at] = top / kLog2e + std::log(sum);
    log_sum_exp_tolerance_[at] = 2 * moved + 0x1p-20 * (1 + std::fabs(log_sum_exp_[at]));
    for (std::size_t d = 0; d < dim; ++d) {
      double& out = out_[at * dim + d];
      for (std::size_t t = 0; t < n; ++t) out += score[t] / sum * tokens[t].v[d];
      for (std::size_t t = 0; t < n; ++t) {
        const double p = score[t] / sum;
        tolerance_[at * dim + d] += p * (4 * (tokens[t].page_position < 0 ? 0x1p-8 : u) * tokens[t].v_parts[d] + 2 * std::fabs(tokens[t].v[d] - out) * error[t]);
      }
    }
  }
}

DecodeOutput PreCase::run(const Settings& settings, DecodePath path) const {
  DecodeArgs args{};
  args.segments = segments_.data(), args.chunks = chunks_.data(), args.n_chunks = static_cast<std::int64_t>(chunks_.size());
  args.q = q_.data(), args.n_query_heads = spec_.n_query_heads, args.head_dim = spec_.head_dim;
  args.rope = &rope_, args.rope_offsets = spec_.rope_offsets;
  args.max_chunk_tiles = static_cast<std::int32_t>(spec_.tiles_a_chunk);
  return run_decode(args, unit_, path, first_chunk_, spec_.n_kv_heads, settings);
}

DecodeOutput PreCase::run_in_all_orders(Accumulation accumulation, DecodePath path) const {
  return simt::run_in_all_orders(accumulation, [&](const Settings& s) { return run(s, path); });
}

double PreCase::worst_ratio(const DecodeOutput& output) const {
  return testing::worst_ratio(output.out, out_, [&](std::size_t i) { return tolerance_[i]; });
}

void PreCase::expect_close(const DecodeOutput& output, const std::string& what) const {
  const double log_sum_exp_ratio = testing::worst_ratio(output.log_sum_exp, log_sum_exp_, [&](std::size_t i) { return log_sum_exp_tolerance_[i]; });
  expect_within(output, worst_ratio(output), log_sum_exp_ratio, what);
}

}  // namespace kvrt::simt
