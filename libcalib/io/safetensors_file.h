#pragma once
// Named arrays in one safetensors file: what a plan carries beside its JSON.

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

namespace calib::io {

/// fp32 or int32, row-major. Shape: any; the number of values is its product.
struct NamedArray {
  std::string name;
  std::vector<std::int64_t> shape;
  std::variant<std::vector<float>, std::vector<std::int32_t>> values;

  std::size_t n_values() const {
    return std::visit([](const auto& v) { return v.size(); }, values);
  }
};

/// Bytes of the file: header sorted by name and padded to 8 bytes, arrays in the same order without gaps.
/// Throws kInternal: a name twice, a shape that does not fit; kNumeric: a value that is not finite.
std::string safetensors_bytes(const std::vector<NamedArray>& arrays, const std::map<std::string, std::string>& metadata = {});
/// The same, atomically to a file.
void write_safetensors_file(const std::string& path, const std::vector<NamedArray>& arrays,
                            const std::map<std::string, std::string>& metadata = {});

/// Strict: types F32 and I32 only, no gap, overlap or trailing byte. Sorted by name.
/// Throws: kNotFound, kIo, kFormat naming the array, kNumeric for a value that is not finite.
std::vector<NamedArray> read_safetensors_file(const std::string& path);

}  // namespace calib::io
