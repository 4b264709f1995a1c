// Vocabularies of GGUF files. Keys and defaults: ggml/docs/gguf.md and llama.cpp's loader, as behaviour to match.

#include <cmath>
#include <cstring>

#include "libcalib/base/error.h"
#include "libcalib/base/sha256.h"
#include "libcalib/base/utf8.h"
#include "libcalib/text/bpe_tokenizer.h"
#include "libcalib/text/byte_level.h"
#include "libcalib/text/sentencepiece_bpe.h"
#include "libcalib/weights/gguf.h"

namespace calib::text {
namespace {

using weights::GgufMetadata;
using weights::GgufValue;

// tokenizer.ggml.token_type
enum TokenType : std::int64_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };

constexpr const char* kPrefix = "tokenizer.ggml.";

struct Vocabulary {
  const std::vector<std::string>* tokens = nullptr;
  std::vector<std::int64_t> types;
  std::vector<double> scores;
};

Vocabulary read_vocabulary(const GgufMetadata& m) {
  Vocabulary v;
  v.tokens = m.texts("tokenizer.ggml.tokens");
  if (!v.tokens || v.tokens->empty()) fail(ErrorKind::kFormat, m.path, "tokenizer.ggml.tokens is absent or empty");
  const std::size_t n = v.tokens->size();
  if (n > static_cast<std::size_t>(BpeModel::kMaxVocab))
    fail(ErrorKind::kFormat, m.path, "tokenizer.ggml.tokens has {} entries, more than {}", n, BpeModel::kMaxVocab);
  if (const auto* types = m.integers("tokenizer.ggml.token_type")) v.types = *types;
  else v.types.assign(n, kNormal);
  if (v.types.size() != n) fail(ErrorKind::kMismatch, m.path, "tokenizer.ggml.token_type has {} entries, tokenizer.ggml.tokens {}", v.types.size(), n);
  if (const auto* scores = m.numbers("tokenizer.ggml.scores")) {
    v.scores = *scores;
    if (v.scores.size() != n) fail(ErrorKind::kMismatch, m.path, "tokenizer.ggml.scores has {} entries, tokenizer.ggml.tokens {}", v.scores.size(), n);
  }
  return v;
}

void add_vocabulary(const GgufMetadata& m, const Vocabulary& v, const LogSink& log, TokenizerParts& parts) {
  std::size_t n_twice = 0;
  std::string first_twice;
  for (std::size_t i = 0; i < v.tokens->size(); ++i) {
    const std::string& text = (*v.tokens)[i];
    const auto id = static_cast<TokenId>(i);
    parts.texts.emplace(id, text);
    const bool special = v.types[i] == kControl || v.types[i] == kUnknown;
    if (special || v.types[i] == kUserDefined) {
      parts.raw_tokens.add({.id = id, .content = text, .special = special});
      parts.added_texts.emplace(id, text);
    }
    if (!parts.model.add_entry(text, id) && n_twice++ == 0) first_twice = text;
  }
  if (n_twice > 0)
    log.warning(
        fmt::format("{}: {} vocabulary entries stand twice, the first is \"{}\"; the later id of each is used", m.path, n_twice, to_valid_utf8(first_twice)));
}

std::optional<TokenId> token_key(const GgufMetadata& m, const std::string& name, std::size_t n_tokens) {
  const auto id = m.integer(kPrefix + name);
  if (!id) return std::nullopt;
  if (*id < 0 || *id >= static_cast<std::int64_t>(n_tokens))
    fail(ErrorKind::kFormat, m.path, "tokenizer.ggml.{} is {}, the vocabulary has {} entries", name, *id, n_tokens);
  return static_cast<TokenId>(*id);
}

void read_byte_bpe(const GgufMetadata& m, const LogSink& log, TokenizerParts& parts, bool& default_bos) {
  auto pre = m.text("tokenizer.ggml.pre");
  if (!pre) {
    log.warning(fmt::format("{}: tokenizer.ggml.pre is absent; text is cut as for gpt-2, which can be wrong for this model", m.path));
    pre = "gpt-2";
  }
  if (!parts.pre_tokenizer.add_named(*pre))
    fail(ErrorKind::kUnsupported, m.path,
         "tokenizer.ggml.pre is \"{}\"; offered are gpt-2, llama-bpe, qwen2, smollm. Give the model as a Hugging Face folder with tokenizer.json instead",
         to_valid_utf8(*pre));
  default_bos = pre->starts_with("llama");
  parts.model.options.ignore_merges = pre->starts_with("llama");
  parts.model.options.byte_alphabet = true;
  parts.spelling = PieceSpelling::kByteAlphabet;
  const auto* merges = m.texts("tokenizer.ggml.merges");
  if (!merges) fail(ErrorKind::kFormat, m.path, "tokenizer.ggml.merges is absent, which tokenizer.ggml.model gpt2 needs");
  for (std::size_t i = 0; i < merges->size(); ++i) {
    const std::string& entry = (*merges)[i];
    const auto space = entry.find(' ', 1);  // a part is never empty
    if (space == std::string::npos || space + 1 == entry.size())
      fail(ErrorKind::kFormat, m.path, "tokenizer.ggml.merges[{}] = \"{}\" is not two parts with a space between them", i, to_valid_utf8(entry));
    const std::string left = entry.substr(0, space), right = entry.substr(space + 1);
    const auto a = parts.model.find(left), b = parts.model.find(right), product = parts.model.find(left + right);
    if (!a || !b || !product)
      fail(ErrorKind::kFormat, m.path, "tokenizer.ggml.merges[{}] = \"{}\": \"{}\" is not in the vocabulary", i, to_valid_utf8(entry),
           to_valid_utf8(!a   ? left
                         : !b ? right
                              : left + right));
    parts.model.add_merge(left, *a, right, *b, static_cast<std::int32_t>(i), *product);
  }
}

void read_sentencepiece(const GgufMetadata& m, const Vocabulary& v, TokenizerParts& parts, bool& default_bos) {
  if (v.scores.empty()) fail(ErrorKind::kFormat, m.path, "tokenizer.ggml.scores is absent, which tokenizer.ggml.model llama needs");
  std::vector<bool> mergeable(v.tokens->size());
  for (std::size_t i = 0; i < mergeable.size(); ++i) {
    if (!std::isfinite(v.scores[i])) fail(ErrorKind::kFormat, m.path, "tokenizer.ggml.scores[{}] is not a finite number", i);
    mergeable[i] = v.types[i] == kNormal || v.types[i] == kUserDefined || v.types[i] == kUnused;
  }
  add_scored_merges(*v.tokens, v.scores, mergeable, parts.model);
  if (m.boolean("tokenizer.ggml.add_space_prefix").value_or(true)) parts.normalizer.add(PrependText{" "});
  parts.normalizer.add(ReplaceMatches{Regex::literal(" ", m.path), "\xE2\x96\x81"});
  parts.model.options.byte_fallback = true;
  parts.model.find_byte_entries();
  parts.model.options.unknown = token_key(m, "unknown_token_id", v.tokens->size());
  parts.spelling = PieceSpelling::kSentencePiece;
  default_bos = true;
}

void hash_value(Sha256& hash, const GgufValue& value) {
  const auto number = [&](auto x) { hash.update(&x, sizeof x); };
  const auto text = [&](const std::string& s) {
    number(static_cast<std::uint64_t>(s.size()));
    hash.update(s);
  };
  number(static_cast<std::uint64_t>(value.index()));
  std::visit([&](const auto& v) {
    using V = std::decay_t<decltype(v)>;
    if constexpr (std::is_same_v<V, std::string>) {
      text(v);
    } else if constexpr (std::is_same_v<V, std::monostate>) {
    } else if constexpr (std::is_same_v<V, std::vector<std::string>>) {
      number(static_cast<std::uint64_t>(v.size()));
      for (const std::string& s : v) text(s);
    } else if constexpr (std::is_arithmetic_v<V>) {
      number(v);
    } else {
      number(static_cast<std::uint64_t>(v.size()));
      hash.update(v.data(), v.size() * sizeof v[0]);
    }
  }, value);
}

// Over the keys that decide which ids a text gives, in the map's order; a chat template is not one of them.
std::string vocabulary_sha256(const GgufMetadata& m) {
  Sha256 hash;
  for (const auto& [key, value] : m.values) {
    if (!key.starts_with(kPrefix)) continue;
    hash.update(key);
    hash_value(hash, value);
  }
  return hash.hex();
}

}  // namespace

