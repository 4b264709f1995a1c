#include "libcalib/weights/safetensors.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "libcalib/base/json.h"

namespace calib::weights {
namespace {

using Json = nlohmann::json;

struct Dtype {
  const char* name;
  TensorType type;
  std::uint64_t bits;
};
constexpr Dtype kDtypes[] = {
    {"F32", TensorType::kF32, 32},      {"F16", TensorType::kF16, 16},      {"BF16", TensorType::kBF16, 16},
    {"F64", TensorType::kF64, 64},      {"I8", TensorType::kI8, 8},         {"I16", TensorType::kI16, 16},
    {"I32", TensorType::kI32, 32},      {"I64", TensorType::kI64, 64},      {"U8", TensorType::kU8, 8},
    {"U16", TensorType::kU16, 16},      {"U32", TensorType::kU32, 32},      {"U64", TensorType::kU64, 64},
    {"BOOL", TensorType::kBool, 8},     {"F8_E4M3", TensorType::kF8E4M3, 8}, {"F8_E5M2", TensorType::kF8E5M2, 8},
    {"F8_E8M0", TensorType::kOther, 8}, {"F8_E4M3FNUZ", TensorType::kOther, 8}, {"F8_E5M2FNUZ", TensorType::kOther, 8},
    {"F6_E2M3", TensorType::kOther, 6}, {"F6_E3M2", TensorType::kOther, 6}, {"F4", TensorType::kOther, 4},
    {"C64", TensorType::kOther, 64},
};

const Dtype* find_dtype(const std::string& name) {
  const auto it = std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const Dtype& d) { return name == d.name; });
  return it == std::end(kDtypes) ? nullptr : it;
}

// Length of the JSON header, checked against the limit and the file before it is used for anything.
std::size_t header_length(const MappedFile& file) {
  const std::string_view bytes = file.bytes();
  if (const std::string found = describe_foreign_content(bytes.substr(0, 512)); !found.empty() && found.rfind("safetensors", 0) != 0)
    fail(ErrorKind::kFormat, file.path(), "expected a safetensors file, found: {}", found);
  if (bytes.size() < 8)
    fail(ErrorKind::kFormat, file.path(), "file of {} bytes is too short for the 8-byte length field of safetensors", bytes.size());
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  if (length > kMaxSafetensorsHeaderBytes)
    fail(ErrorKind::kFormat, file.path(), "header length field {} exceeds the limit {} (file has {} bytes): not a safetensors file, or damaged",
         length, kMaxSafetensorsHeaderBytes, bytes.size());
  if (length > bytes.size() - 8)
    fail(ErrorKind::kFormat, file.path(), "header length field {} exceeds the {} bytes that follow it (file has {} bytes): cut off?", length,
         bytes.size() - 8, bytes.size());
  if (length < 2 || bytes[8] != '{')
    fail(ErrorKind::kFormat, file.path(), "header length field {}, file size {}: the header does not start with {{", length, bytes.size());
  return static_cast<std::size_t>(length);
}

// Signed numbers, fractions and 1e3 stay out: nothing is converted on the way to an offset.
std::optional<std::vector<std::uint64_t>> whole_numbers(const Json& list) {
  if (!list.is_array()) return {};
  std::vector<std::uint64_t> out;
  for (const Json& v : list) {
    if (!v.is_number_unsigned()) return {};
    out.push_back(v.get<std::uint64_t>());
  }
  return out;
}

// One header entry -> one tensor with offsets inside the data section; the problem as text if the entry is no good.
std::optional<std::string> read_entry(const std::string& name, const Json& entry, TensorInfo& t) {
  if (!entry.is_object()) return fmt::format("tensor {}: its entry is not an object", name);
  for (const auto& item : entry.items())
    if (item.key() != "dtype" && item.key() != "shape" && item.key() != "data_offsets")
      return fmt::format("tensor {}: unknown field {} (expected dtype, shape, data_offsets)", name, item.key());
  if (entry.size() != 3) return fmt::format("tensor {}: needs the three fields dtype, shape and data_offsets", name);
  if (!entry["dtype"].is_string()) return fmt::format("tensor {}: dtype is not a string", name);
  t.name = name;
  t.type_name = entry["dtype"].get<std::string>();
  const Dtype* dtype = find_dtype(t.type_name);
  if (dtype == nullptr) return fmt::format("tensor {}: unknown dtype {}", name, t.type_name);
  t.type = dtype->type;

  const auto shape = whole_numbers(entry["shape"]);
  if (!shape) return fmt::format("tensor {}: shape {} is not a list of non-negative integers", name, entry["shape"].dump());
  const auto offsets = whole_numbers(entry["data_offsets"]);
  if (!offsets || offsets->size() != 2)
    return fmt::format("tensor {}: data_offsets {} is not a pair of non-negative integers", name, entry["data_offsets"].dump());
  const std::uint64_t begin = (*offsets)[0], end = (*offsets)[1];

  std::uint64_t n = 1, bits = 0;
  bool fits = true;
  for (std::uint64_t d : *shape) {
    fits = fits && d <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) && !__builtin_mul_overflow(n, d, &n);
    t.shape.push_back(static_cast<std::int64_t>(d));
  }
  fits = fits && n <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) && !__builtin_mul_overflow(n, dtype->bits, &bits);
  const std::string spelled = fmt::format("tensor {} ({} [{}])", name, t.type_name, fmt::join(*shape, ", "));
  if (!fits) return fmt::format("{}: needs more than 2^63 bytes, data_offsets [{}, {}]", spelled, begin, end);
  if (bits % 8 != 0) return fmt::format("{}: {} bits do not fill whole bytes", spelled, bits);
  if (begin > end) return fmt::format("{}: data_offsets [{}, {}] are reversed", spelled, begin, end);
  if (end - begin != bits / 8)
    return fmt::format("{}: needs {} bytes, data_offsets [{}, {}] give {}", spelled, bits / 8, begin, end, end - begin);
  t.n_elements = static_cast<std::int64_t>(n);
  t.offset = begin;
  t.size_bytes = end - begin;
  return {};
}

