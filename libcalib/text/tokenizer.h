#pragma once
// Text -> token ids, equal to the reference implementation of each tokenizer family.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "libcalib/base/error.h"

namespace calib::weights {
class GgufMetadata;
}

namespace calib::text {

using TokenId = std::int32_t;

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  /// Ids of raw text, without BOS. Special-token strings in the text are literal text unless `parse_special`.
  /// Throws: kFormat naming byte and offset if the vocabulary cannot express the text.
  virtual std::vector<TokenId> encode(std::string_view utf8, bool parse_special = false) const = 0;
  /// Bytes of one id (special tokens: their text).
  virtual std::string piece(TokenId id) const = 0;
  virtual std::int64_t vocab_size() const = 0;
  virtual std::optional<TokenId> bos() const = 0;
  virtual std::optional<TokenId> eos() const = 0;
  virtual bool adds_bos() const = 0;          ///< a document starts with bos()
  const std::string& sha256() const { return sha256_; }  ///< of tokenizer.json, or of the GGUF vocabulary keys

 protected:
  std::string sha256_;
};

/// Reads FOLDER/tokenizer.json (+ tokenizer_config.json for add_bos_token). Throws: kNotFound, kFormat, kUnsupported (names the part).
std::unique_ptr<Tokenizer> load_tokenizer_json(const std::string& folder, const LogSink& log = {});
/// Vocabulary of a GGUF file: tokenizer.ggml.model gpt2 (pre gpt-2, llama-bpe, qwen2, smollm; absent = gpt-2 with a warning) or llama.
std::unique_ptr<Tokenizer> load_tokenizer_gguf(const weights::GgufMetadata& metadata, const LogSink& log = {});

}  // namespace calib::text
