#include "tests/support/safetensors_writer.h"

#include <bit>
#include <cmath>
#include <cstring>

#include <nlohmann/json.hpp>

namespace calib::test {
namespace {

template <typename T>
std::string raw_bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// Through double arithmetic rather than bit tricks, so that the readers under test are checked by something unlike them.
std::uint16_t to_f16(float value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double a = std::fabs(static_cast<double>(value));
  if (std::isnan(value)) return sign | 0x7E00;
  if (a >= 65520.0) return sign | 0x7C00;
  int exponent = a < 0x1p-14 ? -14 : std::ilogb(a);
  double steps = std::nearbyint(std::ldexp(a, 10 - exponent));  // units of the last place
  if (steps >= 2048.0) steps /= 2, ++exponent;
  if (steps < 1024.0) return sign | static_cast<std::uint16_t>(steps);  // subnormal
  return sign | static_cast<std::uint16_t>(((exponent + 15) << 10) + static_cast<int>(steps - 1024.0));
}

std::uint16_t to_bf16(float value) {
  if (std::isnan(value)) return 0x7FC0;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

}  // namespace

std::string f32_bytes(std::span<const float> values) {
  return {reinterpret_cast<const char*>(values.data()), values.size_bytes()};
}
std::string f16_bytes(std::span<const float> values) {
  std::vector<std::uint16_t> out;
  for (float v : values) out.push_back(to_f16(v));
  return raw_bytes(out);
}
std::string bf16_bytes(std::span<const float> values) {
  std::vector<std::uint16_t> out;
  for (float v : values) out.push_back(to_bf16(v));
  return raw_bytes(out);
}
std::string f64_bytes(std::span<const float> values) { return raw_bytes(std::vector<double>(values.begin(), values.end())); }

SafetensorsTensor f32_tensor(std::string name, std::vector<std::int64_t> shape, std::span<const float> values) {
  return {std::move(name), "F32", std::move(shape), f32_bytes(values)};
}

std::string safetensors_header(const std::vector<SafetensorsTensor>& tensors, const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::size_t at = 0;
  for (const auto& t : tensors) {
    header[t.name] = {{"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {at, at + t.bytes.size()}}};
    at += t.bytes.size();
  }
  return header.dump();
}

std::string safetensors_bytes(const std::vector<SafetensorsTensor>& tensors, const std::map<std::string, std::string>& metadata) {
  std::string header = safetensors_header(tensors, metadata), data;
  header.resize((header.size() + 7) / 8 * 8, ' ');
  for (const auto& t : tensors) data += t.bytes;
  return safetensors_raw(header, data);
}

std::string safetensors_raw(std::string_view header, std::string_view data) { return safetensors_raw(header.size(), header, data); }

std::string safetensors_raw(std::uint64_t length_field, std::string_view header, std::string_view data) {
  std::string out(8, '\0');
  std::memcpy(out.data(), &length_field, 8);
  out += header;
  out += data;
  return out;
}

namespace {

std::pair<nlohmann::ordered_json, std::string_view> take_apart(std::string_view file) {
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  const auto n = static_cast<std::size_t>(length);
  return {nlohmann::ordered_json::parse(file.substr(8, n)), file.substr(8 + n)};
}

}  // namespace

std::vector<SafetensorsTensor> split_safetensors(std::string_view file) {
  const auto [header, data] = take_apart(file);
  std::vector<SafetensorsTensor> out;
  for (const auto& item : header.items()) {
    if (item.key() == "__metadata__") continue;
    const auto offsets = item.value()["data_offsets"].get<std::vector<std::size_t>>();
    out.push_back({item.key(), item.value()["dtype"].get<std::string>(), item.value()["shape"].get<std::vector<std::int64_t>>(),
                   std::string(data.substr(offsets[0], offsets[1] - offsets[0]))});
  }
  return out;
}

std::string edit_safetensors_header(std::string_view file, const std::function<void(nlohmann::ordered_json&)>& edit) {
  auto [header, data] = take_apart(file);
  edit(header);
  return safetensors_raw(header.dump(), data);
}

}  // namespace calib::test
