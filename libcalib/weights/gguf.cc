#include "libcalib/weights/gguf.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include <fmt/ranges.h>

#include "libcalib/base/json.h"
#include "libcalib/base/utf8.h"
#include "libcalib/weights/gguf_dequant.h"

namespace calib::weights {
namespace {

enum Kind : std::uint32_t { kU8, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kString, kArray, kU64, kI64, kF64, kNKinds };
constexpr std::size_t kKindBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
constexpr int kMaxArrayDepth = 8, kMaxDims = 4;
constexpr std::size_t kMaxNameBytes = 64, kMaxKeyBytes = 65535, kMaxAlignment = std::size_t{1} << 20;
constexpr std::size_t kLeastKeyBytes = 8 + 1 + 4 + 1, kLeastTensorBytes = 8 + 1 + 4 + 4 + 8;  // of one entry in the file
constexpr auto kMaxInt64 = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

// Reads fields in order; no field is used before it is known to lie inside the file.
class Cursor {
 public:
  explicit Cursor(const MappedFile& file) : file_(file) {}

  std::size_t at() const { return at_; }
  std::size_t left() const { return file_.size() - at_; }
  std::size_t file_size() const { return file_.size(); }
  const std::string& path() const { return file_.path(); }

  template <typename T>
  T read(const std::string& what) {
    if (left() < sizeof(T))
      fail(ErrorKind::kFormat, path(), "cut off: {} at offset {} needs {} bytes, {} are left (file has {} bytes)", what, at_, sizeof(T), left(), file_size());
    T value;
    std::memcpy(&value, file_.bytes().data() + at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }
  std::string_view text(const std::string& what) {
    const std::size_t field = at_;
    const auto length = read<std::uint64_t>(what);
    if (length > left())
      fail(ErrorKind::kFormat, path(), "{} at offset {}: string length {} exceeds the {} bytes left (file has {} bytes): damaged or cut off",
           what, field, length, left(), file_size());
    const std::string_view value = file_.bytes().substr(at_, static_cast<std::size_t>(length));
    at_ += value.size();
    return value;
  }
  // A count of items that take at least item_bytes each.
  std::uint64_t count(const std::string& what, std::size_t item_bytes) {
    const std::size_t field = at_;
    const auto n = read<std::uint64_t>(what);
    if (n > left() / item_bytes)
      fail(ErrorKind::kFormat, path(), "{} at offset {} is {}, but the {} bytes left hold at most {} (file has {} bytes)", what, field, n, left(),
           left() / item_bytes, file_size());
    return n;
  }

 private:
  const MappedFile& file_;
  std::size_t at_ = 0;
};

std::int64_t read_integer(Cursor& in, std::uint32_t kind, const std::string& what) {
  switch (kind) {
    case kU8: return in.read<std::uint8_t>(what);
    case kI8: return in.read<std::int8_t>(what);
    case kU16: return in.read<std::uint16_t>(what);
    case kI16: return in.read<std::int16_t>(what);
    case kU32: return in.read<std::uint32_t>(what);
    case kI32: return in.read<std::int32_t>(what);
    case kI64: return in.read<std::int64_t>(what);
    default: break;
  }
  const std::size_t field = in.at();
  const auto value = in.read<std::uint8_t>(what);  // kBool
  if (value > 1) fail(ErrorKind::kFormat, in.path(), "{} at offset {}: boolean has the value {}", what, field, value);
  return value;
}

std::uint32_t read_kind(Cursor& in, const std::string& what) {
  const std::size_t field = in.at();
  const auto kind = in.read<std::uint32_t>(what);
  if (kind >= kNKinds) fail(ErrorKind::kFormat, in.path(), "{} at offset {}: unknown value type {} (0 to {} are known)", what, field, kind, kNKinds - 1);
  return kind;
}

GgufValue read_array(Cursor& in, const std::string& what, int depth);

GgufValue read_value(Cursor& in, std::uint32_t kind, const std::string& what) {
  switch (kind) {
    case kF32: return static_cast<double>(in.read<float>(what));
    case kF64: return in.read<double>(what);
    case kBool: return read_integer(in, kind, what) != 0;
    case kString: return std::string(in.text(what));
    case kArray: return read_array(in, what, 1);
    case kU64: {
      const auto v = in.read<std::uint64_t>(what);
      if (v > kMaxInt64) return static_cast<double>(v);  // integer() then refuses it
      return static_cast<std::int64_t>(v);
    }
    default: return read_integer(in, kind, what);
  }
}

GgufValue read_array(Cursor& in, const std::string& what, int depth) {
  if (depth > kMaxArrayDepth)
    fail(ErrorKind::kFormat, in.path(), "{} at offset {}: arrays nested deeper than {}", what, in.at(), kMaxArrayDepth);
  const std::uint32_t kind = read_kind(in, what + ", element type");
  const std::size_t least = kind == kString ? 8 : kind == kArray ? 12 : kKindBytes[kind];
  const std::uint64_t n = in.count(what + ", element count", least);
  if (kind == kArray) {
    for (std::uint64_t i = 0; i < n; ++i) read_array(in, what, depth + 1);
    return std::monostate{};
  }
  if (kind == kString) {
    std::vector<std::string> out;
    for (std::uint64_t i = 0; i < n; ++i) out.emplace_back(in.text(what));
    return out;
  }
  if (kind == kF32 || kind == kF64 || kind == kU64) {
    std::vector<double> out;
    std::vector<std::int64_t> whole;
    for (std::uint64_t i = 0; i < n; ++i) {
      if (kind == kF32) out.push_back(in.read<float>(what));
      else if (kind == kF64) out.push_back(in.read<double>(what));
      else {
        const auto v = in.read<std::uint64_t>(what);
        out.push_back(static_cast<double>(v));
        if (v <= kMaxInt64) whole.push_back(static_cast<std::int64_t>(v));
      }
    }
    if (kind == kU64 && whole.size() == out.size()) return whole;
    return out;
  }
  std::vector<std::int64_t> out;
  for (std::uint64_t i = 0; i < n; ++i) out.push_back(read_integer(in, kind, what));
  return out;
}

void check_name(Cursor& in, const std::string& what, std::string_view name, std::size_t limit) {
  const std::size_t field = in.at() - name.size() - 8;
  if (name.empty() || name.size() > limit)
    fail(ErrorKind::kFormat, in.path(), "{} at offset {} has {} bytes, expected 1 to {}", what, field, name.size(), limit);
  if (repair_utf8(name).n_replaced != 0) fail(ErrorKind::kFormat, in.path(), "{} at offset {} is not valid UTF-8: {}", what, field, to_valid_utf8(name));
}

void read_magic(Cursor& in, const MappedFile& file) {
  const std::string_view head = file.bytes().substr(0, 512);
  if (head.substr(0, 4) != "GGUF") {
    std::string found = describe_foreign_content(head);
    if (found.empty() && file.size() == 0) found = "empty file";
    const bool text = std::all_of(head.begin(), head.end(), [](unsigned char c) { return c >= 0x20 || c == '\n' || c == '\r' || c == '\t'; });
    if (found.empty())
      found = text ? "plain text"
                   : fmt::format("bytes {:02x}", fmt::join(reinterpret_cast<const std::uint8_t*>(head.data()),
                                                           reinterpret_cast<const std::uint8_t*>(head.data()) + std::min<std::size_t>(head.size(), 4), " "));
    const bool safetensors = found.rfind("safetensors", 0) == 0, old = found.rfind("old GGML", 0) == 0;
    fail(ErrorKind::kFormat, file.path(), "expected a GGUF file, found: {}{}", found,
         safetensors ? "; pass the folder that holds it" : old ? "; convert the model again" : "");
  }
  in.read<std::uint32_t>("magic");
}

std::uint32_t read_version(Cursor& in) {
  const auto version = in.read<std::uint32_t>("version");
  if (version == 0x02000000 || version == 0x03000000 || version == 0x01000000)
    fail(ErrorKind::kVersion, in.path(), "big-endian GGUF file (version bytes 00 00 00 {:02}): only little-endian files are read", version >> 24);
  if (version == 1) fail(ErrorKind::kVersion, in.path(), "GGUF version 1 is too old (2 and 3 are read): convert the model again");
  if (version != 2 && version != 3) fail(ErrorKind::kVersion, in.path(), "GGUF version {} at offset 4 is not supported (2 and 3 are read)", version);
  return version;
}

TensorInfo read_tensor(Cursor& in, std::uint64_t number, std::uint64_t n_tensors) {
  const std::string what = fmt::format("tensor {} of {}", number + 1, n_tensors);
  TensorInfo t;
  const std::string_view name = in.text(what + ", name");
  check_name(in, what + ", name", name, kMaxNameBytes);
  t.name = name;
  const std::string named = fmt::format("tensor {}", t.name);
  const std::size_t rank_field = in.at();
  const auto n_dims = in.read<std::uint32_t>(named + ", number of dimensions");
  if (n_dims > kMaxDims) fail(ErrorKind::kFormat, in.path(), "{} at offset {}: {} dimensions, at most {} are allowed", named, rank_field, n_dims, kMaxDims);
  const std::size_t dims_field = in.at();
  std::vector<std::uint64_t> dims;
  for (std::uint32_t i = 0; i < n_dims; ++i) dims.push_back(in.read<std::uint64_t>(named + ", dimensions"));
  const std::size_t type_field = in.at();
  const auto code = in.read<std::uint32_t>(named + ", type");
  const GgufTensorType* type = find_gguf_type(code);
  if (type == nullptr) fail(ErrorKind::kFormat, in.path(), "{} at offset {}: unknown tensor type {}", named, type_field, code);
  const auto offset = in.read<std::uint64_t>(named + ", data offset");

  std::uint64_t n = 1, bytes = 0;
  bool fits = true;
  for (std::uint64_t d : dims) {
    if (d == 0) fail(ErrorKind::kFormat, in.path(), "{} at offset {}: dims [{}] contain 0", named, dims_field, fmt::join(dims, ", "));
    fits = fits && d <= kMaxInt64 && !__builtin_mul_overflow(n, d, &n);
  }
  const auto elements = static_cast<std::uint64_t>(type->block.elements);
  fits = fits && n <= kMaxInt64 && !__builtin_mul_overflow(n / elements, static_cast<std::uint64_t>(type->block.bytes), &bytes);
  if (!fits || bytes > in.file_size())
    fail(ErrorKind::kFormat, in.path(), "{} at offset {}: dims [{}] of {} need more bytes than the file has ({})", named, dims_field, fmt::join(dims, ", "),
         type->name, in.file_size());
  if ((dims.empty() ? 1 : dims[0]) % elements != 0)
    fail(ErrorKind::kFormat, in.path(), "{} at offset {}: dims [{}]: rows of {} are not a multiple of the {} values of a {} block", named, dims_field,
         fmt::join(dims, ", "), dims.empty() ? 1 : dims[0], elements, type->name);
  t.type = type->type;
  t.type_name = type->name;
  t.shape.assign(dims.rbegin(), dims.rend());
  t.n_elements = static_cast<std::int64_t>(n);
  t.file = in.path();
  t.offset = static_cast<std::size_t>(offset);
  t.size_bytes = static_cast<std::size_t>(bytes);
  return t;
}

std::size_t round_up(std::size_t size, std::size_t alignment) { return (size + alignment - 1) / alignment * alignment; }

// Tensors lie one after the other at aligned offsets up to the end of the file. This also finds a tensor count that is too
// small: the data section would then start early, and bytes would be left over at its end.
void check_layout(const Cursor& in, GgufFile& out) {
  std::vector<const TensorInfo*> by_offset;
  for (const TensorInfo& t : out.tensors) {
    if (t.offset % out.alignment != 0)
      fail(ErrorKind::kFormat, in.path(), "tensor {}: data offset {} is not a multiple of general.alignment {}", t.name, t.offset, out.alignment);
    if (t.offset > in.file_size())
      fail(ErrorKind::kFormat, in.path(), "tensor {}: data offset {} is past the end of the file ({} bytes)", t.name, t.offset, in.file_size());
    by_offset.push_back(&t);
  }
  std::sort(by_offset.begin(), by_offset.end(), [](const auto* a, const auto* b) { return a->offset < b->offset; });
  std::size_t end = 0;
  const TensorInfo* previous = nullptr;
  for (const TensorInfo* t : by_offset) {
    const std::size_t expected = round_up(end, out.alignment);
    if (t->offset != expected)
      fail(ErrorKind::kFormat, in.path(), "tensor {}: data offset {}, expected {}: {} {}", t->name, t->offset, expected,
           t->offset < expected ? "overlaps" : "leaves unused bytes after", previous ? previous->name : "the start of the data");
    end = t->offset + t->size_bytes;
    previous = t;
  }
  const std::size_t needed = previous ? out.data_offset + end : in.at();
  if (in.file_size() < needed)
    fail(ErrorKind::kFormat, in.path(), "cut off: tensor {} ends at byte {}, but the file has {} bytes (expected at least {})", previous->name, needed,
         in.file_size(), needed);
  if (in.file_size() > round_up(needed, out.alignment))
    fail(ErrorKind::kFormat, in.path(), "{} bytes follow the last of {} tensors: expected {} bytes, file has {}", in.file_size() - needed, out.tensors.size(),
         needed, in.file_size());
}

std::string kind_name(const GgufValue& v) {
  static const char* const kNames[] = {"a nested array", "a boolean", "an integer", "a number that is no 64-bit signed integer", "a string",
                                       "an array of integers", "an array of numbers", "an array of strings"};
  return kNames[v.index()];
}

template <typename T>
const T* typed(const GgufMetadata& m, const std::string& key, const char* expected) {
  const auto it = m.values.find(key);
  if (it == m.values.end()) return nullptr;
  const T* value = std::get_if<T>(&it->second);
  if (value == nullptr) fail(ErrorKind::kFormat, m.path, "key {} holds {}, expected {}", key, kind_name(it->second), expected);
  return value;
}
template <typename T>
std::optional<T> copied(const T* value) {
  return value == nullptr ? std::optional<T>() : std::optional<T>(*value);
}

}  // namespace

std::optional<std::int64_t> GgufMetadata::integer(const std::string& key) const { return copied(typed<std::int64_t>(*this, key, "an integer")); }
std::optional<bool> GgufMetadata::boolean(const std::string& key) const { return copied(typed<bool>(*this, key, "a boolean")); }
std::optional<std::string> GgufMetadata::text(const std::string& key) const { return copied(typed<std::string>(*this, key, "a string")); }
std::optional<double> GgufMetadata::number(const std::string& key) const {
  const auto it = values.find(key);
  if (it != values.end() && std::holds_alternative<std::int64_t>(it->second)) return static_cast<double>(std::get<std::int64_t>(it->second));
  return copied(typed<double>(*this, key, "a number"));
}
const std::vector<std::string>* GgufMetadata::texts(const std::string& key) const { return typed<std::vector<std::string>>(*this, key, "an array of strings"); }
const std::vector<double>* GgufMetadata::numbers(const std::string& key) const { return typed<std::vector<double>>(*this, key, "an array of numbers"); }
const std::vector<std::int64_t>* GgufMetadata::integers(const std::string& key) const {
  return typed<std::vector<std::int64_t>>(*this, key, "an array of integers");
}

namespace {

/// Header and metadata; returns the number of tensors that the table behind them holds.
std::uint64_t read_metadata(Cursor& in, const MappedFile& file, GgufFile& out) {
  read_magic(in, file);
  out.metadata.path = file.path();
  out.version = read_version(in);
  const std::uint64_t n_tensors = in.count("tensor count", kLeastTensorBytes);
  const std::uint64_t n_keys = in.count("key count", kLeastKeyBytes);
  for (std::uint64_t i = 0; i < n_keys; ++i) {
    const std::string what = fmt::format("key {} of {}", i + 1, n_keys);
    const std::size_t field = in.at();
    const std::string_view key = in.text(what);
    check_name(in, what, key, kMaxKeyBytes);
    const std::string named = fmt::format("key {}", key);
    const std::uint32_t kind = read_kind(in, named);
    const std::size_t value_field = in.at();
    auto [slot, fresh] = out.metadata.values.emplace(key, std::monostate{});
    if (!fresh) fail(ErrorKind::kFormat, file.path(), "key {} stands twice, again at offset {}", key, field);
    slot->second = read_value(in, kind, named);
    if (key == "general.alignment") {
      if (kind != kU32)
        fail(ErrorKind::kFormat, file.path(), "key general.alignment at offset {} has value type {}, expected {} (uint32)", value_field, kind,
             static_cast<int>(kU32));
      const auto a = static_cast<std::size_t>(std::get<std::int64_t>(slot->second));
      if (a < 8 || (a & (a - 1)) != 0 || a > kMaxAlignment)
        fail(ErrorKind::kFormat, file.path(), "key general.alignment at offset {} is {}, expected a power of two from 8 to {}", value_field, a, kMaxAlignment);
      out.alignment = a;
    }
  }
  return n_tensors;
}

}  // namespace

GgufMetadata parse_gguf_metadata(const MappedFile& file) {
  Cursor in(file);
  GgufFile out;
  read_metadata(in, file, out);
  return std::move(out.metadata);
}

GgufFile parse_gguf(const MappedFile& file) {
  Cursor in(file);
  GgufFile out;
  const std::uint64_t n_tensors = read_metadata(in, file, out);
  std::set<std::string> names;
  for (std::uint64_t i = 0; i < n_tensors; ++i) {
    const std::size_t field = in.at();
    out.tensors.push_back(read_tensor(in, i, n_tensors));
    if (!names.insert(out.tensors.back().name).second)
      fail(ErrorKind::kFormat, file.path(), "tensor {} stands twice, again at offset {}", out.tensors.back().name, field);
  }
  out.data_offset = round_up(in.at(), out.alignment);
  check_layout(in, out);
  for (TensorInfo& t : out.tensors) t.offset += out.data_offset;
  return out;
}

}  // namespace calib::weights
