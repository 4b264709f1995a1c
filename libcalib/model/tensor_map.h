#pragma once
// Which tensor of a checkpoint plays which part, with every name and shape checked before any weight is read.

#include <array>
#include <cstdint>
#include <vector>

#include "libcalib/model/architecture.h"
#include "libcalib/model/config.h"
#include "libcalib/weights/checkpoint.h"

namespace calib::model {

struct TensorMap {
  /// By block, then by BlockPart; nullptr where the configuration has no such part.
  std::vector<std::array<const weights::TensorInfo*, kNBlockParts>> blocks;
  const weights::TensorInfo* embedding = nullptr;   ///< [vocab, hidden]
  const weights::TensorInfo* final_norm = nullptr;  ///< [hidden]
  const weights::TensorInfo* head = nullptr;        ///< [vocab, hidden]; the embedding if tied, nullptr if absent (CF-01)
};

/// Throws: kMismatch listing missing and unexpected tensors and "n of m tensors used", shapes that contradict the
/// configuration, surplus layers. Tensors that no decoder part claims are reported to `log` with their count.
TensorMap map_tensors(const ModelConfig& config, const weights::Checkpoint& checkpoint, const LogSink& log = {});

}  // namespace calib::model
