#pragma once
// Paged pools of one KV head's neighbours for the tests of decode attention, and attention in double over decode_row().

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/core/layout.h"
#include "kernels/read/decode_cpu.h"
#include "libcalib/base/rng.h"
#include "tests/kernels/fake_quant_fixture.h"

namespace kvrt::testing {

/// Pages of one side with three heads, the middle one in use. Everything is 0xFF until it is written; no byte follows the last block.
struct Pool {
  PageCodec codec;
  std::int64_t block = 0, page_bytes = 0, header = 128;
  std::vector<std::uint8_t> bytes;
  std::vector<StaticRange> channel_ranges;
  std::vector<std::int32_t> pages;  ///< list of the sequence, backwards; page 0 is another's
  std::vector<float> rows;          ///< [slots, D], what is encoded
  int n_slots = 0;

  Pool(const std::string& text, int head_dim, int page_tokens, int slots, std::uint64_t seed, double spread = 1.0) {
    const Scheme s = parse(text);
    LayerLayout l;
    l.n_kv_heads = 1, l.head_dim = head_dim, l.page_tokens = page_tokens, l.k = l.v = s;
    codec = make_page_codec(s, code_bits(s.format), head_dim, page_tokens);
    codec.range = static_range(s.format, -5.0f, 5.0f);
    for (int c = 0; c < head_dim; ++c) channel_ranges.push_back(static_range(s.format, -4.0f - 0.01f * static_cast<float>(c), 4.5f));
    if (s.granularity == Granularity::kChannelStatic) codec.channel_ranges = channel_ranges.data();
    constexpr std::int8_t kLevels[] = {-127, -99, -80, -60, -41, -29, -17, -5, 7, 15, 32, 40, 61, 77, 98, 127};
    const int entries = 1 << code_bits(s.format);
    if (is_nuq(s.format)) codec.codebook = make_codebook(kLevels + (16 - entries) / 2, entries, 1.0f / 127.0f);
    const BlockLayout b = block_layout(l, CacheSide::kV);
    block = page_tokens < 64 ? codec.params + 64 : b.block;
    page_bytes = header + 3 * block;
    const int n_pages = (slots + page_tokens - 1) / page_tokens;
    n_slots = n_pages * page_tokens;
    bytes.assign(static_cast<std::size_t>((n_pages + 1) * page_bytes - block), 0xFF);  // the used head's last block ends the pool
    for (int i = 0; i < n_pages; ++i) pages.push_back(n_pages - i);
    calib::Rng rng(seed);
    rows.resize(static_cast<std::size_t>(n_slots) * static_cast<std::size_t>(head_dim));
    for (std::size_t i = 0; i < rows.size(); ++i)
      rows[i] = static_cast<float>(spread * rng.normal() + 0.3 * std::sin(static_cast<double>(i % static_cast<std::size_t>(head_dim))));
  }

  Pool(const Pool&) = delete;
  SegmentSide side() const { return {codec, bytes.data(), page_bytes, header + block}; }
  std::uint8_t* head(int slot) { return bytes.data() + pages[static_cast<std::size_t>(slot / codec.page_tokens)] * page_bytes + header + block; }
  const std::uint8_t* head(int slot) const { return const_cast<Pool*>(this)->head(slot); }

  /// Writes slots [begin, end). Channel groups are encoded whole; codes of their slots from `end` on become 0xFF again.
  void write(int begin, int end) {
    EncodeCounters counters;
    const int d = codec.head_dim, p = codec.page_tokens;
    if (codec.granularity != Granularity::kChannel) {
      for (int t = begin; t < end; ++t) encode_row(codec, &rows[static_cast<std::size_t>(t * d)], t % p, head(t), &counters);
      return;
    }
    for (int g = begin / codec.group; g * codec.group < end; ++g) {
      const int first = g * codec.group;
      encode_channel_group(codec, &rows[static_cast<std::size_t>(first * d)], d, first % p / codec.group, head(first), &counters);
      for (int t = std::max(first, end); t < first + codec.group; ++t) {
        std::uint8_t* b = head(t);
        std::fill_n(b + (t % p) * codec.row_bytes, codec.row_bytes, std::uint8_t{0xFF});
        if (codec.bits == 3) std::fill_n(b + codec.plane_b + (t % p) * codec.row_bytes / 2, codec.row_bytes / 2, std::uint8_t{0xFF});
      }
    }
  }
  /// Stored values of one slot.
  std::vector<float> read(int slot) const {
    std::vector<float> out(static_cast<std::size_t>(codec.head_dim), NAN);
    decode_row(codec, head(slot), slot % codec.page_tokens, out.data());
    return out;
  }
};

/// RoPE in double.
struct Rope {
  std::vector<double> inv_freq;
  bool interleaved = false;
  void rotate(std::vector<double>* x, double position) const {
    const std::size_t n = inv_freq.size();
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + n;
      const double c = std::cos(position * inv_freq[i]), s = std::sin(position * inv_freq[i]), x0 = (*x)[a], x1 = (*x)[b];
      (*x)[a] = x0 * c - x1 * s, (*x)[b] = x0 * s + x1 * c;
    }
  }
};

