#pragma once
// A plan as a JSON document plus named arrays; plan_file.h puts both on disk.

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "libcalib/base/error.h"
#include "libcalib/io/safetensors_file.h"
#include "libcalib/plan/plan.h"

namespace calib::artifacts {

/// Everything but `tensors`, which describes the file beside it. Field order as in schemas/plan.md.
nlohmann::ordered_json plan_to_json(const plan::Plan& plan);

/// The constants of all units, named layers.<index>.<k|v>.<what>.
std::vector<io::NamedArray> plan_arrays(const plan::Plan& plan);

/// Inverse of both. `where` is the file's name in messages. Derived fields (bits, group, frame, rotation, rope classes, scale)
/// must say what the scheme and the model say. Throws kFormat with the JSON path, kMismatch (an array that is not the plan's).
plan::Plan plan_from_json(const nlohmann::json& document, const std::vector<io::NamedArray>& arrays, const std::string& where, const LogSink& log);

}  // namespace calib::artifacts
