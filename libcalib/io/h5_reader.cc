#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include <fcntl.h>
#include <hdf5.h>
#include <unistd.h>

#include "libcalib/base/error.h"
#include "libcalib/base/json.h"
#include "libcalib/base/mapped_file.h"
#include "libcalib/base/utf8.h"
#include "libcalib/io/h5.h"
#include "libcalib/io/h5_library.h"

namespace calib::io {
namespace {

constexpr std::string_view kSignature("\x89HDF\r\n\x1a\n", 8);
constexpr std::uint64_t kMaxDeflateRatio = 1032;  // zlib's bound

template <typename T>
hid_t native_type() {
  if constexpr (std::is_same_v<T, float>) return H5T_NATIVE_FLOAT;
  else if constexpr (std::is_same_v<T, double>) return H5T_NATIVE_DOUBLE;
  else if constexpr (std::is_same_v<T, std::int32_t>) return H5T_NATIVE_INT32;
  else if constexpr (std::is_same_v<T, std::int64_t>) return H5T_NATIVE_INT64;
  else if constexpr (std::is_same_v<T, std::uint8_t>) return H5T_NATIVE_UINT8;
  else if constexpr (std::is_same_v<T, std::uint16_t>) return H5T_NATIVE_UINT16;
  else if constexpr (std::is_same_v<T, std::uint32_t>) return H5T_NATIVE_UINT32;
  else return H5T_NATIVE_UINT64;
}

// Every stored value must be representable: same class, not wider, sign kept.
template <typename T>
bool holds(hid_t stored) {
  const std::size_t size = H5Tget_size(stored);
  if constexpr (std::is_floating_point_v<T>) {
    return H5Tget_class(stored) == H5T_FLOAT && size <= sizeof(T);
  } else {
    if (H5Tget_class(stored) != H5T_INTEGER) return false;
    const bool stored_signed = H5Tget_sign(stored) == H5T_SGN_2;
    if (stored_signed) return std::is_signed_v<T> && size <= sizeof(T);
    return std::is_signed_v<T> ? size < sizeof(T) : size <= sizeof(T);
  }
}

std::string type_text(hid_t type) {
  switch (H5Tget_class(type)) {
    case H5T_INTEGER: return fmt::format("{}int{}", H5Tget_sign(type) == H5T_SGN_2 ? "" : "u", 8 * H5Tget_size(type));
    case H5T_FLOAT: return fmt::format("float{}", 8 * H5Tget_size(type));
    case H5T_STRING: return "string";
    default: return "of another type";
  }
}

// End of file as the superblock states it; 0 if it does not say.
std::uint64_t stated_size(std::string_view head) {
  if (head.size() < 48) return 0;
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(head[i]); };
  const unsigned version = byte(8);
  const std::size_t at = version == 0 ? 40 : version == 1 ? 44 : 28;
  const unsigned offset_size = version <= 1 ? byte(13) : byte(9);
  if (version > 3 || offset_size != 8 || at + 8 > head.size()) return 0;
  std::uint64_t out = 0;
  for (std::size_t i = 0; i < 8; ++i) out |= static_cast<std::uint64_t>(byte(at + i)) << (8 * i);
  return out;
}

// "kvcalib.stats" -> "stats": what a user calls the file.
std::string kind_of(const std::string& schema) { return schema.substr(schema.rfind('.') + 1); }

std::string cut_padding(const char* p, std::size_t size, H5T_str_t padding) {
  if (padding == H5T_STR_NULLTERM) size = ::strnlen(p, size);
  const char fill = padding == H5T_STR_SPACEPAD ? ' ' : '\0';
  while (size > 0 && p[size - 1] == fill) --size;
  return to_valid_utf8(std::string_view(p, size));
}

}  // namespace

struct H5Reader::Impl {
  std::string path;
  std::uint64_t file_size = 0;
  int version = 0;
  H5Handle file;

  [[noreturn]] void wrong(const std::string& object, const std::string& message) const {
    fail(ErrorKind::kFormat, path, "{}: {}", object, message);
  }
  [[noreturn]] void damaged(const std::string& object) const {
    const std::string cause = h5_system_cause();
    if (!cause.empty()) fail(ErrorKind::kIo, path, "{} cannot be read: {}", object, cause);
    wrong(object, "cannot be read, the file is damaged (checksum or structure); make it again");
  }

