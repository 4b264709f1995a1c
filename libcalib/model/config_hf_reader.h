#pragma once
// INTERNAL to model/: reads config.json key by key. null counts as absent, nothing is converted between types.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json_fwd.hpp>

#include "libcalib/model/config.h"

namespace calib::model {

/// At most 60 characters of a value, for messages.
std::string shorten(const nlohmann::json& value);

/// One JSON object, which outlives this. `scope` ("text_config.") goes in front of key names in messages.
/// Throws: kFormat naming file, key, value and what was expected, for a value of another type or out of range.
class KeyReader {
 public:
  KeyReader(const nlohmann::json& object, std::string path, std::string scope = "")
      : object_(object), path_(std::move(path)), scope_(std::move(scope)) {}

  bool has(const char* key) const { return find(key) != nullptr; }
  bool is_null(const char* key) const;
  std::optional<std::int64_t> count(const char* key) const;  ///< positive integer
  std::optional<std::int64_t> count_or_zero(const char* key) const;
  std::int64_t required_count(const char* key) const;
  std::optional<double> positive(const char* key) const;
  std::optional<double> number(const char* key) const;
  std::optional<bool> flag(const char* key) const;
  std::optional<std::string> text(const char* key) const;
  const nlohmann::json* object(const char* key) const;  ///< nullptr if absent
  const nlohmann::json* array(const char* key) const;
  const std::string& path() const { return path_; }
  const std::string& scope() const { return scope_; }

 private:
  const nlohmann::json* find(const char* key) const;
  [[noreturn]] void wrong(const char* key, const nlohmann::json& value, const char* expected) const;

  const nlohmann::json& object_;
  std::string path_, scope_;
};

/// Keeps what a family default was used for, so that it can be written to the output.
template <typename T>
T or_default(const std::optional<T>& value, T fallback, const char* key, ModelConfig& config) {
  if (value) return *value;
  config.defaults.push_back(fmt::format("{}={}", key, fallback));
  return fallback;
}

/// rope_theta, rope_scaling, rope_parameters and rope_local_base_freq -> config.rope and, where the family has one, local_rope.
/// Throws: kFormat where two spellings disagree, kUnsupported naming the scaling type or the layer type.
void read_hf_rope(const KeyReader& keys, ModelConfig& config);

}  // namespace calib::model
