#pragma once
// GGUF v2 and v3 containers: header, metadata and tensor table, checked against the file's size before anything is allocated.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "libcalib/base/mapped_file.h"
#include "libcalib/weights/checkpoint.h"

namespace calib::weights {

/// One metadata value. Integers of all widths become int64 (uint64 above int64's range is kFormat where it is read),
/// floats double. Arrays of strings or numbers are flat; nested arrays are checked and skipped.
using GgufValue = std::variant<std::monostate, bool, std::int64_t, double, std::string, std::vector<std::int64_t>,
                               std::vector<double>, std::vector<std::string>>;

class GgufMetadata {
 public:
  std::map<std::string, GgufValue> values;
  std::string path;

  bool has(const std::string& key) const { return values.count(key) != 0; }
  /// Absent -> nullopt; present with another type -> kFormat naming key and type.
  std::optional<std::int64_t> integer(const std::string& key) const;
  std::optional<double> number(const std::string& key) const;      ///< integer or float
  std::optional<bool> boolean(const std::string& key) const;
  std::optional<std::string> text(const std::string& key) const;
  const std::vector<std::string>* texts(const std::string& key) const;
  const std::vector<double>* numbers(const std::string& key) const;
  const std::vector<std::int64_t>* integers(const std::string& key) const;
};

/// One parsed file. A vocabulary-only file (no tensors) is legal here.
struct GgufFile {
  GgufMetadata metadata;
  std::vector<TensorInfo> tensors;
  std::uint32_t version = 0;
  std::size_t alignment = 32, data_offset = 0;
};
/// Throws: kFormat, kVersion with field, value and offset.
GgufFile parse_gguf(const MappedFile& file);
/// The metadata alone: nothing behind it needs to be there, or is looked at. Throws as parse_gguf.
GgufMetadata parse_gguf_metadata(const MappedFile& file);

}  // namespace calib::weights