  bool has(const std::string& name) const {
    for (std::size_t end = name.find('/', 1);; end = name.find('/', end + 1)) {
      const std::string part = name.substr(0, end);
      if (part != "/" && H5Lexists(file.get(), part.c_str(), H5P_DEFAULT) <= 0) return false;
      if (end == std::string::npos) return true;
    }
  }

  H5Handle dataset(const std::string& name) const {
    if (!has(name)) wrong(name, "dataset is missing");
    H5Handle out(H5Dopen2(file.get(), name.c_str(), H5P_DEFAULT), H5Dclose);
    if (!out.valid()) damaged(name);
    return out;
  }

  Shape shape(const std::string& name, hid_t dataset) const {
    const H5Handle space(H5Dget_space(dataset), H5Sclose);
    const int n = space.valid() ? H5Sget_simple_extent_ndims(space.get()) : -1;
    if (n < 0) damaged(name);
    std::vector<hsize_t> dims(static_cast<std::size_t>(n));
    if (n > 0 && H5Sget_simple_extent_dims(space.get(), dims.data(), nullptr) < 0) damaged(name);
    for (const hsize_t d : dims)
      if (d > static_cast<hsize_t>(1) << 48) wrong(name, fmt::format("extent {} is not credible", d));
    return Shape(dims.begin(), dims.end());
  }

  // Number of elements, after the check that the file can hold that many.
  std::size_t credible_count(const std::string& name, hid_t dataset, const Shape& shape, std::size_t element_bytes) const {
    std::uint64_t n = 1;
    for (const std::int64_t d : shape)
      if (__builtin_mul_overflow(n, static_cast<std::uint64_t>(d), &n)) wrong(name, "shape " + shape_text(shape) + " overflows");
    std::uint64_t bytes = 0;
    if (__builtin_mul_overflow(n, static_cast<std::uint64_t>(element_bytes), &bytes)) wrong(name, "shape " + shape_text(shape) + " overflows");
    const H5Handle properties(H5Dget_create_plist(dataset), H5Pclose);
    bool compressed = false;
    const int n_filters = H5Pget_nfilters(properties.get());
    for (int i = 0; i < n_filters; ++i) {
      unsigned flags = 0, config = 0;
      std::size_t n_values = 0;
      const H5Z_filter_t filter = H5Pget_filter2(properties.get(), static_cast<unsigned>(i), &flags, &n_values, nullptr, 0, nullptr, &config);
      compressed = compressed || (filter != H5Z_FILTER_FLETCHER32 && filter != H5Z_FILTER_SHUFFLE);
    }
    const std::uint64_t stored = H5Dget_storage_size(dataset);
    if (stored > 2 * file_size + 4096 || (!compressed && bytes > stored) || (compressed && bytes / kMaxDeflateRatio > stored))
      wrong(name, fmt::format("shape {} needs {} bytes, the file holds {} for it", shape_text(shape), bytes, stored));
    return static_cast<std::size_t>(n);
  }

