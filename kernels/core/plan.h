#pragma once
// A plan in memory: what kvrt_plan_view describes, checked and owned.

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/core/layout.h"
#include "kernels/core/status.h"
#include "kernels/kvrt.h"

namespace kvrt {

struct UnitPlan {
  std::string text;            ///< canonical scheme string
  Scheme scheme;
  std::string chan_perm = "natural", block_order;  ///< block_order: empty, half_split or adjacent
  int spread = 0;              ///< N of spread<N>, 0 = natural
  std::vector<float> mean, smooth, clip_lo, clip_hi, clip_alpha, codebook, basis_mean, basis_in, basis, ef_u;  ///< those of plan_constants.h
  std::vector<std::int32_t> ef_order;
};

struct LayerPlan {
  int index = 0, n_q_heads = 0, rotary_dim = 0;
  kvrt_rope_style rope_style = KVRT_ROPE_NONE;
  double attention_factor = 1, softmax_scale = 1;
  std::vector<double> inv_freq;
  double salient_fraction = 0;
  LayerLayout layout;          ///< schemes, heads, head_dim, tiers, page_tokens
  UnitPlan units[KVRT_SIDES];
};

struct Plan {
  std::string architecture, model_name, weights_sha256;
  std::vector<LayerPlan> layers;  ///< ascending index
  int page_tokens = 64;
  std::int64_t scale_refresh_tokens = 0;

  const LayerPlan* find(int layer) const;
};

/// Checks everything a view states and copies it. Codes: kArgument for null pointers, kFormat for what breaks the rules of a plan.
Status make_plan(const kvrt_plan_view& view, Plan* out);

/// Empty if this build runs the unit (side of the layer) on its CPU backends; else the part that is missing.
std::string missing_part(const Plan& plan, const LayerPlan& layer, CacheSide side);

/// The scheme nearest to the unit's own that this build runs in its place; empty if the unit runs as it is, or if no other scheme would.
std::string nearest_offered(const Plan& plan, const LayerPlan& layer, CacheSide side);

/// "layer 3 K int4.token.g32"
std::string unit_name(const LayerPlan& layer, CacheSide side);

}  // namespace kvrt

/// Behind the C handle: the plan, and its own view of itself.
struct kvrt_plan {
  kvrt::Plan plan;
  std::vector<kvrt_layer_view> layer_views;
  kvrt_plan_view view = {};
};
