#pragma once
// Conversations as token ids. What a template prints is special where the model has a token for it; what a message says is literal.

#include <string>
#include <vector>

#include "libcalib/text/jsonl_reader.h"
#include "libcalib/text/tokenizer.h"

namespace calib::text {

/// chatml: "<|im_start|>ROLE\nCONTENT<|im_end|>\n" for every message.
/// llama3: "<|start_header_id|>ROLE<|end_header_id|>\n\nCONTENT<|eot_id|>", content without white space at its ends.
/// plain:  "ROLE: CONTENT\n\n", no special tokens.
/// None prints BOS: documents get theirs where the tokenizer adds one.
class ChatTemplate {
 public:
  /// Throws: kUsage for an unknown name; kMismatch naming the special token that the tokenizer lacks.
  ChatTemplate(const std::string& name, const Tokenizer& tokenizer);
  std::vector<TokenId> encode(const std::vector<ChatMessage>& messages) const;

 private:
  enum class Kind { kChatml, kLlama3, kPlain };
  TokenId special(const std::string& text) const;
  Kind kind_ = Kind::kPlain;
  std::string name_;
  const Tokenizer& tokenizer_;
  TokenId open_ = 0, header_end_ = 0, close_ = 0;
};

}  // namespace calib::text
