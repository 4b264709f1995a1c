#include "tools/common/option_values.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "libcalib/base/error.h"
#include "libcalib/base/utf8.h"
#include "libcalib/io/atomic_file.h"
#include "libcalib/io/h5.h"
#include "libcalib/io/json.h"

namespace calib::tools {
namespace {

/// "-o,--output" -> "--output".
std::string long_name(const std::string& names) {
  const std::size_t at = names.rfind("--");
  return at == std::string::npos ? names : names.substr(at);
}

template <typename T>
bool parse_all(const std::string& text, T& value) {
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  return result.ec == std::errc() && result.ptr == end;
}

}  // namespace

std::int64_t parse_integer(const std::string& option, const std::string& text, std::int64_t low, std::int64_t high) {
  std::int64_t value = 0;
  if (!parse_all(text, value) || value < low || value > high)
    fail(ErrorKind::kUsage, option, "is \"{}\", expected a whole number from {} to {}", to_valid_utf8(text), low, high);
  return value;
}

double parse_number(const std::string& option, const std::string& text, double low, double high) {
  double value = 0;
  if (!parse_all(text, value) || !(value >= low && value <= high))
    fail(ErrorKind::kUsage, option, "is \"{}\", expected a number from {} to {}", to_valid_utf8(text), low, high);
  return value;
}

std::int64_t parse_bytes(const std::string& option, const std::string& text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  std::string unit(result.ptr, end);
  double factor = 0;
  if (result.ec == std::errc()) {
    static constexpr struct { const char* name; double factor; } kUnits[] = {
        {"", 1}, {"B", 1}, {"K", 0x1p10}, {"KiB", 0x1p10}, {"M", 0x1p20}, {"MiB", 0x1p20}, {"G", 0x1p30}, {"GiB", 0x1p30},
        {"T", 0x1p40}, {"TiB", 0x1p40}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}};
    for (const auto& u : kUnits)
      if (unit == u.name) factor = u.factor;
  }
  if (factor == 0 || !(value >= 0) || value * factor > 0x1p60)
    fail(ErrorKind::kUsage, option, "is \"{}\", expected bytes such as 512MiB, 4GiB or 2GB", to_valid_utf8(text));
  return static_cast<std::int64_t>(value * factor);
}

std::string format_bytes(double bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int u = 0;
  while (bytes >= 1024 && u < 4) bytes /= 1024, ++u;
  return u == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.{}f} {}", bytes, bytes < 100 ? 1 : 0, kUnits[u]);
}

std::string format_duration(double seconds) {
  const auto s = static_cast<std::int64_t>(std::llround(std::min(std::max(seconds, 0.0), 3.6e7)));
  if (s >= 3600) return fmt::format("{}h{:02}m", s / 3600, s / 60 % 60);
  if (s >= 60) return fmt::format("{}m{:02}s", s / 60, s % 60);
  return fmt::format("{}s", s);
}

std::vector<std::string> split_list(const std::string& option, const std::string& text) {
  std::vector<std::string> items;
  if (text.empty()) return items;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    if (end == begin) fail(ErrorKind::kUsage, option, "is \"{}\", which has an empty item; write a comma only between two", to_valid_utf8(text));
    items.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return items;
}

std::vector<std::string> split_lists(const std::string& option, const std::vector<std::string>& texts) {
  std::vector<std::string> items;
  for (const std::string& text : texts)
    for (std::string& item : split_list(option, text)) items.push_back(std::move(item));
  return items;
}

std::vector<int> parse_layers(const std::string& option, const std::vector<std::string>& items) {
  constexpr std::int64_t kMostLayers = 1 << 16;
  std::vector<int> layers;
  for (const std::string& item : items) {
    const std::size_t dash = item.find('-');
    const std::string ends[2] = {item.substr(0, dash), dash == std::string::npos ? item : item.substr(dash + 1)};
    std::int64_t first = 0, last = 0;
    const auto in_range = [](std::int64_t l) { return l >= 0 && l <= kMostLayers; };
    if (!parse_all(ends[0], first) || !parse_all(ends[1], last) || !in_range(first) || !in_range(last))
      fail(ErrorKind::kUsage, option + " " + to_valid_utf8(item), "expected a layer number from 0 to {} or a range such as 5-8", kMostLayers);
    if (last < first) fail(ErrorKind::kUsage, option + " " + item, "a range goes upwards; write {}-{}", last, first);
    for (std::int64_t l = first; l <= last; ++l) layers.push_back(static_cast<int>(l));
  }
  std::sort(layers.begin(), layers.end());
  if (const auto twice = std::adjacent_find(layers.begin(), layers.end()); twice != layers.end())
    fail(ErrorKind::kUsage, option, "names layer {} twice; name each layer once", *twice);
  return layers;
}

