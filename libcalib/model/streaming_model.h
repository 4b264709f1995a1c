#pragma once
// A checkpoint opened as a sequence of blocks, one in memory at a time. No Torch types here.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "libcalib/base/error.h"
#include "libcalib/base/model_geometry.h"
#include "libcalib/text/tokenizer.h"

namespace calib::model {

class Block;
class Head;
class Embedding;

struct ModelOptions {
  std::string device = "cpu";   ///< cpu, cuda, cuda:i
  std::string dtype = "auto";   ///< auto (fp32 on CPU, bf16 on CUDA), fp32, bf16
  int n_threads = 0;            ///< 0 = all
  bool fast_identity = false;
};

/// Configuration, names and shapes are checked in open(); weights of a block are read in load_block() and released with it.
class StreamingModel {
 public:
  /// Sets libtorch's number of threads and calls reuse_tensor_memory(), both for the whole process.
  /// Throws: kNotFound, kIo, kFormat, kMismatch, kUnsupported (CASES.md 4.3) before any forward pass.
  static StreamingModel open(const std::string& path, const ModelOptions& options, const LogSink& log = {});
  ~StreamingModel();
  StreamingModel(StreamingModel&&) noexcept;

  const ModelIdentity& identity() const;
  std::int64_t n_layers() const;
  const LayerGeometry& layer(std::int64_t l) const;
  /// Loads one block (fp32 or bf16 on the device); the mapped pages of its weights are dropped after the copy.
  std::unique_ptr<Block> load_block(std::int64_t l) const;
  std::unique_ptr<Embedding> load_embedding() const;
  bool has_head() const;                       ///< false: untied and lm_head.weight absent (CF-01)
  std::unique_ptr<Head> load_head() const;     ///< kMismatch naming lm_head.weight if !has_head()
  /// The tokenizer of the folder or GGUF.
  std::unique_ptr<text::Tokenizer> load_tokenizer(const LogSink& log = {}) const;
  const std::string& device() const;
  const std::string& dtype() const;            ///< resolved
  /// Bytes: largest block, embedding, head; for --dry-run.
  std::int64_t block_bytes() const;
  std::int64_t embedding_bytes() const;        ///< of the table; load_embedding() reads rows on demand and holds none of it
  std::int64_t head_bytes() const;             ///< 0 without a head
  std::int64_t hidden_bytes_per_token() const; ///< one row of hidden state in the compute dtype
  std::int64_t intermediate_size() const;
  /// "rope_theta=10000" for every key that was absent and got its family's default.
  const std::vector<std::string>& defaults_used() const;

 private:
  struct Impl;
  explicit StreamingModel(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace calib::model
