#pragma once
// Constants of one (unit, scheme): what a plan stores beside the scheme string.

#include <array>
#include <string_view>
#include <utility>
#include <vector>

namespace calib::quant {

/// Fitted from statistics; empty vectors where the scheme needs none. Names, shapes and meaning: kernels/core/plan_constants.h.
/// Legend: H KV heads, D head_dim, r rank.
struct SchemeParams {
  std::vector<float> mean;              ///< [H, D] (center), in the scheme's frame
  std::vector<float> smooth;            ///< [H, D]
  std::vector<float> clip_lo, clip_hi;  ///< tensor [1], head [H], channel.static [H, D]; nvfp4 [1]
  std::vector<float> clip_alpha;        ///< [1] clip over token and channel groups
  std::vector<float> codebook;          ///< [2^b]
  std::vector<float> basis_mean, basis_in, basis;  ///< [H, D], [H, D r], [H, r D] (lowrank)
  std::vector<float> ef_u, ef_order;    ///< [H, D(D+1)/2], [H, D]; the order holds channel numbers
  /// [2^b] at 2 bits: `codebook` by Q-Norm. In no file: it takes the place of `codebook` where held-out text says that it is better.
  std::vector<float> codebook_qnorm;

  /// (name in files, array), in the order of files.
  std::array<std::pair<std::string_view, std::vector<float>*>, 11> arrays() {
    return {{{"mean", &mean}, {"smooth", &smooth}, {"clip_lo", &clip_lo}, {"clip_hi", &clip_hi}, {"clip_alpha", &clip_alpha}, {"codebook", &codebook},
             {"basis_mean", &basis_mean}, {"basis_in", &basis_in}, {"basis", &basis}, {"ef_u", &ef_u}, {"ef_order", &ef_order}}};
  }
  std::array<std::pair<std::string_view, const std::vector<float>*>, 11> arrays() const {
    return {{{"mean", &mean}, {"smooth", &smooth}, {"clip_lo", &clip_lo}, {"clip_hi", &clip_hi}, {"clip_alpha", &clip_alpha}, {"codebook", &codebook},
             {"basis_mean", &basis_mean}, {"basis_in", &basis_in}, {"basis", &basis}, {"ef_u", &ef_u}, {"ef_order", &ef_order}}};
  }
  /// Null for an unknown name.
  std::vector<float>* find(std::string_view name) {
    for (const auto& [known, values] : arrays())
      if (known == name) return values;
    return nullptr;
  }
  bool empty() const {
    for (const auto& [name, values] : arrays())
      if (!values->empty()) return false;
    return true;
  }
  bool operator==(const SchemeParams&) const = default;
};

}  // namespace calib::quant
