#include "libcalib/text/bpe_model.h"

#include <algorithm>

#include "libcalib/base/utf8.h"
#include "libcalib/text/byte_level.h"

namespace calib::text {
namespace {

std::uint64_t pair_key(TokenId left, TokenId right) {
  return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32) | static_cast<std::uint32_t>(right);
}

std::uint64_t joint_key(char32_t left, char32_t right) { return (static_cast<std::uint64_t>(left) << 32) | right; }

char32_t last_character(std::string_view text) {
  std::size_t at = text.size() - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return decode_utf8(text, at).scalar;
}

// Heap order: the smallest (rank, position) on top.
bool later(const BpeModel::Scratch::Candidate& a, const BpeModel::Scratch::Candidate& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
}

}  // namespace

bool BpeModel::add_entry(const std::string& text, TokenId id) {
  CALIB_CHECK(id >= 0 && id < kMaxVocab);
  const bool fresh = ids_.insert_or_assign(text, id).second;
  if (!text.empty())
    if (const Utf8Step s = decode_utf8(text, 0); s.valid && s.size == text.size() && s.scalar < char_ids_.size()) char_ids_[s.scalar] = id;
  return fresh;
}

TokenId BpeModel::add_character(const std::string& character) {
  if (const auto entry = ids_.find(character); entry != ids_.end()) return entry->second;
  const auto [it, fresh] = characters_.try_emplace(character, kMaxVocab + static_cast<TokenId>(character_texts_.size()));
  if (fresh) character_texts_.push_back(character);
  return it->second;
}

void BpeModel::add_merge(const std::string& left_text, TokenId left, const std::string& right_text, TokenId right, std::int32_t rank, TokenId product) {
  merges_.insert_or_assign(pair_key(left, right), Merge{rank, product});
  joints_.insert(joint_key(last_character(left_text), decode_utf8(right_text, 0).scalar));
}

bool BpeModel::can_cut() const noexcept {
  const bool unknown_can_join = options.fuse_unknown && options.unknown && !(options.byte_fallback && all_bytes_);
  return !options.ignore_merges && !options.byte_alphabet && !unknown_can_join;
}

std::size_t BpeModel::first_cut(std::string_view rest) const {
  Utf8Step step = decode_utf8(rest, 0);
  std::size_t at = step.size;
  while (at < rest.size()) {
    const Utf8Step next = decode_utf8(rest, at);
    if (!joints_.contains(joint_key(step.scalar, next.scalar))) break;
    step = next;
    at += step.size;
  }
  return at;
}

void BpeModel::find_byte_entries() {
  for (int b = 0; b < 256; ++b)
    if (const auto it = ids_.find(fmt::format("<0x{:02X}>", b)); it != ids_.end()) byte_ids_[static_cast<std::size_t>(b)] = it->second;
  all_bytes_ = std::find(byte_ids_.begin(), byte_ids_.end(), kNone) == byte_ids_.end();
}

std::optional<TokenId> BpeModel::find(const std::string& text) const {
  const auto it = ids_.find(text);
  return it == ids_.end() ? std::nullopt : std::optional(it->second);
}

const BpeModel::Merge* BpeModel::find_merge(TokenId left, TokenId right) const {
  const auto it = merges_.find(pair_key(left, right));
  return it == merges_.end() ? nullptr : &it->second;
}

TokenId BpeModel::id_of_character(char32_t scalar, std::string_view text) const {
  if (scalar < char_ids_.size()) {
    if (char_ids_[scalar] != kNone) return char_ids_[scalar];
  } else if (const auto it = ids_.find(std::string(text)); it != ids_.end()) {
    return it->second;
  }
  if (characters_.empty()) return kNone;
  const auto it = characters_.find(std::string(text));
  return it == characters_.end() ? kNone : it->second;
}

