#include <algorithm>
#include <cmath>
#include <numeric>

#include "libcalib/artifacts/stats_file.h"
#include "libcalib/artifacts/stats_layout.h"
#include "libcalib/base/error.h"
#include "libcalib/io/h5.h"
#include "libcalib/io/provenance.h"

namespace calib::artifacts {
namespace {

using io::H5Writer;
using io::Shape;
using stats::GramAccumulator;
using stats::LayerStats;
using stats::QuantileSketch;
using stats::TensorStats;

template <typename T>
std::span<const T> view(const std::vector<T>& values) {
  return std::span<const T>(values);
}

template <typename T, typename Item, typename Get>
void write_field(H5Writer& file, const std::string& name, const std::vector<Item>& items, const Shape& shape, Get get) {
  std::vector<T> out;
  out.reserve(items.size());
  for (const Item& item : items) out.push_back(static_cast<T>(get(item)));
  file.write(name, view(out), shape);
}

// Counters of all channels one after the other, in the narrowest type that holds the largest.
void write_sketches(H5Writer& file, const std::string& group, const TensorStats& tensor, const Shape& channels) {
  std::vector<std::int64_t> offsets = {0};
  std::vector<std::uint16_t> octaves;
  std::vector<std::uint32_t> counts;
  std::uint32_t largest = 0;
  for (const QuantileSketch& sketch : tensor.sketches) {
    for (const QuantileSketch::Octave& octave : sketch.octaves()) {
      octaves.push_back(static_cast<std::uint16_t>(octave.octave));
      counts.insert(counts.end(), octave.counts.begin(), octave.counts.end());
      largest = std::max(largest, *std::max_element(octave.counts.begin(), octave.counts.end()));
    }
    offsets.push_back(static_cast<std::int64_t>(octaves.size()));
  }
  const int mantissa_bits = tensor.sketches.front().mantissa_bits();
  const Shape table = {static_cast<std::int64_t>(octaves.size()), std::int64_t{1} << mantissa_bits};
  file.group(group);
  file.attribute(group, "mantissa_bits", static_cast<std::int64_t>(mantissa_bits));
  write_field<std::uint64_t>(file, group + "/zeros", tensor.sketches, channels, [](const QuantileSketch& s) { return s.zeros(); });
  file.write(group + "/octave_offset", view(offsets), {static_cast<std::int64_t>(offsets.size())});
  file.write(group + "/octave", view(octaves), {table[0]});
  const auto write_counts = [&](const auto& narrow) { file.write(group + "/counts", view(narrow), table, io::Packing::kDeflate); };
  if (largest <= 0xFF) write_counts(std::vector<std::uint8_t>(counts.begin(), counts.end()));
  else if (largest <= 0xFFFF) write_counts(std::vector<std::uint16_t>(counts.begin(), counts.end()));
  else write_counts(counts);
}

void write_quantiles(H5Writer& file, ThreadPool& pool, const std::string& name, const TensorStats& tensor, std::span<const double> probabilities,
                     bool absolute) {
  std::vector<double> out(tensor.n_channels() * probabilities.size());
  pool.parallel_for(tensor.n_heads, [&](std::int64_t head) {
    const int h = static_cast<int>(head);
    for (int c = 0; c < tensor.head_dim; ++c) {
      const std::vector<double> values = absolute ? tensor.abs_quantiles(h, c, probabilities) : tensor.quantiles(h, c, probabilities);
      std::copy(values.begin(), values.end(), out.begin() + static_cast<std::ptrdiff_t>(tensor.index(h, c) * probabilities.size()));
    }
  });
  file.write(name, view(out), {tensor.n_heads, tensor.head_dim, static_cast<std::int64_t>(probabilities.size())});
  file.attribute(name, "p", probabilities);
  if (tensor.n_tokens() < stats::kLowCount) file.attribute(name, "low_n", tensor.n_tokens());
}

void write_tensor(H5Writer& file, ThreadPool& pool, const std::string& group, const TensorStats& tensor) {
  const Shape channels = {tensor.n_heads, tensor.head_dim};
  using stats::Extrema;
  using stats::Moments;
  write_field<std::int64_t>(file, group + "/count", tensor.moments, channels, [](const Moments& m) { return m.n; });
  write_field<double>(file, group + "/mean", tensor.moments, channels, [](const Moments& m) { return m.mean; });
  write_field<double>(file, group + "/m2", tensor.moments, channels, [](const Moments& m) { return m.m2; });
  write_field<double>(file, group + "/m3", tensor.moments, channels, [](const Moments& m) { return m.m3; });
  write_field<double>(file, group + "/m4", tensor.moments, channels, [](const Moments& m) { return m.m4; });
  write_field<float>(file, group + "/min", tensor.extrema, channels, [](const Extrema& e) { return e.min; });
  write_field<float>(file, group + "/max", tensor.extrema, channels, [](const Extrema& e) { return e.max; });
  write_field<float>(file, group + "/absmax", tensor.extrema, channels, [](const Extrema& e) { return e.absmax(); });
  write_quantiles(file, pool, group + "/abs_quantiles", tensor, stats::kAbsQuantiles, true);
  write_quantiles(file, pool, group + "/signed_quantiles", tensor, stats::kSignedQuantiles, false);
  write_sketches(file, group + "/sketch", tensor, channels);
}

void write_split(H5Writer& file, ThreadPool& pool, const std::string& group, const LayerStats::Split& split) {
  write_tensor(file, pool, group, split.body);
  write_tensor(file, pool, group + "/sink", split.sink);
}

void write_gram(H5Writer& file, const std::string& name, const GramAccumulator& gram, bool eigenvalues) {
  const std::int64_t n = gram.n_matrices(), d = gram.dim();
  std::vector<double> values, spectrum;
  for (int m = 0; m < gram.n_matrices(); ++m) {
    CALIB_CHECK(gram.n_rows(m) == gram.n_rows(0));
    const std::vector<double> matrix = gram.matrix(m);
    values.insert(values.end(), matrix.begin(), matrix.end());
    if (!eigenvalues) continue;
    const std::vector<double> of_matrix = gram.eigenvalues(m);
    spectrum.insert(spectrum.end(), of_matrix.begin(), of_matrix.end());
  }
  file.write(name, view(values), {n, d, d});
  file.attribute(name, "n_rows", gram.n_rows(0));
  if (gram.centred()) file.write(name + "_mean", view(gram.mean_state()), {n, d});
  if (eigenvalues) file.write(name + "_eigenvalues", view(spectrum), {n, d});
}

void write_attention(H5Writer& file, const std::string& group, const stats::AttentionStats& attention) {
  using stats::AttentionStats;
  const std::int64_t q = attention.n_q_heads(), b = attention.n_buckets(), n_top = static_cast<std::int64_t>(stats::kTopShares.size());
  file.write(group + "/n_rows", view(attention.rows_state()), {q, b});
  file.write(group + "/weight", view(attention.weight_state()), {q, b});
  const auto write_means = [&](const std::string& name, int first, int n) {
    std::vector<double> out;
    for (int h = 0; h < q; ++h)
      for (int bucket = 0; bucket < b; ++bucket)
        for (int m = first; m < first + n; ++m) out.push_back(attention.mean(h, bucket, m));
    file.write(group + "/" + name, view(out), n == 1 ? Shape{q, b} : Shape{q, b, n_top});
  };
  write_means("entropy", AttentionStats::kEntropy, 1);
  write_means("normalised_entropy", AttentionStats::kNormalisedEntropy, 1);
  write_means("n_eff", AttentionStats::kNEff, 1);
  write_means("sink_mass", AttentionStats::kSinkMass, 1);
  write_means("top_mass", AttentionStats::kTopMass, static_cast<int>(n_top));
  file.attribute(group + "/top_mass", "share", stats::kTopShares);
}

// Per head: |mean| over rms deviation, and root of the mean squared norm.
struct HeadScale {
  std::vector<double> mean_ratio, rms_norm;
};
HeadScale head_scale(const TensorStats& tensor) {
  HeadScale out;
  for (int h = 0; h < tensor.n_heads; ++h) {
    double mean_sq = 0, variance = 0;
    for (int c = 0; c < tensor.head_dim; ++c) {
      const stats::Moments& m = tensor.moments[tensor.index(h, c)];
      mean_sq += m.mean * m.mean;
      variance += m.variance();
    }
    out.mean_ratio.push_back(variance > 0 ? std::sqrt(mean_sq / variance) : 0.0);
    out.rms_norm.push_back(std::sqrt(mean_sq + variance));
  }
  return out;
}

void write_outliers(H5Writer& file, const std::string& group, const LayerStats& layer) {
  const auto write_one = [&](const std::string& name, const TensorStats& tensor) {
    const Shape channels = {tensor.n_heads, tensor.head_dim};
    const std::vector<double> ratio = stats::channel_outlier_ratios(tensor);
    std::vector<std::int32_t> rank;
    for (int h = 0; h < tensor.n_heads; ++h) {
      std::vector<std::int32_t> order(static_cast<std::size_t>(tensor.head_dim));
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) { return ratio[tensor.index(h, a)] > ratio[tensor.index(h, b)]; });
      rank.insert(rank.end(), order.begin(), order.end());
    }
    file.write(group + "/" + name + "/ratio", view(ratio), channels);
    file.write(group + "/" + name + "/rank", view(rank), channels);
    write_field<double>(file, group + "/" + name + "/kurtosis", tensor.moments, channels, [](const stats::Moments& m) { return m.excess_kurtosis(); });
  };
  write_one("k_pre", layer.k_pre.body);
  write_one("k_post", layer.k_post.body);
  write_one("v", layer.v.body);
  const HeadScale pre = head_scale(layer.k_pre.body), post = head_scale(layer.k_post.body), value = head_scale(layer.v.body);
  const Shape heads = {static_cast<std::int64_t>(pre.mean_ratio.size())};
  std::vector<double> norm_ratio;
  for (std::size_t h = 0; h < value.rms_norm.size(); ++h) norm_ratio.push_back(value.rms_norm[h] > 0 ? pre.rms_norm[h] / value.rms_norm[h] : 0.0);
  file.write(group + "/key_mean_ratio_pre", view(pre.mean_ratio), heads);
  file.write(group + "/key_mean_ratio_post", view(post.mean_ratio), heads);
  file.write(group + "/key_value_norm_ratio", view(norm_ratio), heads);
}