  H5Handle attribute(const std::string& object, const std::string& name) const {
    if (object != "/" && !has(object)) wrong(object, "is missing");
    if (H5Aexists_by_name(file.get(), object.c_str(), name.c_str(), H5P_DEFAULT) <= 0) wrong(object, "attribute `" + name + "` is missing");
    H5Handle out(H5Aopen_by_name(file.get(), object.c_str(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
    if (!out.valid()) damaged(object);
    const H5Handle space(H5Aget_space(out.get()), H5Sclose);
    if (!space.valid() || H5Sget_simple_extent_npoints(space.get()) != 1) wrong(object, "attribute `" + name + "` is not a single value");
    return out;
  }

  template <typename T>
  T number(const std::string& object, const std::string& name) const {
    const H5Handle a = attribute(object, name);
    const H5Handle type(H5Aget_type(a.get()), H5Tclose);
    if (!type.valid() || !holds<T>(type.get())) wrong(object, "attribute `" + name + "` is " + type_text(type.get()) + ", expected a number");
    T out{};
    if (H5Aread(a.get(), native_type<T>(), &out) < 0) damaged(object);
    return out;
  }

  std::string string(const std::string& object, const std::string& name) const {
    const H5Handle a = attribute(object, name);
    const H5Handle type(H5Aget_type(a.get()), H5Tclose);
    if (!type.valid() || H5Tget_class(type.get()) != H5T_STRING) wrong(object, "attribute `" + name + "` is " + type_text(type.get()) + ", expected a string");
    if (H5Tis_variable_str(type.get()) > 0) {
      char* text = nullptr;
      if (H5Aread(a.get(), type.get(), &text) < 0) damaged(object);
      std::string out = to_valid_utf8(text != nullptr ? text : "");
      H5free_memory(text);
      return out;
    }
    const std::size_t size = H5Tget_size(type.get());
    if (size > file_size) wrong(object, "attribute `" + name + "` is longer than the file");
    std::string buffer(size, '\0');
    if (H5Aread(a.get(), type.get(), buffer.data()) < 0) damaged(object);
    return cut_padding(buffer.data(), size, H5Tget_strpad(type.get()));
  }
};

H5Reader::H5Reader(const std::string& path, const std::string& schema, int newest_version) : impl_(std::make_unique<Impl>()) {
  h5_start();
  impl_->path = path;
  {
    const MappedFile map(path);
    const std::string_view head = map.bytes().substr(0, 64);
    impl_->file_size = map.size();
    if (head.substr(0, kSignature.size()) != kSignature) {
      const std::string foreign = describe_foreign_content(map.bytes().substr(0, 4096));
      fail(ErrorKind::kFormat, path, "not a {} file: expected HDF5, found {}", kind_of(schema),
           !foreign.empty() && foreign != "HDF5" ? foreign : map.size() == 0 ? "an empty file" : "other content");
    }
    const std::uint64_t stated = stated_size(head);
    if (stated > map.size() || map.size() < 48)
      fail(ErrorKind::kFormat, path, "truncated: {} bytes{}", map.size(), stated > 0 ? fmt::format(", its header says {}", stated) : "");
  }
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd >= 0) {
    try {
      h5_check_lock(fd, false, path);
    } catch (...) {
      ::close(fd);
      throw;
    }
    ::close(fd);
  }
  const H5Handle access = h5_file_access(false);
  impl_->file = H5Handle(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get()), H5Fclose);
  if (!impl_->file.valid()) impl_->damaged("HDF5 header");

  if (!has_attribute("/", "schema")) fail(ErrorKind::kFormat, path, "not a {} file: the attribute `schema` is missing", kind_of(schema));
  const std::string found = impl_->string("/", "schema");
  if (found != schema) fail(ErrorKind::kFormat, path, "is a {} file ({}), expected a {} file ({})", kind_of(found), found, kind_of(schema), schema);
  const auto version = impl_->number<std::int64_t>("/", "schema_version");
  if (version < 1 || version > newest_version)
    fail(ErrorKind::kVersion, path, "{} schema version {}, this program reads 1 to {}", schema, version, newest_version);
  if (!has_attribute("/", "complete") || impl_->number<std::int64_t>("/", "complete") != 1)
    fail(ErrorKind::kFormat, path, "is not complete: the run that wrote it did not finish");
  impl_->version = static_cast<int>(version);
}

H5Reader::~H5Reader() = default;
H5Reader::H5Reader(H5Reader&&) noexcept = default;

const std::string& H5Reader::path() const noexcept { return impl_->path; }
int H5Reader::schema_version() const noexcept { return impl_->version; }
bool H5Reader::has(const std::string& name) const { return impl_->has(name); }

std::vector<std::string> H5Reader::children(const std::string& group) const {
  if (!impl_->has(group)) wrong(group, "group is missing");
  H5G_info_t info;
  if (H5Gget_info_by_name(impl_->file.get(), group.c_str(), &info, H5P_DEFAULT) < 0) impl_->damaged(group);
  std::vector<std::string> out;
  for (hsize_t i = 0; i < info.nlinks; ++i) {
    const auto name_of = [&](char* to, std::size_t size) {
      return H5Lget_name_by_idx(impl_->file.get(), group.c_str(), H5_INDEX_NAME, H5_ITER_INC, i, to, size, H5P_DEFAULT);
    };
    const ssize_t n = name_of(nullptr, 0);
    if (n < 0 || static_cast<std::uint64_t>(n) > impl_->file_size) impl_->damaged(group);
    std::string name(static_cast<std::size_t>(n) + 1, '\0');
    if (name_of(name.data(), name.size()) < 0) impl_->damaged(group);
    name.pop_back();
    out.push_back(std::move(name));
  }
  std::sort(out.begin(), out.end());
  return out;
}

Shape H5Reader::shape(const std::string& name) const { return impl_->shape(name, impl_->dataset(name).get()); }

template <typename T>
std::vector<T> H5Reader::read(const std::string& name, const Shape& expected) const {
  const H5Handle dataset = impl_->dataset(name);
  const H5Handle type(H5Dget_type(dataset.get()), H5Tclose);
  if (!type.valid()) impl_->damaged(name);
  if (!holds<T>(type.get()))
    wrong(name, fmt::format("is {}, expected {}{}", type_text(type.get()),
                            std::is_floating_point_v<T> ? "float"
                            : std::is_signed_v<T>       ? "int"
                                                        : "uint",
                            8 * sizeof(T)));
  const Shape found = impl_->shape(name, dataset.get());
  bool fits = found.size() == expected.size();
  for (std::size_t i = 0; fits && i < found.size(); ++i) fits = expected[i] == kAnySize || expected[i] == found[i];
  if (!fits) wrong(name, fmt::format("shape {}, expected {}", shape_text(found), shape_text(expected)));
  std::vector<T> out(impl_->credible_count(name, dataset.get(), found, H5Tget_size(type.get())));
  if (!out.empty() && H5Dread(dataset.get(), native_type<T>(), H5S_ALL, H5S_ALL, H5P_DEFAULT, out.data()) < 0) impl_->damaged(name);
  return out;
}
template std::vector<float> H5Reader::read(const std::string&, const Shape&) const;
template std::vector<double> H5Reader::read(const std::string&, const Shape&) const;
template std::vector<std::int32_t> H5Reader::read(const std::string&, const Shape&) const;
template std::vector<std::int64_t> H5Reader::read(const std::string&, const Shape&) const;
template std::vector<std::uint8_t> H5Reader::read(const std::string&, const Shape&) const;
template std::vector<std::uint16_t> H5Reader::read(const std::string&, const Shape&) const;
template std::vector<std::uint32_t> H5Reader::read(const std::string&, const Shape&) const;
template std::vector<std::uint64_t> H5Reader::read(const std::string&, const Shape&) const;

std::vector<std::string> H5Reader::read_strings(const std::string& name) const {
  const H5Handle dataset = impl_->dataset(name);
  const H5Handle type(H5Dget_type(dataset.get()), H5Tclose);
  if (!type.valid()) impl_->damaged(name);
  if (H5Tget_class(type.get()) != H5T_STRING) wrong(name, "is " + type_text(type.get()) + ", expected strings");
  const Shape found = impl_->shape(name, dataset.get());
  if (found.size() != 1) wrong(name, "shape " + shape_text(found) + ", expected one dimension");
  const std::size_t size = H5Tget_size(type.get()), n = impl_->credible_count(name, dataset.get(), found, size);
  std::vector<std::string> out;
  if (n == 0) return out;
  if (H5Tis_variable_str(type.get()) > 0) {
    std::vector<char*> texts(n, nullptr);
    if (H5Dread(dataset.get(), type.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, texts.data()) < 0) impl_->damaged(name);
    for (const char* text : texts) out.push_back(to_valid_utf8(text != nullptr ? text : ""));
    const H5Handle space(H5Dget_space(dataset.get()), H5Sclose);
    H5Dvlen_reclaim(type.get(), space.get(), H5P_DEFAULT, texts.data());
    return out;
  }
  std::vector<char> buffer(n * size);
  if (H5Dread(dataset.get(), type.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, buffer.data()) < 0) impl_->damaged(name);
  for (std::size_t i = 0; i < n; ++i) out.push_back(cut_padding(buffer.data() + i * size, size, H5Tget_strpad(type.get())));
  return out;
}

bool H5Reader::has_attribute(const std::string& object, const std::string& name) const {
  return impl_->has(object) && H5Aexists_by_name(impl_->file.get(), object.c_str(), name.c_str(), H5P_DEFAULT) > 0;
}
std::string H5Reader::string_attribute(const std::string& object, const std::string& name) const { return impl_->string(object, name); }
std::int64_t H5Reader::integer_attribute(const std::string& object, const std::string& name) const { return impl_->number<std::int64_t>(object, name); }
std::uint64_t H5Reader::unsigned_attribute(const std::string& object, const std::string& name) const { return impl_->number<std::uint64_t>(object, name); }
double H5Reader::number_attribute(const std::string& object, const std::string& name) const { return impl_->number<double>(object, name); }

void H5Reader::wrong(const std::string& object, const std::string& message) const { impl_->wrong(object, message); }

}  // namespace calib::io
