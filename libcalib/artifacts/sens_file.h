#pragma once
// sens.h5: the scores of kvsens (schemas/sens.md is the layout's contract).

#include <string>

#include "libcalib/sens/sens_result.h"

namespace calib::artifacts {

/// Writes under a temporary name and renames. Throws: kIo, kNotFound (the folder), kInternal if table sizes disagree.
void write_sens_file(const std::string& path, const sens::SensResult& result);

/// Throws: kNotFound, kIo, kFormat (names both schemas if it is another of our files), kVersion.
sens::SensResult read_sens_file(const std::string& path);

}  // namespace calib::artifacts
