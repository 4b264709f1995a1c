// tokenizer.json of the `tokenizers` library, model type BPE, with tokenizer_config.json and special_tokens_map.json beside it.

#include <filesystem>
#include <set>

#include <nlohmann/json.hpp>

#include "libcalib/base/error.h"
#include "libcalib/base/json.h"
#include "libcalib/base/mapped_file.h"
#include "libcalib/base/sha256.h"
#include "libcalib/base/utf8.h"
#include "libcalib/text/bpe_tokenizer.h"
#include "libcalib/text/tokenizer_json_parts.h"

namespace calib::text {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

TokenId read_id(const json& value, const std::string& where, const std::string& text) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() >= static_cast<std::uint64_t>(BpeModel::kMaxVocab))
    fail(ErrorKind::kFormat, where, "the id of \"{}\" is {}, expected an integer from 0 to {}", to_valid_utf8(text),
         value.is_number() ? value.dump() : value.type_name(), BpeModel::kMaxVocab - 1);
  return static_cast<TokenId>(value.get<std::uint64_t>());
}

void read_vocab(const json& model, TokenizerParts& parts) {
  const auto vocab = model.find("vocab");
  if (vocab == model.end() || !vocab->is_object() || vocab->empty()) fail(ErrorKind::kFormat, parts.where, "model.vocab is not an object with entries");
  for (const auto& [text, value] : vocab->items()) {
    const TokenId id = read_id(value, parts.where, text);
    parts.model.add_entry(text, id);
    parts.texts.try_emplace(id, text);
  }
}

// The two parts of a merge, from "a b" or ["a", "b"].
std::pair<std::string, std::string> read_merge(const json& entry, std::size_t index, bool pairs, const std::string& where) {
  if (entry.is_array() != pairs || (!entry.is_array() && !entry.is_string()))
    fail(ErrorKind::kFormat, where, "model.merges[{}] = {} is not {}, as the entries before it are", index, entry.dump(), pairs ? "a pair" : "a string");
  if (pairs) {
    if (entry.size() != 2 || !entry[0].is_string() || !entry[1].is_string())
      fail(ErrorKind::kFormat, where, "model.merges[{}] = {} is not a pair of strings", index, entry.dump());
    return {entry[0].get<std::string>(), entry[1].get<std::string>()};
  }
  const auto& text = entry.get_ref<const std::string&>();
  const auto space = text.find(' ');
  if (space == std::string::npos || space != text.rfind(' ') || space == 0 || space + 1 == text.size())
    fail(ErrorKind::kFormat, where, "model.merges[{}] = {} is not two parts with one space between them", index, entry.dump());
  return {text.substr(0, space), text.substr(space + 1)};
}

void read_merges(const json& model, TokenizerParts& parts) {
  const auto merges = model.find("merges");
  if (merges == model.end() || merges->is_null()) return;
  if (!merges->is_array()) fail(ErrorKind::kFormat, parts.where, "model.merges is {}, expected a list", merges->type_name());
  const bool pairs = !merges->empty() && (*merges)[0].is_array();
  for (std::size_t i = 0; i < merges->size(); ++i) {
    const auto [left, right] = read_merge((*merges)[i], i, pairs, parts.where);
    const auto a = parts.model.find(left), b = parts.model.find(right), product = parts.model.find(left + right);
    if (!a || !b || !product)
      fail(ErrorKind::kFormat, parts.where, "model.merges[{}] = {}: \"{}\" is not in the vocabulary", i, (*merges)[i].dump(),
           to_valid_utf8(!a ? left : !b ? right : left + right));
    parts.model.add_merge(left, *a, right, *b, static_cast<std::int32_t>(i), *product);
  }
}

void read_model(const json& model, PartReader& reader, TokenizerParts& parts) {
  if (!model.is_object()) fail(ErrorKind::kFormat, parts.where, "\"model\" is not an object");
  const std::string type = json_text(model, "type", "BPE", parts.where);
  if (type != "BPE") return reader.note_unsupported("model " + to_valid_utf8(type));
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (!json_text(model, key, "", parts.where).empty()) reader.note_unsupported(fmt::format("model.{}", key));
  if (const auto dropout = model.find("dropout"); dropout != model.end() && !dropout->is_null() && *dropout != 0.0) reader.note_unsupported("model.dropout");
  parts.model.options.ignore_merges = json_flag(model, "ignore_merges", false, parts.where);
  parts.model.options.byte_fallback = json_flag(model, "byte_fallback", false, parts.where);
  parts.model.options.fuse_unknown = json_flag(model, "fuse_unk", false, parts.where);
  read_vocab(model, parts);
  read_merges(model, parts);
  if (parts.model.options.byte_fallback) parts.model.find_byte_entries();
}