void BpeModel::append_unknown(std::string_view character, std::size_t offset, Scratch& scratch, bool& after_unknown) const {
  if (options.byte_fallback) {
    const bool all = std::all_of(character.begin(), character.end(), [&](char c) { return byte_ids_[static_cast<unsigned char>(c)] != kNone; });
    if (all) {
      for (const char c : character) scratch.symbols.push_back({byte_ids_[static_cast<unsigned char>(c)], 0, 0});
      after_unknown = false;
      return;
    }
  }
  if (!options.unknown) {
    if (options.byte_alphabet) {
      const int byte = char_to_byte(decode_utf8(character, 0).scalar);
      fail(ErrorKind::kFormat, where_, "the vocabulary has no entry for byte 0x{:02X} at offset {} of the text, and no unknown token", byte, offset);
    }
    fail(ErrorKind::kFormat, where_, "the vocabulary has no entry for U+{:04X} (first byte 0x{:02X}) at offset {} of the text, and no unknown token",
         static_cast<std::uint32_t>(decode_utf8(character, 0).scalar), static_cast<unsigned char>(character[0]), offset);
  }
  if (!(options.fuse_unknown && after_unknown)) scratch.symbols.push_back({*options.unknown, 0, 0});
  after_unknown = true;
}

void BpeModel::encode(std::string_view piece, std::size_t offset, Scratch& scratch, std::vector<TokenId>& out) const {
  if (piece.empty()) return;
  if (options.ignore_merges)
    if (const auto it = ids_.find(std::string(piece)); it != ids_.end()) {
      out.push_back(it->second);
      return;
    }
  scratch.symbols.clear();
  bool after_unknown = false;
  std::size_t n_chars = 0;
  for (std::size_t at = 0; at < piece.size(); ++n_chars) {
    const Utf8Step s = decode_utf8(piece, at);
    const std::string_view character = piece.substr(at, s.size);
    if (const TokenId id = id_of_character(s.scalar, character); id != kNone) {
      scratch.symbols.push_back({id, 0, 0});
      after_unknown = false;
    } else {
      // In the byte alphabet a piece has one character per byte of the text.
      append_unknown(character, offset + (options.byte_alphabet ? n_chars : at), scratch, after_unknown);
    }
    at += s.size;
  }
  merge_all(scratch);
  if (scratch.symbols.empty()) return;
  for (std::int32_t i = 0; i >= 0; i = scratch.symbols[static_cast<std::size_t>(i)].next) {
    const TokenId id = scratch.symbols[static_cast<std::size_t>(i)].id;
    if (id < kMaxVocab) {
      out.push_back(id);
      continue;
    }
    // A character that merges know, but that no merge took: spelled as if it were unknown.
    Scratch spelled;
    bool ignored = false;
    append_unknown(character_texts_[static_cast<std::size_t>(id - kMaxVocab)], offset, spelled, ignored);
    for (const auto& s : spelled.symbols) out.push_back(s.id);
  }
}

void BpeModel::merge_all(Scratch& scratch) const {
  auto& symbols = scratch.symbols;
  auto& heap = scratch.heap;
  heap.clear();
  const auto n = static_cast<std::int32_t>(symbols.size());
  for (std::int32_t i = 0; i < n; ++i) symbols[static_cast<std::size_t>(i)].previous = i - 1, symbols[static_cast<std::size_t>(i)].next = i + 1 < n ? i + 1 : -1;
  const auto consider = [&](std::int32_t left) -> bool {
    if (left < 0) return false;
    const auto& s = symbols[static_cast<std::size_t>(left)];
    if (s.next < 0) return false;
    const Merge* merge = find_merge(s.id, symbols[static_cast<std::size_t>(s.next)].id);
    if (!merge) return false;
    heap.push_back({merge->rank, left, merge->product});
    return true;
  };
  for (std::int32_t i = 0; i + 1 < n; ++i) consider(i);
  std::make_heap(heap.begin(), heap.end(), later);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const Scratch::Candidate best = heap.back();
    heap.pop_back();
    auto& left = symbols[static_cast<std::size_t>(best.at)];
    // A candidate is stale when either symbol has been joined since: a joined right symbol has id kNone.
    if (left.id == kNone || left.next < 0) continue;
    auto& right = symbols[static_cast<std::size_t>(left.next)];
    const Merge* merge = find_merge(left.id, right.id);
    if (!merge || merge->product != best.product || merge->rank != best.rank) continue;
    left.id = merge->product;
    left.next = right.next;
    right.id = kNone;
    if (left.next >= 0) symbols[static_cast<std::size_t>(left.next)].previous = best.at;
    if (consider(left.previous)) std::push_heap(heap.begin(), heap.end(), later);
    if (consider(best.at)) std::push_heap(heap.begin(), heap.end(), later);
  }
}

}  // namespace calib::text
