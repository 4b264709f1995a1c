// Which CUDA kernels read a page format, and how a pair of formats is decoded. Host code of every build.

#include "kernels/read/decode_instances.h"

namespace kvrt {

const char* family_name(DecodeFamily family) {
  constexpr const char* kNames[] = {"b16", "e8", "i8", "i4", "i3", "i2", "c4", "c3", "c2"};
  return kNames[static_cast<int>(family)];
}

bool decode_family(const PageCodec& codec, DecodeFamily* family, std::string* error) {
  using F = DecodeFamily;
  switch (codec.format) {
    case Format::kBf16: case Format::kFp16: *family = F::kB16; break;
    case Format::kFp8E4m3: *family = F::kE8; break;
    case Format::kInt8: case Format::kSint8: *family = F::kI8; break;
    case Format::kInt4: case Format::kSint4: *family = F::kI4; break;
    case Format::kInt3: *family = F::kI3; break;
    case Format::kInt2: *family = F::kI2; break;
    case Format::kNuq4: case Format::kLm4: *family = F::kC4; break;
    case Format::kNuq3: case Format::kLm3: *family = F::kC3; break;
    case Format::kNuq2: case Format::kLm2: *family = F::kC2; break;
    default:
      *error = "decode on cuda has no kernel for fp8e5m2, fp4 and the blocks of llama.cpp";
      return false;
  }
  if (codec.out_per_mille > 0) {
    const int whole = codec.out_per_mille / 10;
    *error = "decode on cuda reads no outliers: out" + (codec.out_per_mille % 10 ? std::string("0.5") : std::to_string(whole));
    return false;
  }
  if (codec.head_dim > kMaxDecodeDim || codec.head_dim % 2 != 0) {
    *error = "decode on cuda has even head_dim up to " + std::to_string(kMaxDecodeDim) + ", not " + std::to_string(codec.head_dim);
    return false;
  }
  return true;
}

namespace {

struct Pair {
  DecodeFamily k, v;
  int head_dim;
};
constexpr Pair kFused[] = {
#define KVRT_FUSED(K, V, D, N) KVRT_IF_##D##_##N({DecodeFamily::k##K, DecodeFamily::k##V, D}, )
#define KVRT_SCORE(K, D, P)
#define KVRT_PV(V, D, P)
#include "kernels/instances.txt"
#undef KVRT_FUSED
#undef KVRT_SCORE
#undef KVRT_PV
};

struct Pass {
  DecodeFamily family;
  int head_dim;
  bool is_padded;
};
constexpr Pass kScore[] = {
#define KVRT_FUSED(K, V, D, N)
#define KVRT_SCORE(K, D, P) KVRT_IF_##D##_P##P({DecodeFamily::k##K, D, P != 0}, )
#define KVRT_PV(V, D, P)
#include "kernels/instances.txt"
#undef KVRT_SCORE
#undef KVRT_PV
    {DecodeFamily::kB16, 0, false},
};
constexpr Pass kPv[] = {
#define KVRT_SCORE(K, D, P)
#define KVRT_PV(V, D, P) KVRT_IF_##D##_P##P({DecodeFamily::k##V, D, P != 0}, )
#include "kernels/instances.txt"
#undef KVRT_FUSED
#undef KVRT_SCORE
#undef KVRT_PV
    {DecodeFamily::kB16, 0, false},
};

template <std::size_t N>
bool has_pass(const Pass (&passes)[N], DecodeFamily family, int head_dim) {
  for (const Pass& p : passes) {
    if (p.family == family && (p.is_padded ? head_dim <= p.head_dim && head_dim % 2 == 0 : head_dim == p.head_dim)) return true;
  }
  return false;
}

}  // namespace

bool choose_decode_path(const DecodeUnit& unit, DecodePath* path, std::string* error) {
  const auto refuse = [&](const std::string& text) {
    *error = "decode on cuda: " + text;
    return false;
  };
  if (unit.pre) return refuse("keys before RoPE have no kernel");
  for (const Pair& p : kFused) {
    if (p.k == unit.k && p.v == unit.v && p.head_dim == unit.head_dim) return *path = DecodePath::kFused, true;
  }
  if (has_pass(kScore, unit.k, unit.head_dim) && has_pass(kPv, unit.v, unit.head_dim)) return *path = DecodePath::kTwoPass, true;
  const bool is_built_elsewhere = unit.head_dim <= kMaxDecodeDim && unit.head_dim % 2 == 0;
  return refuse("head_dim " + std::to_string(unit.head_dim) +
                (is_built_elsewhere ? " is in builds with KVRT_CUDA_INSTANCES=all" : " has no kernel; even ones up to " + std::to_string(kMaxDecodeDim) + " do"));
}

}  // namespace kvrt
