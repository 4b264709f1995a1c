// The vector paths of fake_quant and append, compiled for the instruction set of the whole build.

#include "kernels/core/isa.h"
#include "kernels/write/encode_lanes.h"

namespace kvrt {

void fake_quant_run_baseline(const FakeQuantJob& job, const StaticGrids& grids, int head, std::int64_t first, int n, float* scratch,
                         EncodeCounters* counters) {
  fake_quant_run(job, grids, head, first, n, scratch, counters);
}

AppendPath append_path_baseline() { return {kBaselineName, take_rows, store_bf16_row, load_bf16_row, encode_rows}; }

}  // namespace kvrt
