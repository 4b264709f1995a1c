#pragma once
// Normalizers of tokenizer.json: Prepend, Replace, NFC and sequences of them.

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "libcalib/text/regex.h"

namespace calib::text {

struct PrependText { std::string text; };                    ///< in front of every non-empty segment
struct ReplaceMatches { Regex pattern; std::string text; };  ///< every match, left to right
struct ComposeNfc {};                                        ///< Unicode normalisation form C (utf8proc)

class Normalizer {
 public:
  using Step = std::variant<PrependText, ReplaceMatches, ComposeNfc>;
  void add(Step step) { steps_.push_back(std::move(step)); }
  bool empty() const noexcept { return steps_.empty(); }
  /// Requires: valid UTF-8.
  std::string apply(std::string_view text) const;

 private:
  std::vector<Step> steps_;
};

/// NFC of valid UTF-8, which may contain NUL.
std::string compose_nfc(std::string_view text);

}  // namespace calib::text
