#pragma once
// What a contender of `kvsens evaluate` keeps of each layer, and what that costs. No Torch.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/core/tiers.h"
#include "libcalib/quant/row_rotation.h"
#include "libcalib/sens/candidates.h"
#include "libcalib/sens/eval_result.h"

namespace calib::sens {

/// One layer's cache: how K and V are stored. An unset side is exact and not even rounded.
struct LayerChange {
  std::optional<UnitCandidate> k, v;
  kvrt::Tiers tiers;
  std::shared_ptr<const quant::SalientTier> salient;  ///< set where the tiers hold salient tokens
  // Beyond the schemes, and measured in place alone:
  std::int64_t scale_refresh = 0;  ///< tokens between two refreshes of static ranges (quant/scale_refresh.h), 0 = none
  std::shared_ptr<const quant::RowRotation> k_rotation, v_rotation;  ///< in front of the codec; null = none
  float value_carry = 0;           ///< share of a value row's error that the next row takes over (quant/carried_error.h)
  double key_noise = 0;            ///< sigma of noise_contender(); k is unset then
  std::uint64_t noise_seed = 0;
};
/// Empty, or what of a layer no runtime and no reply does, for the message that says so: "raising static ranges", …
std::string only_in_place(const LayerChange& layer);

struct Contender {
  EvalContender header;              ///< name, kind, schemes, sinks, window, effective bits
  std::vector<LayerChange> layers;   ///< as ModelIdentity::layers
};

/// All bytes that the runtime allocates for one sequence of n_tokens, times 8, over the number of K and V elements it holds.
/// Requires: both sides of every layer set.
double effective_bits(const ModelIdentity& model, const std::vector<LayerChange>& layers, std::int64_t n_tokens);

/// Sinks and window for KSCHEME:VSCHEME pairs; presets bring their own.
struct PairTiers {
  std::int64_t n_sinks = 4, window = 128;
};

/// A preset or "KSCHEME:VSCHEME" on every layer. `saliency` is asked for presets with a salient tier. Throws: kUsage (unknown name, shape,
/// a scheme without the constants it needs, a tier without statistics).
Contender uniform_contender(const std::string& text, const ModelIdentity& model, const PairTiers& pair_tiers, const ParamsProvider& params,
                            const LogSink& log = {}, const SaliencyProvider& saliency = {});

/// Static ranges that are raised every `interval` tokens, in the layers that have such. False if none does.
bool refresh_scales(std::vector<LayerChange>& layers, std::int64_t interval);
/// The same with refresh_scales(), named "… refresh 512"; empty if no range of it can be raised.
std::optional<Contender> refreshed_contender(const Contender& contender, const ModelIdentity& model, std::int64_t interval);

/// The matrix that takes the place of `had` in a unit.
using RotationProvider = std::function<std::shared_ptr<const quant::RowRotation>(std::size_t layer_idx, Side side)>;

/// The contender named "… rotate query", with such matrices in the place of `had`: on keys and values where `query`, on keys, then before
/// RoPE, where `grouped`. Empty if it has no such unit. Throws: kUsage naming unit and reason for one that cannot be turned (geometry,
/// calibrated constants, a format that is not kept before RoPE), kUnsupported (a salient tier).
std::optional<Contender> rotated_contender(const Contender& contender, const ModelIdentity& model, quant::RotationKind kind, const RotationProvider& rotations);

/// The contender named "… carry 0.25", its value rows taking over a share of the error before them. Empty if no values of it can.
/// Throws kUnsupported (a salient tier).
std::optional<Contender> carrying_contender(const Contender& contender, double share);

/// Every post-RoPE key k, sinks and the newest too, as k + sigma (|k| / sqrt(head_dim)) N(0, I); V exact. The normal numbers depend on
/// (seed, layer, position) alone: the same at every sigma and in every document. n_sinks: rows that are not scored.
Contender noise_contender(const ModelIdentity& model, double sigma, std::uint64_t seed, std::int64_t n_sinks);

/// int2.token.g on all K, V exact, sinks 0, window 2: must be far above the noise floor (METHODS.md 9).
Contender negative_control(const ModelIdentity& model);

}  // namespace calib::sens