/// Keys and values of some tokens as the attention sees them, in double.
struct DenseRows {
  std::vector<std::vector<double>> k, v;
  void add(const Pool& keys, const Pool& values, int slot, const Rope* rope, double position, const std::vector<float>& k_mean,
           const std::vector<float>& v_mean) {
    const std::vector<float> kf = keys.read(slot), vf = values.read(slot);
    std::vector<double> kd(kf.begin(), kf.end()), vd(vf.begin(), vf.end());
    for (std::size_t i = 0; i < k_mean.size(); ++i) kd[i] += k_mean[i];
    for (std::size_t i = 0; i < v_mean.size(); ++i) vd[i] += v_mean[i];
    if (rope) rope->rotate(&kd, position);
    k.push_back(kd), v.push_back(vd);
  }
};

/// Softmax attention of one query over rows [0, n), and the terms of its allowed error (KERNELS.md 7).
struct Expected {
  std::vector<double> o, a_v;
  std::vector<double> a_s;
  double lse = 0;  ///< natural
};
inline Expected attend_double(const DenseRows& rows, std::size_t n, const float* q, double cap = 0) {
  const std::size_t d = rows.k[0].size();
  Expected e;
  e.o.assign(d, 0.0), e.a_v.assign(d, 0.0), e.a_s.assign(d, 0.0);
  std::vector<double> score(n), magnitude(n);
  double top = -INFINITY, sum = 0;
  for (std::size_t t = 0; t < n; ++t) {
    for (std::size_t c = 0; c < d; ++c) {
      const double term = static_cast<double>(q[c]) * rows.k[t][c];
      score[t] += term, magnitude[t] += std::fabs(term);
    }
    if (cap > 0) score[t] = cap * std::tanh(score[t] / cap);
    top = std::max(top, score[t]);
  }
  for (std::size_t t = 0; t < n; ++t) sum += std::exp2(score[t] - top);
  for (std::size_t t = 0; t < n; ++t) {
    const double p = std::exp2(score[t] - top) / sum;
    for (std::size_t c = 0; c < d; ++c) e.o[c] += p * rows.v[t][c], e.a_v[c] += p * std::fabs(rows.v[t][c]);
  }
  for (std::size_t t = 0; t < n; ++t) {
    const double p = std::exp2(score[t] - top) / sum;
    for (std::size_t c = 0; c < d; ++c) e.a_s[c] += p * std::fabs(rows.v[t][c] - e.o[c]) * magnitude[t] * std::log(2.0);
  }
  e.lse = (top + std::log2(sum)) * std::log(2.0);
  return e;
}

struct PartialBuffer {
  std::vector<float> m, l, o;
  PartialBuffer(int n_queries, int d)
      : m(static_cast<std::size_t>(n_queries), NAN), l(m), o(static_cast<std::size_t>(n_queries * d), NAN) {
    clear_partial(view(), n_queries, d);
  }
  Partial view() { return {m.data(), l.data(), o.data()}; }
};

/// Runs one path with a workspace that starts as 0xFF.
inline void run_path(const DecodeBackend& path, const HeadAttention& job) {
  const Status status = check_head_attention(job);
  ASSERT_TRUE(status.ok()) << status.text();
  static std::vector<float> storage;
  const auto n = static_cast<std::size_t>(decode_workspace_floats(job.segment.k.codec.head_dim, job.n_queries));
  storage.resize(n + 16);
  float* base = storage.data();
  while (reinterpret_cast<std::uintptr_t>(base) % 64 != 0) ++base;
  std::fill_n(reinterpret_cast<std::uint8_t*>(base), n * sizeof(float), std::uint8_t{0xFF});
  path.attend(job, base);
}

}  // namespace kvrt::testing
