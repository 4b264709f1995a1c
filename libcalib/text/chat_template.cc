#include "libcalib/text/chat_template.h"

#include "libcalib/base/error.h"
#include "libcalib/base/utf8.h"

namespace calib::text {
namespace {

std::string trimmed(const std::string& text) {
  constexpr const char* kBlanks = " \t\r\n\v\f";
  const auto first = text.find_first_not_of(kBlanks);
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

}  // namespace

ChatTemplate::ChatTemplate(const std::string& name, const Tokenizer& tokenizer) : name_(name), tokenizer_(tokenizer) {
  if (name == "chatml") {
    kind_ = Kind::kChatml;
    open_ = special("<|im_start|>");
    close_ = special("<|im_end|>");
  } else if (name == "llama3") {
    kind_ = Kind::kLlama3;
    open_ = special("<|start_header_id|>");
    header_end_ = special("<|end_header_id|>");
    close_ = special("<|eot_id|>");
  } else if (name != "plain") {
    fail(ErrorKind::kUsage, "--chat-template", "\"{}\" is none of chatml, llama3, plain", to_valid_utf8(name));
  }
}

TokenId ChatTemplate::special(const std::string& text) const {
  std::vector<TokenId> ids;
  try {
    ids = tokenizer_.encode(text, true);
  } catch (const Error&) {
    ids.clear();  // a vocabulary that cannot even spell it has no such token
  }
  if (ids.size() != 1)
    fail(ErrorKind::kMismatch, "--chat-template " + name_, "the tokenizer has no token {}; choose the template that the model was trained with, or plain",
         text);
  return ids[0];
}

std::vector<TokenId> ChatTemplate::encode(const std::vector<ChatMessage>& messages) const {
  std::vector<TokenId> ids;
  std::string literal;  // neighbouring literal text is encoded in one piece, as the whole prompt would be
  const auto flush = [&] {
    if (literal.empty()) return;
    const auto more = tokenizer_.encode(literal, false);
    ids.insert(ids.end(), more.begin(), more.end());
    literal.clear();
  };
  const auto put = [&](TokenId id) {
    flush();
    ids.push_back(id);
  };
  for (const auto& [role, content] : messages) {
    switch (kind_) {
      case Kind::kChatml:
        put(open_);
        literal += role + "\n" + content;
        put(close_);
        literal += "\n";
        break;
      case Kind::kLlama3:
        put(open_);
        literal += role;
        put(header_end_);
        literal += "\n\n" + trimmed(content);
        put(close_);
        break;
      case Kind::kPlain: literal += role + ": " + content + "\n\n"; break;
    }
  }
  flush();
  return ids;
}

}  // namespace calib::text
