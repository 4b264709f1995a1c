// The vector path of fake_quant and append, compiled for the instruction set in its name (kernels/CMakeLists.txt).

#include "kernels/write/encode_lanes.h"

namespace kvrt {

WritePath write_path_avx2() { return lanes_path("avx2"); }

}  // namespace kvrt
