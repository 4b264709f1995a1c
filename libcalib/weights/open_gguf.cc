#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>

#include "libcalib/weights/opened_files.h"

namespace calib::weights {
namespace {

std::string part_path(const SplitName& name, std::uint64_t number) {
  return fmt::format("{}-{:05}-of-{:05}.gguf", name.base, number, name.count);
}

bool read_number(std::string_view digits, std::uint64_t& out) {
  const auto [end, status] = std::from_chars(digits.data(), digits.data() + digits.size(), out);
  return status == std::errc() && end == digits.data() + digits.size();
}

std::int64_t split_key(const GgufMetadata& m, const char* key) {
  const auto value = m.integer(key);
  if (!value) fail(ErrorKind::kMismatch, m.path, "part of a split model without the key {}", key);
  return *value;
}

// A part must state what the first one states: another model's part with a fitting name is found here.
void check_part(const GgufFile& part, std::uint64_t number, const GgufMetadata& given) {
  const GgufMetadata& m = part.metadata;
  for (const char* key : {"split.count", "split.tensors.count"})
    if (const auto got = split_key(m, key), expected = split_key(given, key); got != expected)
      fail(ErrorKind::kMismatch, m.path, "{} is {}, but {} says {}: part of another model?", key, got, given.path, expected);
  if (const auto got = split_key(m, "split.no"); got != static_cast<std::int64_t>(number) - 1)
    fail(ErrorKind::kMismatch, m.path, "split.no is {} (counted from 0), but the file name says part {}", got, number);
  const auto here = m.text("general.architecture"), there = given.text("general.architecture");
  if (here && there && *here != *there)
    fail(ErrorKind::kMismatch, m.path, "general.architecture is {}, but {} says {}", *here, given.path, *there);
}

void check_all_there(const SplitName& name, const std::string& given) {
  std::vector<std::string> missing;
  for (std::uint64_t i = 1; i <= name.count; ++i) {
    std::error_code ignored;
    if (std::string part = part_path(name, i); !std::filesystem::exists(part, ignored)) missing.push_back(std::move(part));
  }
  if (missing.size() == 1) fail(ErrorKind::kNotFound, missing[0], "part of the split model {} not found", given);
  if (!missing.empty())
    throw Error(ErrorKind::kNotFound, given, fmt::format("{} of {} parts of this split model not found", missing.size(), name.count), missing);
}

}  // namespace

SplitName parse_split_name(const std::string& path) {
  constexpr std::size_t kTail = sizeof("-00001-of-00003.gguf") - 1;
  if (path.size() < kTail) return {};
  const std::string_view tail = std::string_view(path).substr(path.size() - kTail);
  SplitName out;
  if (tail[0] != '-' || tail.substr(6, 4) != "-of-" || tail.substr(15) != ".gguf" || !read_number(tail.substr(1, 5), out.number) ||
      !read_number(tail.substr(10, 5), out.count) || out.number < 1 || out.number > out.count)
    return {};
  out.base = path.substr(0, path.size() - kTail);
  return out;
}

OpenedFiles open_gguf(const std::string& path) {
  OpenedFiles out;
  MappedFile given(path);
  GgufFile parsed = parse_gguf(given);
  const auto add = [&](MappedFile file, GgufFile&& part) {
    out.header_bytes.push_back(part.data_offset);
    out.files.push_back(std::move(file));
    std::move(part.tensors.begin(), part.tensors.end(), std::back_inserter(out.tensors));
  };
  if (parsed.metadata.integer("split.count").value_or(1) <= 1) {
    if (parsed.tensors.empty())
      fail(ErrorKind::kMismatch, path, "no tensors, vocabulary only: expected a model with weights ({} metadata keys were read)", parsed.metadata.values.size());
    out.metadata = std::move(parsed.metadata);
    add(std::move(given), std::move(parsed));
    return out;
  }

  const SplitName name = parse_split_name(path);
  const auto count = static_cast<std::uint64_t>(split_key(parsed.metadata, "split.count"));
  if (name.count != count)
    fail(ErrorKind::kMismatch, path, "part {} of a model split in {}: the file name should end in -{:05}-of-{:05}.gguf",
         split_key(parsed.metadata, "split.no") + 1, count, split_key(parsed.metadata, "split.no") + 1, count);
  check_all_there(name, path);
  std::map<std::string, std::string> file_of;
  for (std::uint64_t i = 1; i <= count; ++i) {
    const std::string part = i == name.number ? path : part_path(name, i);
    MappedFile file(part);
    GgufFile next = parse_gguf(file);
    check_part(next, i, parsed.metadata);
    for (const TensorInfo& t : next.tensors)
      if (const auto [it, fresh] = file_of.emplace(t.name, part); !fresh)
        fail(ErrorKind::kMismatch, part, "tensor {} is also in {}", t.name, it->second);
    if (i == 1) out.metadata = next.metadata;
    add(std::move(file), std::move(next));
  }
  if (const auto total = split_key(*out.metadata, "split.tensors.count"); total != static_cast<std::int64_t>(out.tensors.size()))
    fail(ErrorKind::kMismatch, path, "split.tensors.count is {}, but the {} parts hold {} tensors", total, count, out.tensors.size());
  return out;
}

}  // namespace calib::weights
