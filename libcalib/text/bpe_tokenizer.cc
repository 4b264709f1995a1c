#include "libcalib/text/bpe_tokenizer.h"

#include <algorithm>
#include <charconv>

#include "libcalib/base/utf8.h"
#include "libcalib/text/byte_level.h"

namespace calib::text {
namespace {

// Words repeat; longer pieces hardly do, and their ids would only fill memory.
constexpr std::size_t kMaxCachedBytes = 32, kMaxCachedWords = 1 << 17;

bool is_valid_utf8(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    if (static_cast<unsigned char>(text[at]) < 0x80) {
      ++at;
      continue;
    }
    const Utf8Step step = decode_utf8(text, at);
    if (!step.valid) return false;
    at += step.size;
  }
  return true;
}

struct WordHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view word) const { return std::hash<std::string_view>{}(word); }
};

}  // namespace

// One call of encode(): its ids and what it has learnt about repeated words.
class BpeTokenizer::Run {
 public:
  explicit Run(const TokenizerParts& parts) : parts_(parts), cuts_(parts.model.can_cut()) {}

  void encode(std::string_view text, bool parse_special) {
    for (const Segment& outer : parts_.raw_tokens.split(text, parse_special)) {
      if (outer.id) {
        ids.push_back(*outer.id);
        continue;
      }
      const std::size_t base = static_cast<std::size_t>(outer.text.data() - text.data());
      const std::string changed = parts_.normalizer.empty() ? std::string() : parts_.normalizer.apply(outer.text);
      const std::string_view normal = parts_.normalizer.empty() ? outer.text : std::string_view(changed);
      if (parts_.normalized_tokens.empty()) {
        encode_literal(normal, base, base == 0);
        continue;
      }
      for (const Segment& inner : parts_.normalized_tokens.split(normal, parse_special)) {
        const std::size_t at = base + static_cast<std::size_t>(inner.text.data() - normal.data());
        if (inner.id) ids.push_back(*inner.id);
        else encode_literal(inner.text, at, at == 0);
      }
    }
  }

  std::vector<TokenId> ids;

 private:
  void encode_literal(std::string_view text, std::size_t base, bool at_text_start) {
    parts_.pre_tokenizer.run(text, at_text_start, [&](std::string_view piece, std::size_t offset) { encode_piece(piece, base + offset); });
  }

  void encode_piece(std::string_view piece, std::size_t offset) {
    if (!cuts_) return encode_word(piece, offset);
    for (std::size_t at = 0; at < piece.size();) {
      const std::size_t size = parts_.model.first_cut(piece.substr(at));
      encode_word(piece.substr(at, size), offset + at);
      at += size;
    }
  }

  void encode_word(std::string_view piece, std::size_t offset) {
    if (piece.size() > kMaxCachedBytes) return parts_.model.encode(piece, offset, scratch_, ids);
    if (const auto it = words_.find(piece); it != words_.end()) {
      ids.insert(ids.end(), it->second.begin(), it->second.end());
      return;
    }
    const std::size_t first = ids.size();
    parts_.model.encode(piece, offset, scratch_, ids);
    if (words_.size() < kMaxCachedWords) words_.emplace(piece, std::vector<TokenId>(ids.begin() + static_cast<std::ptrdiff_t>(first), ids.end()));
  }

  const TokenizerParts& parts_;
  const bool cuts_;  ///< without a pre-tokenizer the piece is the whole text; in parts its words repeat
  BpeModel::Scratch scratch_;
  std::unordered_map<std::string, std::vector<TokenId>, WordHash, std::equal_to<>> words_;
};

BpeTokenizer::BpeTokenizer(TokenizerParts parts) : parts_(std::move(parts)) {
  for (const auto& [id, text] : parts_.texts) vocab_size_ = std::max<std::int64_t>(vocab_size_, std::int64_t{id} + 1);
  for (const auto& [id, text] : parts_.added_texts) vocab_size_ = std::max<std::int64_t>(vocab_size_, std::int64_t{id} + 1);
  sha256_ = parts_.sha256;
}

std::vector<TokenId> BpeTokenizer::encode(std::string_view utf8, bool parse_special) const {
  Run run(parts_);
  if (is_valid_utf8(utf8)) run.encode(utf8, parse_special);
  else run.encode(to_valid_utf8(utf8), parse_special);
  return std::move(run.ids);
}

std::string BpeTokenizer::piece(TokenId id) const {
  // An id may be a vocabulary entry and an added token at once (tokenizers/minimal of the test data): the entry is what text gives.
  const auto entry = parts_.texts.find(id);
  const auto added = parts_.added_texts.find(id);
  if (added != parts_.added_texts.end() && (entry == parts_.texts.end() || entry->second == added->second)) return added->second;
  if (entry == parts_.texts.end())
    fail(ErrorKind::kFormat, parts_.where, "token id {} is not in the vocabulary (ids below {})", id, vocab_size_);
  const std::string& text = entry->second;
  switch (parts_.spelling) {
    case PieceSpelling::kText: return text;
    case PieceSpelling::kByteAlphabet: return bytes_of_chars(text);
    case PieceSpelling::kSentencePiece: break;
  }
  if (text.size() == 6 && text.starts_with("<0x") && text.ends_with('>')) {
    int byte = 0;
    if (std::from_chars(text.data() + 3, text.data() + 5, byte, 16).ptr == text.data() + 5) return std::string(1, static_cast<char>(byte));
  }
  static const std::string_view visible_space = "\xE2\x96\x81";
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    if (text.compare(at, visible_space.size(), visible_space) == 0) {
      out += ' ';
      at += visible_space.size();
    } else {
      out += text[at++];
    }
  }
  return out;
}

}  // namespace calib::text
