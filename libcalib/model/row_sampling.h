#pragma once
// Which query rows get their attention probabilities looked at.

#include <cstdint>
#include <vector>

#include "libcalib/base/model_geometry.h"

namespace calib::model {

struct RowSample {
  std::vector<std::int64_t> rows;   ///< ascending
  std::vector<double> row_weight;   ///< eligible rows of the bucket / sampled rows of the bucket
};

/// At most n_rows rows of a document, equally many per position bucket (all of a bucket that has fewer), without
/// replacement, seeded by (seed, document, layer). Rows that see fewer than kMinVisibleKeys keys are never taken.
/// Source: METHODS.md 3, "Attention".
RowSample sample_rows(const LayerGeometry& layer, std::int64_t n_tokens, std::int64_t n_rows, std::uint64_t seed,
                      std::int64_t document_idx);

}  // namespace calib::model
