#pragma once
// HDF5 files as flat sets of named arrays, strings and attributes. Not thread-safe: the library itself is not.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "libcalib/base/thread_pool.h"

namespace calib::io {

using Shape = std::vector<std::int64_t>;
inline constexpr std::int64_t kAnySize = -1;            ///< in an expected shape
inline constexpr std::size_t kMaxAttributeBytes = 60 * 1024;

/// kDeflate: zlib level 1, for large arrays of small counts.
enum class Packing { kPlain, kDeflate };

/// Writes one file through AtomicFile. Every array is one dataset with a checksum (Fletcher-32, or that of its compression); groups come into being with
/// their first member; nothing in the file depends on the time of writing. Names are absolute: "/layers/00/k_pre/mean".
/// Throws kIo with the cause (disk full, file size limit, locked target) and kInternal for a name used twice.
class H5Writer {
 public:
  /// Root attributes `schema` and `schema_version` are written at once, `complete` by finish().
  /// `pool` compresses kDeflate arrays; it outlives this object. Without one the caller's thread does.
  H5Writer(const std::string& path, const std::string& schema, int schema_version, ThreadPool* pool = nullptr);
  ~H5Writer();
  H5Writer(H5Writer&&) noexcept;

  void group(const std::string& name);
  void write(const std::string& name, std::span<const float> values, const Shape& shape);
  void write(const std::string& name, std::span<const double> values, const Shape& shape);
  void write(const std::string& name, std::span<const std::int32_t> values, const Shape& shape);
  void write(const std::string& name, std::span<const std::int64_t> values, const Shape& shape);
  void write(const std::string& name, std::span<const std::uint8_t> values, const Shape& shape, Packing packing = Packing::kPlain);
  void write(const std::string& name, std::span<const std::uint16_t> values, const Shape& shape, Packing packing = Packing::kPlain);
  void write(const std::string& name, std::span<const std::uint32_t> values, const Shape& shape, Packing packing = Packing::kPlain);
  void write(const std::string& name, std::span<const std::uint64_t> values, const Shape& shape);
  /// Null-padded UTF-8 of the longest one's length (variable-length if that would be wasteful). Damaged UTF-8 is repaired.
  void write_strings(const std::string& name, const std::vector<std::string>& values);

  /// `object`: a group or dataset that exists, "/" for the root. Throws kInternal past kMaxAttributeBytes.
  void attribute(const std::string& object, const std::string& name, const std::string& value);
  void attribute(const std::string& object, const std::string& name, std::int64_t value);
  void attribute(const std::string& object, const std::string& name, std::uint64_t value);
  void attribute(const std::string& object, const std::string& name, double value);
  void attribute(const std::string& object, const std::string& name, std::span<const double> values);

  /// Completeness marker, flush, close, rename. Nothing stands under `path` before this returns.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Reads a complete file of one schema. Byte order and string kind may be any; an array's size is checked against the file
/// before memory is taken. Everything that is wrong inside the file is kFormat naming file and object.
class H5Reader {
 public:
  /// Throws: kNotFound; kIo (unreadable, locked: names HDF5_USE_FILE_LOCKING); kFormat (not HDF5, truncated, damaged, another
  /// schema or none, not complete); kVersion (schema_version outside 1..newest_version).
  H5Reader(const std::string& path, const std::string& schema, int newest_version);
  ~H5Reader();
  H5Reader(H5Reader&&) noexcept;

  const std::string& path() const noexcept;
  int schema_version() const noexcept;
  bool has(const std::string& name) const;
  /// Names directly under a group, sorted.
  std::vector<std::string> children(const std::string& group) const;
  Shape shape(const std::string& name) const;

  /// `expected`: the shape, kAnySize where any extent will do. T: float, double, int32, int64, uint8, uint16, uint32, uint64;
  /// the stored type must be of the same class and not wider.
  template <typename T>
  std::vector<T> read(const std::string& name, const Shape& expected) const;
  std::vector<std::string> read_strings(const std::string& name) const;

  bool has_attribute(const std::string& object, const std::string& name) const;
  std::string string_attribute(const std::string& object, const std::string& name) const;
  std::int64_t integer_attribute(const std::string& object, const std::string& name) const;
  std::uint64_t unsigned_attribute(const std::string& object, const std::string& name) const;
  double number_attribute(const std::string& object, const std::string& name) const;

  /// Throws kFormat at this file: "<object>: <message>".
  [[noreturn]] void wrong(const std::string& object, const std::string& message) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// "(3, 64)".
std::string shape_text(const Shape& shape);

}  // namespace calib::io