void add_token(AddedToken token, TokenizerParts& parts) {
  parts.added_texts.try_emplace(token.id, token.content);
  if (token.normalized && !parts.normalizer.empty()) {
    token.content = parts.normalizer.apply(token.content);
    parts.normalized_tokens.add(std::move(token));
  } else {
    parts.raw_tokens.add(std::move(token));  // without a normalizer both kinds compete for the same text
  }
}

void read_added_tokens(const json& root, const LogSink& log, TokenizerParts& parts) {
  const auto list = root.find("added_tokens");
  if (list == root.end() || list->is_null()) return;
  if (!list->is_array()) fail(ErrorKind::kFormat, parts.where, "\"added_tokens\" is {}, expected a list", list->type_name());
  for (std::size_t i = 0; i < list->size(); ++i) {
    const json& entry = (*list)[i];
    const std::string where = fmt::format("{}: added_tokens[{}]", parts.where, i);
    if (!entry.is_object() || !entry.contains("id") || !entry.contains("content")) fail(ErrorKind::kFormat, where, "\"id\" or \"content\" is absent");
    AddedToken token;
    token.content = json_text(entry, "content", "", where);
    if (token.content.empty()) fail(ErrorKind::kFormat, where, "\"content\" is empty");
    token.id = read_id(entry["id"], where, token.content);
    if (const auto entry_id = parts.model.find(token.content); entry_id && *entry_id != token.id) {
      log.warning(fmt::format("{} gives \"{}\" the id {}, model.vocab {}; the latter is used", where, to_valid_utf8(token.content), token.id, *entry_id));
      token.id = *entry_id;
    }
    token.single_word = json_flag(entry, "single_word", false, where);
    token.lstrip = json_flag(entry, "lstrip", false, where);
    token.rstrip = json_flag(entry, "rstrip", false, where);
    token.normalized = json_flag(entry, "normalized", false, where);
    token.special = json_flag(entry, "special", false, where);
    add_token(std::move(token), parts);
  }
}

std::optional<TokenId> id_of(const std::string& text, const TokenizerParts& parts) {
  for (const auto& [id, content] : parts.added_texts)
    if (content == text) return id;
  return parts.model.find(text);
}

// A special token in a config: "text" or {"content": "text", …}; absent and null give "".
std::string config_token(const json& config, const char* key, const std::string& where) {
  const auto it = config.find(key);
  if (it == config.end() || it->is_null() || it->is_boolean()) return "";
  if (it->is_string()) return it->get<std::string>();
  if (it->is_object()) return json_text(*it, "content", "", where + ": " + key);
  fail(ErrorKind::kFormat, where, "\"{}\" is {}, expected a string or an object with \"content\"", key, it->type_name());
}

// Names that a config gives to vocabulary entries make those entries special, listed under added_tokens or not.
void add_named_specials(const json& config, const std::string& where, TokenizerParts& parts) {
  std::vector<std::string> names;
  for (const char* key : {"bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"})
    names.push_back(config_token(config, key, where));
  if (const auto more = config.find("additional_special_tokens"); more != config.end() && more->is_array())
    for (const json& item : *more) {
      if (item.is_string()) names.push_back(item.get<std::string>());
      else if (item.is_object()) names.push_back(json_text(item, "content", "", where));
    }
  for (const std::string& name : names) {
    if (name.empty() || parts.raw_tokens.find(name) || parts.normalized_tokens.find(name)) continue;
    if (const auto id = id_of(name, parts)) add_token({*id, name, false, false, false, false, true}, parts);
  }
}

json read_object(const fs::path& path) {
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(path, ignored))) return json::object();
  const MappedFile file(path.string());
  json object = parse_json_strict(file.bytes(), path.string());
  if (!object.is_object()) fail(ErrorKind::kFormat, path.string(), "expected a JSON object, found {}", object.type_name());
  return object;
}

