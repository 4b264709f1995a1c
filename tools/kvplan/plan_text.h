#pragma once
// Parts of what several sub-commands print.

#include <string>

#include "libcalib/plan/plan.h"

namespace calib::tools {

/// "llama SmolLM2.gguf, 30 layers, 4.48 effective bits at T=8192, 50.6 MiB, sinks 4, window 128".
std::string headline(const plan::Plan& plan);

/// "predicted KL 0.0041 +- 0.0003 nats (fisher_vec, unfitted), proven optimal"; empty without a prediction.
std::string prediction_line(const plan::Plan& plan);

/// Eight columns, one for every two bits, an odd bit as a half step: 3 is "#-......".
std::string bits_bar(int bits);

/// Budget with its unit: "4.5 effective bits", "12GiB".
std::string limit_text(const plan::Request& request);

}  // namespace calib::tools
