#pragma once
// eval.json: what `kvsens evaluate` measured, with the names of llama-perplexity's KL-divergence block.

#include <string>

#include "libcalib/sens/eval_result.h"

namespace calib::artifacts {

/// The document as text (ends with a line feed). Throws kNumeric naming the field if a number is not finite.
std::string eval_to_json(const sens::EvalResult& result);
void write_eval_file(const std::string& path, const sens::EvalResult& result);

/// Throws: kNotFound, kIo, kFormat with the JSON path, kVersion.
sens::EvalResult read_eval_file(const std::string& path);

}  // namespace calib::artifacts
