#pragma once
// Writes safetensors files for tests, also broken ones.

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace calib::test {

struct SafetensorsTensor {
  std::string name, dtype;           ///< "F32", "BF16", …
  std::vector<std::int64_t> shape;
  std::string bytes;                 ///< little-endian, row-major
};

std::string f32_bytes(std::span<const float> values);
/// Values rounded to nearest even.
std::string f16_bytes(std::span<const float> values);
std::string bf16_bytes(std::span<const float> values);
std::string f64_bytes(std::span<const float> values);

SafetensorsTensor f32_tensor(std::string name, std::vector<std::int64_t> shape, std::span<const float> values);

/// JSON header of tensors laid out one after the other in the order given.
std::string safetensors_header(const std::vector<SafetensorsTensor>& tensors,
                               const std::map<std::string, std::string>& metadata = {});
/// Whole file; the header is padded with spaces to a multiple of 8 bytes.
std::string safetensors_bytes(const std::vector<SafetensorsTensor>& tensors,
                              const std::map<std::string, std::string>& metadata = {});
/// Length field + header + data as they are given, whether or not they agree.
std::string safetensors_raw(std::string_view header, std::string_view data);
std::string safetensors_raw(std::uint64_t length_field, std::string_view header, std::string_view data);

/// Takes a well-formed file apart, in the order of the data.
std::vector<SafetensorsTensor> split_safetensors(std::string_view file);
/// Applies `edit` to the JSON header of a well-formed file; the data stay as they are.
std::string edit_safetensors_header(std::string_view file, const std::function<void(nlohmann::ordered_json&)>& edit);

}  // namespace calib::test
