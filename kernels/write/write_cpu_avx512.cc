// The vector path of fake_quant and append, compiled for the instruction set in its name (kernels/CMakeLists.txt).

#include "kernels/write/encode_lanes.h"

namespace kvrt {

WritePath write_path_avx512() { return lanes_path("avx512"); }

}  // namespace kvrt
