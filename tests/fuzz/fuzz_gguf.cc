#include <vector>

#include "libcalib/weights/gguf.h"
#include "libcalib/weights/gguf_dequant.h"
#include "tests/fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace calib::weights;
  calib::fuzz::with_file(data, size, [&](const calib::MappedFile& file) {
    for (const auto& t : parse_gguf(file).tensors) {
      if (t.offset > size || t.size_bytes > size - t.offset) std::abort();
      if (!dequantizes(t.type)) continue;
      std::vector<float> values(static_cast<std::size_t>(t.n_elements));
      dequantize(t.type, file.bytes().data() + t.offset, t.n_elements, values.data());
    }
  });
  return 0;
}
