#pragma once
// KVTuner's per-layer precision files (EXPORTS.md 5.11): YAML, layer -> nbits_key, nbits_value. Namespace `exports`: `export` is a keyword.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "libcalib/plan/planner.h"

namespace calib::exports {

/// How the codes of a file are to be read, which the file itself does not say.
enum class KvtunerMode {
  kPerToken,  ///< both sides int{b}.token.g; residual 0: window 0
  kKivi,      ///< K int{b}.channel.g32, V int{b}.token.g32; residual 32: window 32
};
/// "pertoken" or "kivi". Throws kUsage naming `option`.
KvtunerMode parse_kvtuner_mode(const std::string& option, const std::string& text);
const char* kvtuner_mode_name(KvtunerMode mode);

/// Widths of one layer, of its widest head where the file gives each head its own.
struct KvtunerLayer {
  int k_bits = 0, v_bits = 0;  ///< 2, 4 or 8
  bool uneven = false;         ///< heads differed
  bool operator==(const KvtunerLayer&) const = default;
};
struct KvtunerBits {
  std::vector<KvtunerLayer> layers;  ///< as the model's layers
  bool per_head = false;
  /// (sum K + sum V) / 2L: KVTuner's own figure, without scales and minima.
  double mean_bits() const;
  std::size_t n_uneven() const;
};

inline constexpr std::size_t kMostKvtunerBytes = std::size_t{1} << 20, kMostKvtunerLine = std::size_t{1} << 16;

/// Every layer of the model once, in any order. Untrusted text: at most kMostKvtunerBytes in lines of kMostKvtunerLine, three levels of
/// maps, plain whole numbers in decimal, no anchors, tags or second document.
/// Throws, each with `where`, line and key: kFormat (not that, a layer, head or field twice, an unknown field), kMismatch (a layer or head
/// that the model does not have, or that the file lacks), kUnsupported (a width that is not 2, 4 or 8).
KvtunerBits parse_kvtuner(std::string_view yaml, const std::string& where, const std::vector<LayerGeometry>& model);

/// The plan that KVTuner runs with these widths: sinks 0, the mode's schemes and window. Throws as plan::imported_plan().
plan::Plan kvtuner_plan(const ModelIdentity& model, const KvtunerBits& bits, KvtunerMode mode, const plan::Accounting& accounting,
                        const plan::EvidenceByLayer& evidence);

}  // namespace calib::exports
