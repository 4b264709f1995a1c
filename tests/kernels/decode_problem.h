#pragma once
// One decode problem: pages written by the normative codec into buffers that start as 0xFF, queries, and the double reference with the
// error allowed against it (KERNELS.md 7). Shared by the executor's tests and by the check on a GPU: standard library only.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/read/decode_cuda.h"

namespace kvrt::testing {

/// Throws std::invalid_argument.
Scheme scheme_of(const std::string& text);
/// Of a head block.
std::int64_t params_bytes(const PageCodec& codec);

/// Largest |got - expected| / tolerance(i); NaN counts as infinite.
template <class Tolerance>
double worst_ratio(const std::vector<float>& got, const std::vector<double>& expected, Tolerance tolerance) {
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i]) continue;
    const double error = std::fabs(got[i] - expected[i]);
    if (!std::isfinite(error)) return INFINITY;
    worst = std::max(worst, error / tolerance(i));
  }
  return worst;
}

/// A segment to fill: `ring` segments start in the middle of their slots and wrap.
struct SegmentSpec {
  std::string k, v;  ///< scheme strings
  std::int64_t n_tokens;
  int page_tokens = 64;
  bool is_ring = false;
  int spread = 0;            ///< stored order of keys
  bool is_centred = false;   ///< both sides have a mean
};

struct DecodeSpec {
  int head_dim = 128, n_query_heads = 8, n_kv_heads = 2;
  std::vector<std::vector<SegmentSpec>> sequences;  ///< segments of each sequence
  std::int64_t tiles_a_chunk = 8;
  double query_scale = 1, key_offset = 0, value_offset = 0.3;
  double soft_cap = 0;      ///< of natural scores, 0: none
  std::uint64_t seed = 7;
  bool has_reference = true;  ///< false: for timing; the first page of a segment is repeated, no reference
};

/// Outputs of decode + combine: [rows, G, D], [rows, G].
struct DecodeResult {
  std::vector<float> out, log_sum_exp;
};

struct DecodeReference {
  std::vector<double> out, tolerance, log_sum_exp;  ///< [rows, G, D], [rows, G, D], [rows, G]
};

class DecodeProblem {
 public:
  /// Throws std::invalid_argument for a scheme that has no kernel.
  explicit DecodeProblem(const DecodeSpec& spec);

  const DecodeSpec& spec() const noexcept { return spec_; }
  std::int64_t n_rows() const noexcept { return static_cast<std::int64_t>(spec_.sequences.size()) * spec_.n_kv_heads; }
  const std::vector<Segment>& segments() const noexcept { return segments_; }
  /// [2, n_rows, G, D]: in the model's order, then in that of stored keys; DecodeChunk::row counts through both.
  const std::vector<float>& q() const noexcept { return q_; }
  const std::vector<DecodeChunk>& chunks() const noexcept { return chunks_; }
  const std::vector<std::int64_t>& first_chunk() const noexcept { return first_chunk_; }
  const DecodeUnit& unit() const noexcept { return unit_; }
  DecodePath path() const noexcept { return path_; }   ///< what choose_decode_path() says
  float soft_cap() const noexcept;                     ///< as DecodeArgs takes it
  std::int32_t max_chunk_tiles() const noexcept;
  std::int64_t cache_bytes() const noexcept { return cache_bytes_; }  ///< codes and parameters of the live tokens

  /// Memory that the segments point into.
  struct Region {
    const void* data;
    std::size_t bytes;
  };
  std::vector<Region> regions() const;
  void replan(std::int64_t tiles_a_chunk);

  const DecodeReference& reference() const noexcept { return reference_; }
  /// Largest |out - reference| / tolerance, and |lse - reference| in units of what 16-bit operands allow; NaN counts as infinite.
  double worst_ratio(const DecodeResult& result) const;
  double worst_log_sum_exp_ratio(const DecodeResult& result) const;

 private:
  void add_segment(const SegmentSpec& s, int sequence);
  void add_constants(const SegmentSpec& s, int side, PageCodec* codec);
  void fill_queries();
  void fill_reference();

  DecodeSpec spec_;
  std::vector<std::vector<std::uint8_t>> pools_;
  std::vector<std::vector<std::int32_t>> page_lists_;
  std::vector<std::vector<StaticRange>> ranges_;  ///< of channel.static
  std::vector<std::vector<float>> means_;         ///< in stored order
  std::vector<Segment> segments_;
  std::vector<int> segment_rows_;
  std::vector<float> q_;
  std::vector<DecodeChunk> chunks_;
  std::vector<std::int64_t> first_chunk_;
  std::int64_t cache_bytes_ = 0;
  DecodeUnit unit_ = {DecodeFamily::kB16, DecodeFamily::kB16, KeyPairs::kNone, 0};
  DecodePath path_ = DecodePath::kFused;
  double unit_roundoff_ = 0x1p-11;
  DecodeReference reference_;
};

}  // namespace kvrt::testing
