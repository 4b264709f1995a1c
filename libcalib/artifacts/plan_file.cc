#include "libcalib/artifacts/plan_file.h"

#include <algorithm>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "libcalib/artifacts/plan_json.h"
#include "libcalib/base/json.h"
#include "libcalib/base/mapped_file.h"
#include "libcalib/base/sha256.h"
#include "libcalib/base/utf8.h"
#include "libcalib/io/atomic_file.h"
#include "libcalib/io/json.h"
#include "libcalib/io/json_schema.h"

namespace calib::artifacts {

extern const char* const kPlanSchemaText;  // plan_schema.cc, made from schemas/plan.schema.json

namespace {

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash + 1);
}

std::string name_of(const std::string& path) { return path.substr(folder_of(path).size()); }

void check_schema(const io::JsonValue& root, const std::string& path) {
  if (!root.has("schema")) fail(ErrorKind::kVersion, path, "/schema is missing; expected {} version {}", kPlanSchemaName, kPlanSchemaVersion);
  const io::JsonValue schema = root.at("schema");
  if (!schema.has("version")) fail(ErrorKind::kVersion, path, "/schema/version is missing; this program reads version 1 to {}", kPlanSchemaVersion);
  if (const std::string name = schema.at("name").string(); name != kPlanSchemaName)
    fail(ErrorKind::kFormat, path, "/schema/name is \"{}\", expected \"{}\"", to_valid_utf8(name), kPlanSchemaName);
  const std::int64_t version = schema.at("version").integer();
  if (version < 1 || version > kPlanSchemaVersion)
    fail(ErrorKind::kVersion, path, "/schema/version is {}, this program reads 1 to {}", version, kPlanSchemaVersion);
}

/// The arrays beside the plan, if it names any. The name is a plain file name: a plan does not reach into other folders.
std::vector<io::NamedArray> read_arrays(const nlohmann::json& document, const io::JsonValue& root, const std::string& path) {
  const io::JsonValue tensors = root.at("tensors");
  if (document.at("tensors").is_null()) return {};
  const io::JsonValue file = tensors.at("file");
  const std::string name = file.string();
  const bool has_control = std::any_of(name.begin(), name.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; });
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos || name.find('\\') != std::string::npos || has_control)
    fail(ErrorKind::kFormat, path, "{} is \"{}\", expected the name of a file in the plan's own folder", file.path(), to_valid_utf8(name));
  const std::string beside = folder_of(path) + name;
  require_file(beside, fmt::format("{} needs it, for its constants: keep both together, or make the plan again", path));
  const std::string expected = tensors.at("sha256").string(), found = sha256_of_file(beside);
  if (found != expected)
    fail(ErrorKind::kMismatch, beside, "is not the tensor file of {}: sha256 {}, {}/sha256 states {}", path, found, tensors.path(), to_valid_utf8(expected));
  return io::read_safetensors_file(beside);
}

}  // namespace

std::string plan_tensor_path(const std::string& path) {
  constexpr std::string_view kSuffix = ".json";
  const bool has_suffix = path.size() > kSuffix.size() && path.compare(path.size() - kSuffix.size(), kSuffix.size(), kSuffix) == 0;
  return (has_suffix ? path.substr(0, path.size() - kSuffix.size()) : path) + ".safetensors";
}

std::vector<std::string> plan_schema_problems(const std::string& path) {
  return io::schema_problems(io::read_json_file(path), parse_json_strict(kPlanSchemaText, "plan.schema.json"));
}

namespace {

/// Name of the tensor file in the JSON file at `path`; empty if it names none.
std::string named_tensor_file(const std::string& path) {
  try {
    const nlohmann::json document = io::read_json_file(path);
    const auto tensors = document.find("tensors");
    return tensors != document.end() && tensors->is_object() ? tensors->value("file", "") : "";
  } catch (const Error&) {
    return "";  // no plan, or no JSON
  } catch (const nlohmann::json::exception&) {
    return "";
  }
}

bool belongs_to_plan(const std::string& beside, const std::string& path) { return named_tensor_file(path) == name_of(beside); }

}  // namespace

std::vector<std::string> plan_input_files(const std::string& path) {
  std::vector<std::string> files = {path};
  if (const std::string name = named_tensor_file(path); !name.empty()) files.push_back(folder_of(path) + name);
  return files;
}

void check_tensor_path(const std::string& path) {
  const std::string beside = plan_tensor_path(path);
  std::error_code error;
  if (std::filesystem::exists(beside, error) && !belongs_to_plan(beside, path))
    fail(ErrorKind::kUsage, beside, "exists and is not the tensor file of a plan at {}: it would be replaced; remove it or give the plan another name", path);
}

void write_plan(const plan::Plan& plan, const std::string& path) {
  const std::string beside = plan_tensor_path(path);
  std::error_code error;
  const bool own = std::filesystem::exists(beside, error) && belongs_to_plan(beside, path);
  nlohmann::ordered_json document;
  document["schema"] = {{"name", kPlanSchemaName}, {"version", kPlanSchemaVersion}};
  document.update(plan_to_json(plan));
  const std::vector<io::NamedArray> arrays = plan_arrays(plan);
  if (arrays.empty()) {
    document["tensors"] = nullptr;
    io::write_json_file(path, document);
    if (own) std::filesystem::remove(beside, error);
    return;
  }
  const std::string bytes = io::safetensors_bytes(arrays);
  check_tensor_path(path);
  document["tensors"] = {{"file", name_of(beside)}, {"bytes", bytes.size()}, {"sha256", sha256_hex(bytes)}};
  const std::string text = io::json_text(document, path);
  // Both are complete under temporary names before either appears. A plan whose tensors are not its own is refused by hash.
  io::AtomicFile tensor_file(beside), json_file(path);
  tensor_file.write(bytes);
  json_file.write(text);
  tensor_file.commit();
  json_file.commit();
}

plan::Plan read_plan(const std::string& path, const LogSink& log) {
  require_file(path, "kvplan writes plans");
  const nlohmann::json document = io::read_json_file(path);
  const io::JsonValue root(document, path);
  check_schema(root, path);
  return plan_from_json(document, read_arrays(document, root, path), path, log);
}

}  // namespace calib::artifacts
