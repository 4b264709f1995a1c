#include "libcalib/artifacts/saliency_file.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "libcalib/base/mapped_file.h"
#include "libcalib/base/utf8.h"
#include "libcalib/io/atomic_file.h"
#include "libcalib/io/json.h"
#include "libcalib/io/provenance.h"

namespace calib::artifacts {
namespace {

using nlohmann::ordered_json;
using sens::MeanSe;

constexpr char kSaliencySchema[] = "kvcalib.saliency";
constexpr int kSaliencyVersion = 1;

ordered_json mean_to_json(const MeanSe& value) { return {{"mean", value.mean}, {"se", value.se}}; }

ordered_json rates_to_json(const sens::SaliencyRates& rates) {
  return {{"hit_rate", mean_to_json(rates.hit)}, {"prompt_hit_rate", mean_to_json(rates.prompt_hit)}, {"overlap", mean_to_json(rates.overlap)},
          {"gain", mean_to_json(rates.gain)}, {"catchable", rates.catchable}};
}

ordered_json score_to_json(std::size_t score, const sens::SaliencyScore& from, const sens::SaliencyResult& result) {
  ordered_json out = {{"name", sens::kTokenScoreNames[score]}, {"total", rates_to_json(from.total)}};
  out["buckets"] = ordered_json::array();
  for (const sens::SaliencyBucket& b : from.buckets) {
    ordered_json bucket = {{"first_position", b.first_position}, {"end_position", b.end_position}, {"n_documents", b.n_documents}};
    bucket.update(rates_to_json(b.rates));
    out["buckets"].push_back(std::move(bucket));
  }
  out["layers"] = ordered_json::array();
  for (std::size_t l = 0; l < from.layers.size(); ++l) {
    const sens::SaliencyLayer& layer = from.layers[l];
    ordered_json to = {{"index", result.layers[l].index}};
    to.update(rates_to_json(layer.rates));
    to["worst_head"] = layer.worst_head, to["worst_head_hit_rate"] = layer.worst_head_hit;
    if (layer.e_out) to["e_out"] = *layer.e_out;
    if (layer.e_mass) to["e_mass"] = *layer.e_mass;
    to["abstain"] = layer.abstain;
    out["layers"].push_back(std::move(to));
  }
  return out;
}

ordered_json fraction_to_json(const sens::SaliencyFraction& from, const sens::SaliencyResult& result) {
  ordered_json out = {{"fraction", from.requested}, {"achieved", from.achieved}, {"block_base", from.block_base}, {"block_salient", from.block_salient},
                      {"best", sens::kTokenScoreNames[from.best]}, {"runner_up", sens::kTokenScoreNames[from.runner_up]}, {"lead", mean_to_json(from.lead)}};
  out["last_layer"] = ordered_json::array();
  for (std::size_t s = sens::kOwnScores; s < sens::kTokenScores; ++s) {
    const sens::LastLayerVerdict v = sens::last_layer_verdict(from, s);
    out["last_layer"].push_back(
        {{"score", sens::kTokenScoreNames[s]}, {"allowed", v.allowed}, {"worst_layer", result.layers[v.worst_layer].index}, {"worst_hit_rate", v.worst_hit}});
  }
  out["e_out_base"] = from.e_out_base, out["e_out_salient"] = from.e_out_salient;
  out["e_mass_base"] = from.e_mass_base, out["e_mass_salient"] = from.e_mass_salient;
  out["scores"] = ordered_json::array();
  for (std::size_t s = 0; s < sens::kTokenScores; ++s) out["scores"].push_back(score_to_json(s, from.scores[s], result));
  return out;
}

}  // namespace

std::string saliency_to_json(const sens::SaliencyResult& result) {
  const sens::SaliencySettings& s = result.settings;
  ordered_json out = {{"schema", {{"name", kSaliencySchema}, {"version", kSaliencyVersion}}}};
  out["settings"] = {{"seq_len", s.seq_len}, {"n_documents", s.n_documents}, {"n_sinks", s.n_sinks}, {"window", s.window}, {"match_rows", s.match_rows},
                     {"base_k", s.base_k}, {"base_v", s.base_v}, {"salient", s.salient}};
  out["same_text_as_calibration"] = result.same_text_as_calibration;
  out["layers"] = ordered_json::array();
  for (const sens::SaliencyLayerFacts& f : result.layers)
    out["layers"].push_back(
        {{"index", f.index}, {"normalised_entropy", f.normalised_entropy}, {"query_shift", f.query_shift}, {"n_statistics_rows", f.n_statistics_rows}});
  out["fractions"] = ordered_json::array();
  for (const sens::SaliencyFraction& f : result.fractions) out["fractions"].push_back(fraction_to_json(f, result));
  out["warnings"] = result.warnings;
  out["model"] = io::model_to_json(result.model);
  out["data"] = io::data_to_json(result.data);
  out["calibration_data"] = io::data_to_json(result.calibration_data);
  out["provenance"] = io::provenance_to_json(result.provenance);
  return io::json_text(out, "saliency.json");
}

sens::SaliencyVerdicts read_saliency_file(const std::string& path) {
  require_file(path, "kvsens saliency writes it");
  const nlohmann::json document = io::read_json_file(path);
  const io::JsonValue root(document, path), schema = root.at("schema");
  if (const std::string name = schema.at("name").string(); name != kSaliencySchema)
    fail(ErrorKind::kFormat, path, "/schema/name is \"{}\", expected \"{}\"", to_valid_utf8(name), kSaliencySchema);
  if (const std::int64_t version = schema.at("version").integer(); version < 1 || version > kSaliencyVersion)
    fail(ErrorKind::kVersion, path, "/schema/version is {}, this program reads 1 to {}", version, kSaliencyVersion);
  sens::SaliencyVerdicts out;
  out.model = io::model_from_json(root.at("model"));
  const io::JsonValue s = root.at("settings");
  out.settings = {s.at("seq_len").integer(), s.at("n_documents").integer(), s.at("n_sinks").integer(), s.at("window").integer(), s.at("match_rows").integer(),
                  s.at("base_k").string(), s.at("base_v").string(), s.at("salient").string()};
  out.same_text_as_calibration = root.at("same_text_as_calibration").boolean();
  const io::JsonValue fractions = root.at("fractions");
  for (std::size_t f = 0; f < fractions.size(); ++f) {
    sens::SaliencyVerdicts::Fraction& fraction = out.fractions.emplace_back();
    fraction.requested = fractions.element(f).at("fraction").number();
    const io::JsonValue scores = fractions.element(f).at("scores");
    for (std::size_t i = 0; i < scores.size(); ++i) {
      std::vector<sens::SaliencyVerdicts::Layer>& layers = fraction.layers[scores.element(i).at("name").string()];
      const io::JsonValue list = scores.element(i).at("layers");
      for (std::size_t l = 0; l < list.size(); ++l) {
        const io::JsonValue layer = list.element(l), index = layer.at("index");
        const bool known = std::any_of(out.model.layers.begin(), out.model.layers.end(), [n = index.integer()](const LayerGeometry& g) { return g.index == n; });
        if (!known) index.wrong("a layer of /model/layers");
        layers.push_back({static_cast<int>(index.integer()), layer.at("hit_rate").at("mean").number(), layer.at("abstain").strings()});
      }
    }
  }
  return out;
}

void write_saliency_file(const std::string& path, const sens::SaliencyResult& result) { io::write_file(path, saliency_to_json(result)); }

}  // namespace calib::artifacts
