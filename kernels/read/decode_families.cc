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

bool has_any_groups(const PageCodec& codec, bool is_key) {
  if (codec.granularity != Granularity::kToken || codec.group == codec.head_dim) return false;
  const int lane_channels = codec.head_dim / (is_key ? 4 : 8);  // 0: rows narrower than the lanes of a row
  return codec.spread != 0 || lane_channels == 0 || codec.group % lane_channels != 0;
}

namespace {

constexpr DecodeUnit kFused[] = {
#define KVRT_FUSED(K, V, D, N) KVRT_IF_##D##_##N({DecodeFamily::k##K, DecodeFamily::k##V, KeyPairs::kNone, D}, )
#define KVRT_FUSED_PRE(K, V, D, N) KVRT_IF_##D##_##N({DecodeFamily::k##K, DecodeFamily::k##V, KeyPairs::kSplit, D}, )
#include "kernels/instances.txt"
};

struct Pass {
  DecodeFamily family;
  int head_dim;
  bool is_padded;
};
constexpr Pass kScore[] = {
#define KVRT_SCORE(K, D, P) KVRT_IF_##D##_P##P({DecodeFamily::k##K, D, P != 0}, )
#include "kernels/instances.txt"
    {DecodeFamily::kB16, 0, false},
};
constexpr DecodeUnit kScorePre[] = {
#define KVRT_SCORE_PRE(K, D, R) KVRT_IF_##D##_##R({DecodeFamily::k##K, {}, KeyPairs::R, D}, )
#include "kernels/instances.txt"
    {DecodeFamily::kB16, {}, KeyPairs::kNone, 0},
};
constexpr Pass kPv[] = {
#define KVRT_PV(V, D, P) KVRT_IF_##D##_P##P({DecodeFamily::k##V, D, P != 0}, )
#include "kernels/instances.txt"
    {DecodeFamily::kB16, 0, false},
};

template <std::size_t N>
bool has_pass(const Pass (&passes)[N], DecodeFamily family, int head_dim, bool is_general) {
  for (const Pass& p : passes) {
    if (p.family == family && (p.is_padded ? head_dim <= p.head_dim && head_dim % 2 == 0 : head_dim == p.head_dim && !is_general)) return true;
  }
  return false;
}

bool has_score(const DecodeUnit& unit) {
  if (unit.pairs == KeyPairs::kNone) return has_pass(kScore, unit.k, unit.head_dim, unit.k_general);
  for (const DecodeUnit& u : kScorePre) {
    if (u.k == unit.k && u.pairs == unit.pairs && u.head_dim == unit.head_dim) return true;
  }
  return false;
}

}  // namespace

bool key_pairs(const PageCodec& codec, const RopeTables& rope, KeyPairs* pairs, std::string* error) {
  const auto refuse = [&](const std::string& text) {
    *error = "decode on cuda: keys before RoPE " + text;
    return false;
  };
  const int dim = codec.head_dim, rotated = 2 * rope.n_pairs;
  const std::string order = codec.spread == 0 ? "natural" : "spread" + std::to_string(codec.spread);
  if (rotated % 4 != 0) return refuse("rotate a multiple of 4 channels, not " + std::to_string(rotated));
  if (codec.page_tokens > kRopeFine) return refuse("have pages of at most " + std::to_string(kRopeFine) + " tokens, not " + std::to_string(codec.page_tokens));
  int block = dim / 4 < 32 ? dim / 4 : 32;  // channels of a lane that must lie in one group
  if (rope.interleaved || rotated == 0) {
    if (codec.spread != 0) return refuse("with interleaved pairs are read in natural order, not " + order);
    *pairs = KeyPairs::kAdjacent;
  } else {
    if (rotated != dim && rotated * 2 != dim && rotated * 4 != dim) {
      return refuse("with half-split pairs rotate all, half or a quarter of the channels, not " + std::to_string(rotated) + " of " + std::to_string(dim));
    }
    if (codec.spread != rope.n_pairs) return refuse("with half-split pairs are read in spread" + std::to_string(rope.n_pairs) + ", not " + order);
    *pairs = rotated == dim ? KeyPairs::kSplit : rotated * 2 == dim ? KeyPairs::kHalf : KeyPairs::kQuarter;
    block = rope.n_pairs / 4;
  }
  if (codec.granularity == Granularity::kToken && codec.group % block != 0) {
    return refuse("of head_dim " + std::to_string(dim) + " have groups of a multiple of " + std::to_string(block) + " channels, not " + std::to_string(codec.group));
  }
  return true;
}

bool choose_decode_path(const DecodeUnit& unit, DecodePath* path, std::string* error) {
  const auto refuse = [&](const std::string& text) {
    *error = "decode on cuda: " + text;
    return false;
  };
  const bool is_general = (unit.pairs == KeyPairs::kNone && unit.k_general) || unit.v_general;
  for (const DecodeUnit& p : kFused) {
    if (!is_general && p.k == unit.k && p.v == unit.v && p.pairs == unit.pairs && p.head_dim == unit.head_dim) return *path = DecodePath::kFused, true;
  }
  const bool has_scores = has_score(unit);
  if (has_scores && has_pass(kPv, unit.v, unit.head_dim, unit.v_general)) return *path = DecodePath::kTwoPass, true;
  if (unit.pairs != KeyPairs::kNone && !has_scores) {
    return refuse(std::string("keys before RoPE of family ") + family_name(unit.k) + ", head_dim " + std::to_string(unit.head_dim) +
                  ", have no kernel for this order of pairs in this build");
  }
  const bool is_built_elsewhere = unit.head_dim <= kMaxDecodeDim && unit.head_dim % 2 == 0;
  const bool has_width = has_pass(kPv, DecodeFamily::kB16, unit.head_dim, false);  // then it is the groups
  return refuse((has_width ? "groups that are no multiple of a quarter (keys) or an eighth (values) of " : "") + ("head_dim " + std::to_string(unit.head_dim)) +
                (is_built_elsewhere ? " is in builds with KVRT_CUDA_INSTANCES=all" : " has no kernel; even ones up to " + std::to_string(kMaxDecodeDim) + " do"));
}

}  // namespace kvrt
