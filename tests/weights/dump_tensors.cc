// dump_tensors MODEL OUT: all tensors of a checkpoint as fp32, one after the other in name order. For comparisons with other
// readers (scripts/make_gguf_golden.py --compare).
#include <cstdio>
#include <fstream>
#include <vector>

#include "libcalib/weights/checkpoint.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: dump_tensors MODEL OUT\n");
    return 2;
  }
  try {
    const auto checkpoint = calib::weights::Checkpoint::open(argv[1]);
    std::ofstream out(argv[2], std::ios::binary);
    for (const auto& t : checkpoint.tensors()) {
      std::vector<float> values(static_cast<std::size_t>(t.n_elements));
      checkpoint.read_f32(t, values);
      checkpoint.release(t);
      out.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * 4));
    }
    std::printf("%zu tensors, identity %s\n", checkpoint.tensors().size(), checkpoint.identity_sha256(false).c_str());
    return out.flush() ? 0 : 3;
  } catch (const calib::Error& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return calib::exit_code(e.kind());
  }
}
