#pragma once
// INTERNAL to sens/: hidden states of many documents and runs, blocks over changed caches, and logits compared in row tiles.
// Legend: T tokens, C hidden size, V vocabulary.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "libcalib/model/hidden_store.h"
#include "libcalib/model/streaming_model.h"
#include "libcalib/model/torch_block.h"
#include "libcalib/sens/contender.h"
#include "libcalib/sens/evaluate.h"
#include "libcalib/sens/kld_block.h"
#include "libcalib/sens/packed_cache.h"
#include "libcalib/text/corpus.h"

namespace calib::sens {

/// Query rows of one attention tile; a reference and what is compared with it use the same, so that only the change remains.
inline constexpr std::int64_t kQueryTile = 128;

/// Dense fp32 on the CPU.
at::Tensor on_cpu(const at::Tensor& x);

/// [slot, document] -> [T, C] in the compute dtype; a slot is a layer of a walk, a contender or a label draw.
class DocumentStates {
 public:
  DocumentStates(const std::vector<text::Document>& documents, std::int64_t n_slots, std::int64_t hidden_size, at::TensorOptions options,
                 std::int64_t memory_limit_bytes);
  void put(std::int64_t slot, std::size_t document, const at::Tensor& x);
  at::Tensor get(std::int64_t slot, std::size_t document) const;
  std::int64_t spilled_bytes() const { return store_.spilled_bytes(); }

 private:
  std::int64_t row(std::int64_t slot, std::size_t document) const { return slot * first_row_.back() + first_row_[document]; }
  std::vector<std::int64_t> first_row_;  ///< per document, then the total
  std::int64_t hidden_size_;
  at::TensorOptions options_;
  model::HiddenStore store_;
};

/// One block over one document, x: [T, C] -> [T, C]. `change` null: exact cache. Attention runs in tiles of query_tile rows.
at::Tensor run_block(const model::Block& block, const at::Tensor& x, const LayerChange* change, std::int64_t query_tile, ThreadPool& pool);
/// The same through the runtime's pages, token by token. layer_idx: position in ModelIdentity::layers.
at::Tensor run_block_packed(const model::Block& block, const at::Tensor& x, std::size_t layer_idx, PackedCache& cache);

/// One run of a walk: what its caches hold, and the rows of its attention tiles.
struct WalkRun {
  const Contender* contender = nullptr;  ///< null: exact caches
  std::int64_t query_tile = kQueryTile;
  bool packed = false;  ///< through the runtime's pages
};

/// Every document through all blocks, once a run; each block is loaded once. References must outlive it.
class JointWalk {
 public:
  using BeforeBlock = std::function<void(const model::Block& block, std::size_t layer, std::size_t document)>;
  /// Requires: a first run, exact.
  JointWalk(const model::StreamingModel& model, const std::vector<text::Document>& documents, std::vector<WalkRun> runs, std::int64_t hidden_memory_bytes,
            ThreadPool& pool, const EvaluateProgressFn& progress);
  /// `before`: while the states of that document are still the block's inputs.
  void through_blocks(const BeforeBlock& before = {});
  /// [T, C], inputs of the block under way; final states after through_blocks().
  at::Tensor states(std::size_t run, std::size_t document) const { return states_.get(static_cast<std::int64_t>(run), document); }
  /// Reports tokens as done; the head's share of the total, one for each token and run, is the caller's.
  void advance(std::int64_t tokens);

 private:
  const model::StreamingModel& model_;
  const std::vector<text::Document>& documents_;
  std::vector<WalkRun> runs_;
  ThreadPool& pool_;
  const EvaluateProgressFn& progress_;
  DocumentStates states_;
  std::vector<std::unique_ptr<PackedCache>> packed_;  ///< per run; null: exact, or fake-quantised
  std::int64_t done_ = 0, total_ = 0;
};

/// K and V of one document as its rows read them under `change`.
struct ChangedCache {
  at::Tensor k_coded, k_exact, v_coded, v_exact;  ///< [T, H, D] fp32, post-RoPE
};
ChangedCache change_cache(const model::Block& block, const at::Tensor& k_pre, const at::Tensor& k_post, const at::Tensor& v,
                          const LayerChange& change, ThreadPool& pool);

/// Rows [first, end) of one document compared: reference final states against each contender's. Returns [contender][row].
/// labels[t] is the next token of row t. Throws kNumeric naming contender and row of the first non-finite value.
std::vector<std::vector<KldRow>> compare_final_states(const model::Head& head, const at::Tensor& reference, const std::vector<at::Tensor>& contenders,
                                                      const std::vector<std::string>& names, const std::vector<text::TokenId>& ids,
                                                      std::int32_t document, std::int64_t first, std::int64_t end, ThreadPool& pool);

/// Greedy choice of every row of final states x: [n, C], lowest id on ties. Throws kNumeric naming the run.
std::vector<text::TokenId> greedy_choices(const model::Head& head, const at::Tensor& x, const std::string& run_name);

}  // namespace calib::sens
