// The vector paths of fake_quant and append, compiled for the instruction set in its name (kernels/CMakeLists.txt).

#include "kernels/write/encode_lanes.h"

namespace kvrt {

void fake_quant_run_avx2(const FakeQuantJob& job, const StaticGrids& grids, int head, std::int64_t first, int n, float* scratch,
                         EncodeCounters* counters) {
  fake_quant_run(job, grids, head, first, n, scratch, counters);
}

AppendPath append_path_avx2() { return {"avx2", take_rows, store_bf16_row, load_bf16_row, encode_rows}; }

}  // namespace kvrt
