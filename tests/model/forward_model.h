#pragma once
// Runs one token sequence through a model and keeps everything, for comparisons.

#include <string>
#include <vector>

#include "libcalib/model/streaming_model.h"
#include "libcalib/model/streaming_runner.h"

namespace calib::test {

struct CapturedLayer {
  std::vector<float> q_pre, k_pre, q_post, k_post, v, hidden;  ///< [T, heads, D], [T, C]
};
struct Forward {
  std::vector<CapturedLayer> layers;
  std::vector<float> logits;  ///< [T, V]; empty without a head
  std::int64_t vocab = 0;
  model::ReferenceNll nll;
  double mean_nll() const;
  std::int64_t argmax(std::int64_t row) const;
};

/// Layers and NLL come from run_streaming(), logits from the blocks called one by one.
Forward run_forward(const model::StreamingModel& model, const std::vector<text::TokenId>& ids);
Forward run_forward(const std::string& path, const std::vector<text::TokenId>& ids);

/// Logits of the last position only.
std::vector<float> last_logits(const model::StreamingModel& model, const std::vector<text::TokenId>& ids);

/// Sum of the squares of one layer's W_o.
double squared_norm_of_output_projection(const model::StreamingModel& model, std::int64_t layer);

/// Loads the head and drops it: what load_head() throws comes out.
void load_and_drop_head(const model::StreamingModel& model);

/// max |a - b| / max |b|; infinity if the sizes differ.
double relative_difference(const std::vector<float>& a, const std::vector<float>& b);

}  // namespace calib::test
