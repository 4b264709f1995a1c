// The vector path of decode attention, compiled for the instruction set in its name (kernels/CMakeLists.txt).

#include "kernels/read/decode_lanes.h"

namespace kvrt {

void attend_head_avx512(const HeadAttention& job, float* workspace) { attend_head(job, workspace); }

}  // namespace kvrt
