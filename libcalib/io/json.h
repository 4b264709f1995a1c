#pragma once
// JSON files: a deterministic writer and typed access that names the JSON path of what is wrong.

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace calib::io {

/// Text of one document, two-space indent, arrays of plain values on one line, a line feed at the end. The same value gives
/// the same bytes on every machine and under every locale: doubles in their shortest form that reads back equal, always
/// with a point or an exponent; strings as valid UTF-8 (damaged parts become U+FFFD).
/// Throws kNumeric naming the JSON path of a number that is not finite: JSON has no form for it.
std::string json_text(const nlohmann::ordered_json& value, const std::string& where);
/// json_text to a file, atomically.
void write_json_file(const std::string& path, const nlohmann::ordered_json& value);

/// parse_json_strict on a whole file. Throws: kNotFound, kIo, kFormat.
nlohmann::json read_json_file(const std::string& path);

/// A value as messages show it: its JSON, cut where it is long.
std::string shown_json(const nlohmann::json& value);

/// One value of a parsed document and where it stands. Every failure is kFormat at "<file>" naming the JSON path, what was
/// found and what was expected. The document must outlive it.
class JsonValue {
 public:
  JsonValue(const nlohmann::json& value, std::string file, std::string path = "");

  JsonValue at(const char* key) const;         ///< member that must be there
  bool has(const char* key) const;             ///< requires an object
  std::size_t size() const;                    ///< requires an array
  JsonValue element(std::size_t i) const;      ///< element; requires an array
  std::string string() const;
  bool boolean() const;
  double number() const;                       ///< any finite number
  std::int64_t integer() const;                ///< 4 and 4.0, not 4.5
  std::uint64_t unsigned_integer() const;
  std::vector<std::string> strings() const;
  const std::string& path() const noexcept { return path_; }
  [[noreturn]] void wrong(const std::string& expected) const;

 private:
  const nlohmann::json* value_;
  std::string file_, path_;
};

}  // namespace calib::io
