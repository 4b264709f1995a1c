#include "libcalib/io/json.h"

#include <charconv>
#include <cmath>
#include <limits>

#include <nlohmann/json.hpp>

#include "libcalib/base/error.h"
#include "libcalib/base/json.h"
#include "libcalib/base/mapped_file.h"
#include "libcalib/base/plural.h"
#include "libcalib/base/utf8.h"
#include "libcalib/io/atomic_file.h"

namespace calib::io {
namespace {

using nlohmann::ordered_json;

void put_string(const std::string& raw, std::string& out) {
  out += '"';
  for (const char c : to_valid_utf8(raw)) {
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F)
          fmt::format_to(std::back_inserter(out), "\\u{:04x}", static_cast<unsigned>(static_cast<unsigned char>(c)));
        else
          out += c;
    }
  }
  out += '"';
}

class Writer {
 public:
  explicit Writer(const std::string& where) : where_(where) {}

  void put(const ordered_json& value, const std::string& path, int depth) {
    switch (value.type()) {
      case ordered_json::value_t::object: return put_object(value, path, depth);
      case ordered_json::value_t::array: return put_array(value, path, depth);
      case ordered_json::value_t::string: return put_string(value.get_ref<const std::string&>(), out);
      case ordered_json::value_t::boolean: out += value.get<bool>() ? "true" : "false"; return;
      case ordered_json::value_t::number_integer: out += fmt::format("{}", value.get<std::int64_t>()); return;
      case ordered_json::value_t::number_unsigned: out += fmt::format("{}", value.get<std::uint64_t>()); return;
      case ordered_json::value_t::number_float: return put_double(value.get<double>(), path);
      case ordered_json::value_t::null: out += "null"; return;
      default: fail(ErrorKind::kInternal, where_, "{} holds a value that JSON does not know", path);
    }
  }

  std::string out;

 private:
  void put_double(double x, const std::string& path) {
    if (!std::isfinite(x)) fail(ErrorKind::kNumeric, where_, "{} is {}, which JSON cannot hold", path.empty() ? "/" : path, std::isnan(x) ? "NaN" : "infinite");
    char text[40];
    const auto end = std::to_chars(text, text + sizeof text, x).ptr;
    const std::string_view shortest(text, static_cast<std::size_t>(end - text));
    out += shortest;
    if (shortest.find_first_of(".e") == std::string_view::npos) out += ".0";
  }

  void line(int depth) {
    out += '\n';
    out.append(static_cast<std::size_t>(2 * depth), ' ');
  }

  void put_object(const ordered_json& value, const std::string& path, int depth) {
    if (value.empty()) {
      out += "{}";
      return;
    }
    out += '{';
    bool first = true;
    for (const auto& [key, member] : value.items()) {
      if (!first) out += ',';
      first = false;
      line(depth + 1);
      put_string(key, out);
      out += ": ";
      put(member, path + "/" + key, depth + 1);
    }
    line(depth);
    out += '}';
  }

  void put_array(const ordered_json& value, const std::string& path, int depth) {
    bool plain = true;
    for (const auto& element : value) plain = plain && !element.is_structured();
    out += '[';
    std::size_t i = 0;
    for (const auto& element : value) {
      if (i > 0) out += plain ? ", " : ",";
      if (!plain) line(depth + 1);
      put(element, path + "/" + fmt::format("{}", i++), depth + 1);
    }
    if (!plain) line(depth);
    out += ']';
  }

  std::string where_;
};

}  // namespace

std::string json_text(const ordered_json& value, const std::string& where) {
  Writer writer(where);
  writer.put(value, "", 0);
  writer.out += '\n';
  return std::move(writer.out);
}

void write_json_file(const std::string& path, const ordered_json& value) { write_file(path, json_text(value, path)); }

nlohmann::json read_json_file(const std::string& path) {
  const MappedFile file(path);
  const std::string foreign = describe_foreign_content(file.bytes().substr(0, 4096));
  if (!foreign.empty()) fail(ErrorKind::kFormat, path, "expected JSON, found {}", foreign);
  return parse_json_strict(file.bytes(), path);
}

std::string shown_json(const nlohmann::json& value) {
  constexpr std::size_t kShown = 80;
  std::string text = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (text.size() <= kShown) return text;
  if (value.is_structured()) return fmt::format("{} of {}", value.is_array() ? "a list" : "an object", value.size());
  return to_valid_utf8(text.substr(0, kShown)) + "…";
}

JsonValue::JsonValue(const nlohmann::json& value, std::string file, std::string path)
    : value_(&value), file_(std::move(file)), path_(std::move(path)) {}

void JsonValue::wrong(const std::string& expected) const {
  std::string found = value_->type_name();
  if (value_->is_primitive()) found = shown_json(*value_);
  fail(ErrorKind::kFormat, file_, "{} is {}, expected {}", path_.empty() ? "/" : path_, found, expected);
}

bool JsonValue::has(const char* key) const {
  if (!value_->is_object()) wrong("an object");
  return value_->contains(key);
}

JsonValue JsonValue::at(const char* key) const {
  if (!has(key)) fail(ErrorKind::kFormat, file_, "{}/{} is missing", path_, key);
  return JsonValue(value_->at(key), file_, path_ + "/" + key);
}

std::size_t JsonValue::size() const {
  if (!value_->is_array()) wrong("an array");
  return value_->size();
}

JsonValue JsonValue::element(std::size_t i) const {
  if (i >= size()) fail(ErrorKind::kFormat, file_, "{} has {}, expected more than {}", path_, counted(size(), "element"), i);
  return JsonValue(value_->at(i), file_, path_ + "/" + fmt::format("{}", i));
}

std::string JsonValue::string() const {
  if (!value_->is_string()) wrong("a string");
  return value_->get<std::string>();
}

bool JsonValue::boolean() const {
  if (!value_->is_boolean()) wrong("true or false");
  return value_->get<bool>();
}

double JsonValue::number() const {
  if (!value_->is_number()) wrong("a number");
  return value_->get<double>();
}

std::int64_t JsonValue::integer() const {
  if (value_->is_number_unsigned()) {
    if (value_->get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) wrong("an integer below 2^63");
    return static_cast<std::int64_t>(value_->get<std::uint64_t>());
  }
  if (value_->is_number_integer()) return value_->get<std::int64_t>();
  if (value_->is_number_float()) {
    const double x = value_->get<double>();
    if (x == std::floor(x) && std::fabs(x) < 9.0e15) return static_cast<std::int64_t>(x);
  }
  wrong("an integer");
}

std::uint64_t JsonValue::unsigned_integer() const {
  if (value_->is_number_unsigned()) return value_->get<std::uint64_t>();
  const std::int64_t x = integer();
  if (x < 0) wrong("an integer >= 0");
  return static_cast<std::uint64_t>(x);
}

std::vector<std::string> JsonValue::strings() const {
  std::vector<std::string> out;
  for (std::size_t i = 0; i < size(); ++i) out.push_back(element(i).string());
  return out;
}

}  // namespace calib::io
