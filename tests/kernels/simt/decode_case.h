#pragma once
// One decode problem for the executor: pages written by the normative codec into buffers that start as 0xFF, the CUDA sources run on
// them, and the double reference with the error allowed against it (KERNELS.md 7).

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/read/decode_cuda.h"
#include "tests/kernels/simt/executor.h"

namespace kvrt::simt {

/// A segment to fill: `ring` segments start in the middle of their slots and wrap.
struct SegmentSpec {
  std::string k, v;  ///< scheme strings
  std::int64_t n_tokens;
  int page_tokens = 64;
  bool is_ring = false;
};

struct DecodeSpec {
  int head_dim = 128, n_query_heads = 8, n_kv_heads = 2;
  std::vector<std::vector<SegmentSpec>> sequences;  ///< segments of each sequence
  std::int64_t tiles_a_chunk = 8;
  double query_scale = 1, key_offset = 0, value_offset = 0.3;
  std::uint64_t seed = 7;
};

class DecodeCase {
 public:
  explicit DecodeCase(const DecodeSpec& spec);

  struct Output {
    std::vector<float> out, log_sum_exp;  ///< [rows, G, D], [rows, G]
    Counts counts;
    std::string error;                    ///< of the launch; empty if it ran
  };
  /// decode + combine under the settings.
  Output run(const Settings& settings) const;

  struct Reference {
    std::vector<double> out, tolerance, log_sum_exp;  ///< [rows, G, D], [rows, G, D], [rows, G]
  };
  const Reference& reference() const noexcept { return reference_; }
  std::int64_t cache_bytes() const noexcept { return cache_bytes_; }  ///< codes and parameters of live tokens

  /// Largest |out - reference| / tolerance; NaN counts as infinite.
  double worst_ratio(const Output& output) const;
  /// Fails the current test unless the run succeeded and every output is inside its tolerance.
  void expect_close(const Output& output, const std::string& what) const;

 private:
  struct Pool {
    std::vector<std::uint8_t> bytes;
    const std::uint8_t* base = nullptr;  ///< 128-byte aligned
  };
  void add_segment(const SegmentSpec& s, int sequence);
  void fill_reference();

  DecodeSpec spec_;
  std::vector<Pool> pools_;
  std::vector<std::vector<std::int32_t>> page_lists_;
  std::vector<Segment> segments_;
  std::vector<int> segment_rows_;
  std::vector<float> q_;
  std::int64_t cache_bytes_ = 0;
  DecodeFamily k_family_ = DecodeFamily::kB16, v_family_ = DecodeFamily::kB16;
  double unit_roundoff_ = 0x1p-11;
  Reference reference_;
};

/// Three fiber orders must agree bit for bit; returns the forward one.
DecodeCase::Output run_in_all_orders(const DecodeCase& decode, Accumulation accumulation);

}  // namespace kvrt::simt
