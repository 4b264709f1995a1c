// Dispatch of decode on cuda: the kernels of this build, one line of instances.txt each.

#include "kernels/read/decode_instances.h"

namespace kvrt {
namespace {

using F = DecodeFamily;
using Launch = Status (*)(const DecodeArgs&, void*);

struct FusedInstance {
  F k, v;
  KeyPairs pairs;
  int head_dim, head_tiles;
  Launch launch;
};
constexpr FusedInstance kFused[] = {
#define KVRT_FUSED(K, V, D, N) KVRT_IF_##D##_##N({F::k##K, F::k##V, KeyPairs::kNone, D, N, &launch_fused<F::k##K, F::k##V, D, N>}, )
#define KVRT_FUSED_PRE(K, V, D, N) KVRT_IF_##D##_##N({F::k##K, F::k##V, KeyPairs::kSplit, D, N, &launch_fused_pre<F::k##K, F::k##V, D, N>}, )
#include "kernels/instances.txt"
};

struct PassInstance {
  F family;
  int head_dim;
  bool is_padded;
  Launch launch;
};
constexpr PassInstance kScore[] = {
#define KVRT_SCORE(K, D, P) KVRT_IF_##D##_P##P({F::k##K, D, P != 0, &launch_score<F::k##K, D, P != 0>}, )
#include "kernels/instances.txt"
    {F::kB16, 0, false, nullptr},
};
struct PrePassInstance {
  F family;
  int head_dim;
  KeyPairs pairs;
  Launch launch;
};
constexpr PrePassInstance kScorePre[] = {
#define KVRT_SCORE_PRE(K, D, R) KVRT_IF_##D##_##R({F::k##K, D, KeyPairs::R, &launch_score_pre<F::k##K, D, KeyPairs::R>}, )
#include "kernels/instances.txt"
    {F::kB16, 0, KeyPairs::kNone, nullptr},
};
constexpr PassInstance kPv[] = {
#define KVRT_PV(V, D, P) KVRT_IF_##D##_P##P({F::k##V, D, P != 0, &launch_pv<F::k##V, D, P != 0>}, )
#include "kernels/instances.txt"
    {F::kB16, 0, false, nullptr},
};

/// The smallest number of head tiles that holds all heads; else one, and several CTAs a chunk.
Launch find_fused(const DecodeUnit& unit, int n_query_heads) {
  const int wanted = n_query_heads > 8 ? 2 : 1;
  if ((unit.pairs == KeyPairs::kNone && unit.k_general) || unit.v_general) return nullptr;
  Launch found = nullptr;
  for (const FusedInstance& i : kFused) {
    if (i.k == unit.k && i.v == unit.v && i.pairs == unit.pairs && i.head_dim == unit.head_dim && i.head_tiles <= wanted) found = i.launch;
  }
  return found;
}

/// Exact widths stand before padded ones.
template <std::size_t N>
Launch find_pass(const PassInstance (&passes)[N], F family, int head_dim, bool is_general) {
  for (const PassInstance& p : passes) {
    if (p.family == family && (p.is_padded ? head_dim <= p.head_dim && head_dim % 2 == 0 : head_dim == p.head_dim && !is_general)) return p.launch;
  }
  return nullptr;
}

Launch find_score(const DecodeUnit& unit) {
  if (unit.pairs == KeyPairs::kNone) return find_pass(kScore, unit.k, unit.head_dim, unit.k_general);
  for (const PrePassInstance& p : kScorePre) {
    if (p.family == unit.k && p.head_dim == unit.head_dim && p.pairs == unit.pairs) return p.launch;
  }
  return nullptr;
}

Status no_instance(const DecodeUnit& unit, const char* path) {
  return Status(Code::kUnsupported, std::string(path) + " decode on cuda has no instance for K " + family_name(unit.k) +
                                        (unit.pairs != KeyPairs::kNone ? " pre" : "") + " with V " + family_name(unit.v) + ", head_dim " +
                                        std::to_string(unit.head_dim));
}

}  // namespace

Status decode_cuda(const DecodeArgs& args, const DecodeUnit& unit, DecodePath path, void* stream) {
  if (args.n_query_heads < 1 || args.head_dim != unit.head_dim) {
    return Status(Code::kArgument, "decode on cuda: " + std::to_string(args.n_query_heads) + " query heads, head_dim " + std::to_string(args.head_dim) +
                                       " for kernels of " + std::to_string(unit.head_dim));
  }
  if (unit.pairs != KeyPairs::kNone && (args.rope == nullptr || args.rope_offsets < 1 || args.rope_offsets > kRopeFine)) {
    return Status(Code::kArgument, "decode on cuda: keys before RoPE without tables, or with " + std::to_string(args.rope_offsets) + " offsets in a page");
  }
  if (path == DecodePath::kFused) {
    const Launch fused = find_fused(unit, args.n_query_heads);
    return fused ? fused(args, stream) : no_instance(unit, "fused");
  }
  const Launch score = find_score(unit), pv = find_pass(kPv, unit.v, unit.head_dim, unit.v_general);
  if (!score || !pv) return no_instance(unit, "two_pass");
  if (!args.scores || args.max_chunk_tiles < 1) return Status(Code::kArgument, "two_pass decode on cuda: no memory for scores");
  if (Status status = score(args, stream); !status.ok()) return status;
  return pv(args, stream);
}

}  // namespace kvrt
