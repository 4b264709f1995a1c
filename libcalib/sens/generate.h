#pragma once
// Greedy continuations of prompts by the reference and by every contender, and how they compare (METHODS.md 9). No Torch types here.

#include <cstdint>
#include <optional>
#include <vector>

#include "libcalib/base/thread_pool.h"
#include "libcalib/model/streaming_model.h"
#include "libcalib/sens/contender.h"
#include "libcalib/sens/eval_result.h"
#include "libcalib/sens/evaluate.h"
#include "libcalib/text/corpus.h"

namespace calib::sens {

struct GenerateOptions {
  std::int64_t n_tokens = 0;  ///< cap on a reply
  std::int64_t depth = 0;     ///< tokens of a prompt: the first of each document; longer documents are cut, shorter ones left out
  std::optional<text::TokenId> end_token;
  bool packed = false;        ///< contenders' caches are the runtime's packed pages
  std::int64_t cache_memory_bytes = std::int64_t{4} << 30;  ///< prompts are continued together as long as their caches fit
  std::int64_t query_tile = 128;
};

inline constexpr double kCatastrophicRep4 = 0.2, kCatastrophicKld = 1.0;
inline constexpr std::int64_t kLoopsShowTokens = 1024;  ///< shorter replies hide loops

/// The replies themselves, prompt by prompt: `contender` null reads an exact cache. The end token, if met, is a reply's last.
/// Decodes token by token over K and V kept as the contender's next row reads them; a block is coded when it leaves the window.
std::vector<std::vector<text::TokenId>> greedy_replies(const model::StreamingModel& model, const std::vector<text::Document>& prompts,
                                                       const Contender* contender, const GenerateOptions& options, ThreadPool& pool,
                                                       const EvaluateProgressFn& progress = {});

/// What can be refused before any work. Throws: kUsage (depth + n_tokens past the model's positions), kInfeasible (no document of `depth`
/// tokens, or prompts not longer than the sinks), kUnsupported (only_in_place()).
void check_generate(const model::StreamingModel& model, const std::vector<text::Document>& documents, const std::vector<Contender>& contenders,
                    const GenerateOptions& options);

/// Fills generation, reference_replies and the contenders' `generation` of a result of evaluate() over the same contenders. All blocks
/// are in memory at once. Throws: as check_generate(), kMismatch (no head), kNumeric, kUnsupported (packed).
void generate(const model::StreamingModel& model, const std::vector<text::Document>& documents, const std::vector<Contender>& contenders,
              const GenerateOptions& options, ThreadPool& pool, EvalResult* result, const LogSink& log = {}, const EvaluateProgressFn& progress = {});

/// Bytes of the blocks and of the caches held together.
std::int64_t generate_bytes(const model::StreamingModel& model, std::size_t n_prompts, const GenerateOptions& options);

}  // namespace calib::sens
