// The vector path of decode attention, compiled for the instruction set of the whole build.

#include "kernels/read/decode_lanes.h"

namespace kvrt {

void attend_head_baseline(const HeadAttention& job, float* workspace) { attend_head(job, workspace); }

std::int64_t decode_workspace_floats(int head_dim, int n_queries) {
  Workspace unused;
  return lay_out(head_dim, n_queries, nullptr, &unused);
}

}  // namespace kvrt
