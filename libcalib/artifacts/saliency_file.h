#pragma once
// saliency.json: what `kvsens saliency` measured (schemas/README.md).

#include <string>

#include "libcalib/sens/saliency_result.h"

namespace calib::artifacts {

/// The document as text (ends with a line feed). Throws kNumeric naming the field if a number is not finite.
std::string saliency_to_json(const sens::SaliencyResult& result);
/// Throws: kNotFound, kIo, kFormat (JSON pointer, found, expected), kVersion.
sens::SaliencyVerdicts read_saliency_file(const std::string& path);
void write_saliency_file(const std::string& path, const sens::SaliencyResult& result);

}  // namespace calib::artifacts
