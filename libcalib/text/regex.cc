#include "libcalib/text/regex.h"

#include <cctype>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "libcalib/base/error.h"
#include "libcalib/base/utf8.h"

namespace calib::text {
namespace {

[[noreturn]] void refuse(std::string_view pattern, const std::string& where, std::string_view part) {
  fail(ErrorKind::kUnsupported, where, "regular expression \"{}\" uses {}, which is not offered", to_valid_utf8(pattern), part);
}

bool is_hex(char c) { return std::isxdigit(static_cast<unsigned char>(c)) != 0; }

}  // namespace

std::string translate_oniguruma(std::string_view p, const std::string& where) {
  std::string out;
  bool in_class = false;
  std::size_t class_start = 0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    const char c = p[i];
    if (c != '\\') {
      if (in_class) {
        if (c == '[') refuse(p, where, "a class inside a class");
        if (c == '&' && i + 1 < p.size() && p[i + 1] == '&') refuse(p, where, "a class intersection (&&)");
        if (c == ']' && i > class_start) in_class = false;
      } else if (c == '[') {
        in_class = true;
        class_start = i + 1 < p.size() && p[i + 1] == '^' ? i + 2 : i + 1;
      }
      out += c;
      continue;
    }
    if (++i >= p.size()) refuse(p, where, "a single backslash at its end");
    const char e = p[i];
    switch (e) {
      // PCRE2's \s has U+180E and its \w lacks marks and connectors; Oniguruma follows the Unicode properties.
      case 's': out += "\\p{White_Space}"; break;
      case 'S': out += "\\P{White_Space}"; break;
      case 'w': out += in_class ? "\\p{L}\\p{M}\\p{Nd}\\p{Pc}" : "[\\p{L}\\p{M}\\p{Nd}\\p{Pc}]"; break;
      case 'W':
        if (in_class) refuse(p, where, "\\W inside a class");
        out += "[^\\p{L}\\p{M}\\p{Nd}\\p{Pc}]";
        break;
      case 'd': out += "\\p{Nd}"; break;
      case 'D': out += "\\P{Nd}"; break;
      case 'u': {
        if (i + 4 >= p.size() || !is_hex(p[i + 1]) || !is_hex(p[i + 2]) || !is_hex(p[i + 3]) || !is_hex(p[i + 4]))
          refuse(p, where, "\\u without four hexadecimal digits");
        out += "\\x{" + std::string(p.substr(i + 1, 4)) + "}";
        i += 4;
        break;
      }
      case 'p':
      case 'P': {
        if (i + 1 >= p.size() || p[i + 1] != '{') refuse(p, where, fmt::format("\\{} without braces", e));
        const auto close = p.find('}', i);
        if (close == std::string_view::npos) refuse(p, where, fmt::format("\\{} without a closing brace", e));
        std::string name(p.substr(i + 2, close - i - 2));
        const bool negated = !name.empty() && name[0] == '^';
        if (negated) name.erase(0, 1);
        // Names longer than two letters are scripts here; PCRE2 would read the bare name as script *extensions*.
        if (name.size() > 2) name = "sc:" + name;
        out += std::string("\\") + e + "{" + (negated ? "^" : "") + name + "}";
        i = close;
        break;
      }
      case 'n': case 'r': case 't': case 'f': case 'e': case 'x':
        out += '\\';
        out += e;
        break;
      default:
        if (std::isalnum(static_cast<unsigned char>(e))) refuse(p, where, fmt::format("\\{}", e));
        out += '\\';
        out += e;
    }
  }
  return out;
}

struct Regex::Code {
  pcre2_code* code = nullptr;
  std::string written, where;
  ~Code() { pcre2_code_free(code); }
};

std::shared_ptr<const Regex::Code> Regex::compile(const std::string& pattern, std::string_view written, const std::string& where) {
  auto result = std::make_shared<Code>();
  result->written = to_valid_utf8(written);
  result->where = where;
  int error = 0;
  PCRE2_SIZE offset = 0;
  result->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr);
  if (!result->code)
    fail(ErrorKind::kUnsupported, where, "regular expression \"{}\" is not understood near its character {}", result->written,
         std::min<std::size_t>(offset, pattern.size()));
  pcre2_jit_compile(result->code, PCRE2_JIT_COMPLETE);  // without it matching is slower, not different
  return result;
}

Regex::Regex(std::string_view oniguruma, const std::string& where)
    : code_(compile(translate_oniguruma(oniguruma, where), oniguruma, where)) {}

Regex Regex::literal(std::string_view text, const std::string& where) {
  std::string pattern;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x80 && !std::isalnum(static_cast<unsigned char>(c))) pattern += fmt::format("\\x{{{:02x}}}", c);
    else pattern += c;
  }
  return Regex(compile(pattern, text, where));
}

std::optional<Match> Regex::find(std::string_view text, std::size_t from) const {
  // One match block per thread: making one per call costs more than most matches.
  struct MatchData {
    pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
    ~MatchData() { pcre2_match_data_free(data); }
  };
  thread_local MatchData block;
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  while (from <= text.size()) {
    int rc = pcre2_match(code_->code, subject, text.size(), from, PCRE2_NO_UTF_CHECK, block.data, nullptr);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
      rc = pcre2_match(code_->code, subject, text.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, block.data, nullptr);
    if (rc == PCRE2_ERROR_NOMATCH) return std::nullopt;
    if (rc < 0)
      fail(ErrorKind::kUnsupported, code_->where, "regular expression \"{}\" exceeds the matcher's limits (code {}) after byte {} of a piece of {} bytes",
           code_->written, rc, from, text.size());
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(block.data);
    if (range[1] > range[0]) return Match{range[0], range[1]};
    from = range[1];
    if (from >= text.size()) return std::nullopt;
    from += decode_utf8(text, from).size;
  }
  return std::nullopt;
}

}  // namespace calib::text
