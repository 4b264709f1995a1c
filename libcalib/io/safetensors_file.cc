#include "libcalib/io/safetensors_file.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include <nlohmann/json.hpp>

#include "libcalib/base/error.h"
#include "libcalib/base/json.h"
#include "libcalib/base/mapped_file.h"
#include "libcalib/io/atomic_file.h"
#include "libcalib/io/json.h"

namespace calib::io {
namespace {

static_assert(std::endian::native == std::endian::little, "arrays are copied as they lie in memory");
constexpr std::size_t kElementBytes = 4;  // of both types
constexpr std::size_t kAlignment = 8;

std::size_t product(const std::vector<std::int64_t>& shape) {
  std::size_t n = 1;
  for (const std::int64_t d : shape) {
    if (d < 0 || __builtin_mul_overflow(n, static_cast<std::size_t>(d), &n))
      fail(ErrorKind::kInternal, "safetensors", "shape ({}) is not valid", fmt::join(shape, ", "));
  }
  return n;
}

void check_finite(const NamedArray& array, const std::string& where) {
  if (const auto* values = std::get_if<std::vector<float>>(&array.values)) {
    const auto bad = std::find_if(values->begin(), values->end(), [](float x) { return !std::isfinite(x); });
    if (bad != values->end()) fail(ErrorKind::kNumeric, where, "array {}, element {} is not finite", array.name, bad - values->begin());
  }
}

std::string_view raw_bytes(const NamedArray& array) {
  return std::visit([](const auto& v) { return std::string_view(reinterpret_cast<const char*>(v.data()), v.size() * kElementBytes); }, array.values);
}

template <typename T>
std::vector<T> copy_values(std::string_view bytes) {
  std::vector<T> out(bytes.size() / sizeof(T));
  if (!out.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

}  // namespace

std::string safetensors_bytes(const std::vector<NamedArray>& arrays, const std::map<std::string, std::string>& metadata) {
  std::map<std::string, const NamedArray*> sorted;
  for (const NamedArray& array : arrays) {
    if (!sorted.emplace(array.name, &array).second) fail(ErrorKind::kInternal, "safetensors", "array {} stands twice", array.name);
    if (product(array.shape) != array.n_values())
      fail(ErrorKind::kInternal, "safetensors", "array {} has {} values for shape ({})", array.name, array.n_values(), fmt::join(array.shape, ", "));
    check_finite(array, "safetensors");
  }
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::size_t offset = 0;
  for (const auto& [name, array] : sorted) {
    const std::size_t end = offset + array->n_values() * kElementBytes;
    header[name] = {{"dtype", array->values.index() == 0 ? "F32" : "I32"}, {"shape", array->shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = json_text(header, "safetensors header");
  text.pop_back();
  text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  const std::uint64_t length = text.size();
  std::string out(reinterpret_cast<const char*>(&length), sizeof length);
  out += text;
  for (const auto& entry : sorted) out += raw_bytes(*entry.second);
  return out;
}

void write_safetensors_file(const std::string& path, const std::vector<NamedArray>& arrays, const std::map<std::string, std::string>& metadata) {
  write_file(path, safetensors_bytes(arrays, metadata));
}

std::vector<NamedArray> read_safetensors_file(const std::string& path) {
  const MappedFile file(path);
  const std::string_view bytes = file.bytes();
  std::uint64_t length = 0;
  if (bytes.size() < sizeof length) fail(ErrorKind::kFormat, path, "not a safetensors file: {} bytes", bytes.size());
  std::memcpy(&length, bytes.data(), sizeof length);
  if (length > bytes.size() - sizeof length)
    fail(ErrorKind::kFormat, path, "header length {} exceeds the {} bytes that follow it", length, bytes.size() - sizeof length);
  const std::string_view data = bytes.substr(sizeof length + length);
  const nlohmann::json header = parse_json_strict(bytes.substr(sizeof length, length), path);
  if (!header.is_object()) fail(ErrorKind::kFormat, path, "the header is not an object");

  struct Extent {
    std::uint64_t begin, end;
    std::string name;
  };
  std::vector<Extent> extents;
  std::vector<NamedArray> out;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const JsonValue array(entry, path, "/" + name), dtype = array.at("dtype"), shape = array.at("shape"), offsets = array.at("data_offsets");
    NamedArray read;
    read.name = name;
    std::uint64_t n = 1;
    for (std::size_t i = 0; i < shape.size(); ++i) {
      const std::uint64_t extent = shape.element(i).unsigned_integer();
      if (extent > bytes.size() || __builtin_mul_overflow(n, extent, &n) || n > bytes.size()) shape.wrong("a shape that the file can hold");
      read.shape.push_back(static_cast<std::int64_t>(extent));
    }
    if (offsets.size() != 2) offsets.wrong("two numbers");
    const std::uint64_t begin = offsets.element(0).unsigned_integer(), end = offsets.element(1).unsigned_integer();
    if (begin > end || end > data.size() || end - begin != n * kElementBytes)
      fail(ErrorKind::kFormat, path, "array {}: bytes {} to {} of {} for {} elements of 4 bytes", name, begin, end, data.size(), n);
    const std::string_view content = data.substr(begin, end - begin);
    if (dtype.string() == "F32") read.values = copy_values<float>(content);
    else if (dtype.string() == "I32") read.values = copy_values<std::int32_t>(content);
    else fail(ErrorKind::kFormat, path, "array {} has type {}, expected F32 or I32", name, dtype.string());
    check_finite(read, path);
    extents.push_back({begin, end, name});
    out.push_back(std::move(read));
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
  std::uint64_t at = 0;
  for (const Extent& extent : extents) {
    if (extent.begin != at) fail(ErrorKind::kFormat, path, "array {} starts at byte {}, expected {} (gap or overlap)", extent.name, extent.begin, at);
    at = extent.end;
  }
  if (at != data.size()) fail(ErrorKind::kFormat, path, "{} bytes past the last array", data.size() - at);
  return out;
}

}  // namespace calib::io
