// The vector path of fake_quant and append, compiled for the instruction set of the whole build.

#include "kernels/core/isa.h"
#include "kernels/write/encode_lanes.h"

namespace kvrt {

WritePath write_path_baseline() { return lanes_path(kBaselineName); }

}  // namespace kvrt
