#pragma once
// Constants of error feedback (METHODS.md 4.11) from the moment that errors meet.

#include <vector>

namespace calib::quant {

/// One head: channels by descending moment, and the upper triangle U (by rows, in that order) with (H + 0.1 mean diagonal I)^-1 = U^T U.
struct FeedbackTriangle {
  std::vector<float> u;
  std::vector<float> order;
};
/// moment: [dim, dim] symmetric, positive semi-definite; all zeros gives the identity. Throws kNumeric if it is neither.
FeedbackTriangle feedback_triangle(std::vector<double> moment, int dim);

}  // namespace calib::quant
