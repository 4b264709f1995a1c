#pragma once
// Unicode regular expressions of tokenizers (PCRE2 with UTF and UCP), written in the dialect of tokenizer.json (Oniguruma).

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace calib::text {

/// Byte range of one match.
struct Match {
  std::size_t begin = 0, end = 0;
};

class Regex {
 public:
  /// Translates the places where Oniguruma and PCRE2 read the same text differently (`\s`, `\w`, `\uHHHH`, scripts).
  /// Throws: kUnsupported naming the expression and the part (nested classes, `&&`, `\h`, `\b`, …) that has no equal.
  Regex(std::string_view oniguruma, const std::string& where);
  /// A pattern that matches exactly `text`.
  static Regex literal(std::string_view text, const std::string& where);

  /// First non-empty match at or after `from`. Requires: valid UTF-8; `from` on a character border.
  std::optional<Match> find(std::string_view text, std::size_t from) const;

 private:
  struct Code;
  explicit Regex(std::shared_ptr<const Code> code) : code_(std::move(code)) {}
  static std::shared_ptr<const Code> compile(const std::string& pattern, std::string_view written, const std::string& where);
  std::shared_ptr<const Code> code_;
};

/// The PCRE2 spelling of an Oniguruma expression; see Regex.
std::string translate_oniguruma(std::string_view pattern, const std::string& where);

}  // namespace calib::text
