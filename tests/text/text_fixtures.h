#pragma once
// Small tokenizers and texts that the tests of libcalib/text share.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "libcalib/base/error.h"
#include "libcalib/text/tokenizer.h"
#include "tests/support/shared_data.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib::text {

using Ids = std::vector<TokenId>;
using Json = nlohmann::json;
using test::read_file;
using test::TempFolder;
using test::write_file;

/// {"model": {type BPE, vocab, merges}} without any other part.
inline Json bpe_json(const std::vector<std::string>& vocab, const std::vector<std::string>& merges = {}) {
  Json entries = Json::object();
  for (std::size_t i = 0; i < vocab.size(); ++i) entries[vocab[i]] = i;
  return {{"model", {{"type", "BPE"}, {"vocab", entries}, {"merges", merges}}}};
}

inline std::unique_ptr<Tokenizer> load(const Json& tokenizer, const Json& config = {}, const LogSink& log = {}) {
  const TempFolder folder;
  write_file(folder.file("tokenizer.json"), tokenizer.dump());
  if (!config.is_null()) write_file(folder.file("tokenizer_config.json"), config.dump());
  return load_tokenizer_json(folder.path(), log);
}

inline std::unique_ptr<Tokenizer> tok_byte() { return load(Json::parse(test::tok_byte_json())); }

/// Byte tokenizer that starts documents with <s> (256).
inline std::unique_ptr<Tokenizer> tok_byte_bos() {
  return load(Json::parse(test::tok_byte_json()), {{"bos_token", "<s>"}, {"eos_token", "</s>"}, {"add_bos_token", true}});
}

/// Lower-case words of 2 to 8 letters with single spaces and a line feed after every 12th, seed 3, cut at n bytes.
std::string random_words(std::size_t n);

/// Collects what goes to a LogSink.
struct Log {
  std::vector<std::string> warnings, notes;
  LogSink sink() {
    LogSink s;
    s.warning = [this](const std::string& text) { warnings.push_back(text); };
    s.note = [this](const std::string& text) { notes.push_back(text); };
    return s;
  }
};

/// Runs `body`, expects an Error of this kind, and returns its text.
inline std::string error_text(ErrorKind kind, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    EXPECT_EQ(static_cast<int>(e.kind()), static_cast<int>(kind)) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

}  // namespace calib::text
