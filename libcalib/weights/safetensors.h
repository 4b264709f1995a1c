#pragma once
// The safetensors container: 8-byte length, JSON header, data section without gaps, overlaps or trailing bytes.

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "libcalib/base/mapped_file.h"
#include "libcalib/weights/checkpoint.h"

namespace calib::weights {

/// Longest header that is read; the format's own limit. A longer claim is refused before anything is allocated.
inline constexpr std::size_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct SafetensorsFile {
  std::vector<TensorInfo> tensors;              ///< in the order of their data; offsets count from the file's first byte
  std::map<std::string, std::string> metadata;  ///< __metadata__
  std::size_t data_offset = 0;                  ///< 8 + header length
};

/// Reads and checks the whole header; touches no tensor data. A file without tensors is legal.
/// Throws: kFormat naming the file and the tensor, with the numbers that disagree.
/// Exact: every tensor's span equals shape x dtype, and the spans tile the data section.
SafetensorsFile parse_safetensors(const MappedFile& file);

}  // namespace calib::weights
