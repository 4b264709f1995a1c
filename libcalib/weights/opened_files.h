#pragma once
// What opening a model's files gives, before it becomes a Checkpoint. Internal to weights/.

#include <optional>
#include <string>
#include <vector>

#include "libcalib/base/mapped_file.h"
#include "libcalib/weights/gguf.h"

namespace calib::weights {

struct OpenedFiles {
  std::string folder;                      ///< of a Hugging Face model
  std::vector<MappedFile> files;
  std::vector<std::size_t> header_bytes;   ///< per file: everything before the tensor data
  std::vector<TensorInfo> tensors;         ///< of all files, in no particular order
  std::optional<GgufMetadata> metadata;    ///< of a GGUF model (part 1 of a split one)
};

/// config.json + model.safetensors, or the shards that model.safetensors.index.json names. Index, shards and folder are
/// reconciled: each listed tensor lies in its shard and nowhere else, each tensor of a shard is listed; files that the
/// index does not name are left alone and noted.
OpenedFiles open_hf_folder(const std::string& folder, const LogSink& log);

/// One GGUF file, or all parts of the split model that this file is a part of.
/// Throws kMismatch for a file without tensors.
OpenedFiles open_gguf(const std::string& path);

/// Number of parts that a name ending in "-00002-of-00003.gguf" states and the part's number from 1; 0 for other names.
struct SplitName {
  std::string base;
  std::uint64_t number = 0, count = 0;
};
SplitName parse_split_name(const std::string& path);

}  // namespace calib::weights
