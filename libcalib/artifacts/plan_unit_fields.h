#pragma once
// Fields of plan.json that follow from a scheme and the model: written for readers, checked on reading.

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "libcalib/plan/plan.h"

namespace calib::artifacts {

/// One constant array of a unit. `values` points into the unit.
struct UnitArray {
  std::string what, name;  ///< mean; layers.3.k.mean
  std::vector<std::int64_t> shape;
  const std::vector<float>* values = nullptr;
  bool integer = false;  ///< int32 in the file
};

/// The arrays that the unit holds, in the order of SchemeParams.
std::vector<UnitArray> unit_arrays(const plan::UnitPlan& unit, Side side, const LayerGeometry& layer);

/// Shape that the scheme asks of an array; empty if it needs none.
std::vector<std::int64_t> expected_shape(const std::string& what, const kvrt::Scheme& scheme, const LayerGeometry& layer);

std::string array_name(int layer, Side side, const std::string& what);
/// layers.3.saliency.a
std::string saliency_array_name(int layer, const std::string& what);

/// Channels or coefficients (token groups), channels (blocks) or tokens (channel groups) that share a range; 0 if none do.
std::int64_t group_size(const kvrt::Scheme& scheme, const LayerGeometry& layer);

/// null, or {kind: hadamard, size, base, power}: blocks of `size` = base * power channels are turned together.
nlohmann::ordered_json rotation_json(const kvrt::Scheme& scheme, Side side, const LayerGeometry& layer);

/// Float formats with one static scale: the dequantisation multiplier; 0 for all others.
double static_scale(const plan::UnitPlan& unit);

/// Layers with the same RoPE, as runtime.rope.
nlohmann::ordered_json rope_classes_json(const ModelIdentity& model);

}  // namespace calib::artifacts
