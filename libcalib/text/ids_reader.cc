#include "libcalib/text/ids_reader.h"

#include <charconv>

#include "libcalib/base/error.h"
#include "libcalib/base/utf8.h"

namespace calib::text {
namespace {

constexpr std::size_t kMaxDetails = 1000, kMaxShown = 40;

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\v' || c == '\f'; }

}  // namespace

IdLines read_id_lines(std::string_view text, std::int64_t vocab_size, const std::string& where) {
  IdLines out;
  std::vector<std::string> malformed, outside;
  std::size_t n_malformed = 0, n_outside = 0, n_line = 0;
  for (std::size_t at = 0; at < text.size();) {
    const auto end = std::min(text.find('\n', at), text.size());
    const std::string_view line = text.substr(at, end - at);
    ++n_line;
    at = end + 1;
    const std::size_t first = out.ids.size();
    for (std::size_t i = 0; i < line.size();) {
      if (is_blank(line[i])) {
        ++i;
        continue;
      }
      std::size_t stop = i;
      while (stop < line.size() && !is_blank(line[stop])) ++stop;
      const std::string_view word = line.substr(i, stop - i);
      i = stop;
      std::int64_t id = 0;
      const auto [parsed, error] = std::from_chars(word.data(), word.data() + word.size(), id);
      const auto place = [&] { return fmt::format("line {}: {}", n_line, to_valid_utf8(word.substr(0, kMaxShown))); };
      if (error == std::errc::invalid_argument || parsed != word.data() + word.size()) {
        if (n_malformed++ < kMaxDetails) malformed.push_back(place());
      } else if (error != std::errc() || id < 0 || id >= vocab_size) {
        if (n_outside++ < kMaxDetails) outside.push_back(place());
      } else {
        out.ids.push_back(static_cast<TokenId>(id));
      }
    }
    if (out.ids.size() > first) out.lines.emplace_back(first, out.ids.size());
  }
  if (n_malformed > 0)
    throw Error(ErrorKind::kFormat, where,
                fmt::format("{} words are not token ids, the first is {}; expected decimal numbers, one document a line", n_malformed, malformed[0]),
                malformed);
  if (n_outside > 0)
    throw Error(ErrorKind::kMismatch, where, fmt::format("{} ids are not in the vocabulary of {} entries, the first is {}", n_outside, vocab_size, outside[0]),
                outside);
  return out;
}

}  // namespace calib::text
