#include "kernels/read/decode_cuda.h"

#include "kernels/read/decode_kernel.h"

namespace kvrt {
namespace {

template <class Keys, class Values, int D>
Status launch_decode(const DecodeArgs& args, void* stream) {
  return args.n_query_heads <= 8 ? cuda::launch(&decode_kernel<Keys, Values, D, 1>, args.n_chunks, kDecodeThreads, args, stream)
                                 : cuda::launch(&decode_kernel<Keys, Values, D, 2>, args.n_chunks, kDecodeThreads, args, stream);
}

const char* name_of(DecodeFamily f) {
  switch (f) {
    case DecodeFamily::kB16: return "b16";
    case DecodeFamily::kI8: return "i8";
    case DecodeFamily::kI4: return "i4";
  }
  return "?";
}

template <int D>
Status launch_families(const DecodeArgs& args, DecodeFamily k, DecodeFamily v, void* stream) {
  using F = DecodeFamily;
  using I4Keys = TokenKeys<Int4KeyCodes, D>;
  using I8Keys = TokenKeys<Int8KeyCodes, D>;
  using I4Values = TokenValues<Int4ValueCodes, D>;
  using I8Values = TokenValues<Int8ValueCodes, D>;
  if (k == F::kB16 && v == F::kB16) return launch_decode<PlainKeys<D, false>, PlainValues<D, false>, D>(args, stream);
  if (k == F::kI8 && v == F::kI8) return launch_decode<I8Keys, I8Values, D>(args, stream);
  if (k == F::kI8 && v == F::kI4) return launch_decode<I8Keys, I4Values, D>(args, stream);
  if (k == F::kI4 && v == F::kI4) return launch_decode<I4Keys, I4Values, D>(args, stream);
  return Status(Code::kUnsupported, std::string("fused decode on cuda has no instance for K ") + name_of(k) + " with V " + name_of(v));
}

}  // namespace

Status decode_cuda(const DecodeArgs& args, DecodeFamily k, DecodeFamily v, void* stream) {
  if (args.n_query_heads < 1 || args.n_query_heads > 16) {
    return Status(Code::kUnsupported, "fused decode on cuda takes 1 to 16 query heads per KV head, not " + std::to_string(args.n_query_heads));
  }
  if (args.head_dim == 64) return launch_families<64>(args, k, v, stream);
  if (args.head_dim == 128) return launch_families<128>(args, k, v, stream);
  return Status(Code::kUnsupported, "fused decode on cuda has head_dim 64 and 128, not " + std::to_string(args.head_dim));
}

}  // namespace kvrt
