#pragma once
// Which windows of which file are taken.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "libcalib/text/data_option.h"
#include "libcalib/text/tokenizer.h"

namespace calib::text {

/// All documents that one file could give, as ranges of its ids (without BOS).
struct FileDocuments {
  DataOption option;
  std::string name, sha256;
  bool rows = false;                 ///< rows or lines; false: one text cut into windows
  bool adds_bos = false;             ///< each document gets one more token in front
  std::vector<TokenId> ids;
  std::vector<std::pair<std::size_t, std::size_t>> documents;
  bool short_tail = false;           ///< the last window of a text has fewer than seq_len tokens

  std::int64_t n_documents() const { return static_cast<std::int64_t>(documents.size()); }
  std::int64_t n_full() const { return n_documents() - (short_tail ? 1 : 0); }
  std::int64_t n_tokens() const;     ///< of all documents, BOS included
};

/// Appends ids[begin, end) cut into pieces of at most `seq_len` tokens, BOS included. A last piece that would be one token
/// long is dropped unless it is the only one: it predicts nothing. Returns the number of ids dropped.
std::int64_t cut_windows(std::size_t begin, std::size_t end, std::int64_t seq_len, FileDocuments& file);

struct WindowRequest {
  std::int64_t seq_len = 0;
  std::int64_t num_samples = 0;      ///< 0 = as many as there are, up to default_samples
  std::int64_t default_samples = 0;
  bool first = false;
};

/// Indices into files[i].documents, ascending. Files with `num` give exactly that many; `share` divides the rest by tokens
/// (N_f in proportion to share / mean document length), and files without either divide what is left by what they hold.
/// A short last window of a text is taken only where all of the text is. Evenly spaced: floor(i·M/N) of M.
/// Throws: kInfeasible ("have 10 tokens, need 2048 (4 × 512)"), kUsage (shares above 1, num above num_samples).
std::vector<std::vector<std::int64_t>> choose_windows(const std::vector<FileDocuments>& files, const WindowRequest& request);

}  // namespace calib::text
