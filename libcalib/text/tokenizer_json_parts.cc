#include "libcalib/text/tokenizer_json_parts.h"

#include <nlohmann/json.hpp>

#include "libcalib/base/error.h"
#include "libcalib/base/utf8.h"

namespace calib::text {

using nlohmann::json;

bool json_flag(const json& object, const char* key, bool fallback, const std::string& where) {
  const auto it = object.find(key);
  if (it == object.end() || it->is_null()) return fallback;
  if (!it->is_boolean()) fail(ErrorKind::kFormat, where, "\"{}\" is {}, expected true or false", key, it->type_name());
  return it->get<bool>();
}

std::string json_text(const json& object, const char* key, const std::string& fallback, const std::string& where) {
  const auto it = object.find(key);
  if (it == object.end() || it->is_null()) return fallback;
  if (!it->is_string()) fail(ErrorKind::kFormat, where, "\"{}\" is {}, expected a string", key, it->type_name());
  return it->get<std::string>();
}

namespace {

const json& member_array(const json& part, const char* key, const std::string& where) {
  const auto it = part.find(key);
  if (it == part.end() || !it->is_array()) fail(ErrorKind::kFormat, where, "a Sequence has no list \"{}\"", key);
  return *it;
}

Regex read_pattern(const json& part, const std::string& where) {
  const auto it = part.find("pattern");
  if (it != part.end() && it->is_object()) {
    if (const auto s = it->find("String"); s != it->end() && s->is_string()) return Regex::literal(s->get<std::string>(), where);
    if (const auto r = it->find("Regex"); r != it->end() && r->is_string()) return Regex(r->get<std::string>(), where);
  }
  fail(ErrorKind::kFormat, where, "\"pattern\" must be {{\"String\": …}} or {{\"Regex\": …}}");
}

std::optional<SplitBehavior> behavior_named(const std::string& name) {
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  return std::nullopt;
}

SplitBehavior read_behavior(const json& part, const std::string& fallback, const std::string& where) {
  const std::string name = json_text(part, "behavior", fallback, where);
  const auto behavior = behavior_named(name);
  if (!behavior)
    fail(ErrorKind::kFormat, where, "behavior \"{}\" is none of Isolated, Removed, MergedWithPrevious, MergedWithNext, Contiguous", to_valid_utf8(name));
  return *behavior;
}

}  // namespace

std::string PartReader::type_of(const json& part, const char* role) const {
  if (!part.is_object()) fail(ErrorKind::kFormat, where_, "a {} is {}, expected an object with \"type\"", role, part.type_name());
  const std::string type = json_text(part, "type", "", where_);
  if (type.empty()) fail(ErrorKind::kFormat, where_, "a {} has no \"type\"", role);
  return type;
}

void PartReader::read_normalizer(const json& part, Normalizer& out) {
  if (part.is_null()) return;
  const std::string type = type_of(part, "normalizer");
  const std::string where = where_ + ": normalizer " + type;
  if (type == "Sequence") {
    for (const json& member : member_array(part, "normalizers", where)) read_normalizer(member, out);
  } else if (type == "Prepend") {
    out.add(PrependText{json_text(part, "prepend", "", where)});
  } else if (type == "Replace") {
    if (!part.contains("content")) fail(ErrorKind::kFormat, where, "\"content\" is absent");
    out.add(ReplaceMatches{read_pattern(part, where), json_text(part, "content", "", where)});
  } else if (type == "NFC") {
    out.add(ComposeNfc{});
  } else {
    note_unsupported("normalizer " + to_valid_utf8(type));
  }
}

void PartReader::read_pre_tokenizer(const json& part, PreTokenizer& out) {
  if (part.is_null()) return;
  const std::string type = type_of(part, "pre-tokenizer");
  const std::string where = where_ + ": pre-tokenizer " + type;
  if (type == "Sequence") {
    for (const json& member : member_array(part, "pretokenizers", where)) read_pre_tokenizer(member, out);
  } else if (type == "ByteLevel") {
    if (json_flag(part, "add_prefix_space", true, where)) out.add(PrefixSpaceStep{});
    if (json_flag(part, "use_regex", true, where)) out.add(SplitStep{Regex(kGpt2Regex, where)});
    out.add(ByteAlphabetStep{});
  } else if (type == "Split") {
    Regex pattern = read_pattern(part, where);
    const SplitBehavior behavior = read_behavior(part, "", where);
    out.add(SplitStep{std::move(pattern), behavior, json_flag(part, "invert", false, where)});
  } else if (type == "Digits") {
    const bool individual = json_flag(part, "individual_digits", false, where);
    out.add(SplitStep{Regex(R"(\p{N})", where), individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous});
  } else if (type == "Punctuation") {
    out.add(SplitStep{Regex(R"([!-\/:-@\[-`{-~\p{P}])", where), read_behavior(part, "Isolated", where)});
  } else if (type == "Metaspace") {
    MetaspaceStep step;
    step.replacement = json_text(part, "replacement", "\xE2\x96\x81", where);
    if (step.replacement.empty()) fail(ErrorKind::kFormat, where, "\"replacement\" is empty");
    const std::string scheme = json_text(part, "prepend_scheme", json_flag(part, "add_prefix_space", true, where) ? "always" : "never", where);
    if (scheme == "always") step.prepend = MetaspaceStep::Prepend::kAlways;
    else if (scheme == "first") step.prepend = MetaspaceStep::Prepend::kFirst;
    else if (scheme == "never") step.prepend = MetaspaceStep::Prepend::kNever;
    else fail(ErrorKind::kFormat, where, "prepend_scheme \"{}\" is none of always, first, never", to_valid_utf8(scheme));
    const Regex replacement = Regex::literal(step.replacement, where);
    out.add(std::move(step));
    if (json_flag(part, "split", true, where)) out.add(SplitStep{replacement, SplitBehavior::kMergedWithNext});
  } else {
    note_unsupported("pre-tokenizer " + to_valid_utf8(type));
  }
}

PartReader::PostProcessing PartReader::read_post_processor(const json& part) {
  PostProcessing out;
  if (part.is_null()) return out;
  const std::string type = type_of(part, "post-processor");
  if (type == "Sequence") {
    for (const json& member : member_array(part, "processors", where_ + ": post-processor Sequence")) {
      const PostProcessing one = read_post_processor(member);
      if (one.leading && out.leading) fail(ErrorKind::kFormat, where_, "two post-processors set a token in front of the text");
      if (one.leading) out.leading = one.leading;
      out.trailing.insert(out.trailing.end(), one.trailing.begin(), one.trailing.end());
    }
  } else if (type == "TemplateProcessing") {
    read_template(part, out);
  } else if (type != "ByteLevel") {  // ByteLevel there only trims offsets
    note_unsupported("post-processor " + to_valid_utf8(type));
  }
  return out;
}

void PartReader::read_template(const json& part, PostProcessing& out) {
  const std::string where = where_ + ": post-processor TemplateProcessing";
  const auto single = part.find("single");
  if (single == part.end() || !single->is_array()) fail(ErrorKind::kFormat, where, "\"single\" is not a list");
  bool text_seen = false;
  for (const json& item : *single) {
    if (item.is_object() && item.contains("Sequence")) {
      text_seen = true;
      continue;
    }
    const auto special = item.is_object() ? item.find("SpecialToken") : item.end();
    if (!item.is_object() || special == item.end() || !special->is_object())
      fail(ErrorKind::kFormat, where, "an item of \"single\" is neither Sequence nor SpecialToken");
    const std::string name = json_text(*special, "id", "", where);
    if (text_seen) {
      out.trailing.push_back(to_valid_utf8(name));
      continue;
    }
    if (out.leading) {
      note_unsupported("post-processor TemplateProcessing with several tokens in front of the text");
      return;
    }
    const auto tokens = part.find("special_tokens");
    const auto entry = tokens != part.end() && tokens->is_object() ? tokens->find(name) : part.end();
    if (tokens == part.end() || !tokens->is_object() || entry == tokens->end() || !entry->is_object() || !entry->contains("ids") ||
        !(*entry)["ids"].is_array() || (*entry)["ids"].size() != 1 || !(*entry)["ids"][0].is_number_unsigned() ||
        (*entry)["ids"][0].get<std::uint64_t>() > 0x7FFFFFFF)
      fail(ErrorKind::kFormat, where, "\"special_tokens\" gives no single id for \"{}\"", to_valid_utf8(name));
    out.leading = static_cast<TokenId>((*entry)["ids"][0].get<std::uint64_t>());
  }
}

}  // namespace calib::text
