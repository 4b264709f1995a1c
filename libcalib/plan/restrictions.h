#pragma once
// What a target leaves of the candidates: sets of schemes per side, tied units, layers kept at 16 bit, a device's formats.

#include <string>
#include <vector>

#include "kernels/core/scheme.h"
#include "libcalib/base/model_geometry.h"

namespace calib::plan {

struct Restrictions {
  std::vector<std::string> k, v;   ///< canonical scheme strings that a side may take; empty = all
  bool same_kv = false;            ///< K and V of a layer share one scheme
  bool one_pair = false;           ///< one (K, V) pair and one window for all layers that are not skipped
  std::vector<int> skip_layers;    ///< layer numbers kept in bf16
  std::string arch;                ///< device capability (`sm_86`), empty = any
  bool any() const { return !k.empty() || !v.empty() || same_kv || one_pair || !skip_layers.empty() || !arch.empty(); }
};

/// Parses a list of scheme strings, prints them canonically. Throws kUsage naming `option` and the part.
std::vector<std::string> scheme_list(const std::vector<std::string>& texts, const std::string& option);

/// Throws kUsage listing the known device capabilities.
void check_arch(const std::string& arch);
/// Empty if devices of this capability (empty = any) have instructions for the format; else why not.
std::string missing_on_arch(const std::string& arch, kvrt::Format format);

/// Restrictions in the spelling of kvplan's options, "--same-kv --skip-layers 0,1"; empty without any. A list of more than three is
/// counted, not named: "--allow-k (20 schemes)".
std::string restrictions_text(const Restrictions& restrictions);

}  // namespace calib::plan
