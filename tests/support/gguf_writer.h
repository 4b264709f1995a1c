#pragma once
// Writes GGUF files for tests, also broken ones.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace calib::test {

/// Type codes of metadata values.
enum class GgufKind : std::uint32_t { kU8, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kString, kArray, kU64, kI64, kF64 };
/// Type codes of tensors.
enum class GgmlType : std::uint32_t {
  kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ2K = 10, kQ3K = 11, kQ4K = 12, kQ5K = 13,
  kQ6K = 14, kIq4Nl = 20, kIq4Xs = 23, kI8 = 24, kI16 = 25, kI32 = 26, kI64 = 27, kF64 = 28, kBF16 = 30
};

/// Collects metadata and tensors in order; bytes() lays them out. Fields that are set override what would be computed.
class GgufWriter {
 public:
  std::string magic = "GGUF";
  std::uint32_t version = 3;
  std::size_t alignment = 32;  ///< of the data section and of every tensor; write the key with add<uint32_t> when not 32
  std::optional<std::uint64_t> tensor_count, key_count;

  /// T: u8 … i64, float, double, bool, std::string.
  template <typename T>
  void add(const std::string& key, const T& value);
  /// Arrays of the same types (not bool).
  template <typename T>
  void add_array(const std::string& key, const std::vector<T>& values);
  /// A value as raw bytes after its type code.
  void add_raw(const std::string& key, std::uint32_t type_code, std::string_view payload);

  /// `dims` as GGUF stores them: innermost first. `offset` overrides the place in the data section.
  void add_tensor(const std::string& name, std::vector<std::uint64_t> dims, GgmlType type, std::string_view bytes,
                  std::optional<std::uint64_t> offset = {});
  /// `shape` outermost first, as PyTorch prints it.
  void add_f32(const std::string& name, const std::vector<std::int64_t>& shape, std::span<const float> values);

  std::string bytes() const;

 private:
  struct Tensor {
    std::string name;
    std::vector<std::uint64_t> dims;
    std::uint32_t type;
    std::string data;
    std::optional<std::uint64_t> offset;
  };
  std::string metadata_;
  std::uint64_t n_keys_ = 0;
  std::vector<Tensor> tensors_;
};

}  // namespace calib::test
