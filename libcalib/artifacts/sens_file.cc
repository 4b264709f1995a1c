#include "libcalib/artifacts/sens_file.h"

#include <cmath>
#include <set>

#include "libcalib/base/error.h"
#include "libcalib/base/mapped_file.h"
#include "libcalib/base/utf8.h"
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

void write_isolated(H5Writer& file, const std::string& path, const SensResult& result) {
  const sens::IsolatedRuns& runs = *result.isolated;
  const std::size_t n_cells = result.units.size() * result.schemes.size() * result.windows.size();
  if (runs.mean.size() != n_cells || runs.se.size() != n_cells || runs.taken_up.size() != result.units.size())
    fail(ErrorKind::kInternal, path, "/isolated has {} means, {} errors and {} units, expected {} and {}", runs.mean.size(), runs.se.size(),
         runs.taken_up.size(), n_cells, result.units.size());
  file.group("/isolated");
  file.attribute("/isolated", "metric", runs.metric);
  file.attribute("/isolated", "above", runs.above);
  for (const Side side : {Side::kK, Side::kV}) {
    const std::string letter = side == Side::kK ? "_k" : "_v";
    file.attribute("/isolated", "slope" + letter, runs.slope(side).value);
    file.attribute("/isolated", "slope_se" + letter, runs.slope(side).se_ln);
    file.attribute("/isolated", "pairs" + letter, runs.slope(side).n_pairs);
  }
  file.write("/isolated/taken_up", view(runs.taken_up), {static_cast<std::int64_t>(result.units.size())});
  file.write("/isolated/mean", view(runs.mean), score_shape(result, false));
  file.write("/isolated/se", view(runs.se), score_shape(result, false));
  io::write_data(file, "/isolated/data", runs.data);
  io::write_provenance(file, "/isolated/provenance", runs.provenance);
}

/// Numbers that a planner may divide by and add up: a mean wherever there is an error, on valid pairs, some in every unit taken up.
void check_isolated(const H5Reader& file, const SensResult& sens, const sens::IsolatedRuns& runs) {
  if (!sens.scores.count(runs.metric)) file.wrong("/isolated", fmt::format("attribute `metric` is \"{}\", which /score does not hold", to_valid_utf8(runs.metric)));
  if (!(std::isfinite(runs.above) && runs.above > 0)) file.wrong("/isolated", fmt::format("attribute `above` is {}, expected a number above 0", runs.above));
  for (const Side side : {Side::kK, Side::kV}) {
    const sens::IsolatedRuns::Slope& s = runs.slope(side);
    if (!(std::isfinite(s.value) && s.value > 0 && std::isfinite(s.se_ln) && s.se_ln >= 0 && s.n_pairs >= 0))
      file.wrong("/isolated", fmt::format("the slope of {} is {} +- {} from {} pairs", side_name(side), s.value, s.se_ln, s.n_pairs));
  }
  const std::size_t n_schemes = sens.schemes.size();
  for (std::size_t u = 0; u < sens.units.size(); ++u) {
    const std::string unit = fmt::format("layer {} {}", sens.units[u].layer, side_name(sens.units[u].side));
    if (runs.taken_up[u] > 1) file.wrong("/isolated/taken_up", fmt::format("{} has {}, expected 0 or 1", unit, runs.taken_up[u]));
    std::size_t n_measured = 0;
    for (std::size_t s = 0; s < n_schemes; ++s)
      for (std::size_t w = 0; w < sens.windows.size(); ++w) {
        const std::size_t i = sens.index(u, s, w);
        const bool measured = runs.measured(i);
        n_measured += measured;
        if (measured && !sens.valid[u * n_schemes + s]) file.wrong("/isolated/mean", fmt::format("{} {} is measured and not valid", unit, sens.schemes[s]));
        if (measured && !(std::isfinite(runs.mean[i]) && runs.mean[i] >= 0))
          file.wrong("/isolated/mean", fmt::format("{} {} is {}, expected at least 0", unit, sens.schemes[s], runs.mean[i]));
        if (measured != (std::isfinite(runs.se[i]) && runs.se[i] >= 0))
          file.wrong("/isolated/se", fmt::format("{} {} is {} beside a mean of {}", unit, sens.schemes[s], runs.se[i], runs.mean[i]));
      }
    if (runs.taken_up[u] && n_measured == 0) file.wrong("/isolated/mean", fmt::format("{} is taken up and holds no measurement", unit));
  }
}

sens::IsolatedRuns read_isolated(const H5Reader& file, const SensResult& sens) {
  sens::IsolatedRuns out;
  out.metric = file.string_attribute("/isolated", "metric");
  out.above = file.number_attribute("/isolated", "above");
  for (const Side side : {Side::kK, Side::kV}) {
    const std::string letter = side == Side::kK ? "_k" : "_v";
    sens::IsolatedRuns::Slope& slope = side == Side::kK ? out.k : out.v;
    slope = {file.number_attribute("/isolated", "slope" + letter), file.number_attribute("/isolated", "slope_se" + letter),
             file.integer_attribute("/isolated", "pairs" + letter)};
  }
  out.taken_up = file.read<std::uint8_t>("/isolated/taken_up", {static_cast<std::int64_t>(sens.units.size())});
  out.mean = file.read<double>("/isolated/mean", score_shape(sens, false));
  out.se = file.read<double>("/isolated/se", score_shape(sens, false));
  out.data = io::read_data(file, "/isolated/data");
  out.provenance = io::read_provenance(file, "/isolated/provenance");
  check_isolated(file, sens, out);
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
  if (result.isolated) write_isolated(file, path, result);
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
  if (file.has("/isolated")) out.isolated = read_isolated(file, out);
  if (file.has("/joint")) out.joint = read_joint(file, out);
  return out;
}

}  // namespace calib::artifacts