CLI::Option* add_integer(CLI::App& app, const std::string& names, std::int64_t& value, std::int64_t low, std::int64_t high,
                         const std::string& help, const std::string& group) {
  const std::string option = long_name(names);
  return app
      .add_option_function<std::string>(
          names, [=, &value](const std::string& text) { value = parse_integer(option, text, low, high); }, help)
      ->default_str(std::to_string(value))
      ->type_name("N")
      ->group(group);
}

CLI::Option* add_number(CLI::App& app, const std::string& names, double& value, double low, double high, const std::string& help,
                        const std::string& group) {
  const std::string option = long_name(names);
  return app
      .add_option_function<std::string>(
          names, [=, &value](const std::string& text) { value = parse_number(option, text, low, high); }, help)
      ->default_str(fmt::format("{}", value))
      ->type_name("X")
      ->group(group);
}

CLI::Option* add_bytes(CLI::App& app, const std::string& names, std::int64_t& value, const std::string& help,
                       const std::string& group) {
  const std::string option = long_name(names);
  std::string shown = format_bytes(static_cast<double>(value));
  std::erase(shown, ' ');
  return app
      .add_option_function<std::string>(names, [=, &value](const std::string& text) { value = parse_bytes(option, text); }, help)
      ->default_str(shown)
      ->type_name("BYTES")
      ->group(group);
}

CLI::Option* add_text(CLI::App& app, const std::string& names, std::string& value, const std::string& help,
                      const std::string& group, const std::string& type_name) {
  return app.add_option(names, value, help)->default_str(value)->type_name(type_name)->group(group);
}

CLI::Option* add_flag(CLI::App& app, const std::string& names, bool& value, const std::string& help, const std::string& group) {
  return app.add_flag(names, value, help)->group(group);
}

CLI::Option* add_list(CLI::App& app, const std::string& names, std::vector<std::string>& values, const std::string& help, const std::string& group,
                      const std::string& type_name) {
  return app.add_option(names, values, help)->type_name(type_name)->group(group);
}

namespace {

/// Whether the file at `path` holds this schema, of any version.
bool holds_schema(const std::string& path, OutputKind kind) {
  try {
    if (kind.format == OutputFormat::kHdf5) {
      const io::H5Reader reader(path, kind.schema, 1);
      return true;
    }
    const nlohmann::json document = io::read_json_file(path);
    const auto name = nlohmann::json::json_pointer("/schema/name");
    return document.is_object() && document.contains(name) && document.at(name) == kind.schema;
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::kIo) throw;
    return e.kind() == ErrorKind::kVersion;
  }
}

void check_is_own_kind(const std::string& output, OutputKind kind) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::is_regular_file(output, error) || fs::file_size(output, error) == 0 || holds_schema(output, kind)) return;
  fail(ErrorKind::kUsage, "--output " + to_valid_utf8(output), "exists and is no {} file: it would be replaced; remove it or give another name", kind.schema);
}

/// "is an input": the same file under any name, or a file of a model's folder that would be replaced.
void check_is_no_input(const std::string& output, const std::string& input) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (input.empty() || !fs::exists(output, error)) return;
  const fs::path parent = fs::path(output).has_parent_path() ? fs::path(output).parent_path() : ".";
  const bool in_folder = fs::is_directory(input, error) && fs::equivalent(parent, input, error) && !error;
  if (in_folder || (fs::exists(input, error) && fs::equivalent(output, input, error) && !error))
    fail(ErrorKind::kUsage, "--output " + to_valid_utf8(output), "would replace an input ({}); give another name", to_valid_utf8(input));
}

}  // namespace

void check_output(const std::string& output, const std::vector<std::string>& inputs, OutputKind kind) {
  if (output.empty()) fail(ErrorKind::kUsage, "--output", "is empty, expected a file name");
  const std::filesystem::path path(output);
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) fail(ErrorKind::kUsage, output, "is a folder, expected a file name for --output");
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  if (!std::filesystem::is_directory(folder, error)) {
    const std::string name = to_valid_utf8(folder.string());
    if (std::filesystem::exists(folder, error)) fail(ErrorKind::kNotFound, output, "{} is not a folder", name);
    fail(ErrorKind::kNotFound, output, "the folder {} does not exist; create it first", name);
  }
  for (const std::string& input : inputs) check_is_no_input(output, input);
  check_is_own_kind(output, kind);
  // What would fail when the work is done fails now: rights, locks, a full disk. Nothing stays behind.
  if (kind.format == OutputFormat::kHdf5) const io::H5Writer probe(output, "probe", 1);
  else const io::AtomicFile probe(output);
}

}  // namespace calib::tools
