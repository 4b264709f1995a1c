#include "libcalib/text/pre_tokenizer.h"

#include "libcalib/text/byte_level.h"

namespace calib::text {

const std::string_view kGpt2Regex = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
const std::string_view kLlama3Regex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
const std::string_view kQwen2Regex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

bool PreTokenizer::add_named(const std::string& name) {
  const std::string where = "pre-tokenizer " + name;
  if (name == "gpt-2") {
    add(SplitStep{Regex(kGpt2Regex, where)});
  } else if (name == "llama-bpe" || name == "llama3" || name == "llama-v3") {
    add(SplitStep{Regex(kLlama3Regex, where)});
  } else if (name == "qwen2" || name == "deepseek-r1-qwen") {
    add(SplitStep{Regex(kQwen2Regex, where)});
  } else if (name == "smollm") {
    add(SplitStep{Regex(R"(\p{N})", where)});
    add(SplitStep{Regex(kGpt2Regex, where)});
  } else {
    return false;
  }
  add(ByteAlphabetStep{});
  return true;
}

bool PreTokenizer::maps_bytes() const noexcept {
  for (const Step& step : steps_)
    if (std::holds_alternative<ByteAlphabetStep>(step)) return true;
  return false;
}

void PreTokenizer::run(std::string_view text, bool at_text_start, const Sink& sink) const {
  if (!text.empty()) run_from(0, text, 0, at_text_start, sink);
}

void PreTokenizer::run_from(std::size_t step, std::string_view piece, std::size_t offset, bool at_start, const Sink& sink) const {
  if (step == steps_.size()) {
    sink(piece, offset);
  } else if (const auto* how = std::get_if<SplitStep>(&steps_[step])) {
    split(*how, step, piece, offset, at_start, sink);
  } else if (std::holds_alternative<PrefixSpaceStep>(steps_[step])) {
    if (piece.starts_with(' ')) return run_from(step + 1, piece, offset, at_start, sink);
    run_from(step + 1, std::string(1, ' ').append(piece), offset, at_start, sink);
  } else if (std::holds_alternative<ByteAlphabetStep>(steps_[step])) {
    std::string mapped;
    append_byte_chars(piece, mapped);
    run_from(step + 1, mapped, offset, at_start, sink);
  } else {
    const auto& meta = std::get<MetaspaceStep>(steps_[step]);
    std::string visible;
    for (const char c : piece) c == ' ' ? visible += meta.replacement : visible += c;
    const bool wanted = meta.prepend == MetaspaceStep::Prepend::kAlways || (meta.prepend == MetaspaceStep::Prepend::kFirst && at_start);
    if (wanted && !visible.starts_with(meta.replacement)) visible.insert(0, meta.replacement);
    run_from(step + 1, visible, offset, at_start, sink);
  }
}

void PreTokenizer::split(const SplitStep& how, std::size_t step, std::string_view piece, std::size_t offset, bool at_start, const Sink& sink) const {
  const auto emit = [&](std::size_t begin, std::size_t end) {
    if (end > begin) run_from(step + 1, piece.substr(begin, end - begin), offset + begin, at_start && begin == 0, sink);
  };
  // Runs (begin, end, plays a match) in text order; the behaviours differ only in which neighbours they join.
  std::size_t open_begin = 0, open_end = 0;
  bool open = false, previous_match = false;
  const auto flush = [&] {
    if (open) emit(open_begin, open_end);
    open = false;
  };
  const auto start = [&](std::size_t begin, std::size_t end) {
    flush();
    open_begin = begin, open_end = end, open = true;
  };
  const auto visit = [&](std::size_t begin, std::size_t end, bool match) {
    if (begin == end) return;
    match ^= how.invert;
    switch (how.behavior) {
      case SplitBehavior::kIsolated: emit(begin, end); break;
      case SplitBehavior::kRemoved:
        if (!match) emit(begin, end);
        break;
      case SplitBehavior::kContiguous:
        if (open && match == previous_match) open_end = end;
        else start(begin, end);
        break;
      case SplitBehavior::kMergedWithPrevious:
        if (open && match && !previous_match) open_end = end;
        else start(begin, end);
        break;
      case SplitBehavior::kMergedWithNext:
        if (open && previous_match && !match) open_end = end;
        else start(begin, end);
        break;
    }
    previous_match = match;
  };
  std::size_t done = 0;
  while (const auto m = how.pattern.find(piece, done)) {
    visit(done, m->begin, false);
    visit(m->begin, m->end, true);
    done = m->end;
  }
  visit(done, piece.size(), false);
  flush();
}

}  // namespace calib::text
