#include "libcalib/artifacts/eval_file.h"

#include <nlohmann/json.hpp>

#include "libcalib/base/error.h"
#include "libcalib/io/atomic_file.h"
#include "libcalib/io/json.h"
#include "libcalib/io/provenance.h"

namespace calib::artifacts {
namespace {

using io::JsonValue;
using nlohmann::ordered_json;
using sens::EvalBucket;
using sens::EvalContender;
using sens::EvalGeneration;
using sens::EvalReplies;
using sens::EvalResult;
using sens::EvalRetrieval;
using sens::KldBlock;
using sens::MeanSe;

constexpr char kEvalSchema[] = "kvcalib.eval";
constexpr int kEvalVersion = 1;

// The names that users know from llama-perplexity (FORMATS.md 4); order of kKldPercentiles.
constexpr const char* kPercentileNames[] = {"99.9% KLD", "99.0% KLD", "95.0% KLD", "90.0% KLD", "Median KLD",
                                            "10.0% KLD", "5.0% KLD",  "1.0% KLD",  "0.1% KLD"};
static_assert(std::size(kPercentileNames) == sens::kKldPercentiles.size());

struct NamedMean {
  const char* name;
  MeanSe KldBlock::*value;
};
constexpr NamedMean kRatios[] = {
    {"Mean PPL(Q)", &KldBlock::ppl_q}, {"Mean PPL(base)", &KldBlock::ppl_base}, {"Mean PPL(Q)/PPL(base)", &KldBlock::ppl_ratio}, {"Mean KLD", &KldBlock::kld}};
constexpr NamedMean kTokens[] = {{"Mean Δp", &KldBlock::delta_p}, {"RMS Δp", &KldBlock::rms_delta_p}, {"Same top p", &KldBlock::same_top_p}};

ordered_json mean_to_json(const MeanSe& value) { return {{"mean", value.mean}, {"se", value.se}}; }
MeanSe mean_from_json(const JsonValue& value) { return {value.at("mean").number(), value.at("se").number()}; }

ordered_json block_to_json(const KldBlock& block) {
  ordered_json out = {{"n_rows", block.n_rows}, {"n_documents", block.n_documents}};
  for (const NamedMean& field : kRatios) out[field.name] = mean_to_json(block.*field.value);
  out["Maximum KLD"] = block.kld_max;
  for (std::size_t i = 0; i < block.kld_percentiles.size(); ++i) out[kPercentileNames[i]] = block.kld_percentiles[i];
  out["Minimum KLD"] = block.kld_min;
  for (const NamedMean& field : kTokens) out[field.name] = mean_to_json(block.*field.value);
  return out;
}

KldBlock block_from_json(const JsonValue& value) {
  KldBlock out;
  out.n_rows = value.at("n_rows").integer();
  out.n_documents = value.at("n_documents").integer();
  for (const NamedMean& field : kRatios) out.*field.value = mean_from_json(value.at(field.name));
  out.kld_max = value.at("Maximum KLD").number();
  for (std::size_t i = 0; i < out.kld_percentiles.size(); ++i) out.kld_percentiles[i] = value.at(kPercentileNames[i]).number();
  out.kld_min = value.at("Minimum KLD").number();
  for (const NamedMean& field : kTokens) out.*field.value = mean_from_json(value.at(field.name));
  return out;
}

ordered_json replies_to_json(const EvalReplies& r) {
  return {{"rep_4", mean_to_json(r.rep_4)}, {"repeated_suffix", mean_to_json(r.repeated_suffix)}, {"hit_cap", r.hit_cap}, {"document_rep_4", r.document_rep_4}};
}

std::vector<double> numbers(const JsonValue& value) {
  std::vector<double> out;
  for (std::size_t i = 0; i < value.size(); ++i) out.push_back(value.element(i).number());
  return out;
}

EvalReplies replies_from_json(const JsonValue& value) {
  return {mean_from_json(value.at("rep_4")), mean_from_json(value.at("repeated_suffix")), value.at("hit_cap").number(), numbers(value.at("document_rep_4"))};
}

ordered_json generation_to_json(const EvalGeneration& g) {
  return {{"replies", replies_to_json(g.replies)}, {"agreeing_prefix", mean_to_json(g.agreeing_prefix)}, {"row_kld", mean_to_json(g.row_kld)},
          {"document_row_kld", g.document_row_kld}, {"n_catastrophic", g.n_catastrophic}, {"catastrophic_95", {g.catastrophic_low, g.catastrophic_high}}};
}

EvalGeneration generation_from_json(const JsonValue& value) {
  const JsonValue interval = value.at("catastrophic_95");
  return {replies_from_json(value.at("replies")), mean_from_json(value.at("agreeing_prefix")), mean_from_json(value.at("row_kld")),
          numbers(value.at("document_row_kld")), value.at("n_catastrophic").integer(), interval.element(0).number(), interval.element(1).number()};
}

ordered_json retrieval_to_json(const EvalRetrieval& r) {
  ordered_json out = {{"cells", ordered_json::array()}};
  for (const sens::RetrievalCell& c : r.cells) {
    ordered_json cell = {{"length", c.length}};
    if (c.depth) cell["depth"] = *c.depth;
    cell["n"] = c.n, cell["hits"] = c.hits;
    out["cells"].push_back(std::move(cell));
  }
  if (r.pass) out["pass"] = *r.pass;
  return out;
}

EvalRetrieval retrieval_from_json(const JsonValue& value) {
  EvalRetrieval out;
  const JsonValue cells = value.at("cells");
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const JsonValue c = cells.element(i);
    out.cells.push_back({c.at("length").integer(), std::nullopt, c.at("n").integer(), c.at("hits").integer()});
    if (c.has("depth")) out.cells.back().depth = c.at("depth").number();
  }
  if (value.has("pass")) out.pass = value.at("pass").boolean();
  return out;
}

ordered_json attention_to_json(const sens::EvalAttention& a) {
  return {{"kl", mean_to_json(a.kl)}, {"e_out", mean_to_json(a.e_out)}, {"e_mass", mean_to_json(a.e_mass)},
          {"layer_kl", a.layer_kl}, {"layer_e_out", a.layer_e_out}, {"layer_e_mass", a.layer_e_mass}};
}

sens::EvalAttention attention_from_json(const JsonValue& value) {
  return {mean_from_json(value.at("kl")), mean_from_json(value.at("e_out")), mean_from_json(value.at("e_mass")),
          numbers(value.at("layer_kl")), numbers(value.at("layer_e_out")), numbers(value.at("layer_e_mass"))};
}

ordered_json curve_to_json(const sens::DamageCurve& curve) {
  ordered_json out = {{"n_documents", curve.n_documents}, {"n_tokens", curve.n_tokens}, {"points", ordered_json::array()}};
  for (const sens::DamagePoint& p : curve.points) out["points"].push_back({{"sigma", p.sigma}, {"x", p.x}, {"ppl_ratio", p.ppl_ratio}});
  if (curve.rejects_from) out["rejects_from"] = *curve.rejects_from;
  return out;
}

sens::DamageCurve curve_from_json(const JsonValue& value) {
  sens::DamageCurve out{value.at("n_documents").integer(), value.at("n_tokens").integer(), {}, {}};
  const JsonValue points = value.at("points");
  for (std::size_t i = 0; i < points.size(); ++i) {
    const JsonValue p = points.element(i);
    out.points.push_back({p.at("sigma").number(), p.at("x").number(), p.at("ppl_ratio").number()});
  }
  if (value.has("rejects_from")) out.rejects_from = value.at("rejects_from").number();
  return out;
}

ordered_json damage_to_json(const sens::EvalDamage& d) {
  return {{"x", d.x}, {"worst_layer", d.worst_layer}, {"predicted_ppl_ratio", d.predicted_ppl_ratio}, {"rejected", d.rejected}};
}

sens::EvalDamage damage_from_json(const JsonValue& value) {
  return {value.at("x").number(), static_cast<int>(value.at("worst_layer").integer()), value.at("predicted_ppl_ratio").number(), value.at("rejected").boolean()};
}

ordered_json contender_to_json(const EvalContender& contender) {
  ordered_json out = {{"name", contender.name}, {"kind", contender.kind}, {"k", contender.k}, {"v", contender.v},
                      {"description", contender.description}, {"plan_sha256", contender.plan_sha256},
                      {"n_sinks", contender.n_sinks}, {"window", contender.window}};
  if (contender.effective_bits_2048) out["effective_bits_2048"] = *contender.effective_bits_2048;
  if (contender.effective_bits_8192) out["effective_bits_8192"] = *contender.effective_bits_8192;
  out["indistinguishable"] = contender.indistinguishable;
  if (contender.length_limit) out["length_limit"] = *contender.length_limit;
  if (contender.kld_slope) out["kld_slope"] = mean_to_json(*contender.kld_slope);
  if (!contender.flags.empty()) out["flags"] = contender.flags;
  if (contender.attention) out["attention"] = attention_to_json(*contender.attention);
  if (contender.damage) out["damage"] = damage_to_json(*contender.damage);
  if (contender.generation) out["generation"] = generation_to_json(*contender.generation);
  if (contender.retrieval) out["retrieval"] = retrieval_to_json(*contender.retrieval);
  out["total"] = block_to_json(contender.total);
  if (!contender.document_kld.empty()) out["document_kld"] = contender.document_kld;
  out["buckets"] = ordered_json::array();
  for (const EvalBucket& bucket : contender.buckets)
    out["buckets"].push_back({{"first_position", bucket.first_position}, {"end_position", bucket.end_position},
                              {"entropy_shift", mean_to_json(bucket.entropy_shift)}, {"block", block_to_json(bucket.block)}});
  return out;
}

EvalContender contender_from_json(const JsonValue& value) {
  EvalContender out;
  out.name = value.at("name").string();
  out.kind = value.at("kind").string();
  out.k = value.at("k").string();
  out.v = value.at("v").string();
  out.description = value.at("description").string();
  out.plan_sha256 = value.at("plan_sha256").string();
  out.n_sinks = value.at("n_sinks").integer();
  out.window = value.at("window").integer();
  if (value.has("effective_bits_2048")) out.effective_bits_2048 = value.at("effective_bits_2048").number();
  if (value.has("effective_bits_8192")) out.effective_bits_8192 = value.at("effective_bits_8192").number();
  out.indistinguishable = value.at("indistinguishable").boolean();
  if (value.has("length_limit")) out.length_limit = value.at("length_limit").integer();
  if (value.has("kld_slope")) out.kld_slope = mean_from_json(value.at("kld_slope"));
  if (value.has("flags")) out.flags = value.at("flags").strings();
  if (value.has("attention")) out.attention = attention_from_json(value.at("attention"));
  if (value.has("damage")) out.damage = damage_from_json(value.at("damage"));
  if (value.has("generation")) out.generation = generation_from_json(value.at("generation"));
  if (value.has("retrieval")) out.retrieval = retrieval_from_json(value.at("retrieval"));
  out.total = block_from_json(value.at("total"));
  if (value.has("document_kld")) out.document_kld = numbers(value.at("document_kld"));
  const JsonValue buckets = value.at("buckets");
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    const JsonValue from = buckets.element(i);
    EvalBucket bucket;
    bucket.first_position = from.at("first_position").integer();
    bucket.end_position = from.at("end_position").integer();
    bucket.entropy_shift = mean_from_json(from.at("entropy_shift"));
    bucket.block = block_from_json(from.at("block"));
    out.buckets.push_back(bucket);
  }
  return out;
}

}  // namespace

