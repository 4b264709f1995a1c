// The vector path of fake_quant, compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl.

#include "kernels/write/fake_quant_lanes.h"

namespace kvrt {

void fake_quant_run_avx512(const FakeQuantJob& job, const StaticGrids& grids, int head, std::int64_t first, int n, float* scratch,
                         EncodeCounters* counters) {
  fake_quant_run(job, grids, head, first, n, scratch, counters);
}

}  // namespace kvrt
