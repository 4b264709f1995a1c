#pragma once
// The pipeline parts of a tokenizer.json: normalizer, pre-tokenizer and post-processor.

#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "libcalib/text/normalizer.h"
#include "libcalib/text/pre_tokenizer.h"
#include "libcalib/text/tokenizer.h"

namespace calib::text {

/// Reads parts and collects the names of those that are not offered, so that one message can list all.
class PartReader {
 public:
  explicit PartReader(std::string where) : where_(std::move(where)) {}

  /// null = none. Throws: kFormat for a part that lacks what its type needs; kUnsupported for an expression.
  void read_normalizer(const nlohmann::json& part, Normalizer& out);
  void read_pre_tokenizer(const nlohmann::json& part, PreTokenizer& out);

  struct PostProcessing {
    std::optional<TokenId> leading;  ///< the one token set in front of a text
    std::vector<std::string> trailing;  ///< names of tokens set behind it
  };
  PostProcessing read_post_processor(const nlohmann::json& part);

  void note_unsupported(std::string what) { unsupported_.push_back(std::move(what)); }
  const std::vector<std::string>& unsupported() const noexcept { return unsupported_; }

 private:
  std::string type_of(const nlohmann::json& part, const char* role) const;
  void read_template(const nlohmann::json& part, PostProcessing& out);
  std::string where_;
  std::vector<std::string> unsupported_;
};

/// Optional members with their defaults. Throws: kFormat naming the key if the type is another one.
bool json_flag(const nlohmann::json& object, const char* key, bool fallback, const std::string& where);
std::string json_text(const nlohmann::json& object, const char* key, const std::string& fallback, const std::string& where);

}  // namespace calib::text
