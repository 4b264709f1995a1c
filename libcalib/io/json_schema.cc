#include "libcalib/io/json_schema.h"

#include <algorithm>
#include <cmath>

#include <nlohmann/json.hpp>
#include <valijson/adapters/nlohmann_json_adapter.hpp>
#include <valijson/schema.hpp>
#include <valijson/schema_parser.hpp>
#include <valijson/validation_results.hpp>
#include <valijson/validator.hpp>

#include "libcalib/base/error.h"

namespace calib::io {
namespace {

/// The validator takes 4.0 for no integer; JSON itself does not tell the two spellings apart.
void write_whole_numbers_as_integers(nlohmann::json& value) {
  if (value.is_number_float()) {
    const double x = value.get<double>();
    if (x == std::floor(x) && std::fabs(x) < 9.0e15) value = static_cast<std::int64_t>(x);
  } else if (value.is_structured()) {
    for (nlohmann::json& member : value) write_whole_numbers_as_integers(member);
  }
}

}  // namespace

std::vector<std::string> schema_problems(const nlohmann::json& document, const nlohmann::json& schema) {
  nlohmann::json normal = document;
  write_whole_numbers_as_integers(normal);
  valijson::ValidationResults results;
  try {
    valijson::Schema parsed;
    valijson::SchemaParser parser;
    const valijson::adapters::NlohmannJsonAdapter schema_adapter(schema), document_adapter(normal);
    parser.populateSchema(schema_adapter, parsed);
    valijson::Validator validator;
    validator.validate(parsed, document_adapter, &results);
  } catch (const std::exception&) {
    fail(ErrorKind::kInternal, "JSON schema", "the schema that this program carries cannot be read");
  }
  std::vector<std::pair<std::size_t, std::string>> found;
  for (valijson::ValidationResults::Error e; results.popError(e);) {
    std::string path;
    for (std::size_t i = 1; i < e.context.size(); ++i) {  // context: <root>, [member], …
      const std::string& part = e.context[i];
      path += "/" + (part.size() >= 2 && part.front() == '[' ? part.substr(1, part.size() - 2) : part);
    }
    found.emplace_back(e.context.size(), path.empty() ? "/" : path);
  }
  // A broken leaf is reported once for itself and once for every container of it; the leaf says it best.
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<std::string> paths;
  for (auto& [depth, path] : found)
    if (std::find(paths.begin(), paths.end(), path) == paths.end()) paths.push_back(std::move(path));
  return paths;
}

}  // namespace calib::io
