#pragma once
// Token ids written as text.

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "libcalib/text/tokenizer.h"

namespace calib::text {

struct IdLines {
  std::vector<TokenId> ids;
  std::vector<std::pair<std::size_t, std::size_t>> lines;  ///< ranges of ids; empty lines are left out
};

/// One document a line, decimal ids between white space.
/// Throws: kFormat for anything else, kMismatch for ids that are no entry of the vocabulary; both list line and text.
IdLines read_id_lines(std::string_view text, std::int64_t vocab_size, const std::string& where);

}  // namespace calib::text
