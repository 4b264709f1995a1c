#pragma once
// plan.json and plan.safetensors -> Plan. The fields are those of schemas/plan.schema.json; fields that follow from others are checked
// against them, unknown fields are left to other readers, unknown constants are refused.

#include <string>
#include <string_view>

#include "kernels/core/plan.h"
#include "kernels/core/status.h"

namespace kvrt {

/// Both files in memory; `tensors` is empty if the plan names no file. Codes: kFormat for a file that breaks its schema, kMismatch
/// for files that do not belong together, kUnsupported for what later versions write.
Status read_plan(std::string_view json, std::string_view tensors, Plan* out);

/// tensors_path: empty = the file that the plan names, in the plan's folder. kIo for files that cannot be read.
Status load_plan(const std::string& json_path, const std::string& tensors_path, Plan* out);

}  // namespace kvrt
