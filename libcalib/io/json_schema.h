#pragma once
// Checks a JSON document against a JSON Schema (draft 7).

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace calib::io {

/// JSON paths of the places that break the schema, the most specific first, each once; empty if the document is valid. Whole
/// numbers may be written as 4 or 4.0. Throws kInternal if the schema itself is not usable.
std::vector<std::string> schema_problems(const nlohmann::json& document, const nlohmann::json& schema);

}  // namespace calib::io
