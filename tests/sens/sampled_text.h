#pragma once
// Text of a model's own: sequences sampled from it.

#include <memory>
#include <vector>

#include <c10/core/GradMode.h>

#include "libcalib/base/rng.h"
#include "libcalib/model/streaming_model.h"
#include "libcalib/model/torch_block.h"
#include "libcalib/text/corpus.h"

namespace calib::sens::test_fixture {

inline constexpr std::size_t kSequences = 8, kLength = 168;

/// Sequences sampled from the model itself at temperature 1, token 1 first.
inline std::vector<text::Document> sampled_sequences(const model::StreamingModel& model) {
  const c10::NoGradGuard no_grad;
  const auto embedding = model.load_embedding();
  const auto head = model.load_head();
  std::vector<std::unique_ptr<model::Block>> blocks;
  for (std::int64_t l = 0; l < model.n_layers(); ++l) blocks.push_back(model.load_block(l));
  std::vector<text::Document> out(kSequences);
  for (std::size_t s = 0; s < kSequences; ++s) {
    Rng rng = Rng::for_item(29, s);
    out[s].ids = {1};
    while (out[s].ids.size() < kLength) {
      at::Tensor x = embedding->lookup(out[s].ids);
      for (const auto& block : blocks) {
        const model::Projected p = block->project(x);
        x = block->finish(x, block->attend(block->rotate(p.q_pre), block->rotate(p.k_pre), p.v));
      }
      const at::Tensor p = at::softmax(head->logits(x.slice(0, x.size(0) - 1)).to(at::kDouble), -1).contiguous();
      const double* p_data = p.data_ptr<double>();
      double cumulative = p_data[0];
      const double u = rng.uniform();
      text::TokenId id = 0;
      while (id + 1 < head->vocab_size() && cumulative <= u) cumulative += p_data[++id];
      out[s].ids.push_back(id);
    }
  }
  return out;
}

}  // namespace calib::sens::test_fixture
