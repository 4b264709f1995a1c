#include <algorithm>
#include <new>
#include <optional>
#include <set>

#include <fcntl.h>
#include <hdf5.h>
#include <unistd.h>
#include <zlib.h>

#include "libcalib/base/error.h"
#include "libcalib/base/utf8.h"
#include "libcalib/io/atomic_file.h"
#include "libcalib/io/h5.h"
#include "libcalib/io/h5_library.h"

namespace calib::io {
namespace {

constexpr std::size_t kMaxChunkBytes = 1 << 20;
constexpr std::size_t kPackedChunkBytes = 128 << 10;  // small enough for all threads to have some
constexpr int kDeflateLevel = 1;
constexpr std::size_t kMaxPaddedStrings = 64u << 20;  // past this, padding to the longest string is waste

// HDF5 strings end at a zero byte for some readers, so a zero inside becomes U+FFFD like other bytes that cannot stay.
std::string storable(const std::string& raw) {
  std::string out;
  for (const char c : to_valid_utf8(raw))
    if (c == '\0') append_utf8(0xFFFD, out);
    else out += c;
  return out;
}

H5Handle string_type(std::size_t size) {
  H5Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(type.get(), size);
  H5Tset_strpad(type.get(), H5T_STR_NULLPAD);
  H5Tset_cset(type.get(), H5T_CSET_UTF8);
  return type;
}

}  // namespace

std::string shape_text(const Shape& shape) { return fmt::format("({})", fmt::join(shape, ", ")); }

struct H5Writer::Impl {
  Impl(const std::string& path, ThreadPool* pool) : path(path), target(path), pool(pool ? pool : &alone) {}

  std::string path;
  AtomicFile target;
  ThreadPool alone{1};
  ThreadPool* pool;
  H5Handle file, link_properties;
  std::set<std::string> groups, datasets;

  [[noreturn]] void failed(const std::string& name) const {
    const std::string cause = h5_system_cause();
    fail(ErrorKind::kIo, path, "{} cannot be written: {}", name, cause.empty() ? "the HDF5 library refused it" : cause);
  }

  void make_group(const std::string& name) {
    if (name.empty() || name == "/" || groups.contains(name)) return;
    make_group(name.substr(0, name.rfind('/')));
    const H5Handle properties(H5Pcreate(H5P_GROUP_CREATE), H5Pclose);
    H5Pset_obj_track_times(properties.get(), false);
    const H5Handle group(H5Gcreate2(file.get(), name.c_str(), link_properties.get(), properties.get(), H5P_DEFAULT), H5Gclose);
    if (!group.valid()) failed(name);
    groups.insert(name);
  }

  void write(const std::string& name, hid_t stored_type, hid_t memory_type, std::size_t element_bytes, const void* values,
             std::size_t n_values, const Shape& shape, Packing packing = Packing::kPlain) {
    std::vector<hsize_t> dims(shape.begin(), shape.end());
    std::size_t n = 1;
    for (const hsize_t d : dims) n *= d;
    if (dims.empty() || n != n_values)
      fail(ErrorKind::kInternal, path, "{}: shape {} for {} values", name, shape_text(shape), n_values);
    if (!datasets.insert(name).second) fail(ErrorKind::kInternal, path, "{} is written twice", name);
    make_group(name.substr(0, name.rfind('/')));
    const H5Handle space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr), H5Sclose);
    const H5Handle properties(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Pset_obj_track_times(properties.get(), false);
    std::vector<hsize_t> chunk = dims;
    if (n > 0) {  // checksums need chunks
      const auto bytes = [&] {
        std::size_t b = element_bytes;
        for (const hsize_t c : chunk) b *= c;
        return b;
      };
      const std::size_t most = packing == Packing::kDeflate ? kPackedChunkBytes : kMaxChunkBytes;
      for (std::size_t i = 0; i < chunk.size() && bytes() > most;)
        if (chunk[i] == 1) ++i;
        else chunk[i] = (chunk[i] + 1) / 2;
      H5Pset_chunk(properties.get(), static_cast<int>(chunk.size()), chunk.data());
      if (H5Tis_variable_str(stored_type) <= 0) {  // the library has neither for strings of variable length
        if (packing == Packing::kDeflate) H5Pset_deflate(properties.get(), kDeflateLevel);  // has a checksum of its own
        else H5Pset_fletcher32(properties.get());
        H5Pset_fill_time(properties.get(), H5D_FILL_TIME_NEVER);
      }
    }
    H5Handle dataset(H5Dcreate2(file.get(), name.c_str(), stored_type, space.get(), link_properties.get(), properties.get(), H5P_DEFAULT), H5Dclose);
    if (!dataset.valid()) failed(name);
    if (n > 0) {
      // Rows of a table on a little-endian machine are stored as they are: threads compress them, HDF5 only places them.
      const bool as_it_is = packing == Packing::kDeflate && H5Tequal(stored_type, memory_type) > 0 && std::equal(dims.begin() + 1, dims.end(), chunk.begin() + 1);
      if (as_it_is) write_compressed(name, dataset.get(), static_cast<const std::byte*>(values), dims, chunk[0], element_bytes);
      else if (H5Dwrite(dataset.get(), memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) < 0) failed(name);
    }
    if (!dataset.reset()) failed(name);
  }

