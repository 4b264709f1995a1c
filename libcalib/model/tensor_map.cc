#include "libcalib/model/tensor_map.h"

#include <algorithm>
#include <set>
#include <string>

#include <fmt/ranges.h>

#include "libcalib/base/utf8.h"

namespace calib::model {
namespace {

using weights::TensorInfo;

std::string shape_text(const std::vector<std::int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

bool wanted(BlockPart part, const ModelConfig& config) {
  switch (part) {
    case BlockPart::kQBias:
    case BlockPart::kKBias:
    case BlockPart::kVBias: return config.attention_bias;
    case BlockPart::kOBias: return config.output_bias;
    case BlockPart::kQNorm:
    case BlockPart::kKNorm: return config.architecture->qk_norm;
    case BlockPart::kGateBias:
    case BlockPart::kUpBias:
    case BlockPart::kDownBias: return config.mlp_bias;
    case BlockPart::kPostAttentionNorm:
    case BlockPart::kPostMlpNorm: return config.architecture->post_norms;
    default: return true;
  }
}

std::vector<std::int64_t> expected_shape(BlockPart part, const ModelConfig& c) {
  const std::int64_t q = c.n_q_heads * c.head_dim, kv = c.n_kv_heads * c.head_dim;
  switch (part) {
    case BlockPart::kAttentionNorm:
    case BlockPart::kMlpNorm:
    case BlockPart::kPostAttentionNorm:
    case BlockPart::kPostMlpNorm:
    case BlockPart::kOBias:
    case BlockPart::kDownBias: return {c.hidden_size};
    case BlockPart::kQ: return {q, c.hidden_size};
    case BlockPart::kK:
    case BlockPart::kV: return {kv, c.hidden_size};
    case BlockPart::kO: return {c.hidden_size, q};
    case BlockPart::kQBias: return {q};
    case BlockPart::kKBias:
    case BlockPart::kVBias: return {kv};
    case BlockPart::kQNorm:
    case BlockPart::kKNorm: return {c.head_dim};
    case BlockPart::kGate:
    case BlockPart::kUp: return {c.intermediate_size, c.hidden_size};
    case BlockPart::kGateBias:
    case BlockPart::kUpBias: return {c.intermediate_size};
    case BlockPart::kDown: return {c.hidden_size, c.intermediate_size};
  }
  return {};
}

/// Names of one checkpoint under one prefix.
struct Naming {
  const ArchitectureRow* architecture = nullptr;
  bool gguf = false;
  std::string prefix;
  std::string embedding() const { return gguf ? "token_embd.weight" : prefix + "embed_tokens.weight"; }
  std::string final_norm() const { return gguf ? "output_norm.weight" : prefix + "norm.weight"; }
  std::string block(BlockPart part, std::int64_t layer) const { return prefix + block_tensor_name(*architecture, part, layer, gguf); }
  std::vector<std::string> heads() const {
    if (gguf) return {"output.weight"};
    return {"lm_head.weight", "language_model.lm_head.weight", prefix + "lm_head.weight"};
  }
};

Naming find_naming(const ModelConfig& config, const weights::Checkpoint& checkpoint) {
  if (checkpoint.kind() == weights::ContainerKind::kGguf) return {config.architecture, true, ""};
  for (const std::string& prefix : decoder_prefixes()) {
    const Naming naming{config.architecture, false, prefix};
    if (checkpoint.find(naming.embedding()) || checkpoint.find(naming.block(BlockPart::kQ, 0))) return naming;
  }
  std::string found;
  for (std::size_t i = 0; i < std::min<std::size_t>(3, checkpoint.tensors().size()); ++i)
    found += (i ? ", " : "") + to_valid_utf8(checkpoint.tensors()[i].name);
  const Naming naming{config.architecture, false, "model."};
  fail(ErrorKind::kMismatch, checkpoint.path(),
       "no tensor has the name of a {} decoder: found {} tensors, for example {}; expected {}, {}, {} (also under the prefixes {})",
       config.model_type, checkpoint.tensors().size(), found.empty() ? "none" : found, naming.embedding(),
       naming.block(BlockPart::kQ, 0), naming.final_norm(),
       "language_model.model., model.language_model., transformer., or none");
}

/// Collects what contradicts the configuration, so that one run lists all of it.
class Mapper {
 public:
  Mapper(const ModelConfig& config, const weights::Checkpoint& checkpoint)
      : config_(config), checkpoint_(checkpoint), naming_(find_naming(config, checkpoint)) {}

  const TensorInfo* need(const std::string& name, const std::vector<std::int64_t>& shape) {
    const TensorInfo* tensor = checkpoint_.find(name);
    if (!tensor) {
      missing_.push_back(name);
      return nullptr;
    }
    used_.insert(name);
    if (tensor->shape != shape)
      wrong_shapes_.push_back(fmt::format("{} has shape {}, expected {}", name, shape_text(tensor->shape), shape_text(shape)));
    return tensor;
  }

  TensorMap map(const LogSink& log) {
    // A count of layers far above the file's is one line, not a table of names.
    refuse_absent_layers();
    TensorMap result;
    const ModelConfig& c = config_;
    result.embedding = need(naming_.embedding(), {c.vocab_size, c.hidden_size});
    result.final_norm = need(naming_.final_norm(), {c.hidden_size});
    result.blocks.resize(static_cast<std::size_t>(c.n_layers));
    for (std::int64_t l = 0; l < c.n_layers; ++l)
      for (int p = 0; p < kNBlockParts; ++p) {
        const auto part = static_cast<BlockPart>(p);
        result.blocks[static_cast<std::size_t>(l)][static_cast<std::size_t>(p)] =
            wanted(part, c) ? need(naming_.block(part, l), expected_shape(part, c)) : nullptr;
      }
    map_head(result, log);
    report(log);
    return result;
  }

 private:
  bool layer_present(std::int64_t l) const {
    for (const auto& tensor : checkpoint_.tensors())
      if (tensor.name.rfind(layer_prefix(l), 0) == 0) return true;
    return false;
  }
  std::string layer_prefix(std::int64_t l) const {
    return naming_.gguf ? fmt::format("blk.{}.", l) : fmt::format("{}layers.{}.", naming_.prefix, l);
  }

  void refuse_absent_layers() const {
    const char* key = naming_.gguf ? "block_count" : "num_hidden_layers";
    for (std::int64_t l = 0; l < config_.n_layers; ++l)
      if (!layer_present(l))
        fail(ErrorKind::kMismatch, checkpoint_.path(), "layer {} has no tensor ({}*): {} is {}, the weights hold {} layers", l,
             layer_prefix(l), key, config_.n_layers, l);
    if (layer_present(config_.n_layers))
      fail(ErrorKind::kMismatch, checkpoint_.path(),
           "the weights hold layer {} ({}*) and {} is {}: a model cut short gives wrong results", config_.n_layers,
           layer_prefix(config_.n_layers), key, config_.n_layers);
  }

  void map_head(TensorMap& result, const LogSink& log) {
    const TensorInfo* own = nullptr;
    for (const std::string& name : naming_.heads())
      if (!own) own = checkpoint_.find(name);
    if (own) used_.insert(own->name);
    if (config_.tied_embedding) {
      result.head = result.embedding;
      return;
    }
    if (own) result.head = need(own->name, {config_.vocab_size, config_.hidden_size});
    else log.note(fmt::format("{}: no {} and the embedding is not tied: no next-token likelihood", checkpoint_.path(), naming_.heads()[0]));
  }

  /// Names below a known block that look like a part this configuration does not have, or like a renamed one.
  bool belongs_to_block(const std::string& name) const {
    const std::string stem = naming_.gguf ? "blk." : naming_.prefix + "layers.";
    return name.rfind(stem, 0) == 0 && name.find("rotary_emb.inv_freq") == std::string::npos &&
           !(naming_.gguf && !std::isdigit(static_cast<unsigned char>(name[stem.size()])));
  }

  void report(const LogSink& log) const {
    std::vector<std::string> unexpected, unclaimed;
    for (const auto& tensor : checkpoint_.tensors()) {
      if (used_.count(tensor.name)) continue;
      if (naming_.gguf && tensor.name == "rope_freqs.weight") continue;
      (belongs_to_block(tensor.name) ? unexpected : unclaimed).push_back(to_valid_utf8(tensor.name));
    }
    if (!missing_.empty() || !unexpected.empty()) {
      std::vector<std::string> details;
      for (const auto& name : missing_) details.push_back("missing: " + name);
      for (const auto& name : unexpected) details.push_back("unexpected: " + name);
      const std::string first = !missing_.empty() ? "missing " + missing_[0] : "unexpected " + unexpected[0];
      throw Error(ErrorKind::kMismatch, checkpoint_.path(),
                  fmt::format("the weights do not fit the configuration of {}: {} missing, {} unexpected ({}); {} of {} tensors used",
                              config_.model_type, missing_.size(), unexpected.size(), first, used_.size(),
                              checkpoint_.tensors().size()),
                  std::move(details));
    }
    if (!wrong_shapes_.empty()) {
      throw Error(ErrorKind::kMismatch, checkpoint_.path(),
                  fmt::format("{} (head_dim {}, {} query heads, {} KV heads, hidden size {}){}", wrong_shapes_[0], config_.head_dim,
                              config_.n_q_heads, config_.n_kv_heads, config_.hidden_size,
                              wrong_shapes_.size() > 1 ? fmt::format("; {} tensors disagree", wrong_shapes_.size()) : ""),
                  wrong_shapes_.size() > 1 ? wrong_shapes_ : std::vector<std::string>{});
    }
    if (!unclaimed.empty())
      log.note(fmt::format("{}: {} tensors that the decoder does not use, for example {}", checkpoint_.path(), unclaimed.size(), unclaimed[0]));
  }

  const ModelConfig& config_;
  const weights::Checkpoint& checkpoint_;
  Naming naming_;
  std::set<std::string> used_;
  std::vector<std::string> missing_, wrong_shapes_;
};

}  // namespace

TensorMap map_tensors(const ModelConfig& config, const weights::Checkpoint& checkpoint, const LogSink& log) {
  return Mapper(config, checkpoint).map(log);
}

}  // namespace calib::model
