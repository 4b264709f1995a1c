#pragma once
// Calibration text -> documents of token ids (CASES.md 7).

#include <cstdint>
#include <string>
#include <vector>

#include "libcalib/base/error.h"
#include "libcalib/base/model_geometry.h"
#include "libcalib/text/tokenizer.h"

namespace calib::text {

/// One window of at most seq_len tokens: own positions from 0, BOS first if the tokenizer adds one.
struct Document {
  std::vector<TokenId> ids;
  int file_idx = 0;
};

struct CorpusRequest {
  std::vector<std::string> data;    ///< F[:share=0.3,num=64,skip=10]; .txt .jsonl .ids, "-" = standard input
  std::int64_t seq_len = 2048;
  std::int64_t num_samples = 0;     ///< 0 = unset: up to default_samples windows
  std::int64_t default_samples = 128;
  bool first = false;               ///< the first N windows instead of evenly spaced ones
  std::string chat_template;        ///< "", chatml, llama3, plain
  std::int64_t max_positions = 0;   ///< of the model; seq_len beyond it is kUsage
};

struct Corpus {
  std::vector<Document> documents;
  DataIdentity identity;

  /// Tokens of the longest document.
  std::int64_t longest() const;
};

/// Throws: kUsage, kNotFound, kFormat ("no usable text", bad rows with line numbers), kInfeasible ("have 10 tokens, need 2048 (4 × 512)"),
/// kUnsupported (chat rows without --chat-template).
Corpus load_corpus(const CorpusRequest& request, const Tokenizer& tokenizer, const LogSink& log = {});

}  // namespace calib::text