  void write_compressed(const std::string& name, hid_t dataset, const std::byte* values, const std::vector<hsize_t>& dims, hsize_t chunk_rows,
                        std::size_t element_bytes) {
    std::size_t row_bytes = element_bytes;
    for (std::size_t i = 1; i < dims.size(); ++i) row_bytes *= dims[i];
    const std::size_t chunk_bytes = chunk_rows * row_bytes;
    std::vector<std::vector<Bytef>> packed((dims[0] + chunk_rows - 1) / chunk_rows);
    pool->parallel_for(static_cast<std::int64_t>(packed.size()), [&](std::int64_t i) {
      const std::size_t first = static_cast<std::size_t>(i) * chunk_bytes, size = std::min(chunk_bytes, static_cast<std::size_t>(dims[0]) * row_bytes - first);
      std::vector<std::byte> padded;  // a chunk is whole in the file, also where the table ends
      if (size < chunk_bytes) {
        padded.assign(values + first, values + first + size);
        padded.resize(chunk_bytes);
      }
      std::vector<Bytef>& out = packed[static_cast<std::size_t>(i)];
      uLongf n = compressBound(chunk_bytes);
      out.resize(n);
      const auto* from = reinterpret_cast<const Bytef*>(padded.empty() ? values + first : padded.data());
      if (compress2(out.data(), &n, from, chunk_bytes, kDeflateLevel) != Z_OK) throw std::bad_alloc();
      out.resize(n);
    });
    std::vector<hsize_t> offset(dims.size(), 0);
    for (const std::vector<Bytef>& chunk : packed) {
      if (H5Dwrite_chunk(dataset, H5P_DEFAULT, 0, offset.data(), chunk.size(), chunk.data()) < 0) failed(name);
      offset[0] += chunk_rows;
    }
  }