std::unique_ptr<Tokenizer> load_tokenizer_gguf(const GgufMetadata& m, const LogSink& log) {
  const auto model = m.text("tokenizer.ggml.model");
  if (!model) fail(ErrorKind::kFormat, m.path, "no vocabulary: tokenizer.ggml.model is absent");
  if (*model != "gpt2" && *model != "llama")
    fail(ErrorKind::kUnsupported, m.path, "tokenizer.ggml.model is \"{}\"; offered are gpt2 (byte-level BPE) and llama (SentencePiece BPE)", to_valid_utf8(*model));
  TokenizerParts parts(m.path);
  const Vocabulary vocabulary = read_vocabulary(m);
  add_vocabulary(m, vocabulary, log, parts);
  bool default_bos = false;
  const std::size_t n = vocabulary.tokens->size();
  parts.bos = token_key(m, "bos_token_id", n);
  parts.eos = token_key(m, "eos_token_id", n);
  if (*model == "llama") {
    read_sentencepiece(m, vocabulary, parts, default_bos);
    if (!parts.bos && n > 1) parts.bos = 1;  // llama.cpp's defaults for this model
    if (!parts.eos && n > 2) parts.eos = 2;
  } else {
    read_byte_bpe(m, log, parts, default_bos);
  }
  const auto add_bos = m.boolean("tokenizer.ggml.add_bos_token");
  parts.adds_bos = add_bos.value_or(default_bos && parts.bos.has_value());
  if (parts.adds_bos && !parts.bos) fail(ErrorKind::kFormat, m.path, "tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is absent");
  parts.sha256 = vocabulary_sha256(m);
  return std::make_unique<BpeTokenizer>(std::move(parts));
}

}  // namespace calib::text