void write_reference(H5Writer& file, const ReferenceSummary& reference) {
  const std::string group = "/reference";
  file.group(group);
  CALIB_CHECK(reference.nll_sum.size() == reference.nll_count.size());
  file.write(group + "/nll_sum", view(reference.nll_sum), {static_cast<std::int64_t>(reference.nll_sum.size())});
  file.write(group + "/nll_count", view(reference.nll_count), {static_cast<std::int64_t>(reference.nll_count.size())});
  const double sum = std::accumulate(reference.nll_sum.begin(), reference.nll_sum.end(), 0.0);
  const std::int64_t count = std::accumulate(reference.nll_count.begin(), reference.nll_count.end(), std::int64_t{0});
  file.attribute(group, "n_distinct_tokens", reference.n_distinct_tokens);
  file.attribute(group, "commonest_token_share", reference.commonest_token_share);
  if (count > 0) file.attribute("/", "reference_nll", sum / static_cast<double>(count));
  const auto& massive = reference.massive;
  const Shape rows = {static_cast<std::int64_t>(massive.size())};
  write_field<std::int64_t>(file, group + "/massive/layer", massive, rows, [](const auto& m) { return m.layer; });
  write_field<std::int64_t>(file, group + "/massive/document", massive, rows, [](const auto& m) { return m.document; });
  write_field<std::int64_t>(file, group + "/massive/token", massive, rows, [](const auto& m) { return m.token; });
  write_field<std::int64_t>(file, group + "/massive/channel", massive, rows, [](const auto& m) { return m.channel; });
  write_field<double>(file, group + "/massive/value", massive, rows, [](const auto& m) { return m.value; });
  write_field<double>(file, group + "/massive/ratio", massive, rows, [](const auto& m) { return m.ratio; });
  write_field<std::uint8_t>(file, group + "/massive/functional_sink", massive, rows, [](const auto& m) { return m.functional_sink; });
  file.write_strings(group + "/warnings", reference.warnings);
}

}  // namespace

