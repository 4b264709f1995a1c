#pragma once
// Attention through the packed cache of kvrt: every token is appended and decoded one by one, as a runtime does it. No Torch.
// Legend: T tokens, Q query heads, H KV heads, D head_dim.

#include <cstdint>
#include <memory>

#include "libcalib/base/thread_pool.h"
#include "libcalib/sens/contender.h"

namespace calib::sens {

/// One contender's plan in the runtime, with pages for one sequence of one layer at a time.
class PackedCache {
 public:
  /// longest: tokens of the longest document. `pool` shares the heads of a step among threads and outlives this object.
  /// Throws: kUnsupported naming layer, side and scheme that the runtime cannot store; kInternal (a plan that it refuses).
  PackedCache(const ModelIdentity& model, const Contender& contender, std::int64_t longest, ThreadPool& pool);
  ~PackedCache();
  PackedCache(PackedCache&&) noexcept;

  /// One document through one layer, from an empty cache. layer_idx: position in ModelIdentity::layers. q_pre: [T, Q, D], k_pre, v:
  /// [T, H, D], all fp32 and before RoPE, which the runtime applies; o: [T, Q, D]. Row t sees tokens 0..t.
  /// Throws: kNumeric for values that are not finite, naming how many.
  void attend(std::size_t layer_idx, std::int64_t n_tokens, const float* q_pre, const float* k_pre, const float* v, float* o);

  /// Pages of one sequence and layer, for as many tokens as it may come to hold.
  struct Sequence;
  std::shared_ptr<Sequence> begin(std::size_t layer_idx, std::int64_t capacity);
  /// attend() for the next tokens of a sequence, which see those before them.
  void extend(Sequence& sequence, std::int64_t n_tokens, const float* q_pre, const float* k_pre, const float* v, float* o);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace calib::sens