void read_configs(const fs::path& folder, const PartReader::PostProcessing& post, const LogSink& log, TokenizerParts& parts) {
  const std::string config_path = (folder / "tokenizer_config.json").string(), map_path = (folder / "special_tokens_map.json").string();
  const json config = read_object(config_path), map = read_object(map_path);
  for (const auto& [source, path] : {std::pair{&config, config_path}, std::pair{&map, map_path}}) {
    add_named_specials(*source, path, parts);
    if (const std::string bos = config_token(*source, "bos_token", path); !parts.bos && !bos.empty()) parts.bos = id_of(bos, parts);
    if (const std::string eos = config_token(*source, "eos_token", path); !parts.eos && !eos.empty()) parts.eos = id_of(eos, parts);
  }
  parts.adds_bos = post.leading.has_value();
  if (post.leading) parts.bos = post.leading;
  if (config.contains("add_bos_token") && !config["add_bos_token"].is_null()) {
    parts.adds_bos = json_flag(config, "add_bos_token", false, config_path);
    if (parts.adds_bos && !parts.bos) fail(ErrorKind::kFormat, config_path, "add_bos_token is true, but no bos_token of the vocabulary is named");
  }
  if (!post.trailing.empty())
    log.note(fmt::format("{}: the post-processor would set {} behind a text; documents are windows and get none", parts.where, fmt::join(post.trailing, " ")));
}

// What stands there instead of tokenizer.json, for the message.
[[noreturn]] void fail_without_tokenizer_json(const fs::path& folder, const fs::path& path) {
  std::vector<std::string> found;
  for (const char* name : {"tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tekken.json"})
    if (fs::exists(folder / name)) found.push_back(name);
  if (found.empty()) fail(ErrorKind::kNotFound, path.string(), "no tokenizer.json in the model's folder");
  fail(ErrorKind::kUnsupported, (folder / found[0]).string(),
       "only {} found; this form is not read: save the tokenizer as tokenizer.json (AutoTokenizer … save_pretrained) beside it", fmt::join(found, ", "));
}

}  // namespace

std::unique_ptr<Tokenizer> load_tokenizer_json(const std::string& folder_name, const LogSink& log) {
  const fs::path folder(folder_name), path = folder / "tokenizer.json";
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(path, ignored))) fail_without_tokenizer_json(folder, path);
  const MappedFile file(path.string());
  TokenizerParts parts(path.string());
  const json root = parse_json_strict(file.bytes(), parts.where);
  if (!root.is_object() || !root.contains("model")) fail(ErrorKind::kFormat, parts.where, "not a tokenizer: no \"model\" at its top level");
  const auto part = [&](const char* key) { return root.contains(key) ? root[key] : json(); };

  PartReader reader(parts.where);
  reader.read_normalizer(part("normalizer"), parts.normalizer);
  reader.read_pre_tokenizer(part("pre_tokenizer"), parts.pre_tokenizer);
  const auto post = reader.read_post_processor(part("post_processor"));
  read_model(root["model"], reader, parts);
  if (!reader.unsupported().empty())
    fail(ErrorKind::kUnsupported, parts.where, "tokenizer parts that are not offered: {}", fmt::join(reader.unsupported(), ", "));

  parts.model.options.byte_alphabet = parts.pre_tokenizer.maps_bytes();
  parts.spelling = parts.model.options.byte_alphabet   ? PieceSpelling::kByteAlphabet
                   : parts.model.options.byte_fallback ? PieceSpelling::kSentencePiece
                                                       : PieceSpelling::kText;
  read_added_tokens(root, log, parts);
  if (const std::string unknown = json_text(root["model"], "unk_token", "", parts.where); !unknown.empty()) {
    parts.model.options.unknown = id_of(unknown, parts);
    if (!parts.model.options.unknown) fail(ErrorKind::kFormat, parts.where, "model.unk_token \"{}\" is not in the vocabulary", to_valid_utf8(unknown));
  }
  read_configs(folder, post, log, parts);
  parts.sha256 = sha256_hex(file.bytes());
  return std::make_unique<BpeTokenizer>(std::move(parts));
}

}  // namespace calib::text
