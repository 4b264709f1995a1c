#include "libcalib/export/kvtuner.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/plan/synthetic_sens.h"

// A model of four layers with two KV heads.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const calib::ModelIdentity model = calib::plan_test::tiny_model(4, 4, 2);
  calib::fuzz::with_file(data, size, [&](const calib::MappedFile& file) {
    for (const auto& layer : calib::exports::parse_kvtuner(file.bytes(), "input", model.layers).layers)
      for (const int bits : {layer.k_bits, layer.v_bits})
        if (bits != 2 && bits != 4 && bits != 8) std::abort();
  });
  return 0;
}
