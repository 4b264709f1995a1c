// Which CUDA kernel family reads a page format. Host code of every build.

#include "kernels/read/decode_cuda.h"

namespace kvrt {

bool decode_family(const PageCodec& codec, DecodeFamily* family, std::string* error) {
  if (codec.spread != 0) {
    *error = "fused decode on cuda reads keys in the natural channel order, not spread" + std::to_string(codec.spread);
    return false;
  }
  if (codec.out_per_mille > 0) {
    const int whole = codec.out_per_mille / 10;
    *error = "fused decode on cuda reads no outliers: out" + (codec.out_per_mille % 10 ? std::string("0.5") : std::to_string(whole));
    return false;
  }
  const bool is_token = codec.granularity == Granularity::kToken;
  if (codec.format == Format::kBf16 || codec.format == Format::kFp16) {
    *family = DecodeFamily::kB16;
  } else if ((codec.format == Format::kInt4 || codec.format == Format::kInt8) && is_token) {
    if (codec.group < 32 && codec.group < codec.head_dim) {
      *error = "fused decode on cuda reads token groups of 32 channels or more, not " + std::to_string(codec.group);
      return false;
    }
    *family = codec.format == Format::kInt4 ? DecodeFamily::kI4 : DecodeFamily::kI8;
  } else {
    *error = "fused decode on cuda reads bf16, fp16, int8 and int4 with token.g<N>";
    return false;
  }
  return true;
}

}  // namespace kvrt
