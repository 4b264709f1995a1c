#include "libcalib/text/sentencepiece_bpe.h"

#include <algorithm>
#include <optional>

#include "libcalib/base/utf8.h"

namespace calib::text {
namespace {

bool is_one_character(std::string_view text) {
  return !text.empty() && decode_utf8(text, 0).size == text.size();
}

}  // namespace

void add_scored_merges(const std::vector<std::string>& pieces, const std::vector<double>& scores, const std::vector<bool>& mergeable,
                       BpeModel& model) {
  // Equal scores share a rank, so that position decides between them.
  std::vector<double> distinct(scores);
  std::sort(distinct.begin(), distinct.end(), std::greater<>());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  const auto rank_of = [&](double score) {
    return static_cast<std::int32_t>(std::lower_bound(distinct.begin(), distinct.end(), score, std::greater<>()) - distinct.begin());
  };
  const auto symbol = [&](const std::string& part) -> std::optional<TokenId> {
    if (const auto id = model.find(part)) {
      if (mergeable[static_cast<std::size_t>(*id)]) return id;
      return std::nullopt;
    }
    return is_one_character(part) ? std::optional(model.add_character(part)) : std::nullopt;
  };
  for (std::size_t id = 0; id < pieces.size(); ++id) {
    const std::string& piece = pieces[id];
    if (!mergeable[id] || model.find(piece) != static_cast<TokenId>(id)) continue;
    const std::int32_t rank = rank_of(scores[id]);
    for (std::size_t at = 0; at < piece.size();) {
      at += decode_utf8(piece, at).size;
      if (at >= piece.size()) break;
      const std::string left_text = piece.substr(0, at), right_text = piece.substr(at);
      const auto left = symbol(left_text);
      if (!left) continue;
      if (const auto right = symbol(right_text)) model.add_merge(left_text, *left, right_text, *right, rank, static_cast<TokenId>(id));
    }
  }
}

}  // namespace calib::text
