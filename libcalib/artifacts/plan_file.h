#pragma once
// plan.json and its plan.safetensors (FORMATS.md 3; contract: schemas/plan.md, schemas/plan.schema.json).

#include <string>
#include <vector>

#include "libcalib/base/error.h"
#include "libcalib/plan/plan.h"

namespace calib::artifacts {

inline constexpr const char* kPlanSchemaName = "kvcalib.plan";
inline constexpr int kPlanSchemaVersion = 1;  ///< read: 1 to this

/// Writes `path` and, if any unit has constants, the tensors beside it (plan.json -> plan.safetensors). Both or neither: the
/// tensors are renamed into place first, and the JSON names them with their sha256. The same plan gives the same bytes.
/// Throws: kIo naming the path, kNumeric naming the field that is not finite.
void write_plan(const plan::Plan& plan, const std::string& path);

/// Throws kUsage, as write_plan() of a plan with constants would, if the tensor file beside `path` belongs to no plan there.
void check_tensor_path(const std::string& path);

/// Throws: kNotFound, kIo, kFormat (JSON pointer, found, expected), kVersion (supported range), kMismatch (tensors that are not
/// the plan's). Unknown fields warn with their path and are kept. `tokens` may be written 4 or 4.0.
plan::Plan read_plan(const std::string& path, const LogSink& log = {});

/// JSON paths of a file that break schemas/plan.schema.json; empty if it is valid. Throws: kNotFound, kIo, kFormat (not JSON).
std::vector<std::string> plan_schema_problems(const std::string& path);

/// `path` and the tensor file that the plan there names; only `path` if no plan can be read from it. For programs that must not replace
/// what they read. Never throws.
std::vector<std::string> plan_input_files(const std::string& path);

/// The tensor file that belongs to a plan's path.
std::string plan_tensor_path(const std::string& path);

}  // namespace calib::artifacts
