#pragma once
// Scheme strings for the tests of storage.

#include <string>

#include "kernels/codec/group_range.h"
#include "kernels/core/scheme.h"

namespace kvrt::testing {

/// Every format, granularity and modifier that this build stores.
inline constexpr const char* kKeySchemes[] = {
    "bf16", "fp16", "bf16.pre", "fp16.pre", "fp8e4m3.tensor", "fp8e4m3.head", "fp8e4m3.token.g", "fp8e5m2.token.g32", "fp8e5m2.head.pre",
    "int8.token.g", "int4.token.g32", "int4.token.g16", "int3.token.g64", "int2.token.g32", "int8.channel.g32", "int4.channel.g64",
    "int3.channel.g64", "int2.channel.g32", "int4.channel.g64.pre", "int3.channel.g32.pre", "int2.channel.g64.pre", "int4.channel.g128.pre",
    "int8.tensor", "int4.head", "int3.tensor", "int8.channel.static.pre", "int4.channel.static", "sint8.token.g", "sint4.token.g32", "sint4.head",
    "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "q8_0.had", "nuq4.token.g", "nuq3.token.g", "nuq3.channel.static.pre", "nuq2.token.g",
    "nuq4.token.g.ef", "lm4.token.g.had", "lm3.token.g", "lm3.token.g32", "lm2.token.g.had", "nvfp4", "mxfp4", "int4.token.g32.center.had",
    "int4.token.g32.pre.center", "int4.token.g.smooth", "int4.token.g.pre.center.smooth", "int4.token.g32.ef", "int3.channel.g64.pre.ef",
    "sint4.token.g.ef", "lm3.token.g.ef", "int4.channel.static.pre.ef", "int8.token.g.had", "int3.channel.g32.center.had", "int4.token.g32.clip",
    "int3.channel.g64.pre.clip", "sint4.token.g.clip", "nuq4.token.g.clip", "int4.token.g8.pre.pair", "int4.channel.g64.pre.pair",
    "int3.channel.g64.pre.out1", "int4.token.g32.out1", "int2.channel.g32.out2", "int4.channel.static.pre.out1", "nuq3.token.g.out1",
    "nuq3.channel.static.pre.out1", "int4.token.g32.out1.ef", "int3.channel.g64.pre.out1.ef", "int3.token.g64.out0.5",
    "int3.channel.g64.pre.clip.out1.pair", "int4.channel.g32.pre.out1.pair", "int8.tensor.out1", "fp8e4m3.token.g.clip",
    "int3.token.g32.clip.out2.pair", "int2.channel.g64.clip.out0.5.ef", "fp8e5m2.token.g16", "int3.token.g16", "int2.token.g16", "sint4.token.g16",
    "int4.token.g16.center.had", "int4.token.g16.pre.center", "int4.token.g16.ef", "int4.channel.g32.had", "int4.token.g16.clip.pair",
    "int4.token.g.out1", "int3.channel.g32.pre.clip.out2.pair", "int8.channel.static.out0.5", "int4.channel.g64.out1.ef"};

/// Whether keys of `width` channels, all rotated in halves, can have the scheme.
inline bool fits(const char* scheme, int width) {
  Scheme s;
  std::string error;
  if (!parse_scheme(scheme, &s, &error) || !check_shape(s, width, true).empty()) return false;
  return !s.pair || s.granularity != Granularity::kToken || pairs_map_groups(width, false, width, s.group > 0 ? s.group : width);
}

/// As part of a test's name.
inline std::string test_name(std::string scheme) {
  for (char& c : scheme) c = c == '.' ? '_' : c;
  return scheme;
}

}  // namespace kvrt::testing