struct StatsWriter::Impl {
  Impl(const std::string& path, const StatsHeader& header, ThreadPool& pool)
      : path(path), header(header), pool(pool), file(path, kStatsSchema, kStatsVersion, &pool) {}
  std::string path;
  StatsHeader header;
  ThreadPool& pool;
  H5Writer file;
  std::size_t n_added = 0;
};

StatsWriter::StatsWriter(const std::string& path, const StatsHeader& header, ThreadPool& pool) : impl_(std::make_unique<Impl>(path, header, pool)) {
  H5Writer& file = impl_->file;
  file.attribute("/", "n_sinks", header.n_sinks);
  file.attribute("/", "rows_per_document", header.rows_per_document);
  io::write_model(file, "/model", header.model);
  io::write_data(file, "/data", header.data);
  file.group("/layers");
}
StatsWriter::~StatsWriter() = default;
StatsWriter::StatsWriter(StatsWriter&&) noexcept = default;

void StatsWriter::add_layer(const LayerStats& layer) {
  const auto& expected = impl_->header.model.layers;
  CALIB_CHECK(impl_->n_added < expected.size() && layer.geometry().index == expected[impl_->n_added].index);
  CALIB_CHECK(layer.n_sinks() == impl_->header.n_sinks);
  std::vector<std::string> unseen;
  for (const auto& [name, split] : {std::pair("K", &layer.k_pre), std::pair("V", &layer.v)})
    if (split->body.n_tokens() + split->sink.n_tokens() == 0) unseen.push_back(name);
  if (!unseen.empty())
    fail(ErrorKind::kNumeric, impl_->path, "layer {}: no token was seen by {}; nothing can be derived from it", layer.geometry().index, fmt::join(unseen, " and "));

  H5Writer& file = impl_->file;
  const std::string group = layer_group(layer.geometry().index);
  const std::int64_t n_kv = layer.geometry().n_kv_heads, d = layer.geometry().head_dim;
  write_split(file, impl_->pool, group + "/k_pre", layer.k_pre);
  write_split(file, impl_->pool, group + "/k_post", layer.k_post);
  write_split(file, impl_->pool, group + "/v", layer.v);
  write_split(file, impl_->pool, group + "/q_pre", layer.q_pre);
  write_split(file, impl_->pool, group + "/q_post", layer.q_post);
  write_outliers(file, group + "/outliers", layer);
  file.write(group + "/pair_absmax", view(layer.pair_absmax), {n_kv, d / 2});
  write_gram(file, group + "/query_moment", layer.query_moment, false);
  write_gram(file, group + "/query_cov", layer.query_cov, false);
  write_gram(file, group + "/key_cov", layer.key_cov, true);
  write_gram(file, group + "/value_cov", layer.value_cov, true);
  if (!layer.output_moment.empty()) file.write(group + "/output_moment", view(layer.output_moment), {n_kv, d, d});
  write_attention(file, group + "/attention", layer.attention);
  ++impl_->n_added;
}

void StatsWriter::finish(const ReferenceSummary& reference, double seconds) {
  const auto& layers = impl_->header.model.layers;
  if (impl_->n_added < layers.size()) {
    std::vector<int> missing;
    for (std::size_t i = impl_->n_added; i < layers.size(); ++i) missing.push_back(layers[i].index);
    fail(ErrorKind::kNumeric, impl_->path, "layers {}: no token was seen by K and V", fmt::join(missing, ", "));
  }
  write_reference(impl_->file, reference);
  Provenance provenance = impl_->header.provenance;
  provenance.seconds = seconds;
  io::write_provenance(impl_->file, "/provenance", provenance);
  impl_->file.finish();
}

void write_stats_file(const std::string& path, const StatsFile& stats) {
  ThreadPool alone(1);
  StatsWriter writer(path, stats.header, alone);
  for (const LayerStats& layer : stats.layers) writer.add_layer(layer);
  writer.finish(stats.reference, stats.header.provenance.seconds);
}

}  // namespace calib::artifacts
