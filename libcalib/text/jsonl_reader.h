#pragma once
// Rows of a .jsonl file, or of a .json file that holds one list, in the shapes that data sets use.

#include <string>
#include <string_view>
#include <vector>

namespace calib::text {

struct ChatMessage {
  std::string role;     ///< system, user, assistant, …; human and gpt are mapped to user and assistant
  std::string content;
};

/// One row: plain text, or a conversation.
struct DataRow {
  std::string name;  ///< "line 12" or "row 12", counted from 1
  std::string text;
  std::vector<ChatMessage> messages;  ///< non-empty for a conversation
};

/// Accepted keys, in this order of precedence: text; content; messages [{role, content}]; conversations [{from, value}];
/// prompt + completion (joined as they stand); instruction + input? + output (joined by blank lines, empty parts left out).
/// A message's content may be a list of parts {"type": "text", "text": …}. Blank lines are passed over.
/// Throws: kFormat listing every bad row with its line number and keys.
std::vector<DataRow> read_data_rows(std::string_view text, const std::string& where);

}  // namespace calib::text
