#pragma once
// Tokens that are found in text as whole strings before anything else looks at it.

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "libcalib/text/tokenizer.h"

namespace calib::text {

struct AddedToken {
  TokenId id = 0;
  std::string content;
  bool single_word = false;  ///< not inside a word
  bool lstrip = false;       ///< takes the white space before it
  bool rstrip = false;       ///< takes the white space behind it
  bool normalized = false;   ///< looked for in normalised text
  bool special = false;      ///< a control token: literal text unless special tokens are asked for
};

/// A stretch of text, or one token in its place.
struct Segment {
  std::string_view text;
  std::optional<TokenId> id;
};

/// A set of added tokens, searched leftmost first, longest first.
class AddedTokens {
 public:
  /// A content given twice keeps the first.
  void add(AddedToken token);
  bool empty() const noexcept { return tokens_.empty(); }
  const std::vector<AddedToken>& tokens() const noexcept { return tokens_; }
  const AddedToken* find(std::string_view content) const;
  /// Cuts text at tokens. Special ones count only with `parse_special`; what lies inside one that does not count is not
  /// searched either. Requires: valid UTF-8. The views point into `text`.
  std::vector<Segment> split(std::string_view text, bool parse_special) const;

 private:
  const AddedToken* longest_at(std::string_view text, std::size_t at) const;
  std::vector<AddedToken> tokens_;
  std::unordered_map<std::string, std::size_t> by_content_;
  std::array<std::vector<std::size_t>, 256> lengths_;  ///< of contents by first byte, longest first
};

}  // namespace calib::text
