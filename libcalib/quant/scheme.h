#pragma once
// Scheme strings for libcalib: kvrt's grammar with calib errors, the checks against a model, presets and candidate lists.

#include <string>
#include <utility>
#include <vector>

#include "kernels/core/scheme.h"
#include "libcalib/base/error.h"
#include "libcalib/base/model_geometry.h"

namespace calib::quant {

/// Throws kUsage naming the part (`where` = the string).
kvrt::Scheme parse_scheme(const std::string& text);

/// Empty, or why the parts of a valid scheme work against each other.
std::string doubtful_parts(const kvrt::Scheme& scheme);

/// The same, without `pre` where the layer has no RoPE: its keys have one frame, which is called post.
kvrt::Scheme in_frame_of(kvrt::Scheme scheme, const LayerGeometry& layer);

/// Throws kUsage (shape: part, head_dim and sizes that would work). Says nothing of the runtime, which need not offer all that can be scored.
void check_scheme(const kvrt::Scheme& scheme, const LayerGeometry& layer, Side side);

/// A named system of FORMATS.md 2: one (K, V) pair with its own sinks and window.
struct Preset {
  std::string name, k, v;
  std::int64_t n_sinks = 4, window = 128;
  std::string note;
  double salient_fraction = 0;  ///< share of the coded tokens in the salient tier
  std::string salient = {};     ///< its scheme
};
/// ", salient 0.2 at fp8e4m3.token.g"; empty without a tier.
std::string tier_text(double salient_fraction, const std::string& salient);
const std::vector<Preset>& presets();
/// Presets that are more than one pair with its sinks and window: known by name, with what they are and the command that makes their plans.
struct NamedOnly {
  const char* name;
  const char* reason;
};
const std::vector<NamedOnly>& presets_by_name_only();
/// "PRESET" or "KSCHEME:VSCHEME" (then default sinks and window). A token group larger than head_dim becomes head_dim, with a note.
/// Warns of doubtful_parts(). Throws kUsage listing the known names.
Preset resolve_preset(const std::string& text, int head_dim, const LogSink& log = {});

/// `--candidates`: "default", preset names, scheme strings, comma-separated. Returns canonical K and V lists without duplicates.
/// Warns of doubtful_parts().
struct CandidateList {
  std::string name;                 ///< "default-2" or "custom"
  std::vector<std::string> k, v;
};
CandidateList resolve_candidates(const std::string& text, const LogSink& log = {});

}  // namespace calib::quant