[[noreturn]] void fail_all(const MappedFile& file, const char* what, std::vector<std::string> problems) {
  if (problems.size() == 1) fail(ErrorKind::kFormat, file.path(), "{}", problems[0]);
  throw Error(ErrorKind::kFormat, file.path(), fmt::format("{} {}", problems.size(), what), std::move(problems));
}

// The spans must tile [0, data size): a layout with holes or shared bytes has more than one reading.
void check_tiling(const MappedFile& file, const std::vector<TensorInfo>& tensors, std::size_t data_offset) {
  std::vector<std::string> problems;
  std::size_t end = 0;
  const TensorInfo* previous = nullptr;
  for (const TensorInfo& t : tensors) {
    const std::string before = previous ? previous->name : "the start of the data";
    if (t.offset < end)
      problems.push_back(fmt::format("tensors {} and {} overlap: [{}, {}] begins before {}", before, t.name, t.offset, t.offset + t.size_bytes, end));
    else if (t.offset > end)
      problems.push_back(fmt::format("bytes {} to {} of the data, between {} and {}, belong to no tensor", end, t.offset, before, t.name));
    if (t.offset + t.size_bytes >= end) {
      end = t.offset + t.size_bytes;
      previous = &t;
    }
  }
  if (!problems.empty()) fail_all(file, "faults in the layout of the data", std::move(problems));
  const std::size_t data_size = file.size() - data_offset;
  if (end > data_size)
    fail(ErrorKind::kFormat, file.path(), "cut off: tensor {} ends at byte {} of the data, so the file should have {} bytes, but has {}",
         previous->name, end, data_offset + end, file.size());
  if (end < data_size)
    fail(ErrorKind::kFormat, file.path(), "{} bytes after the last tensor ({}): expected {} bytes, file has {}", data_size - end,
         previous ? previous->name : "none", data_offset + end, file.size());
}

}  // namespace

SafetensorsFile parse_safetensors(const MappedFile& file) {
  const std::size_t length = header_length(file);
  std::string_view text = file.bytes().substr(8, length);
  text = text.substr(0, text.find_last_not_of(" \t\r\n") + 1);  // padding may be most of a header
  const Json header = parse_json_strict(text, fmt::format("{} (header of {} bytes, file of {} bytes)", file.path(), length, file.size()));

  SafetensorsFile out;
  out.data_offset = 8 + length;
  std::vector<std::string> problems;
  for (const auto& item : header.items()) {
    if (item.key() == "__metadata__") {
      if (!item.value().is_object()) fail(ErrorKind::kFormat, file.path(), "__metadata__ is not an object");
      for (const auto& entry : item.value().items()) {
        if (!entry.value().is_string()) fail(ErrorKind::kFormat, file.path(), "__metadata__/{} is not a string", entry.key());
        out.metadata[entry.key()] = entry.value().get<std::string>();
      }
      continue;
    }
    TensorInfo t;
    if (auto problem = read_entry(item.key(), item.value(), t)) problems.push_back(std::move(*problem));
    else out.tensors.push_back(std::move(t));
  }
  if (!problems.empty()) fail_all(file, "faulty tensor entries", std::move(problems));
  std::sort(out.tensors.begin(), out.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.offset, a.size_bytes, a.name) < std::tie(b.offset, b.size_bytes, b.name);
  });
  check_tiling(file, out.tensors, out.data_offset);
  for (TensorInfo& t : out.tensors) {
    t.file = file.path();
    t.offset += out.data_offset;
  }
  return out;
}

}  // namespace calib::weights
