#pragma once
// The merges that a SentencePiece BPE vocabulary implies: every way to write an entry as two others, best score first.

#include <string>
#include <vector>

#include "libcalib/text/bpe_model.h"

namespace calib::text {

/// Adds all merges of pieces with scores. SentencePiece joins, at each step, the neighbours whose joined text is the
/// entry with the highest score, leftmost first; characters that are no entry of their own can still be joined.
/// `mergeable[id]` is false for control, byte and unknown entries: text never becomes one of them.
/// Requires: pieces[id] is in `model` for every mergeable id. Cost: O(characters of all pieces).
void add_scored_merges(const std::vector<std::string>& pieces, const std::vector<double>& scores, const std::vector<bool>& mergeable,
                       BpeModel& model);

}  // namespace calib::text
