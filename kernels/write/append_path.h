#pragma once
// The vector pieces of append, one set an instruction set. Rows have a head_dim that 16 divides.

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

struct AppendPath {
  const char* name;
  /// Rows [first, first + n) to out [n, D]: fp32, rotated, not finite ones 0 and counted. angles: [D].
  void (*take_rows)(const IntakeRows& in, std::int64_t first, int n, float* out, float* angles, EncodeCounters* counters);
  /// One row of an exact page.
  void (*store_bf16)(const float* x, int head_dim, std::uint8_t* out);
  void (*load_bf16)(const std::uint8_t* bytes, int head_dim, float* out);
  /// Rows x [n, D] in the unit's frame to slots [slot, slot + n) of a block; n: N for channel groups, else at most kTokenRows.
  /// scratch: scratch_floats(job); bytes: encode_scratch_bytes(head_dim).
  void (*encode)(const FakeQuantJob& job, const StaticGrids& grids, const PageCodec& codec, int head, const float* x, int n, int slot, std::uint8_t* block,
                 float* scratch, std::uint8_t* bytes, EncodeCounters* counters);
};
/// In the order and with the names of decode_backends().
std::vector<AppendPath> append_paths();
AppendPath append_path_baseline();
AppendPath append_path_avx2();
AppendPath append_path_avx512();

/// Whether encode() knows the unit; the scalar page codec writes the others.
bool has_vector_encoder(const FakeQuantJob& job);

/// A row of codes in two orders, or of pairs of parameters.
inline std::int64_t encode_scratch_bytes(int head_dim) { return 4 * std::int64_t{head_dim} + 64; }

}  // namespace kvrt
