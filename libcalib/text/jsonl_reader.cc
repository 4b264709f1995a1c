#include "libcalib/text/jsonl_reader.h"

#include <nlohmann/json.hpp>

#include "libcalib/base/error.h"
#include "libcalib/base/json.h"
#include "libcalib/base/utf8.h"

namespace calib::text {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxDetails = 1000;

// What is wrong with one row; collected, so that one run names all.
struct RowProblem {
  std::string text;
};

[[noreturn]] void reject(std::string text) { throw RowProblem{std::move(text)}; }

std::string text_member(const json& object, const char* key) {
  const auto it = object.find(key);
  if (it == object.end()) reject(fmt::format("\"{}\" is absent", key));
  if (!it->is_string()) reject(fmt::format("\"{}\" is {}, expected a string", key, it->type_name()));
  return it->get<std::string>();
}

std::string read_content(const json& message, const char* key) {
  const auto it = message.find(key);
  if (it == message.end() || !it->is_array()) return text_member(message, key);
  std::string joined;
  for (const json& part : *it) {
    if (part.is_string()) {
      joined += part.get<std::string>();
      continue;
    }
    const std::string type = part.is_object() && part.contains("type") && part["type"].is_string() ? part["type"].get<std::string>() : "text";
    if (!part.is_object() || type != "text")
      reject(fmt::format("a part of \"{}\" is {}, only text is offered", key, part.is_object() ? to_valid_utf8(type) : part.type_name()));
    joined += text_member(part, "text");
  }
  return joined;
}

std::vector<ChatMessage> read_messages(const json& row, const char* list_key, const char* role_key, const char* content_key) {
  const json& list = row[list_key];
  if (!list.is_array() || list.empty()) reject(fmt::format("\"{}\" is not a list with messages", list_key));
  std::vector<ChatMessage> messages;
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (!list[i].is_object()) reject(fmt::format("{}[{}] is {}, expected an object", list_key, i, list[i].type_name()));
    // Some sets keep {role, content} under "conversations".
    const bool other = !list[i].contains(role_key) && list[i].contains("role");
    ChatMessage m{text_member(list[i], other ? "role" : role_key), read_content(list[i], other ? "content" : content_key)};
    if (m.role.empty()) reject(fmt::format("{}[{}] has an empty role", list_key, i));
    if (m.role == "human") m.role = "user";
    if (m.role == "gpt") m.role = "assistant";
    messages.push_back(std::move(m));
  }
  return messages;
}

std::string join_parts(const std::vector<std::string>& parts) {
  std::string out;
  for (const std::string& part : parts) {
    if (part.empty()) continue;
    if (!out.empty()) out += "\n\n";
    out += part;
  }
  return out;
}

DataRow read_row(const json& row) {
  if (!row.is_object()) reject(fmt::format("is {}, expected an object", row.type_name()));
  DataRow out;
  if (row.contains("text")) {
    out.text = text_member(row, "text");
  } else if (row.contains("content")) {
    out.text = read_content(row, "content");
  } else if (row.contains("messages")) {
    out.messages = read_messages(row, "messages", "role", "content");
  } else if (row.contains("conversations")) {
    out.messages = read_messages(row, "conversations", "from", "value");
  } else if (row.contains("prompt") && row.contains("completion")) {
    out.text = text_member(row, "prompt") + text_member(row, "completion");
  } else if (row.contains("instruction") && row.contains("output")) {
    out.text = join_parts(
        {text_member(row, "instruction"), row.contains("input") && !row["input"].is_null() ? text_member(row, "input") : "", text_member(row, "output")});
  } else {
    std::vector<std::string> keys;
    for (const auto& [key, value] : row.items()) keys.push_back(fmt::format("\"{}\"", to_valid_utf8(key)));
    reject(fmt::format("none of text, content, messages, conversations, prompt + completion, instruction + output among its keys: {}",
                       keys.empty() ? std::string("(none)") : fmt::format("{}", fmt::join(keys, ", "))));
  }
  return out;
}

class RowCollector {
 public:
  explicit RowCollector(const std::string& where) : where_(where) {}

  template <typename MakeJson>
  void add(const std::string& name, const MakeJson& make) {
    try {
      rows_.push_back(read_row(make()));
      rows_.back().name = name;
    } catch (const RowProblem& problem) {
      note(name, problem.text);
    } catch (const Error& e) {
      note(name, e.message());
    }
  }
  std::vector<DataRow> finish() {
    if (n_bad_ > 0)
      throw Error(ErrorKind::kFormat, where_, fmt::format("{} row{} cannot be used, the first is {}", n_bad_, n_bad_ == 1 ? "" : "s", problems_[0]), problems_);
    return std::move(rows_);
  }

 private:
  void note(const std::string& name, const std::string& what) {
    if (n_bad_++ < kMaxDetails) problems_.push_back(name + ": " + what);
  }
  const std::string& where_;
  std::vector<DataRow> rows_;
  std::vector<std::string> problems_;
  std::size_t n_bad_ = 0;
};

}  // namespace

std::vector<DataRow> read_data_rows(std::string_view text, const std::string& where) {
  constexpr const char* kBlanks = " \t\r\n";
  RowCollector rows(where);
  const auto first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  const auto last = text.find_last_not_of(kBlanks);
  if (text[first] == '[' && text[last] == ']') {
    const json list = parse_json_strict(text.substr(first, last - first + 1), where);
    for (std::size_t i = 0; i < list.size(); ++i) rows.add(fmt::format("row {}", i + 1), [&]() -> const json& { return list[i]; });
    return rows.finish();
  }
  std::size_t n_line = 0;
  for (std::size_t at = 0; at < text.size();) {
    const auto end = std::min(text.find('\n', at), text.size());
    const std::string_view line = text.substr(at, end - at);
    ++n_line;
    at = end + 1;
    if (line.find_first_not_of(kBlanks) == std::string_view::npos) continue;
    rows.add(fmt::format("line {}", n_line), [&] { return parse_json_strict(line, where); });
  }
  return rows.finish();
}

}  // namespace calib::text