std::string eval_to_json(const EvalResult& result) {
  ordered_json out = {{"schema", {{"name", kEvalSchema}, {"version", kEvalVersion}}}};
  out["settings"] = {{"seq_len", result.settings.seq_len}, {"n_documents", result.settings.n_documents}, {"n_rows", result.settings.n_rows},
                     {"second_half", result.settings.second_half}, {"prefill", result.settings.prefill}, {"backend", result.settings.backend}};
  out["same_text_as_calibration"] = result.same_text_as_calibration;
  out["noise_floor"] = block_to_json(result.noise_floor);
  if (result.negative_control) out["negative_control"] = contender_to_json(*result.negative_control);
  if (result.generation) {
    const sens::GenerationSettings& g = *result.generation;
    out["generation"] = {{"n_documents", g.n_documents}, {"depth", g.depth}, {"n_tokens", g.n_tokens}};
    if (g.end_token) out["generation"]["end_token"] = *g.end_token;
  }
  if (result.reference_replies) out["reference_replies"] = replies_to_json(*result.reference_replies);
  if (result.reference_retrieval) out["reference_retrieval"] = retrieval_to_json(*result.reference_retrieval);
  if (result.damage_curve) out["damage_curve"] = curve_to_json(*result.damage_curve);
  out["contenders"] = ordered_json::array();
  for (const EvalContender& contender : result.contenders) out["contenders"].push_back(contender_to_json(contender));
  out["warnings"] = result.warnings;
  out["model"] = io::model_to_json(result.model);
  out["data"] = io::data_to_json(result.data);
  if (result.calibration_data) out["calibration_data"] = io::data_to_json(*result.calibration_data);
  out["provenance"] = io::provenance_to_json(result.provenance);
  return io::json_text(out, "eval.json");
}

