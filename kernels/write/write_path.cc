#include "kernels/write/write_path.h"

#include "kernels/read/decode_cpu.h"

namespace kvrt {

bool has_vector_encoder(const FakeQuantJob& job) {
  const Format f = job.scheme.format;
  // Entries of a plan's codebook may be equal, and then an entry does not tell its code.
  return !is_fp4(f) && !(is_nuq(f) && job.ef_u);
}

std::vector<WritePath> write_paths() {
  std::vector<WritePath> paths = {write_path_baseline()};
#if defined(KVRT_X86_PATHS)
  const std::size_t n = decode_backends().size();
  if (n > 1) paths.push_back(write_path_avx2());
  if (n > 2) paths.push_back(write_path_avx512());
#endif
  return paths;
}

}  // namespace kvrt
