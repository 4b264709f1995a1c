#include "libcalib/base/json.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include <nlohmann/json.hpp>

#include "libcalib/base/error.h"
#include "libcalib/base/utf8.h"

namespace calib {
namespace {

constexpr std::size_t kMaxDepth = 128;

/// "line 3, column 7 (byte 120): `"scale": NaN,`", or that the text ends there. `position`: bytes read, the last of which was wrong.
std::string place_text(std::string_view text, std::size_t position) {
  constexpr std::size_t kShown = 24;
  const std::size_t wrong = position == 0 ? 0 : position - 1;
  const bool at_end = wrong >= text.size();
  const std::size_t at = at_end ? text.size() : wrong;
  const std::string_view before = text.substr(0, at);
  const std::size_t line_begin = before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
  const std::string place = fmt::format("line {}, column {} (byte {})", std::count(before.begin(), before.end(), '\n') + 1, at - line_begin + 1, position);
  if (at_end) return place + ": the text ends within a value; is the file cut off?";
  const std::size_t begin = std::max(line_begin, at - std::min(at, kShown)), end = std::min(at + kShown, text.find('\n', at));
  return fmt::format("{}: `{}`", place, to_valid_utf8(text.substr(begin, end - begin)));
}

// Checks what the DOM parser accepts in silence (duplicate keys, depth, numbers out of range) on the way to the DOM.
class StrictBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  StrictBuilder(std::string_view text, const std::string& where, nlohmann::json& root) : text_(text), where_(where), root_(root) {}

  bool null() override { return put(nullptr); }
  bool boolean(bool v) override { return put(v); }
  bool number_integer(number_integer_t v) override { return put(v); }
  bool number_unsigned(number_unsigned_t v) override { return put(v); }
  bool number_float(number_float_t v, const string_t& text) override {
    if (!std::isfinite(v)) fail(ErrorKind::kFormat, where_, "number {} at {} is out of range for a double", text, path());
    return put(v);
  }
  bool string(string_t& v) override { return put(std::move(v)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(nlohmann::json::object()); }
  bool start_array(std::size_t) override { return open(nlohmann::json::array()); }
  bool key(string_t& name) override {
    if (stack_.back()->contains(name)) fail(ErrorKind::kFormat, where_, "key \"{}\" stands twice in {}", to_valid_utf8(name), path());
    key_ = std::move(name);
    return true;
  }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& e) override {
    const bool utf8 = std::strstr(e.what(), "UTF-8") != nullptr;
    const bool range = std::strstr(e.what(), "out of range") != nullptr || std::strstr(e.what(), "out_of_range") != nullptr;
    fail(ErrorKind::kFormat, where_, "not valid JSON at {}{}", place_text(text_, position),
         utf8    ? ", invalid UTF-8 in a string"
         : range ? ", number out of range"
                 : "");
  }

 private:
  template <typename V>
  bool put(V&& v) {
    place(nlohmann::json(std::forward<V>(v)));
    return true;
  }
  nlohmann::json* place(nlohmann::json v) {
    if (stack_.empty()) {
      root_ = std::move(v);
      return &root_;
    }
    if (stack_.back()->is_array()) {
      stack_.back()->push_back(std::move(v));
      return &stack_.back()->back();
    }
    auto& slot = (*stack_.back())[key_];
    slot = std::move(v);
    return &slot;
  }
  bool open(nlohmann::json v) {
    if (stack_.size() >= kMaxDepth) fail(ErrorKind::kFormat, where_, "nesting deeper than {} levels at {}", kMaxDepth, path());
    names_.push_back(stack_.empty() ? "" : stack_.back()->is_array() ? std::to_string(stack_.back()->size()) : key_);
    stack_.push_back(place(std::move(v)));
    return true;
  }
  bool close() {
    stack_.pop_back();
    names_.pop_back();
    return true;
  }
  std::string path() const {
    std::string p;
    for (std::size_t i = 1; i < names_.size(); ++i) p += "/" + names_[i];
    return p.empty() ? "/" : to_valid_utf8(p);
  }

  std::string_view text_;
  const std::string& where_;
  nlohmann::json& root_;
  std::vector<nlohmann::json*> stack_;
  std::vector<std::string> names_;
  std::string key_;
};

bool starts_with(std::string_view text, std::string_view prefix) { return text.substr(0, prefix.size()) == prefix; }

}  // namespace

nlohmann::json parse_json_strict(std::string_view text, const std::string& where) {
  if (const std::string foreign = describe_foreign_content(text.substr(0, 512)); !foreign.empty())
    fail(ErrorKind::kFormat, where, "expected JSON, found: {}", foreign);
  nlohmann::json root;
  StrictBuilder builder(text, where, root);
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &builder)) fail(ErrorKind::kFormat, where, "not valid JSON");
  return root;
}

std::string describe_foreign_content(std::string_view b) {
  // First, because the length field may look like the short magic of another format.
  if (b.size() >= 10 && b[8] == '{' && (b[9] == '"' || b[9] == ' ' || b[9] == '}')) {
    std::uint64_t n = 0;
    std::memcpy(&n, b.data(), 8);
    if (n < 100'000'001) return "safetensors file";
  }
  if (starts_with(b, "version https://git-lfs")) {
    const auto at = b.find("\nsize ");
    std::string size;
    if (at != std::string_view::npos)
      for (std::size_t i = at + 6; i < b.size() && std::isdigit(static_cast<unsigned char>(b[i])); ++i) size += b[i];
    return "Git LFS pointer" + (size.empty() ? std::string() : " (the real object has " + size + " bytes; run git lfs pull)");
  }
  std::string head;
  for (char c : b.substr(0, 64)) head += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const auto first = head.find_first_not_of(" \t\r\n");
  if (first != std::string::npos && (head.compare(first, 9, "<!doctype") == 0 || head.compare(first, 5, "<html") == 0)) return "HTML page";
  if (starts_with(b, "GGUF")) return "GGUF file";
  for (const char* magic : {"ggjt", "ggla", "ggml", "ggmf", "tjgg", "algg", "lmgg", "fmgg"})
    if (starts_with(b, magic)) return std::string("old GGML format (magic ") + magic + ")";
  if (starts_with(b, std::string_view("PK\x03\x04", 4))) return "zip archive (a PyTorch .bin or .pt file?)";
  if (starts_with(b, "\x1f\x8b")) return "gzip archive";
  if (starts_with(b, "\x7f""ELF")) return "ELF program";
  if (starts_with(b, "\x89HDF\r\n\x1a\n")) return "HDF5 file";
  return "";
}

}  // namespace calib
