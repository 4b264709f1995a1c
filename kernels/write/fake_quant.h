#pragma once
// decode(encode(x)) of the page codecs without a page in memory: the number scored is the number stored (KERNELS.md L2).

#include <cstdint>
#include <functional>

#include "kernels/codec/range.h"
#include "kernels/core/scheme.h"
#include "kernels/core/status.h"

namespace kvrt {

/// Legend: T tokens, H KV heads, D head_dim. All arrays fp32, row-major.
struct FakeQuantArgs {
  Scheme scheme;
  bool is_key = true;
  std::int64_t n_tokens = 0;   ///< base-tier tokens only, counted from the first one: channel groups start at token 0 of x.
                               ///< channel.g<N>: must be a multiple of N (a partial group is never quantised).
  int n_heads = 0, head_dim = 0;
  const float* x = nullptr;    ///< [T, H, D] in the scheme's frame (the caller applies and undoes RoPE)
  float* out = nullptr;        ///< [T, H, D]; may equal x
  std::int64_t x_token_stride = 0, out_token_stride = 0;  ///< elements between tokens; 0 = H*D. Heads and channels are dense.
  int page_tokens = 64;        ///< out<p> over channel groups: P, whose quota the groups of a page share; at least N is taken
  bool round_input_to_bf16 = false;      ///< the layer has a ring (tiers.h encodes_bf16)
  const std::int32_t* block_order = nullptr;  ///< [D] llama.cpp blocks on keys: stored position -> channel; null = natural

  // Plan constants; which ones a scheme needs follows from its string. Missing ones: Code::kArgument naming it.
  const float* mean = nullptr;     ///< center: [H, D]
  const float* clip_lo = nullptr;  ///< static thresholds: tensor [1], head [H], channel.static [H, D]; fp8, nvfp4: unused
  const float* clip_hi = nullptr;  ///< the same; fp8 and nvfp4 [1]: absmax to cover, scale = clip_hi / largest value of the format
  const float* smooth = nullptr;   ///< smooth: [H, D], > 0
  const float* codebook = nullptr; ///< nuq: [2^b] ascending, each an int8 level times one fp32 step (largest magnitude / 127)
  const float* clip_alpha = nullptr;  ///< clip over token and channel groups: [1] in (0, 1], what is left of a range about its mean
  int rotary_dim = 0;              ///< pair: channels that RoPE turns, the first ones of a head
  bool interleaved = false;        ///< pair: pairs (2i, 2i + 1), else (i, i + rotary_dim / 2)
  const float* ef_u = nullptr;     ///< ef: [H, D(D+1)/2] upper triangle by rows, in the order of ef_order; diagonal > 0
  const std::int32_t* ef_order = nullptr;  ///< ef: [H, D] channels in the order of feedback
  const float* basis_mean = nullptr;  ///< lowrank: [H, D] mean row
  const float* basis_in = nullptr;    ///< lowrank: [H, D, r]; coefficients = (x - mean) basis_in
  const float* basis = nullptr;       ///< lowrank: [H, r, D]; x = mean + coefficients basis

  /// Optional parallel loop over independent pieces; result does not depend on it. Null = serial.
  const std::function<void(std::int64_t n, const std::function<void(std::int64_t)>&)>* parallel_for = nullptr;
};

/// What an encoder meets and survives: non_finite, saturated, floored.
using FakeQuantCounters = EncodeCounters;

/// Requires: pointers valid for the shapes above. The output is in the model's own coordinates (center, smooth, had and lowrank undone).
/// Exact: equals write-page-then-read-page bit for bit. Takes every scheme of the grammar, lowrank too, which no page holds.
Status fake_quant(const FakeQuantArgs& args, FakeQuantCounters* counters = nullptr);

/// The same through the plain scalar page codecs, one value at a time: the oracle of the fast path.
Status fake_quant_reference(const FakeQuantArgs& args, FakeQuantCounters* counters = nullptr);

}  // namespace kvrt
