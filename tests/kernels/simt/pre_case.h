#pragma once
// A decode problem whose keys are stored before RoPE: pages with headers, sinks and a ring of exact pages beside coded ones, and a
// double reference that rotates every key by its own position. The allowed error is derived, see pre_case.cc.

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/codec/rope.h"
#include "tests/kernels/simt/decode_case.h"

namespace kvrt::simt {

struct PreSequence {
  std::int64_t first_position = 0;  ///< of its first token
  std::int64_t n_sinks = 0, n_base = 64, n_window = 0;
};

struct PreSpec {
  std::string k = "int4.channel.g64.pre", v = "int4.token.g";
  int head_dim = 128, n_query_heads = 8, n_kv_heads = 1, page_tokens = 64;
  int n_pairs = 64;               ///< rotary_dim / 2
  bool interleaved = false;
  int spread = 64;                ///< stored order of keys
  double attention_factor = 1;
  std::vector<PreSequence> sequences = {PreSequence()};
  int gap = 0;                    ///< every `gap` slots of a coded page a position is left out; 0: none
  int rope_offsets = 64;
  std::int64_t tiles_a_chunk = 8;
  double query_scale = 1, key_offset = 0;
  std::int64_t header_error = 0;  ///< added to the positions that coded pages name: the reference knows better
  std::uint64_t seed = 11;
};

/// Scores and outputs are compared after combine().
class PreCase {
 public:
  explicit PreCase(const PreSpec& spec);

  DecodeOutput run(const Settings& settings, DecodePath path = DecodePath::kFused) const;
  DecodeOutput run_in_all_orders(Accumulation accumulation, DecodePath path = DecodePath::kFused) const;
  /// Largest |out - reference| / allowed error; NaN counts as infinite.
  double worst_ratio(const DecodeOutput& output) const;
  /// Fails the current test unless the run succeeded and every output is inside its tolerance.
  void expect_close(const DecodeOutput& output, const std::string& what) const;

 private:
  struct Token {
    std::int64_t position, page_position;  ///< page_position: of the page's first slot; -1: exact page
    std::vector<float> k, v;               ///< decoded, [D] model order
    std::vector<double> k_parts, v_parts;  ///< |scale code| + |offset| + |mean|; |v| + |offset|
  };
  void add_segment(const PreSequence& sequence, std::int64_t first_token, std::int64_t n_tokens, bool is_exact, bool is_ring, int row);
  PageCodec codec_of(bool is_key, bool is_exact, int head);
  void fill_reference();
  void rotate(std::int64_t position, double* x) const;
  void add_row_reference(std::int64_t row);

  PreSpec spec_;
  DecodeUnit unit_ = {};
  Scheme schemes_[2];
  std::vector<double> inv_freq_;
  std::vector<float> coarse_, fine_;
  RopeTables rope_;
  std::vector<std::vector<std::uint8_t>> pools_;
  std::vector<std::vector<std::int32_t>> page_lists_;
  std::vector<std::vector<float>> means_;          ///< stored order, one a head and side
  std::vector<std::vector<StaticRange>> ranges_;
  std::vector<Segment> segments_;
  std::vector<int> segment_rows_;
  std::vector<std::vector<Token>> tokens_;         ///< [rows]
  std::vector<float> q_, q_exact_;                 ///< as DecodeArgs has them; model order
  std::vector<DecodeChunk> chunks_;
  std::vector<std::int64_t> first_chunk_;
  std::vector<double> out_, tolerance_, log_sum_exp_, log_sum_exp_tolerance_;
};

}  // namespace kvrt::simt
