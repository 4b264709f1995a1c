#include "tests/support/gguf_writer.h"

#include <type_traits>

namespace calib::test {
namespace {

template <typename T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(T));
}
void put_text(std::string& out, std::string_view text) {
  put<std::uint64_t>(out, text.size());
  out += text;
}

template <typename T>
constexpr GgufKind kind_of() {
  if constexpr (std::is_same_v<T, std::uint8_t>) return GgufKind::kU8;
  if constexpr (std::is_same_v<T, std::int8_t>) return GgufKind::kI8;
  if constexpr (std::is_same_v<T, std::uint16_t>) return GgufKind::kU16;
  if constexpr (std::is_same_v<T, std::int16_t>) return GgufKind::kI16;
  if constexpr (std::is_same_v<T, std::uint32_t>) return GgufKind::kU32;
  if constexpr (std::is_same_v<T, std::int32_t>) return GgufKind::kI32;
  if constexpr (std::is_same_v<T, float>) return GgufKind::kF32;
  if constexpr (std::is_same_v<T, bool>) return GgufKind::kBool;
  if constexpr (std::is_same_v<T, std::string>) return GgufKind::kString;
  if constexpr (std::is_same_v<T, std::uint64_t>) return GgufKind::kU64;
  if constexpr (std::is_same_v<T, std::int64_t>) return GgufKind::kI64;
  return GgufKind::kF64;
}

template <typename T>
void put_value(std::string& out, const T& value) {
  if constexpr (std::is_same_v<T, std::string>) put_text(out, value);
  else put<T>(out, value);
}

std::size_t padding(std::size_t size, std::size_t alignment) {
  return alignment == 0 ? 0 : (alignment - size % alignment) % alignment;
}

}  // namespace

template <typename T>
void GgufWriter::add(const std::string& key, const T& value) {
  std::string payload;
  put_value(payload, value);
  add_raw(key, static_cast<std::uint32_t>(kind_of<T>()), payload);
}

template <typename T>
void GgufWriter::add_array(const std::string& key, const std::vector<T>& values) {
  std::string payload;
  put<std::uint32_t>(payload, static_cast<std::uint32_t>(kind_of<T>()));
  put<std::uint64_t>(payload, values.size());
  for (const T& v : values) put_value(payload, v);
  add_raw(key, static_cast<std::uint32_t>(GgufKind::kArray), payload);
}

#define CALIB_GGUF_WRITER_TYPE(T)                                       \
  template void GgufWriter::add<T>(const std::string&, const T&);       \
  template void GgufWriter::add_array<T>(const std::string&, const std::vector<T>&);
CALIB_GGUF_WRITER_TYPE(std::uint8_t)
CALIB_GGUF_WRITER_TYPE(std::int8_t)
CALIB_GGUF_WRITER_TYPE(std::uint16_t)
CALIB_GGUF_WRITER_TYPE(std::int16_t)
CALIB_GGUF_WRITER_TYPE(std::uint32_t)
CALIB_GGUF_WRITER_TYPE(std::int32_t)
CALIB_GGUF_WRITER_TYPE(std::uint64_t)
CALIB_GGUF_WRITER_TYPE(std::int64_t)
CALIB_GGUF_WRITER_TYPE(float)
CALIB_GGUF_WRITER_TYPE(double)
CALIB_GGUF_WRITER_TYPE(std::string)
template void GgufWriter::add<bool>(const std::string&, const bool&);
#undef CALIB_GGUF_WRITER_TYPE

void GgufWriter::add_raw(const std::string& key, std::uint32_t type_code, std::string_view payload) {
  put_text(metadata_, key);
  put(metadata_, type_code);
  metadata_ += payload;
  ++n_keys_;
}

void GgufWriter::add_tensor(const std::string& name, std::vector<std::uint64_t> dims, GgmlType type, std::string_view bytes,
                            std::optional<std::uint64_t> offset) {
  tensors_.push_back({name, std::move(dims), static_cast<std::uint32_t>(type), std::string(bytes), offset});
}

void GgufWriter::add_f32(const std::string& name, const std::vector<std::int64_t>& shape, std::span<const float> values) {
  add_tensor(name, {shape.rbegin(), shape.rend()}, GgmlType::kF32,
             {reinterpret_cast<const char*>(values.data()), values.size_bytes()});
}

std::string GgufWriter::bytes() const {
  std::string out = magic;
  put(out, version);
  put<std::uint64_t>(out, tensor_count.value_or(tensors_.size()));
  put<std::uint64_t>(out, key_count.value_or(n_keys_));
  out += metadata_;
  std::string data;
  for (const Tensor& t : tensors_) {
    data.append(padding(data.size(), alignment), '\0');
    put_text(out, t.name);
    put<std::uint32_t>(out, static_cast<std::uint32_t>(t.dims.size()));
    for (std::uint64_t d : t.dims) put(out, d);
    put(out, t.type);
    put<std::uint64_t>(out, t.offset.value_or(data.size()));
    data += t.data;
  }
  if (!tensors_.empty()) out.append(padding(out.size(), alignment), '\0');
  return out + data;
}

}  // namespace calib::test
