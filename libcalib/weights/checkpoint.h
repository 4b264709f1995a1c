#pragma once
// A model's files as memory-mapped, typed, bounds-checked tensors: a Hugging Face folder or a GGUF file (also split).

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "libcalib/base/error.h"

namespace calib::weights {

enum class ContainerKind { kSafetensors, kGguf };

enum class TensorType {
  kF32, kF16, kBF16, kF64, kI8, kI16, kI32, kI64, kU8, kU16, kU32, kU64, kBool, kF8E4M3, kF8E5M2,
  kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2K, kQ3K, kQ4K, kQ5K, kQ6K, kIq4Nl,
  kOther,  ///< known to the container, not readable as numbers here; type_name says which
};

struct TensorInfo {
  std::string name;
  TensorType type = TensorType::kOther;
  std::string type_name;             ///< as the container spells it: "BF16", "Q4_K"
  std::vector<std::int64_t> shape;   ///< outermost first, as PyTorch prints it ([out, in]), also for GGUF
  std::int64_t n_elements = 0;
  std::string file;                  ///< path of the file that holds it
  std::size_t offset = 0, size_bytes = 0;  ///< in that file
};

class GgufMetadata;  // libcalib/weights/gguf.h

/// Opens M of `--model M`: a folder (config.json + model.safetensors or shards with model.safetensors.index.json), one
/// .safetensors' folder, one GGUF file, any part of a split GGUF, or a folder with one GGUF inside.
/// Headers of all files are read and checked up front; tensor data are touched only by read_f32().
class Checkpoint {
 public:
  /// Throws: kNotFound, kIo, kFormat, kVersion, kMismatch (CASES.md 4.1, 4.2).
  static Checkpoint open(const std::string& path, const LogSink& log = {});
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  ContainerKind kind() const noexcept;
  const std::string& path() const noexcept;           ///< as given
  /// Folder of a Hugging Face model, else empty. config.json and tokenizer.json stand there.
  const std::string& folder() const noexcept;
  /// Metadata of a GGUF file. Requires kind() == kGguf.
  const GgufMetadata& gguf() const;

  /// Sorted by name.
  const std::vector<TensorInfo>& tensors() const noexcept;
  const TensorInfo* find(const std::string& name) const noexcept;

  /// Whole tensor as fp32, in stored order. Requires out.size() == n_elements.
  /// Throws: kUnsupported naming tensor and type, kNumeric naming the tensor and the index of the first non-finite value.
  void read_f32(const TensorInfo& tensor, std::span<float> out) const;
  /// Rows [first_row, first_row + n_rows) of the outermost dimension as fp32 (embedding lookup, tiled head).
  void read_rows_f32(const TensorInfo& tensor, std::int64_t first_row, std::int64_t n_rows, std::span<float> out) const;
  /// Drops the resident pages of a tensor that is finished with.
  void release(const TensorInfo& tensor) const noexcept;

  /// sha256 over the sorted (name, type, shape, content sha256) list; fast: file sizes + header bytes only.
  std::string identity_sha256(bool fast) const;

 private:
  struct Impl;
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace calib::weights
