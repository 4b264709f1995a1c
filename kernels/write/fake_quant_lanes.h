#pragma once
// The vector path of fake_quant, compiled once per instruction set (write_cpu_*.cc). Values only: no code is
// packed, but every operation is the one of kernels/codec, in the same order, so that results equal the page codecs bit for bit.
// No std:: and no shared inline function may be called here: the linker could merge a copy compiled for a wider instruction set.

#include "kernels/cpu/hadamard_rows.h"
#include "kernels/write/grid_lanes.h"
#include "kernels/write/llamacpp_lanes.h"
#include "kernels/write/outlier_rows.h"

namespace kvrt {
namespace {

/// low_rank_product(): every output adds in the order of its inputs.
static void low_rank_product_lanes(const float* matrix, int n_in, int n_out, const float* x, float* out) {
  constexpr int kVectors = 4, kBlock = kVectors * kLanes;
  int begin = 0;
  for (; begin + kBlock <= n_out; begin += kBlock) {
    F sums[kVectors] = {};
    for (int i = 0; i < n_in; ++i) {
      const float* const row = matrix + static_cast<std::int64_t>(i) * n_out + begin;
      for (int v = 0; v < kVectors; ++v) sums[v] = sums[v] + splat<F>(x[i]) * load<F>(row + v * kLanes);
    }
    for (int v = 0; v < kVectors; ++v) store(out + begin + v * kLanes, sums[v]);
  }
  for_lanes(n_out - begin, [&](auto tag, int o) {
    using V = decltype(tag);
    V sum = {};
    for (int i = 0; i < n_in; ++i) sum = sum + splat<V>(x[i]) * load<V>(matrix + static_cast<std::int64_t>(i) * n_out + begin + o);
    store(out + begin + o, sum);
  });
}

/// x of one token and head -> the encoder's input, in a scratch row. wide: lowrank, [D].
static void to_frame(Run* run, int head, const float* x, float* row, float* wide) {
  const FakeQuantJob& job = *run->job;
  const int d = job.head_dim;
  float* const y = row;
  if (job.basis_in) row = wide;
  const float* mean = job.mean ? job.mean + static_cast<std::int64_t>(head) * d : nullptr;
  const float* smooth = job.smooth ? job.smooth + static_cast<std::int64_t>(head) * d : nullptr;
  if (job.block_order) {
    for (int p = 0; p < d; ++p) row[p] = x[job.block_order[p]];
    x = row;
  }
  for_lanes(d, [&](auto tag, int i) {
    using V = decltype(tag);
    V v = finite_or_zero_lanes<V>(load<V>(x + i), &run->counts);
    if (job.round_input_to_bf16) v = bf16_nearest<V>(v);
    if (mean) v = v - load<V>(mean + i);
    if (smooth) v = v / load<V>(smooth + i);
    store(row + i, v);
  });
  if (job.had.size) rotate_row(job, job.paley, row, d);
  if (job.basis_in) low_rank_product_lanes(job.basis_in + std::int64_t{head} * d * job.width, d, job.width, row, y);
  if (!mean && !smooth && !job.had.size) return;
  for_lanes(job.width, [&](auto tag, int i) {  // what was done may have left the range of fp32
    using V = decltype(tag);
    store(y + i, finite_or_zero_lanes<V>(load<V>(y + i), &run->counts));
  });
}

/// Decoded values in a scratch row -> the model's own coordinates.
static void from_frame(Run* run, int head, float* row, float* out) {
  const FakeQuantJob& job = *run->job;
  const int d = job.head_dim;
  if (job.had.size) rotate_row(job, job.paley_transposed, row, d);
  if (job.basis) {
    low_rank_product_lanes(job.basis + std::int64_t{head} * d * job.width, job.width, d, row, out);
    row = out;
  }
  const float* mean = job.mean ? job.mean + static_cast<std::int64_t>(head) * d : nullptr;
  const float* smooth = job.smooth ? job.smooth + static_cast<std::int64_t>(head) * d : nullptr;
  float* const target = job.block_order ? row : out;
  for_lanes(d, [&](auto tag, int i) {
    using V = decltype(tag);
    V v = load<V>(row + i);
    if (smooth) v = v * load<V>(smooth + i);
    store(target + i, mean ? v + load<V>(mean + i) : v);
  });
  for (int p = 0; job.block_order && p < d; ++p) out[job.block_order[p]] = row[p];
}

static void round_trip(Run* run) {
  const Scheme& s = run->job->scheme;
  const float qmax = static_cast<float>((1 << run->job->bits) - 1);
  if (is_llamacpp_block(s.format)) return llamacpp_blocks<BlockValues>(run);
  switch (s.format) {
    case Format::kBf16: case Format::kFp16: return exact16(run);
    case Format::kNvfp4: case Format::kMxfp4: return fp4_blocks(run);
    case Format::kLm4: case Format::kLm3: case Format::kLm2: return norm_codebook(run);
    case Format::kNuq4: case Format::kNuq3: case Format::kNuq2: return affine_or_static(run, 2.0f, CodebookGrid{&run->job->codebook});
    case Format::kSint8: case Format::kSint4: return symmetric(run, SymmetricGrid{static_cast<float>((1 << (run->job->bits - 1)) - 1)});
    case Format::kFp8E4m3: case Format::kFp8E5m2: {
      const auto value = [f = s.format](auto x, auto scale) { return fp8_round_trip(f, x, scale); };
      return run->grids.lo ? fp8_static(run, value) : fp8_token(run, value);
    }
    default: return s.granularity == Granularity::kChannel ? int_channel(run, AffineGrid{qmax}) : affine_or_static(run, qmax, AffineGrid{qmax});
  }
}

/// Finds the outliers of rows that are in the frame, tokens from number `first` on.
static void pick_outliers(Run* run, std::int64_t first, std::uint16_t* picks, float* rests) {
  run->ranged = run->lanes + (run->ef_u ? 4 * kMaxLanes * run->d : 0);
  const FoundOutliers found = find_outliers(*run->job, run->grids, run->rows, first, run->n, run->ranged, picks);
  run->picks = picks, run->rests = rests, run->n_picks = found.n;
  for (int i = 0; i < found.n; ++i) rests[i] = run->rows[picks[i]];
  run->counts.saturated.single -= found.n_beyond;
}

/// Adds what the entries of outliers hold.
static void restore_outliers(Run* run) {
  for (int i = 0; i < run->n_picks; ++i) {
    float* const value = run->rows + run->picks[i];
    const float delta = f16_nearest<float>(run->rests[i] - *value);
    Tally::add_to(&run->counts.saturated, magnitude(delta) > kF16Max);
    if (delta != 0.0f) *value += minimum(maximum(delta, -kF16Max), kF16Max);
  }
}

static void fake_quant_run(const FakeQuantJob& job, const StaticGrids& grids, int head, std::int64_t first, int n, float* scratch,
                           EncodeCounters* counters) {
  Run run{};
  run.job = &job;
  run.grids = grids;
  run.n = n, run.d = job.width;
  const std::int64_t d = job.head_dim, width = job.width, size = n * width;
  float* const wide = scratch;
  if (job.basis) scratch += d;
  run.rows = scratch, run.lo = scratch + size, run.scale = scratch + 2 * size, run.lanes = scratch + 3 * size;
  run.ranged = run.rows;
  if (job.ef_u) run.ef_u = job.ef_u + head * (d * (d + 1) / 2), run.ef_order = job.ef_order + head * d;
  for (int t = 0; t < n; ++t) to_frame(&run, head, job.x + (first + t) * job.x_stride + head * d, scratch + t * width, wide);
  std::uint16_t picks[kMaxGroupOutliers];
  float rests[kMaxGroupOutliers];
  if (job.scheme.outlier_per_mille > 0) pick_outliers(&run, first, picks, rests);
  round_trip(&run);
  restore_outliers(&run);
  for (int t = 0; t < n; ++t) from_frame(&run, head, scratch + t * width, job.out + (first + t) * job.out_stride + head * d);
  counters->non_finite += run.counts.non_finite.total();
  counters->saturated += run.counts.saturated.total();
  counters->floored += run.counts.floored.total();
}

}  // namespace
}  // namespace kvrt
