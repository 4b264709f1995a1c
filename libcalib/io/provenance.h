#pragma once
// Who made an artifact from what: provenance, model and data identity as HDF5 groups and as JSON members.

#include <string>

#include <nlohmann/json_fwd.hpp>

#include "libcalib/base/model_geometry.h"
#include "libcalib/io/h5.h"
#include "libcalib/io/json.h"

namespace calib::io {

/// Names in both forms: half_split, interleaved, none.
const char* rope_style_name(RopeStyle style);

/// Group `group` with attributes and, for lists, datasets (argv, parents).
void write_provenance(H5Writer& file, const std::string& group, const Provenance& provenance);
Provenance read_provenance(const H5Reader& file, const std::string& group);
/// Per-layer values are datasets over layers; inv_freq of all layers is one array cut by inv_freq_offset.
void write_model(H5Writer& file, const std::string& group, const ModelIdentity& model);
ModelIdentity read_model(const H5Reader& file, const std::string& group);
void write_data(H5Writer& file, const std::string& group, const DataIdentity& data);
DataIdentity read_data(const H5Reader& file, const std::string& group);

nlohmann::ordered_json provenance_to_json(const Provenance& provenance);
Provenance provenance_from_json(const JsonValue& value);
nlohmann::ordered_json model_to_json(const ModelIdentity& model);
ModelIdentity model_from_json(const JsonValue& value);
nlohmann::ordered_json data_to_json(const DataIdentity& data);
DataIdentity data_from_json(const JsonValue& value);

}  // namespace calib::io