  void attribute(const std::string& object, const std::string& name, hid_t stored_type, hid_t memory_type, const void* value,
                 std::size_t bytes, std::optional<hsize_t> n) {
    if (bytes > kMaxAttributeBytes)
      fail(ErrorKind::kInternal, path, "attribute {} of {} has {} bytes; more than {} belong into a dataset", name, object, bytes, kMaxAttributeBytes);
    const H5Handle space(n ? H5Screate_simple(1, &*n, nullptr) : H5Screate(H5S_SCALAR), H5Sclose);
    H5Handle attribute(H5Acreate_by_name(file.get(), object.c_str(), name.c_str(), stored_type, space.get(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
    if (!attribute.valid() || H5Awrite(attribute.get(), memory_type, value) < 0 || !attribute.reset()) failed(object);
  }
};

H5Writer::H5Writer(const std::string& path, const std::string& schema, int schema_version, ThreadPool* pool) {
  h5_start();
  const int old = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (old >= 0) {
    try {
      h5_check_lock(old, true, path);
    } catch (...) {
      ::close(old);
      throw;
    }
    ::close(old);
  }
  impl_ = std::make_unique<Impl>(path, pool);
  h5_check_lock(impl_->target.descriptor(), true, path);

  const H5Handle access = h5_file_access(true), creation(H5Pcreate(H5P_FILE_CREATE), H5Pclose);
  H5Pset_obj_track_times(creation.get(), false);
  impl_->file = H5Handle(H5Fcreate(impl_->target.temporary_path().c_str(), H5F_ACC_TRUNC, creation.get(), access.get()), H5Fclose);
  if (!impl_->file.valid()) impl_->failed("the file");
  impl_->link_properties = H5Handle(H5Pcreate(H5P_LINK_CREATE), H5Pclose);
  H5Pset_char_encoding(impl_->link_properties.get(), H5T_CSET_UTF8);
  attribute("/", "schema", schema);
  attribute("/", "schema_version", static_cast<std::int64_t>(schema_version));
}

H5Writer::~H5Writer() = default;
H5Writer::H5Writer(H5Writer&&) noexcept = default;

void H5Writer::group(const std::string& name) { impl_->make_group(name); }

// Stored little-endian everywhere, so that the bytes do not depend on the machine.
#define CALIB_H5_WRITE(type, stored, memory)                                                         \
  void H5Writer::write(const std::string& name, std::span<const type> values, const Shape& shape) {  \
    impl_->write(name, stored, memory, sizeof(type), values.data(), values.size(), shape);           \
  }
#define CALIB_H5_WRITE_PACKED(type, stored, memory)                                                                  \
  void H5Writer::write(const std::string& name, std::span<const type> values, const Shape& shape, Packing packing) { \
    impl_->write(name, stored, memory, sizeof(type), values.data(), values.size(), shape, packing);                  \
  }
CALIB_H5_WRITE(float, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT)
CALIB_H5_WRITE(double, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE)
CALIB_H5_WRITE(std::int32_t, H5T_STD_I32LE, H5T_NATIVE_INT32)
CALIB_H5_WRITE(std::int64_t, H5T_STD_I64LE, H5T_NATIVE_INT64)
CALIB_H5_WRITE_PACKED(std::uint8_t, H5T_STD_U8LE, H5T_NATIVE_UINT8)
CALIB_H5_WRITE_PACKED(std::uint16_t, H5T_STD_U16LE, H5T_NATIVE_UINT16)
CALIB_H5_WRITE_PACKED(std::uint32_t, H5T_STD_U32LE, H5T_NATIVE_UINT32)
CALIB_H5_WRITE(std::uint64_t, H5T_STD_U64LE, H5T_NATIVE_UINT64)
#undef CALIB_H5_WRITE
#undef CALIB_H5_WRITE_PACKED

void H5Writer::write_strings(const std::string& name, const std::vector<std::string>& values) {
  std::vector<std::string> clean;
  std::size_t longest = 1;
  for (const std::string& value : values) {
    clean.push_back(storable(value));
    longest = std::max(longest, clean.back().size());
  }
  const Shape shape = {static_cast<std::int64_t>(values.size())};
  if (longest > kMaxPaddedStrings / std::max<std::size_t>(1, clean.size())) {
    const H5Handle type = string_type(H5T_VARIABLE);
    std::vector<const char*> pointers;
    for (const std::string& value : clean) pointers.push_back(value.c_str());
    impl_->write(name, type.get(), type.get(), sizeof(char*), pointers.data(), pointers.size(), shape);
    return;
  }
  std::string padded(longest * clean.size(), '\0');
  for (std::size_t i = 0; i < clean.size(); ++i) padded.replace(i * longest, clean[i].size(), clean[i]);
  const H5Handle type = string_type(longest);
  impl_->write(name, type.get(), type.get(), longest, padded.data(), clean.size(), shape);
}

void H5Writer::attribute(const std::string& object, const std::string& name, const std::string& value) {
  const std::string clean = storable(value);
  const H5Handle type = string_type(std::max<std::size_t>(1, clean.size()));
  impl_->attribute(object, name, type.get(), type.get(), clean.c_str(), clean.size(), std::nullopt);
}
void H5Writer::attribute(const std::string& object, const std::string& name, std::int64_t value) {
  impl_->attribute(object, name, H5T_STD_I64LE, H5T_NATIVE_INT64, &value, sizeof value, std::nullopt);
}
void H5Writer::attribute(const std::string& object, const std::string& name, std::uint64_t value) {
  impl_->attribute(object, name, H5T_STD_U64LE, H5T_NATIVE_UINT64, &value, sizeof value, std::nullopt);
}
void H5Writer::attribute(const std::string& object, const std::string& name, double value) {
  impl_->attribute(object, name, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, &value, sizeof value, std::nullopt);
}
void H5Writer::attribute(const std::string& object, const std::string& name, std::span<const double> values) {
  impl_->attribute(object, name, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, values.data(), values.size_bytes(), values.size());
}

void H5Writer::finish() {
  if (H5Fflush(impl_->file.get(), H5F_SCOPE_GLOBAL) < 0) impl_->failed("the file");
  attribute("/", "complete", std::int64_t{1});
  if (H5Fflush(impl_->file.get(), H5F_SCOPE_GLOBAL) < 0) impl_->failed("the file");
  if (!impl_->file.reset()) impl_->failed("the file");
  impl_->target.commit();
}

}  // namespace calib::io
