#include "kernels/core/plan_constants.h"

namespace kvrt {

std::vector<PlanConstant> plan_constants(const Scheme& s, int n_kv_heads, int head_dim) {
  const std::int64_t h = n_kv_heads, d = head_dim;
  const bool is_nuq = s.format == Format::kNuq4 || s.format == Format::kNuq3 || s.format == Format::kNuq2;
  const bool absmax_only = s.format == Format::kFp8E4m3 || s.format == Format::kFp8E5m2 || s.format == Format::kNvfp4;
  std::vector<PlanConstant> list;
  if (s.center) list.push_back({"mean", {h, d}, false, false});
  if (s.smooth) list.push_back({"smooth", {h, d}, true, false});
  PlanConstant thresholds{"clip_hi", {0, 0}, absmax_only, false};
  if (s.granularity == Granularity::kTensor || s.format == Format::kNvfp4) thresholds.shape[0] = 1;
  if (s.granularity == Granularity::kHead) thresholds.shape[0] = h;
  if (s.granularity == Granularity::kChannelStatic) thresholds.shape[0] = h, thresholds.shape[1] = d;
  if (thresholds.shape[0] > 0) {
    if (!absmax_only) {
      list.push_back(thresholds);
      list.back().name = "clip_lo";
    }
    list.push_back(thresholds);
  }
  const bool by_group = s.granularity == Granularity::kToken || s.granularity == Granularity::kChannel;
  if (s.clip && by_group) list.push_back({"clip_alpha", {1, 0}, true, false});
  if (is_nuq) list.push_back({"codebook", {std::int64_t{1} << code_bits(s.format), 0}, false, false});
  if (s.lowrank) {
    list.push_back({"basis_mean", {h, d}, false, false});
    list.push_back({"basis_in", {h, d * s.lowrank}, false, false});
    list.push_back({"basis", {h, d * s.lowrank}, false, false});
  }
  if (s.ef) {
    list.push_back({"ef_u", {h, d * (d + 1) / 2}, false, false});
    list.push_back({"ef_order", {h, d}, false, true});
  }
  return list;
}

}  // namespace kvrt
