#include "libcalib/model/config_hf_reader.h"

#include <cmath>

#include <nlohmann/json.hpp>

#include "libcalib/base/error.h"
#include "libcalib/base/utf8.h"

namespace calib::model {

using nlohmann::json;

namespace {

constexpr std::int64_t kMaxCount = std::int64_t{1} << 31;

}  // namespace

std::string shorten(const json& value) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > 60) text = to_valid_utf8(text.substr(0, 57)) + "...";
  return text;
}

const json* KeyReader::find(const char* key) const {
  const auto it = object_.find(key);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

void KeyReader::wrong(const char* key, const json& value, const char* expected) const {
  fail(ErrorKind::kFormat, path_, "key {}{} is {}, expected {}", scope_, key, shorten(value), expected);
}

bool KeyReader::is_null(const char* key) const {
  const auto it = object_.find(key);
  return it != object_.end() && it->is_null();
}

std::optional<std::int64_t> KeyReader::count(const char* key) const {
  const json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_number_integer() || (value->is_number_unsigned() && value->get<std::uint64_t>() > kMaxCount) ||
      value->get<std::int64_t>() < 1 || value->get<std::int64_t>() > kMaxCount)
    wrong(key, *value, "a positive integer");
  return value->get<std::int64_t>();
}

std::optional<std::int64_t> KeyReader::count_or_zero(const char* key) const {
  const json* value = find(key);
  if (value && value->is_number_integer() && *value == 0) return 0;
  return count(key);
}

std::int64_t KeyReader::required_count(const char* key) const {
  const auto value = count(key);
  if (!value) fail(ErrorKind::kFormat, path_, "key {}{} is missing; expected a positive integer", scope_, key);
  return *value;
}

std::optional<double> KeyReader::positive(const char* key) const {
  const json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_number() || !(value->get<double>() > 0.0) || !std::isfinite(value->get<double>()))
    wrong(key, *value, "a positive number");
  return value->get<double>();
}

std::optional<double> KeyReader::number(const char* key) const {
  const json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_number() || !std::isfinite(value->get<double>())) wrong(key, *value, "a number");
  return value->get<double>();
}

std::optional<bool> KeyReader::flag(const char* key) const {
  const json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_boolean()) wrong(key, *value, "true or false");
  return value->get<bool>();
}

std::optional<std::string> KeyReader::text(const char* key) const {
  const json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_string()) wrong(key, *value, "a string");
  return value->get<std::string>();
}

const json* KeyReader::object(const char* key) const {
  const json* value = find(key);
  if (value && !value->is_object()) wrong(key, *value, "an object or null");
  return value;
}

const json* KeyReader::array(const char* key) const {
  const json* value = find(key);
  if (value && !value->is_array()) wrong(key, *value, "an array or null");
  return value;
}

}  // namespace calib::model
