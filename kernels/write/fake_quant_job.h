#pragma once
// A checked fake_quant call: everything resolved to plain numbers, shared by the scalar path and the vector paths.

#include <cstdint>
#include <vector>

#include "kernels/codec/hadamard.h"
#include "kernels/codec/page_codec.h"
#include "kernels/write/fake_quant.h"

namespace kvrt {

/// Legend as in fake_quant.h.
struct FakeQuantJob {
  Scheme scheme;
  int bits = 16, group = 0, n_heads = 0, head_dim = 0;  ///< group: N, resolved
  int width = 0;                         ///< values that a row stores: head_dim, or the rank
  std::int64_t n_tokens = 0, x_stride = 0, out_stride = 0;
  const float* x = nullptr;
  float* out = nullptr;
  bool round_input_to_bf16 = false;
  const std::int32_t* block_order = nullptr;
  const float* mean = nullptr;           ///< of center or lowrank
  const float* smooth = nullptr;
  const float* basis_in = nullptr;       ///< lowrank
  const float* basis = nullptr;
  Codebook codebook;                     ///< nuq, lm
  float clip_alpha = 1.0f;               ///< 1 = none
  int rotary_dim = 0;
  bool interleaved = false;
  std::vector<std::int32_t> partner;     ///< pair: of each token group or channel, the one whose range it shares; empty without
  int page_tokens = 64;                  ///< P, a multiple of channel groups
  const float* ef_u = nullptr;
  const std::int32_t* ef_order = nullptr;
  /// Static grids, one array a field of StaticRange: tensor and nvfp4 [1], head [H], channel.static [H, D]; else empty.
  std::vector<float> range_lo, range_scale, range_min, range_max;
  HadamardOrder had;                     ///< size 0 without had
  float had_scale = 1.0f;
  std::uint64_t paley[kMaxPaley] = {};   ///< rows of the Paley factor, bit set = -1
  std::uint64_t paley_transposed[kMaxPaley] = {};
};

/// The static grids of one head: arrays of 1 (tensor, head, nvfp4) or D (channel.static) values, null where there are none. partner: of
/// the job, null without.
struct StaticGrids {
  const float *lo = nullptr, *scale = nullptr, *min = nullptr, *max = nullptr;
  const std::int32_t* partner = nullptr;
};
StaticGrids static_grids(const FakeQuantJob& job, int head);

/// The page codec of a job: what its heads share. Static ranges, error feedback and the stored order are the caller's.
PageCodec page_codec_of(const FakeQuantJob& job, int page_tokens);

/// Rows that one piece of work holds in scratch: N for channel groups, else a fixed number.
constexpr int kTokenRows = 32;
inline int rows_per_run(const FakeQuantJob& job) { return job.scheme.granularity == Granularity::kChannel ? job.group : kTokenRows; }
constexpr int kMaxLanes = 16;
/// Floats of scratch that a vector path needs: rows, two arrays for the parameters of their groups; with ef one vector of tokens, what is
/// left of each channel, its grid and its outliers; with outliers the rows that ranges are taken from; lm and ef: the rows beside their codes.
/// lowrank: a whole row before all.
inline std::int64_t scratch_floats(const FakeQuantJob& job) {
  const std::int64_t arrays = job.scheme.outlier_per_mille > 0 || is_lm(job.scheme.format) || job.scheme.ef ? 4 : 3;
  return (arrays * rows_per_run(job) + (job.ef_u ? 4 * kMaxLanes : 0) + (job.basis ? 1 : 0)) * job.head_dim + 64;
}

/// Checks the call and resolves it. Codes: kArgument naming the argument, kUnsupported naming the part of the scheme.
Status make_fake_quant_job(const FakeQuantArgs& args, FakeQuantJob* job);

/// fake_quant() on one path.
struct WritePath;
Status fake_quant_on(const FakeQuantArgs& args, const WritePath& path, FakeQuantCounters* counters);

}  // namespace kvrt
