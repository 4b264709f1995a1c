#pragma once
// Cuts text into the pieces that BPE never merges across.

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "libcalib/text/regex.h"

namespace calib::text {

/// What becomes of a match, as tokenizer.json names it.
enum class SplitBehavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };

struct SplitStep {
  Regex pattern;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  ///< the gaps between matches play the matches
};
struct PrefixSpaceStep {};   ///< a space in front of a piece that does not start with one
struct ByteAlphabetStep {};  ///< bytes become the characters of byte_level.h
struct MetaspaceStep {       ///< SentencePiece's visible space
  enum class Prepend { kNever, kFirst, kAlways };
  std::string replacement;
  Prepend prepend = Prepend::kAlways;
};

class PreTokenizer {
 public:
  using Step = std::variant<SplitStep, PrefixSpaceStep, ByteAlphabetStep, MetaspaceStep>;
  /// Receives a piece and its byte offset in the text that was given.
  using Sink = std::function<void(std::string_view piece, std::size_t offset)>;

  void add(Step step) { steps_.push_back(std::move(step)); }
  /// Appends the steps of a pre-tokenizer of llama.cpp's naming. Returns false if the name is not known.
  bool add_named(const std::string& ggml_pre);

  /// Calls `sink` for every piece, in order. `at_text_start`: the text opens the document.
  /// Requires: valid UTF-8. Cost: one pass per step, memory of one piece per step.
  void run(std::string_view text, bool at_text_start, const Sink& sink) const;
  bool maps_bytes() const noexcept;  ///< has a ByteAlphabetStep

 private:
  void run_from(std::size_t step, std::string_view piece, std::size_t offset, bool at_start, const Sink& sink) const;
  void split(const SplitStep& how, std::size_t step, std::string_view piece, std::size_t offset, bool at_start, const Sink& sink) const;
  std::vector<Step> steps_;
};

/// The expression of GPT-2, also the default of tokenizer.json's ByteLevel.
extern const std::string_view kGpt2Regex;
extern const std::string_view kLlama3Regex;
extern const std::string_view kQwen2Regex;

}  // namespace calib::text
