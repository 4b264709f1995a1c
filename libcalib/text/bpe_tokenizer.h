#pragma once
// The tokenizer that both file formats build: added tokens, normalizer, pre-tokenizer, BPE.

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "libcalib/text/added_tokens.h"
#include "libcalib/text/bpe_model.h"
#include "libcalib/text/normalizer.h"
#include "libcalib/text/pre_tokenizer.h"
#include "libcalib/text/tokenizer.h"

namespace calib::text {

/// How piece() turns a vocabulary entry back into bytes.
enum class PieceSpelling { kText, kByteAlphabet, kSentencePiece };

struct TokenizerParts {
  explicit TokenizerParts(std::string source) : where(source), model(std::move(source)) {}
  std::string where;               ///< file, for messages
  AddedTokens raw_tokens;          ///< found in the text as it is
  AddedTokens normalized_tokens;   ///< found in normalised text; their contents are normalised
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  BpeModel model;
  std::unordered_map<TokenId, std::string> texts;        ///< of vocabulary entries
  std::unordered_map<TokenId, std::string> added_texts;  ///< of added tokens
  PieceSpelling spelling = PieceSpelling::kText;
  std::optional<TokenId> bos, eos;
  bool adds_bos = false;
  std::string sha256;
};

class BpeTokenizer : public Tokenizer {
 public:
  explicit BpeTokenizer(TokenizerParts parts);
  std::vector<TokenId> encode(std::string_view utf8, bool parse_special) const override;
  std::string piece(TokenId id) const override;
  std::int64_t vocab_size() const override { return vocab_size_; }
  std::optional<TokenId> bos() const override { return parts_.bos; }
  std::optional<TokenId> eos() const override { return parts_.eos; }
  bool adds_bos() const override { return parts_.adds_bos; }

 private:
  class Run;
  TokenizerParts parts_;
  std::int64_t vocab_size_ = 0;
};

}  // namespace calib::text
