#pragma once
// Device code of the decode kernels, part 8: types of each family, and the launch of one fused instance.

#include "kernels/read/decode_instances.h"
#include "kernels/read/decode_kernel.h"

namespace kvrt {

namespace detail {
template <DecodeFamily F, int D, bool kIsPadded>
struct FamilyTypes;
#define KVRT_FAMILY(family, format)                                 \
  template <int D, bool kIsPadded>                                  \
  struct FamilyTypes<DecodeFamily::family, D, kIsPadded> {          \
    using KeyCodes = format##KeyCodes<D, kIsPadded>;                \
    using Keys = CodedKeys<KeyCodes, D, kIsPadded>;                 \
    using Values = CodedValues<format##ValueCodes<D, kIsPadded>, D, kIsPadded>; \
  };
KVRT_FAMILY(kE8, Fp8)
KVRT_FAMILY(kI8, Int8)
KVRT_FAMILY(kI4, Int4)
KVRT_FAMILY(kI3, Int3)
KVRT_FAMILY(kI2, Int2)
KVRT_FAMILY(kC4, Code4)
KVRT_FAMILY(kC3, Code3)
KVRT_FAMILY(kC2, Code2)
#undef KVRT_FAMILY
template <int D, bool kIsPadded>
struct FamilyTypes<DecodeFamily::kB16, D, kIsPadded> {
  using Keys = PlainKeys<D, false, kIsPadded>;
  using Values = PlainValues<D, false, kIsPadded>;
};
}  // namespace detail

template <DecodeFamily F, int D, bool kIsPadded>
using KeysOf = typename detail::FamilyTypes<F, D, kIsPadded>::Keys;
template <DecodeFamily F, int D, bool kIsPadded>
using ValuesOf = typename detail::FamilyTypes<F, D, kIsPadded>::Values;

/// CTAs: a chunk and a tile of 8 N heads each.
inline std::int64_t decode_blocks(const DecodeArgs& args, int head_tiles) {
  return args.n_chunks * ((args.n_query_heads + 8 * head_tiles - 1) / (8 * head_tiles));
}

template <DecodeFamily K, DecodeFamily V, int D, int N>
Status launch_fused(const DecodeArgs& args, void* stream) {
  return cuda::launch(&decode_kernel<KeysOf<K, D, false>, ValuesOf<V, D, false>, PlainKeys<D, true, false>, D, N>, decode_blocks(args, N),
                      kDecodeThreads, args, stream);
}

}  // namespace kvrt
