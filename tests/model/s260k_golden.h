#pragma once
// What the restored stories260K gives: greedy continuation of token 1 and the maxima of its keys and values on it.

#include <array>
#include <vector>

#include "libcalib/text/tokenizer.h"

namespace calib::test {

inline const std::vector<text::TokenId> kS260kIds = {
    1,   403, 407, 261, 378, 432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426, 338, 401, 396, 267, 337, 410, 408, 419, 292, 411,
    322, 265, 282, 295, 433, 426, 385, 328, 432, 358, 394, 261, 370, 432, 352, 266, 268, 388, 426, 338, 391, 266, 267, 337, 335, 312,
    432, 398, 312, 286, 267, 414, 270, 333, 415, 426, 13,  438, 310, 439, 419, 357, 336, 432, 313, 438, 310, 432, 278, 316, 439, 419,
    298, 414, 267, 265, 282, 295, 433, 426, 436, 317, 286, 296, 418, 269, 279, 292, 416, 439, 413, 409, 416, 327, 263, 415, 294, 267,
    400, 426, 338, 336, 432, 313, 442, 391, 267, 337, 335, 364, 420, 268, 388, 432, 398, 359, 280, 303, 439, 413, 272, 417};
inline constexpr double kS260kNll = 0.48796;
inline constexpr double kS260kProbabilityOf403 = 0.78369;

struct Absmax {
  double k_pre, k_post, v;
};
inline constexpr std::array<Absmax, 5> kS260kAbsmax = {{{23.83905, 23.88700, 1.51724},
                                                        {26.29685, 26.30304, 1.34295},
                                                        {22.07531, 22.24399, 2.18082},
                                                        {26.35429, 26.35788, 2.44549},
                                                        {18.06080, 18.01570, 3.60152}}};

}  // namespace calib::test
