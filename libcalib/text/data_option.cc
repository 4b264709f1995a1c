#include "libcalib/text/data_option.h"

#include <charconv>
#include <set>
#include <string_view>
#include <vector>

#include "libcalib/base/error.h"
#include "libcalib/base/utf8.h"

namespace calib::text {
namespace {

struct KeyValue {
  std::string_view key, value;
};

// Empty if the text is no list of known keys.
std::vector<KeyValue> read_list(std::string_view text) {
  std::vector<KeyValue> list;
  while (true) {
    const auto comma = text.find(',');
    const std::string_view item = text.substr(0, comma);
    const auto equals = item.find('=');
    if (equals == std::string_view::npos) return {};
    const KeyValue kv{item.substr(0, equals), item.substr(equals + 1)};
    if (kv.key != "share" && kv.key != "num" && kv.key != "skip") return {};
    list.push_back(kv);
    if (comma == std::string_view::npos) return list;
    text.remove_prefix(comma + 1);
  }
}

template <typename Number>
std::optional<Number> whole_number(std::string_view text) {
  Number n{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return n;
}

}  // namespace

DataOption parse_data_option(const std::string& value) {
  DataOption out;
  out.path = value;
  const auto colon = value.rfind(':');
  if (colon == std::string::npos) return out;
  const std::string_view suffix = std::string_view(value).substr(colon + 1);
  const std::vector<KeyValue> list = read_list(suffix);
  if (list.empty()) return out;
  out.path = value.substr(0, colon);
  out.options = std::string(suffix);
  const std::string where = "--data " + to_valid_utf8(value);
  std::set<std::string_view> seen;
  for (const auto& [key, text] : list) {
    if (!seen.insert(key).second) fail(ErrorKind::kUsage, where, "{} is given twice", key);
    if (key == "share") {
      out.share = whole_number<double>(text);
      if (!out.share || !(*out.share > 0 && *out.share <= 1)) fail(ErrorKind::kUsage, where, "share is \"{}\", expected a number above 0 and at most 1", text);
    } else {
      const auto n = whole_number<std::int64_t>(text);
      const std::int64_t least = key == "num" ? 1 : 0;
      if (!n || *n < least) fail(ErrorKind::kUsage, where, "{} is \"{}\", expected a whole number from {} up", key, text, least);
      if (key == "num") out.num = n;
      else out.skip = *n;
    }
  }
  if (out.path.empty()) fail(ErrorKind::kUsage, where, "options without a path in front of them");
  if (out.share && out.num) fail(ErrorKind::kUsage, where, "share and num exclude each other");
  return out;
}

}  // namespace calib::text
