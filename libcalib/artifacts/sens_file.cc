#include "libcalib/artifacts/sens_file.h"

#include <set>

#include "libcalib/base/error.h"
#include "libcalib/base/mapped_file.h"
#include "libcalib/io/h5.h"
#include "libcalib/io/provenance.h"
#include "libcalib/quant/token_tiers.h"

namespace calib::artifacts {
namespace {

using io::H5Reader;
using io::H5Writer;
using io::kAnySize;
using io::Shape;
using sens::FittedArray;
using sens::ScoreTable;
using sens::SensResult;

constexpr char kSensSchema[] = "kvcalib.sens";
constexpr int kSensVersion = 2;       ///< read: 1 to this
constexpr int kPlainSensVersion = 1;  ///< written where no class has a salient tier

template <typename T>
std::span<const T> view(const std::vector<T>& values) {
  return std::span<const T>(values);
}

struct Field {
  const char* name;
  std::vector<double> ScoreTable::*values;
};
constexpr Field kFields[] = {{"mean", &ScoreTable::mean}, {"se", &ScoreTable::se}, {"p99", &ScoreTable::p99}, {"max", &ScoreTable::max},
                             {"worst_decile", &ScoreTable::worst_decile}};

Shape score_shape(const SensResult& result, bool by_bucket) {
  Shape out = {static_cast<std::int64_t>(result.units.size()), static_cast<std::int64_t>(result.schemes.size()), static_cast<std::int64_t>(result.windows.size())};
  if (by_bucket) out.push_back(result.n_buckets);
  return out;
}

void read_params(const H5Reader& file, SensResult& out) {
  for (const std::string& layer : file.children("/params"))
    for (const std::string& side : file.children("/params/" + layer))
      for (const std::string& scheme : file.children("/params/" + layer + "/" + side)) {
        const std::string key = layer + "/" + side + "/" + scheme, group = "/params/" + key;
        std::vector<FittedArray>& arrays = out.params[key];
        for (const std::string& what : file.children(group)) {
          FittedArray array;
          array.what = what;
          array.shape = file.shape(group + "/" + what);
          array.values = file.read<float>(group + "/" + what, array.shape);
          arrays.push_back(std::move(array));
        }
      }
}

struct JointColumn {
  const char* name;
  std::vector<std::int64_t> sens::JointRuns::*values;
};
constexpr JointColumn kJointColumns[] = {{"k", &sens::JointRuns::k}, {"v", &sens::JointRuns::v}, {"tier_class", &sens::JointRuns::tier_class}};
struct JointResult {
  const char* name;
  std::vector<double> sens::JointRuns::*values;
};
constexpr JointResult kJointResults[] = {{"kld", &sens::JointRuns::kld}, {"kld_se", &sens::JointRuns::kld_se}, {"ln_ppl_ratio", &sens::JointRuns::ln_ppl_ratio}};

void write_joint(H5Writer& file, const sens::JointRuns& joint) {
  file.group("/joint");
  const auto n_runs = static_cast<std::int64_t>(joint.size());
  for (const JointColumn& c : kJointColumns) file.write(std::string("/joint/") + c.name, view(joint.*c.values), {n_runs, static_cast<std::int64_t>(joint.n_layers)});
  for (const JointResult& r : kJointResults) file.write(std::string("/joint/") + r.name, view(joint.*r.values), {n_runs});
  io::write_data(file, "/joint/data", joint.data);
  io::write_provenance(file, "/joint/provenance", joint.provenance);
}

sens::JointRuns read_joint(const H5Reader& file, const SensResult& sens) {
  sens::JointRuns out;
  out.n_layers = sens.model.layers.size();
  const Shape runs = file.shape("/joint/kld");
  if (runs.size() != 1) file.wrong("/joint/kld", fmt::format("has {} dimensions, expected 1", runs.size()));
  for (const JointColumn& c : kJointColumns) {
    const std::string name = std::string("/joint/") + c.name;
    out.*c.values = file.read<std::int64_t>(name, {runs[0], static_cast<std::int64_t>(out.n_layers)});
    const std::size_t n = c.values == &sens::JointRuns::tier_class ? sens.windows.size() : sens.schemes.size();
    for (const std::int64_t i : out.*c.values)
      if (i < 0 || static_cast<std::size_t>(i) >= n) file.wrong(name, fmt::format("holds {}, expected 0 to {}", i, static_cast<std::int64_t>(n) - 1));
  }
  for (const JointResult& r : kJointResults) out.*r.values = file.read<double>(std::string("/joint/") + r.name, runs);
  out.data = io::read_data(file, "/joint/data");
  out.provenance = io::read_provenance(file, "/joint/provenance");
  return out;
}

const LayerGeometry& geometry_of(const ModelIdentity& model, std::int64_t layer, const std::string& path) {
  for (const LayerGeometry& g : model.layers)
    if (g.index == layer) return g;
  fail(ErrorKind::kFormat, path, "/saliency holds layer {}, which the model does not have", layer);
}

void read_tiers(const H5Reader& file, SensResult& out) {
  out.salient_fractions = file.read<double>("/salient_fraction", {static_cast<std::int64_t>(out.windows.size())});
  out.salient_scheme = file.string_attribute("/salient_fraction", "scheme");
  out.salient_score = file.string_attribute("/salient_fraction", "score");
  quant::parse_salient_scheme(out.salient_scheme, file.path() + ": /salient_fraction, attribute `scheme`");
  std::set<std::pair<std::int64_t, double>> seen;
  for (std::size_t i = 0; i < out.windows.size(); ++i) {
    const double f = out.salient_fractions[i];
    if (!(f >= 0 && f <= quant::kMostSalient)) file.wrong("/salient_fraction", fmt::format("entry {} is {}, expected 0 to {}", i, f, quant::kMostSalient));
    if (!seen.emplace(out.windows[i], f).second) file.wrong("/salient_fraction", fmt::format("window {} with {} stands twice", out.windows[i], f));
  }
  for (const std::string& name : file.children("/saliency")) {
    const std::string group = "/saliency/" + name;
    if (name.empty() || name.size() > 6 || name.find_first_not_of("0123456789") != std::string::npos) file.wrong(group, "is no layer number");
    const LayerGeometry& g = geometry_of(out.model, std::stoi(name), file.path());
    quant::SaliencyFactors& factors = out.saliency[g.index];
    const Shape shape = file.shape(group + "/m");
    factors.rank = shape.size() == 3 ? static_cast<int>(std::min<std::int64_t>(shape[2], quant::SaliencyFactors::kMostRank + 1)) : 0;
    if (factors.rank < 1 || factors.rank > quant::SaliencyFactors::kMostRank)
      file.wrong(group + "/m", fmt::format("has shape {}, expected a rank of 1 to {} last", io::shape_text(shape), quant::SaliencyFactors::kMostRank));
    factors.a = file.read<float>(group + "/a", {g.n_q_heads, g.head_dim});
    factors.m = file.read<float>(group + "/m", {g.n_q_heads, g.head_dim, factors.rank});
  }
}

}  // namespace

void write_sens_file(const std::string& path, const SensResult& result) {
  const std::size_t n_pairs = result.units.size() * result.schemes.size(), n_cells = n_pairs * result.windows.size();
  if (result.valid.size() != n_pairs || result.base_bytes_per_token.size() != n_pairs)
    fail(ErrorKind::kInternal, path, "valid and base_bytes_per_token need {} entries", n_pairs);
  const bool tiers = !result.salient_scheme.empty();
  if (!result.salient_fractions.empty() && result.salient_fractions.size() != result.windows.size())
    fail(ErrorKind::kInternal, path, "{} salient fractions for {} windows", result.salient_fractions.size(), result.windows.size());
  H5Writer file(path, kSensSchema, tiers ? kSensVersion : kPlainSensVersion);
  file.attribute("/", "n_sinks", result.n_sinks);
  file.attribute("/", "seq_len", result.seq_len);
  file.attribute("/", "candidate_list", result.candidate_list);
  file.attribute("/", "n_buckets", static_cast<std::int64_t>(result.n_buckets));
  io::write_model(file, "/model", result.model);
  io::write_data(file, "/data", result.data);
  io::write_data(file, "/calibration_data", result.calibration_data);

  const Shape pairs = {static_cast<std::int64_t>(result.units.size()), static_cast<std::int64_t>(result.schemes.size())};
  file.write_strings("/schemes/name", result.schemes);
  file.write("/schemes/base_bytes_per_token", view(result.base_bytes_per_token), pairs);
  file.write("/valid", view(result.valid), pairs);
  std::vector<std::int64_t> layers;
  std::vector<std::string> sides;
  for (const sens::UnitId& unit : result.units) {
    layers.push_back(unit.layer);
    sides.push_back(side_name(unit.side));
  }
  file.write("/units/layer", view(layers), {pairs[0]});
  file.write_strings("/units/side", sides);
  file.write("/windows", view(result.windows), {static_cast<std::int64_t>(result.windows.size())});
  if (tiers) {
    file.write("/salient_fraction", view(result.salient_fractions), {static_cast<std::int64_t>(result.windows.size())});
    file.attribute("/salient_fraction", "scheme", result.salient_scheme);
    file.attribute("/salient_fraction", "score", result.salient_score);
    file.group("/saliency");
    for (const auto& [layer, factors] : result.saliency) {
      const LayerGeometry& g = geometry_of(result.model, layer, path);
      const std::string group = fmt::format("/saliency/{:02}", layer);
      file.write(group + "/a", view(factors.a), {g.n_q_heads, g.head_dim});
      file.write(group + "/m", view(factors.m), {g.n_q_heads, g.head_dim, factors.rank});
    }
  }

  file.group("/params");
  for (const auto& [key, arrays] : result.params) {
    file.group("/params/" + key);
    for (const FittedArray& array : arrays) file.write("/params/" + key + "/" + array.what, view(array.values), array.shape);
  }
  file.group("/score");
  for (const auto& [metric, table] : result.scores) {
    const std::string group = "/score/" + metric;
    for (const Field& field : kFields) {
      const std::vector<double>& values = table.*field.values;
      if (values.size() != n_cells) fail(ErrorKind::kInternal, path, "{}/{} has {} entries, expected {}", group, field.name, values.size(), n_cells);
      file.write(group + "/" + field.name, view(values), score_shape(result, false));
    }
    file.write(group + "/by_bucket", view(table.by_bucket), score_shape(result, true));
  }
  if (result.joint) write_joint(file, *result.joint);
  io::write_provenance(file, "/provenance", result.provenance);
  file.finish();
}

SensResult read_sens_file(const std::string& path) {
  require_file(path, "kvsens writes scores");
  const H5Reader file(path, kSensSchema, kSensVersion);
  SensResult out;
  out.n_sinks = file.integer_attribute("/", "n_sinks");
  out.seq_len = file.integer_attribute("/", "seq_len");
  out.candidate_list = file.string_attribute("/", "candidate_list");
  const std::int64_t n_buckets = file.integer_attribute("/", "n_buckets");
  if (n_buckets < 0 || n_buckets > 64) file.wrong("/", fmt::format("attribute `n_buckets` is {}", n_buckets));
  out.n_buckets = static_cast<int>(n_buckets);
  out.provenance = io::read_provenance(file, "/provenance");
  out.model = io::read_model(file, "/model");
  out.data = io::read_data(file, "/data");
  out.calibration_data = io::read_data(file, "/calibration_data");

  out.schemes = file.read_strings("/schemes/name");
  if (std::set<std::string>(out.schemes.begin(), out.schemes.end()).size() != out.schemes.size()) file.wrong("/schemes/name", "a scheme stands twice");
  const auto layers = file.read<std::int64_t>("/units/layer", {kAnySize});
  const auto sides = file.read_strings("/units/side");
  if (sides.size() != layers.size()) file.wrong("/units/side", fmt::format("{} entries for {} units", sides.size(), layers.size()));
  std::set<std::pair<std::int64_t, std::string>> seen;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (sides[i] != "K" && sides[i] != "V") file.wrong("/units/side", fmt::format("entry {} is \"{}\", expected K or V", i, sides[i]));
    if (layers[i] < 0 || layers[i] > 1'000'000 || !seen.emplace(layers[i], sides[i]).second)
      file.wrong("/units", fmt::format("entry {} (layer {}, {}) is out of range or stands twice", i, layers[i], sides[i]));
    out.units.push_back({static_cast<int>(layers[i]), sides[i] == "K" ? Side::kK : Side::kV});
  }
  out.windows = file.read<std::int64_t>("/windows", {kAnySize});
  if (file.has("/salient_fraction")) read_tiers(file, out);
  const Shape pairs = {static_cast<std::int64_t>(out.units.size()), static_cast<std::int64_t>(out.schemes.size())};
  out.base_bytes_per_token = file.read<double>("/schemes/base_bytes_per_token", pairs);
  out.valid = file.read<std::uint8_t>("/valid", pairs);
  read_params(file, out);
  for (const std::string& metric : file.children("/score")) {
    ScoreTable& table = out.scores[metric];
    for (const Field& field : kFields) table.*field.values = file.read<double>("/score/" + metric + "/" + field.name, score_shape(out, false));
    table.by_bucket = file.read<double>("/score/" + metric + "/by_bucket", score_shape(out, true));
  }
  if (file.has("/joint")) out.joint = read_joint(file, out);
  return out;
}

}  // namespace calib::artifacts
