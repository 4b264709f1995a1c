#include <algorithm>
#include <cmath>

#include "libcalib/artifacts/stats_file.h"
#include "libcalib/artifacts/stats_layout.h"
#include "libcalib/base/error.h"
#include "libcalib/base/mapped_file.h"
#include "libcalib/io/h5.h"
#include "libcalib/io/provenance.h"

namespace calib::artifacts {
namespace {

using io::H5Reader;
using io::kAnySize;
using io::Shape;
using stats::GramAccumulator;
using stats::LayerStats;
using stats::QuantileSketch;
using stats::TensorStats;

std::vector<double> finite(const H5Reader& file, const std::string& name, const Shape& shape) {
  std::vector<double> out = file.read<double>(name, shape);
  const auto bad = std::find_if(out.begin(), out.end(), [](double x) { return !std::isfinite(x); });
  if (bad != out.end()) file.wrong(name, fmt::format("element {} is not finite", bad - out.begin()));
  return out;
}

void read_sketches(const H5Reader& file, const std::string& group, TensorStats& tensor) {
  const std::int64_t n_channels = static_cast<std::int64_t>(tensor.n_channels());
  const int mantissa_bits = tensor.sketches.front().mantissa_bits();
  const std::size_t per_octave = tensor.sketches.front().counters_per_octave();
  if (file.integer_attribute(group, "mantissa_bits") != mantissa_bits)
    file.wrong(group, fmt::format("mantissa_bits is {}, expected {}", file.integer_attribute(group, "mantissa_bits"), mantissa_bits));
  const auto zeros = file.read<std::uint64_t>(group + "/zeros", {tensor.n_heads, tensor.head_dim});
  const auto offsets = file.read<std::int64_t>(group + "/octave_offset", {n_channels + 1});
  const auto octaves = file.read<std::uint16_t>(group + "/octave", {kAnySize});
  const auto counts = file.read<std::uint32_t>(group + "/counts", {static_cast<std::int64_t>(octaves.size()), static_cast<std::int64_t>(per_octave)});
  if (offsets.front() != 0 || offsets.back() != static_cast<std::int64_t>(octaves.size()) || !std::is_sorted(offsets.begin(), offsets.end()))
    file.wrong(group + "/octave_offset", fmt::format("does not cut {} octaves into {} channels", octaves.size(), n_channels));
  for (std::size_t i = 0; i < tensor.n_channels(); ++i) {
    QuantileSketch& sketch = tensor.sketches[i];
    std::uint64_t total = zeros[i];
    for (auto o = static_cast<std::size_t>(offsets[i]); o < static_cast<std::size_t>(offsets[i + 1]); ++o)
      for (std::size_t j = 0; j < per_octave; ++j) total += counts[o * per_octave + j];
    if (total != static_cast<std::uint64_t>(tensor.moments[i].n))
      file.wrong(group, fmt::format("channel {} counts {} values, expected {}", i, total, tensor.moments[i].n));
    sketch.add_zeros(zeros[i]);
    for (auto o = static_cast<std::size_t>(offsets[i]); o < static_cast<std::size_t>(offsets[i + 1]); ++o) {
      if (!QuantileSketch::is_octave(octaves[o])) file.wrong(group + "/octave", fmt::format("entry {} is {}, not an octave", o, octaves[o]));
      sketch.add_octave(octaves[o], std::span(counts).subspan(o * per_octave, per_octave));
    }
  }
}

void read_tensor(const H5Reader& file, const std::string& group, TensorStats& tensor) {
  const Shape channels = {tensor.n_heads, tensor.head_dim};
  const auto count = file.read<std::int64_t>(group + "/count", channels);
  const auto mean = finite(file, group + "/mean", channels), m2 = finite(file, group + "/m2", channels), m3 = finite(file, group + "/m3", channels),
             m4 = finite(file, group + "/m4", channels);
  const auto low = file.read<float>(group + "/min", channels), high = file.read<float>(group + "/max", channels);
  for (std::size_t i = 0; i < count.size(); ++i) {
    if (count[i] < 0 || count[i] != count[0]) file.wrong(group + "/count", fmt::format("element {} is {}, expected {} as for all channels", i, count[i], count[0]));
    if (m2[i] < 0 || m4[i] < 0) file.wrong(group + "/m2", fmt::format("channel {} has a negative sum of even powers", i));
    const bool bounded = std::isfinite(low[i]) && std::isfinite(high[i]) && low[i] <= high[i];
    if (count[i] > 0 && !bounded) file.wrong(group + "/min", fmt::format("channel {} has the range {} to {}", i, low[i], high[i]));
    tensor.moments[i] = {count[i], mean[i], m2[i], m3[i], m4[i]};
    if (count[i] > 0) tensor.extrema[i] = {low[i], high[i]};
  }
  read_sketches(file, group + "/sketch", tensor);
}

void read_split(const H5Reader& file, const std::string& group, LayerStats::Split& split) {
  read_tensor(file, group, split.body);
  read_tensor(file, group + "/sink", split.sink);
}

void read_gram(const H5Reader& file, const std::string& name, GramAccumulator& gram) {
  const std::int64_t n = gram.n_matrices(), d = gram.dim(), n_rows = file.integer_attribute(name, "n_rows");
  if (n_rows < 0) file.wrong(name, fmt::format("attribute `n_rows` is {}", n_rows));
  std::vector<double> sum = finite(file, name, {n, d, d});
  for (double& x : sum) x *= static_cast<double>(n_rows) / gram.rows_per_token();
  std::vector<double> mean = gram.centred() ? finite(file, name + "_mean", {n, d}) : std::vector<double>(static_cast<std::size_t>(n * d), 0.0);
  gram.set_state(std::vector<std::int64_t>(static_cast<std::size_t>(n), n_rows), std::move(mean), std::move(sum));
}

void read_attention(const H5Reader& file, const std::string& group, stats::AttentionStats& attention) {
  using stats::AttentionStats;
  const std::int64_t q = attention.n_q_heads(), n_top = static_cast<std::int64_t>(stats::kTopShares.size());
  auto n_rows = file.read<std::int64_t>(group + "/n_rows", {q, kAnySize});
  const std::int64_t b = static_cast<std::int64_t>(n_rows.size()) / q;
  auto weight = finite(file, group + "/weight", {q, b});
  std::vector<double> sums(n_rows.size() * AttentionStats::kMeasures);
  const auto read_means = [&](const std::string& name, int first, std::int64_t n) {
    const auto means = finite(file, group + "/" + name, n == 1 ? Shape{q, b} : Shape{q, b, n});
    for (std::size_t cell = 0; cell < n_rows.size(); ++cell)
      for (std::int64_t m = 0; m < n; ++m)
        sums[cell * AttentionStats::kMeasures + static_cast<std::size_t>(first + m)] =
            weight[cell] * means[cell * static_cast<std::size_t>(n) + static_cast<std::size_t>(m)];
  };
  read_means("entropy", AttentionStats::kEntropy, 1);
  read_means("normalised_entropy", AttentionStats::kNormalisedEntropy, 1);
  read_means("n_eff", AttentionStats::kNEff, 1);
  read_means("sink_mass", AttentionStats::kSinkMass, 1);
  read_means("top_mass", AttentionStats::kTopMass, n_top);
  attention.set_state(static_cast<int>(b), std::move(n_rows), std::move(weight), std::move(sums));
}

ReferenceSummary read_reference(const H5Reader& file) {
  const std::string group = "/reference";
  ReferenceSummary out;
  out.nll_sum = finite(file, group + "/nll_sum", {kAnySize});
  out.nll_count = file.read<std::int64_t>(group + "/nll_count", {static_cast<std::int64_t>(out.nll_sum.size())});
  out.n_distinct_tokens = file.integer_attribute(group, "n_distinct_tokens");
  out.commonest_token_share = file.number_attribute(group, "commonest_token_share");
  const auto layer = file.read<std::int64_t>(group + "/massive/layer", {kAnySize});
  const Shape rows = {static_cast<std::int64_t>(layer.size())};
  const auto document = file.read<std::int64_t>(group + "/massive/document", rows), token = file.read<std::int64_t>(group + "/massive/token", rows),
             channel = file.read<std::int64_t>(group + "/massive/channel", rows);
  const auto value = file.read<double>(group + "/massive/value", rows), ratio = file.read<double>(group + "/massive/ratio", rows);
  const auto sink = file.read<std::uint8_t>(group + "/massive/functional_sink", rows);
  for (std::size_t i = 0; i < layer.size(); ++i) out.massive.push_back({layer[i], document[i], token[i], channel[i], value[i], ratio[i], sink[i] != 0});
  out.warnings = file.read_strings(group + "/warnings");
  return out;
}

}  // namespace

struct StatsReader::Impl {
  explicit Impl(const std::string& path) : file(open(path)) {}
  static H5Reader open(const std::string& path) {
    require_file(path, "kvcalib writes statistics");
    return H5Reader(path, kStatsSchema, kStatsVersion);
  }
  H5Reader file;
  StatsHeader header;
  ReferenceSummary reference;
};

StatsReader::StatsReader(const std::string& path) : impl_(std::make_unique<Impl>(path)) {
  const H5Reader& file = impl_->file;
  StatsHeader& header = impl_->header;
  header.n_sinks = file.integer_attribute("/", "n_sinks");
  header.rows_per_document = file.integer_attribute("/", "rows_per_document");
  if (header.n_sinks < 0) file.wrong("/", fmt::format("attribute `n_sinks` is {}", header.n_sinks));
  header.provenance = io::read_provenance(file, "/provenance");
  header.model = io::read_model(file, "/model");
  header.data = io::read_data(file, "/data");
  impl_->reference = read_reference(file);
  std::vector<std::string> missing;
  for (const LayerGeometry& layer : header.model.layers)
    if (!file.has(layer_group(layer.index))) missing.push_back(layer_group(layer.index));
  if (!missing.empty()) throw Error(ErrorKind::kFormat, path, fmt::format("{} of {} layers are missing", missing.size(), header.model.layers.size()), missing);
}
StatsReader::~StatsReader() = default;
StatsReader::StatsReader(StatsReader&&) noexcept = default;

const StatsHeader& StatsReader::header() const { return impl_->header; }
const ReferenceSummary& StatsReader::reference() const { return impl_->reference; }
std::size_t StatsReader::n_layers() const { return impl_->header.model.layers.size(); }

LayerStats StatsReader::layer(std::size_t i) const {
  CALIB_CHECK(i < n_layers());
  const H5Reader& file = impl_->file;
  const LayerGeometry& geometry = impl_->header.model.layers[i];
  const std::string group = layer_group(geometry.index);
  // The geometry comes from the file: a shape that the file does not hold must not make the arrays below.
  if (file.shape(group + "/k_pre/count") != Shape{geometry.n_kv_heads, geometry.head_dim} ||
      file.shape(group + "/query_cov") != Shape{geometry.n_q_heads, geometry.head_dim, geometry.head_dim})
    file.wrong(group, fmt::format("arrays do not have {} query heads, {} KV heads and {} channels as /model says", geometry.n_q_heads, geometry.n_kv_heads,
                                  geometry.head_dim));
  LayerStats layer(geometry, impl_->header.n_sinks);
  read_split(file, group + "/k_pre", layer.k_pre);
  read_split(file, group + "/k_post", layer.k_post);
  read_split(file, group + "/v", layer.v);
  read_split(file, group + "/q_pre", layer.q_pre);
  read_split(file, group + "/q_post", layer.q_post);
  layer.pair_absmax = file.read<float>(group + "/pair_absmax", {geometry.n_kv_heads, geometry.head_dim / 2});
  read_gram(file, group + "/query_moment", layer.query_moment);
  read_gram(file, group + "/query_cov", layer.query_cov);
  read_gram(file, group + "/key_cov", layer.key_cov);
  read_gram(file, group + "/value_cov", layer.value_cov);
  if (const std::string name = group + "/output_moment"; file.has(name))
    layer.output_moment = finite(file, name, {geometry.n_kv_heads, geometry.head_dim, geometry.head_dim});
  read_attention(file, group + "/attention", layer.attention);
  return layer;
}

StatsFile read_stats_file(const std::string& path) {
  const StatsReader reader(path);
  StatsFile out;
  out.header = reader.header();
  out.reference = reader.reference();
  for (std::size_t i = 0; i < reader.n_layers(); ++i) out.layers.push_back(reader.layer(i));
  return out;
}

}  // namespace calib::artifacts
