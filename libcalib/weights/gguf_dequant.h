#pragma once
// Dequantisation of GGUF tensor types to fp32.
//
// Each type is a run of blocks; a block holds `elements` values in `bytes` bytes. Source: the block structures that the
// GGUF format names; values equal the `gguf` Python package (tests/golden/gguf_dequant.json).

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "libcalib/weights/checkpoint.h"

namespace calib::weights {

struct BlockLayout {
  std::int64_t elements = 1;  ///< values of one block
  std::int64_t bytes = 0;     ///< 0: not known here
};

/// A tensor type as the GGUF file codes it.
struct GgufTensorType {
  std::uint32_t code;
  const char* name;
  TensorType type;  ///< kOther: sizes known, values not readable
  BlockLayout block;
};
/// nullptr for a code that no GGUF version in use assigns.
const GgufTensorType* find_gguf_type(std::uint32_t code);

/// Block of a readable type of either container; bytes == 0 for kOther.
BlockLayout block_layout(TensorType type);

/// Values of n_elements consecutive elements. Requires: n_elements is a multiple of the type's block, bytes hold them all,
/// and dequantizes(type).
void dequantize(TensorType type, const void* bytes, std::int64_t n_elements, float* out);
bool dequantizes(TensorType type);

}  // namespace calib::weights
