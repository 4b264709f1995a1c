#include "libcalib/text/added_tokens.h"

#include <algorithm>

#include "libcalib/base/utf8.h"
#include "libcalib/text/regex.h"

namespace calib::text {
namespace {

bool is_word_character(std::string_view text, std::size_t at) {
  static const Regex word(R"(\w)", "word characters");
  const auto match = word.find(text.substr(at, decode_utf8(text, at).size), 0);
  return match.has_value();
}

bool is_space(char32_t c) {
  return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
         c == 0x202F || c == 0x205F || c == 0x3000;
}

std::size_t previous_start(std::string_view text, std::size_t at) {
  do --at;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80);
  return at;
}

bool touches_word(std::string_view text, std::size_t begin, std::size_t end) {
  return (begin > 0 && is_word_character(text, previous_start(text, begin))) || (end < text.size() && is_word_character(text, end));
}

}  // namespace

void AddedTokens::add(AddedToken token) {
  if (token.content.empty() || !by_content_.try_emplace(token.content, tokens_.size()).second) return;
  auto& lengths = lengths_[static_cast<unsigned char>(token.content[0])];
  const std::size_t length = token.content.size();
  if (std::find(lengths.begin(), lengths.end(), length) == lengths.end()) {
    lengths.push_back(length);
    std::sort(lengths.rbegin(), lengths.rend());
  }
  tokens_.push_back(std::move(token));
}

const AddedToken* AddedTokens::find(std::string_view content) const {
  const auto it = by_content_.find(std::string(content));
  return it == by_content_.end() ? nullptr : &tokens_[it->second];
}

const AddedToken* AddedTokens::longest_at(std::string_view text, std::size_t at) const {
  for (const std::size_t length : lengths_[static_cast<unsigned char>(text[at])])
    if (at + length <= text.size())
      if (const AddedToken* token = find(text.substr(at, length))) return token;
  return nullptr;
}

std::vector<Segment> AddedTokens::split(std::string_view text, bool parse_special) const {
  std::vector<Segment> segments;
  std::size_t done = 0;
  for (std::size_t at = 0; at < text.size();) {
    const AddedToken* token = longest_at(text, at);
    if (!token) {
      ++at;
      continue;
    }
    std::size_t begin = at, end = at + token->content.size();
    at = end;
    if ((token->special && !parse_special) || (token->single_word && touches_word(text, begin, end))) continue;
    if (token->lstrip)
      while (begin > done && is_space(decode_utf8(text, previous_start(text, begin)).scalar)) begin = previous_start(text, begin);
    if (token->rstrip)
      while (end < text.size() && is_space(decode_utf8(text, end).scalar)) end += decode_utf8(text, end).size;
    begin = std::max(begin, done);
    if (begin > done) segments.push_back({text.substr(done, begin - done), std::nullopt});
    segments.push_back({text.substr(begin, end - begin), token->id});
    done = end;
    at = std::max(at, done);
  }
  if (done < text.size()) segments.push_back({text.substr(done), std::nullopt});
  return segments;
}

}  // namespace calib::text
