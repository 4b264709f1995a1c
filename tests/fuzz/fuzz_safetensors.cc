#include "libcalib/weights/safetensors.h"
#include "tests/fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  calib::fuzz::with_file(data, size, [&](const calib::MappedFile& file) {
    for (const auto& t : calib::weights::parse_safetensors(file).tensors)
      if (t.offset > size || t.size_bytes > size - t.offset) std::abort();  // what is accepted lies inside the file
  });
  return 0;
}
