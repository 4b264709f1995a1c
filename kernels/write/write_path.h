#pragma once
// The vector pieces of fake_quant and append, one set an instruction set. Rows of append have a head_dim that 16 divides.

#include <cstdint>
#include <vector>

#include "kernels/codec/page_codec.h"
#include "kernels/codec/rope.h"
#include "kernels/write/fake_quant_job.h"

namespace kvrt {

enum class IntakeType { kF32, kF16, kBf16 };

/// Rows of one sequence and head as the caller has them.
struct IntakeRows {
  const std::uint8_t* data = nullptr;     ///< of the first row
  std::int64_t row_bytes = 0;             ///< distance of two rows
  IntakeType dtype = IntakeType::kF32;
  int head_dim = 0;
  const RopeTables* rope = nullptr;       ///< keys to rotate; null: as they are
  std::int64_t first_position = 0;        ///< of the first row
  bool round_to_bf16 = false;             ///< what a ring does to them
};

struct WritePath {
  const char* name;
  /// Fake-quantises tokens [first, first + n) of one head. n: N for channel groups, else at most kTokenRows. scratch: scratch_floats(job).
  void (*fake_quant)(const FakeQuantJob& job, const StaticGrids& grids, int head, std::int64_t first, int n, float* scratch, EncodeCounters* counters);
  /// Rows [first, first + n) to out [n, D]: fp32, rotated, not finite ones 0 and counted. angles: [D].
  void (*take_rows)(const IntakeRows& in, std::int64_t first, int n, float* out, float* angles, EncodeCounters* counters);
  /// One row of an exact page.
  void (*store_bf16)(const float* x, int head_dim, std::uint8_t* out);
  void (*load_bf16)(const std::uint8_t* bytes, int head_dim, float* out);
  /// Rows x [n, D] in the unit's frame to slots [slot, slot + n) of a block; n and scratch as for fake_quant. bytes:
  /// encode_scratch_bytes(head_dim).
  void (*encode)(const FakeQuantJob& job, const StaticGrids& grids, const PageCodec& codec, int head, const float* x, int n, int slot, std::uint8_t* block,
                 float* scratch, std::uint8_t* bytes, EncodeCounters* counters);
};
/// The vector paths that this build has and this CPU runs, in the order and with the names of decode_backends().
std::vector<WritePath> write_paths();
WritePath write_path_baseline();
WritePath write_path_avx2();
WritePath write_path_avx512();

/// Whether encode() knows the unit; the scalar page codec writes the others.
bool has_vector_encoder(const FakeQuantJob& job);

/// A row of codes in two orders, or of pairs of parameters.
inline std::int64_t encode_scratch_bytes(int head_dim) { return 4 * std::int64_t{head_dim} + 64; }

}  // namespace kvrt