void write_eval_file(const std::string& path, const EvalResult& result) { io::write_file(path, eval_to_json(result)); }

EvalResult read_eval_file(const std::string& path) {
  const nlohmann::json document = io::read_json_file(path);
  const JsonValue root(document, path);
  if (!root.has("schema")) fail(ErrorKind::kFormat, path, "not an eval file: /schema is missing");
  const JsonValue schema = root.at("schema");
  if (schema.at("name").string() != kEvalSchema)
    fail(ErrorKind::kFormat, path, "is a {} file, expected a {} file", schema.at("name").string(), kEvalSchema);
  const std::int64_t version = schema.at("version").integer();
  if (version < 1 || version > kEvalVersion) fail(ErrorKind::kVersion, path, "{} schema version {}, this program reads 1 to {}", kEvalSchema, version, kEvalVersion);

  EvalResult out;
  const JsonValue settings = root.at("settings");
  out.settings.seq_len = settings.at("seq_len").integer();
  out.settings.n_documents = settings.at("n_documents").integer();
  out.settings.n_rows = settings.at("n_rows").integer();
  out.settings.second_half = settings.at("second_half").boolean();
  out.settings.prefill = settings.at("prefill").string();
  out.settings.backend = settings.at("backend").string();
  out.same_text_as_calibration = root.at("same_text_as_calibration").boolean();
  out.noise_floor = block_from_json(root.at("noise_floor"));
  if (root.has("negative_control")) out.negative_control = contender_from_json(root.at("negative_control"));
  if (root.has("generation")) {
    const JsonValue g = root.at("generation");
    out.generation = {g.at("n_documents").integer(), g.at("depth").integer(), g.at("n_tokens").integer(), std::nullopt};
    if (g.has("end_token")) out.generation->end_token = static_cast<std::int32_t>(g.at("end_token").integer());
  }
  if (root.has("damage_curve")) out.damage_curve = curve_from_json(root.at("damage_curve"));
  if (root.has("reference_replies")) out.reference_replies = replies_from_json(root.at("reference_replies"));
  if (root.has("reference_retrieval")) out.reference_retrieval = retrieval_from_json(root.at("reference_retrieval"));
  const JsonValue contenders = root.at("contenders");
  for (std::size_t i = 0; i < contenders.size(); ++i) out.contenders.push_back(contender_from_json(contenders.element(i)));
  out.warnings = root.at("warnings").strings();
  out.model = io::model_from_json(root.at("model"));
  out.data = io::data_from_json(root.at("data"));
  if (root.has("calibration_data")) out.calibration_data = io::data_from_json(root.at("calibration_data"));
  out.provenance = io::provenance_from_json(root.at("provenance"));
  return out;
}

}  // namespace calib::artifacts
