#pragma once
// Byte-pair encoding: characters of a piece, joined pair by pair in the order of the merges' ranks.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "libcalib/text/tokenizer.h"

namespace calib::text {

struct BpeOptions {
  bool ignore_merges = false;  ///< a piece that is a vocabulary entry is that entry
  bool byte_fallback = false;  ///< characters without an entry become <0xHH> entries, one per byte
  bool fuse_unknown = false;   ///< neighbouring unknown characters become one unknown id
  bool byte_alphabet = false;  ///< pieces are written in the byte alphabet; errors then name bytes
  std::optional<TokenId> unknown;
};

/// Vocabulary and merges. Pieces are encoded one by one and independently.
class BpeModel {
 public:
  /// Ids of entries lie below this; ids from here on are characters that only merges know (add_character()).
  static constexpr TokenId kMaxVocab = 1 << 24;

  explicit BpeModel(std::string where) : where_(std::move(where)) { char_ids_.fill(kNone); }

  BpeOptions options;
  /// Requires: 0 <= id < kMaxVocab. Returns false if the text already has an id; the newer one stays.
  bool add_entry(const std::string& text, TokenId id);
  /// Id for a character that stands for itself until merges join it: its entry, or a new id >= kMaxVocab.
  TokenId add_character(const std::string& character);
  /// Lower ranks join first; among equal ranks the leftmost pair. A pair given twice keeps the later rank.
  void add_merge(const std::string& left_text, TokenId left, const std::string& right_text, TokenId right, std::int32_t rank, TokenId product);
  /// Sets the <0xHH> ids of byte_fallback from the vocabulary; those that are absent stay absent.
  void find_byte_entries();

  std::optional<TokenId> find(const std::string& text) const;
  std::size_t n_entries() const noexcept { return ids_.size(); }
  std::size_t n_merges() const noexcept { return merges_.size(); }

  /// Working memory of encode(), reused from piece to piece; one per thread.
  struct Scratch {
    struct Symbol { TokenId id; std::int32_t previous, next; };
    struct Candidate { std::int32_t rank, at; TokenId product; };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };
  /// Appends the ids of one piece that starts at byte `offset` of the text.
  /// Requires: valid UTF-8, fewer than 2^31 characters. Cost: O(n log n).
  /// Throws: kFormat naming the byte or character that the vocabulary lacks, and its offset.
  void encode(std::string_view piece, std::size_t offset, Scratch& scratch, std::vector<TokenId>& out) const;

  /// End of the shortest head of `rest` that no merge connects with what follows, so that both can be encoded apart with the
  /// same result: no merge has this character at the end of its left part and the next one at the start of its right part.
  /// Requires: can_cut().
  std::size_t first_cut(std::string_view rest) const;
  bool can_cut() const noexcept;

 private:
  static constexpr TokenId kNone = -1;
  struct Merge { std::int32_t rank; TokenId product; };

  TokenId id_of_character(char32_t scalar, std::string_view text) const;
  void append_unknown(std::string_view character, std::size_t offset, Scratch& scratch, bool& after_unknown) const;
  const Merge* find_merge(TokenId left, TokenId right) const;
  void merge_all(Scratch& scratch) const;

  std::string where_;
  std::unordered_map<std::string, TokenId> ids_;
  std::unordered_map<std::uint64_t, Merge> merges_;
  std::unordered_set<std::uint64_t> joints_;  ///< character pairs that some merge joins
  std::array<TokenId, 0x10000> char_ids_;          ///< single characters of the basic plane
  std::unordered_map<std::string, TokenId> characters_;  ///< add_character()
  std::vector<std::string> character_texts_;             ///< of id kMaxVocab + i
  bool all_bytes_ = false;                               ///< every byte has a <0xHH> entry
  std::vector<TokenId> byte_ids_ = std::vector<TokenId>(256, kNone);
};

}  // namespace calib::text
