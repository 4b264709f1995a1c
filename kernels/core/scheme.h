#pragma once
// Scheme strings: the one grammar of how a unit (layer, side) is stored. parse -> print is the identity on canonical strings.
// C++17, standard library only.

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/core/host_device.h"

namespace kvrt {

enum class Format : std::uint8_t {
  kBf16, kFp16, kFp8E4m3, kFp8E5m2, kInt8, kInt4, kInt3, kInt2, kSint8, kSint4,
  kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kIq4Nl, kNuq4, kNuq3, kNuq2, kLm4, kLm3, kLm2, kNvfp4, kMxfp4,
};

enum class Granularity : std::uint8_t {
  kNone,           ///< bf16, fp16
  kBuiltIn,        ///< llama.cpp blocks, nvfp4, mxfp4
  kTensor, kHead,  ///< one static scale a unit, a KV head
  kToken,          ///< ranges per token over `group` consecutive channels
  kChannel,        ///< ranges per channel over `group` consecutive tokens
  kChannelStatic,  ///< calibrated thresholds per channel
};

inline constexpr int kMaxFeedbackDim = 512;  ///< largest head_dim of schemes with `ef`

/// One parsed scheme. Default: bf16.
struct Scheme {
  Format format = Format::kBf16;
  Granularity granularity = Granularity::kNone;
  int group = 0;               ///< N of token.g<N> / channel.g<N>; token: 0 means head_dim (`g` alone)
  bool pre = false, center = false, smooth = false, had = false;
  int lowrank = 0;             ///< rank r, 0 = none
  bool clip = false;
  int outlier_per_mille = 0;   ///< 0, 5, 10 or 20
  bool pair = false, ef = false;

  bool operator==(const Scheme& o) const noexcept;
  bool operator!=(const Scheme& o) const noexcept { return !(*this == o); }
};

/// Parses a canonical scheme string. On failure returns false and sets `error` to a sentence that names the offending
/// part (unknown part, two parts that do not go together, wrong order). Never throws.
bool parse_scheme(std::string_view text, Scheme* out, std::string* error);

/// Empty, or a sentence that says which other encoding the format of `text` is: the `fnuz` floats have the names of fp8e4m3 and fp8e5m2
/// on some devices, other largest values and other codes, and are not stored.
std::string other_encoding(std::string_view text);

/// The canonical string.
std::string to_string(const Scheme& scheme);

/// Empty if the scheme can be laid out for this head_dim and side; else a sentence that names part, head_dim and sizes
/// that would work (e.g. "token.g64 does not divide head_dim 96; use 32, 48 or 96").
std::string check_shape(const Scheme& scheme, int head_dim, bool is_key);

/// Empty if this build keeps a cache in the scheme (append, decode, gather); else a sentence naming the part that is not offered yet.
/// fake_quant takes all schemes.
std::string check_implemented(const Scheme& scheme);

int code_bits(Format format) noexcept;               ///< 16, 8, 5, 4, 3, 2
KVRT_HOST_DEVICE constexpr bool is_llamacpp_block(Format f) noexcept { return f >= Format::kQ8_0 && f <= Format::kIq4Nl; }
bool needs_calibration(const Scheme& scheme) noexcept;  ///< static scales, means, factors, codebooks, bases, error feedback, clip

}  // namespace kvrt
