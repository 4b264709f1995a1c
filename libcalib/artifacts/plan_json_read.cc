#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <map>
#include <string_view>

#include <nlohmann/json.hpp>

#include "kernels/core/plan_constants.h"
#include "libcalib/artifacts/plan_json.h"
#include "libcalib/artifacts/plan_unit_fields.h"
#include "libcalib/base/plural.h"
#include "libcalib/base/utf8.h"
#include "libcalib/io/provenance.h"
#include "libcalib/plan/cost_model.h"
#include "libcalib/quant/token_tiers.h"

namespace calib::artifacts {
namespace {

using io::JsonValue;
using nlohmann::json;

std::string escape_pointer(const std::string& key) {
  std::string out;
  for (const char c : key) out += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
  return out;
}

/// "/a/0 is 3, expected 4" of the first place where two values differ; empty if they are equal.
std::string first_difference(const json& found, const json& expected, const std::string& path) {
  if (found == expected) return "";
  if (found.is_array() && expected.is_array()) {
    if (found.size() != expected.size()) return fmt::format("{} has {}, expected {}", path, counted(found.size(), "element"), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i)
      if (std::string text = first_difference(found[i], expected[i], fmt::format("{}/{}", path, i)); !text.empty()) return text;
  }
  if (found.is_object() && expected.is_object()) {
    for (const auto& [key, value] : expected.items()) {
      const std::string place = path + "/" + escape_pointer(key);
      if (!found.contains(key)) return fmt::format("{} is missing, expected {}", place, io::shown_json(value));
      if (std::string text = first_difference(found.at(key), value, place); !text.empty()) return text;
    }
    for (const auto& [key, value] : found.items())
      if (!expected.contains(key)) return fmt::format("{} is {}, expected none", path + "/" + to_valid_utf8(escape_pointer(key)), io::shown_json(value));
  }
  return fmt::format("{} is {}, expected {}", path, io::shown_json(found), io::shown_json(expected));
}

/// One object being read: typed access by JsonValue, and a record of the members nobody asked for.
class Reader {
 public:
  Reader(const json& document, const std::vector<io::NamedArray>& arrays, std::string where, const LogSink& log)
      : document_(document), where_(std::move(where)), log_(log) {
    for (const io::NamedArray& a : arrays) arrays_[a.name] = &a;
  }

  plan::Plan read();

 private:
  JsonValue value(const json& node, const std::string& path) const { return JsonValue(node, where_, path); }
  JsonValue root() const { return value(document_, ""); }

  /// Warns about and keeps members of the object at `path` that are not `known`; `kept_path` is where they go on rewrite.
  void keep_unknown(const std::string& path, std::initializer_list<std::string_view> known, const std::string& kept_path);
  void keep_unknown(const std::string& path, std::initializer_list<std::string_view> known) { keep_unknown(path, known, path); }

  std::int64_t count(const JsonValue& v, std::int64_t low = 0) const {
    const std::int64_t n = v.integer();
    if (n < low) v.wrong(fmt::format("an integer >= {}", low));
    return n;
  }
  int small(const JsonValue& v) const {
    const std::int64_t n = count(v);
    if (n > std::numeric_limits<int>::max()) v.wrong("an integer below 2^31");
    return static_cast<int>(n);
  }
  bool is_null(const JsonValue& v) const { return document_.at(json::json_pointer(v.path())).is_null(); }
  double positive(const JsonValue& v) const {
    const double x = v.number();
    if (!(x > 0)) v.wrong("a number > 0");
    return x;
  }
  kvrt::Scheme scheme(const JsonValue& v) const {
    kvrt::Scheme s;
    std::string error;
    const std::string text = v.string();
    if (const std::string other = kvrt::other_encoding(text); !other.empty()) fail(ErrorKind::kUnsupported, where_, "{}: {}", v.path(), other);
    if (!kvrt::parse_scheme(text, &s, &error)) fail(ErrorKind::kFormat, where_, "{} is \"{}\": {}", v.path(), to_valid_utf8(text), error);
    return s;
  }
  /// A derived field must say what it is derived from.
  void expect(const JsonValue& object, const char* key, const nlohmann::ordered_json& expected, const std::string& reason) const;

  void read_request();
  void read_summary();
  void read_lists();
  void read_layers();
  std::vector<plan::Reason> read_reasons(const JsonValue& list) const;
  plan::UnitPlan read_unit(const JsonValue& v, Side side, const LayerGeometry& layer);
  void read_params(const JsonValue& v, Side side, const LayerGeometry& layer, plan::UnitPlan& unit);
  /// The array that {tensor, shape} names, which must be these. `owner`: whose shape it is, for messages.
  std::vector<float> read_array(const JsonValue& reference, const std::string& expected_name, const std::vector<std::int64_t>& shape, bool integer,
                                const std::string& owner);
  void read_tiers();
  void read_saliency(const JsonValue& v, const LayerGeometry& geometry, plan::LayerPlan& layer);

  const json& document_;
  std::string where_;
  const LogSink& log_;
  std::map<std::string, const io::NamedArray*> arrays_;
  std::size_t n_arrays_used_ = 0;
  plan::Plan plan_;
};

void Reader::keep_unknown(const std::string& path, std::initializer_list<std::string_view> known, const std::string& kept_path) {
  const json& object = document_.at(json::json_pointer(path));
  for (const auto& [key, member] : object.items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    const std::string name = escape_pointer(key);
    log_.warning(fmt::format("{}: unknown field {}/{} is kept as it is", where_, path, to_valid_utf8(name)));
    plan_.unknown_fields.emplace_back(kept_path + "/" + name, member.dump(-1, ' ', false, json::error_handler_t::replace));
  }
}

void Reader::expect(const JsonValue& object, const char* key, const nlohmann::ordered_json& expected, const std::string& reason) const {
  const std::string path = object.at(key).path();
  const json wanted = expected;
  if (const std::string difference = first_difference(document_.at(json::json_pointer(path)), wanted, path); !difference.empty())
    fail(ErrorKind::kFormat, where_, "{} ({})", difference, reason);
}

std::vector<float> Reader::read_array(const JsonValue& reference, const std::string& expected_name, const std::vector<std::int64_t>& shape, bool integer,
                                      const std::string& owner) {
  const JsonValue written = reference.at("shape");
  const std::string name = reference.at("tensor").string();
  if (name != expected_name) fail(ErrorKind::kFormat, where_, "{}/tensor is \"{}\", expected \"{}\"", reference.path(), to_valid_utf8(name), expected_name);
  std::vector<std::int64_t> stated;
  for (std::size_t i = 0; i < written.size(); ++i) stated.push_back(written.element(i).integer());
  if (stated != shape) written.wrong(fmt::format("[{}] for {} at this layer", fmt::join(shape, ", "), owner));
  const auto found = arrays_.find(name);
  if (found == arrays_.end()) fail(ErrorKind::kMismatch, where_, "{} names tensor {}, which the file beside the plan does not hold", reference.path(), name);
  const auto* values = std::get_if<std::vector<float>>(&found->second->values);
  const auto* integers = std::get_if<std::vector<std::int32_t>>(&found->second->values);
  if ((integer ? integers == nullptr : values == nullptr) || found->second->shape != shape)
    fail(ErrorKind::kMismatch, where_, "tensor {} is not {} [{}], as {} states", name, integer ? "int32" : "fp32", fmt::join(shape, ", "), reference.path());
  ++n_arrays_used_;
  return integer ? std::vector<float>(integers->begin(), integers->end()) : *values;
}

void Reader::read_params(const JsonValue& v, Side side, const LayerGeometry& layer, plan::UnitPlan& unit) {
  const std::string text = kvrt::to_string(unit.scheme);
  const std::vector<kvrt::PlanConstant> needed = kvrt::plan_constants(unit.scheme, layer.n_kv_heads, layer.head_dim);
  for (const auto& [key, target] : unit.params.arrays()) {
    const std::string what(key);
    const auto constant = std::find_if(needed.begin(), needed.end(), [&](const kvrt::PlanConstant& c) { return c.name == what; });
    if (constant == needed.end()) {
      if (v.has(what.c_str())) v.at(what.c_str()).wrong(fmt::format("absent: {} has no `{}`", text, what));
      continue;
    }
    const std::vector<std::int64_t> shape = expected_shape(what, unit.scheme, layer);
    const std::string name = array_name(layer.index, side, what);
    *target = read_array(v.at(what.c_str()), name, shape, constant->integer, text);
    for (const float x : *target)
      if (constant->positive && !(x > 0)) fail(ErrorKind::kFormat, where_, "tensor {} holds {}, expected only numbers > 0", name, x);
  }
  const double scale = static_scale(unit);
  if (scale > 0) {
    const JsonValue written = v.at("scale");
    const double x = positive(written), fnuz = unit.scheme.format == kvrt::Format::kFp8E4m3 ? scale * (448.0 / 240.0) : 0.0;
    if (fnuz > 0 && std::fabs(x - fnuz) <= 1e-6 * fnuz)
      fail(ErrorKind::kMismatch, where_, "{} is {}, made for fp8e4m3fnuz (largest value 240), but the scheme is {} (largest value 448, scale {})",
           written.path(), x, text, scale);
    if (std::fabs(x - scale) > 1e-6 * scale)
      written.wrong(fmt::format("{} (clip_hi over the largest value of {})", scale, text));
  } else if (v.has("scale")) {
    v.at("scale").wrong(fmt::format("absent: {} has no static scale", text));
  }
}

std::vector<plan::Reason> Reader::read_reasons(const JsonValue& list) const {
  std::vector<plan::Reason> reasons;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const JsonValue item = list.element(i), numbers = item.at("numbers");
    plan::Reason reason{item.at("rule").string(), item.at("text").string(), {}};
    const json& node = document_.at(json::json_pointer(numbers.path()));
    if (!node.is_object()) numbers.wrong("an object");
    for (const auto& [name, number] : node.items())
      reason.numbers.emplace_back(name, value(number, numbers.path() + "/" + escape_pointer(name)).number());
    reasons.push_back(std::move(reason));
  }
  return reasons;
}

plan::UnitPlan Reader::read_unit(const JsonValue& v, Side side, const LayerGeometry& layer) {
  plan::UnitPlan unit;
  const JsonValue text = v.at("scheme");
  unit.scheme = scheme(text);
  if (const std::string shape = kvrt::check_shape(unit.scheme, layer.head_dim, side == Side::kK); !shape.empty())
    fail(ErrorKind::kFormat, where_, "{} is \"{}\": {}", text.path(), text.string(), shape);
  const std::string reason = "as " + text.string() + " says";
  expect(v, "bits", kvrt::code_bits(unit.scheme.format), reason);
  expect(v, "group", group_size(unit.scheme, layer), reason);
  if (side == Side::kK) expect(v, "frame", unit.scheme.pre ? "pre" : "post", reason);
  expect(v, "rotation", rotation_json(unit.scheme, side, layer), reason);
  unit.chan_perm = v.at("chan_perm").string();
  if (v.has("block_order")) {
    unit.block_order = v.at("block_order").string();
    if (unit.block_order != "adjacent" && unit.block_order != "half_split") v.at("block_order").wrong("adjacent or half_split");
  }
  read_params(v.at("params"), side, layer, unit);
  unit.why = read_reasons(v.at("why"));
  return unit;
}

void Reader::read_tiers() {
  const JsonValue tiers = root().at("tiers");
  plan_.sink_tokens = count(tiers.at("sink_tokens"));
  plan_.window_tokens = count(tiers.at("window_tokens"));
  if (const JsonValue salient = tiers.at("salient"); !is_null(salient)) {
    const JsonValue text = salient.at("scheme"), score = salient.at("score");
    plan_.salient = plan::SalientTier{quant::parse_salient_scheme(kvrt::to_string(scheme(text)), where_ + ": " + text.path()), score.string()};
    if (plan_.salient->score != quant::kTierScore)
      fail(ErrorKind::kUnsupported, where_, "{} is \"{}\"; this version places tokens by {}", score.path(), to_valid_utf8(plan_.salient->score), quant::kTierScore);
    keep_unknown("/tiers/salient", {"scheme", "score"});
  }
  keep_unknown("/tiers", {"sink_tokens", "window_tokens", "salient"});
}

void Reader::read_saliency(const JsonValue& v, const LayerGeometry& geometry, plan::LayerPlan& layer) {
  const JsonValue fraction = v.at("salient_fraction");
  layer.salient_fraction = fraction.number();
  if (!(layer.salient_fraction >= 0 && layer.salient_fraction <= quant::kMostSalient)) fraction.wrong(fmt::format("a share of 0 to {}", quant::kMostSalient));
  if (layer.salient_fraction == 0) {
    if (v.has("saliency")) v.at("saliency").wrong("absent: the layer has no salient tier");
    return;
  }
  if (!plan_.salient) fraction.wrong("0, for /tiers/salient is null");
  const JsonValue saliency = v.at("saliency"), shape = saliency.at("m").at("shape");
  const std::int64_t rank = shape.size() == 3 ? shape.element(2).integer() : 0;
  if (rank < 1 || rank > quant::SaliencyFactors::kMostRank)
    shape.wrong(fmt::format("[{}, {}, rank 1 to {}]", geometry.n_q_heads, geometry.head_dim, quant::SaliencyFactors::kMostRank));
  layer.saliency.rank = static_cast<int>(rank);
  layer.saliency.a = read_array(saliency.at("a"), saliency_array_name(layer.index, "a"), {geometry.n_q_heads, geometry.head_dim}, false, "saliency");
  layer.saliency.m = read_array(saliency.at("m"), saliency_array_name(layer.index, "m"), {geometry.n_q_heads, geometry.head_dim, rank}, false, "saliency");
  keep_unknown(saliency.path(), {"a", "m"});
}

void Reader::read_layers() {
  const JsonValue layers = root().at("layers");
  const std::vector<LayerGeometry>& model = plan_.model.layers;
  struct Placed {
    std::size_t at;  // in the file
    std::size_t slot;
  };
  std::vector<Placed> placed;
  std::vector<bool> seen(model.size(), false);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const JsonValue index = layers.element(i).at("index");
    const std::int64_t number = index.integer();
    const auto geometry = std::find_if(model.begin(), model.end(), [&](const LayerGeometry& g) { return g.index == number; });
    if (geometry == model.end()) index.wrong("a layer of /model/layers");
    const std::size_t slot = static_cast<std::size_t>(geometry - model.begin());
    if (seen[slot]) index.wrong("each layer once");
    seen[slot] = true;
    placed.push_back({i, slot});
  }
  for (std::size_t l = 0; l < model.size(); ++l)
    if (!seen[l])
      fail(ErrorKind::kFormat, where_, "/layers has no entry for layer {} of the model ({} of {} are there)", model[l].index, layers.size(), model.size());

  plan_.layers.resize(model.size());
  for (const Placed& p : placed) {
    const JsonValue v = layers.element(p.at);
    const std::string kept = fmt::format("/layers/{}", p.slot);
    plan::LayerPlan& layer = plan_.layers[p.slot];
    layer.index = model[p.slot].index;
    layer.module = v.at("module").string();
    read_saliency(v, model[p.slot], layer);
    if (v.has("window_tokens")) layer.window_tokens = count(v.at("window_tokens"));
    layer.k = read_unit(v.at("k"), Side::kK, model[p.slot]);
    layer.v = read_unit(v.at("v"), Side::kV, model[p.slot]);
    keep_unknown(v.path(), {"index", "module", "salient_fraction", "saliency", "window_tokens", "k", "v"}, kept);
    keep_unknown(v.path() + "/k", {"scheme", "bits", "group", "frame", "rotation", "chan_perm", "block_order", "params", "why"}, kept + "/k");
    keep_unknown(v.path() + "/v", {"scheme", "bits", "group", "rotation", "chan_perm", "params", "why"}, kept + "/v");
    for (const char* side : {"/k", "/v"})
      keep_unknown(v.path() + side + "/params",
                   {"mean", "smooth", "clip_lo", "clip_hi", "clip_alpha", "codebook", "basis_mean", "basis_in", "basis", "ef_u", "ef_order", "scale"},
                   kept + side + "/params");
  }
}

void Reader::read_request() {
  const JsonValue v = root().at("request");
  plan::Request& r = plan_.request;
  r.budget = v.at("budget").string();
  r.uniform = v.at("uniform").string();
  if (const JsonValue target = v.at("target"); target.string() != "native")
    fail(ErrorKind::kUnsupported, where_, "/request/target is \"{}\"; this version reads plans for native", to_valid_utf8(target.string()));
  r.profile = v.at("profile").string();
  r.context_tokens = count(v.at("context_tokens"), 1);
  r.batch = count(v.at("batch"), 1);
  r.budget_bytes = count(v.at("budget_bytes"));
  r.max_kl = v.at("max_kl").number();
  r.metric = v.at("metric").string();
  r.candidates = v.at("candidates").string();
  r.window_per_layer = v.at("window_per_layer").boolean();
  if (v.has("imported")) r.imported = v.at("imported").string();
  if (v.has("restrictions")) {
    const JsonValue x = v.at("restrictions");
    const auto schemes = [&](const char* side) {
      const JsonValue list = x.at(side);
      std::vector<std::string> texts;
      for (std::size_t i = 0; i < list.size(); ++i) texts.push_back(kvrt::to_string(scheme(list.element(i))));
      return texts;
    };
    r.restrictions = {schemes("k"), schemes("v"), x.at("same_kv").boolean(), x.at("one_pair").boolean(), {}, x.at("arch").string()};
    const JsonValue skipped = x.at("skip_layers");
    for (std::size_t i = 0; i < skipped.size(); ++i) r.restrictions.skip_layers.push_back(small(skipped.element(i)));
    keep_unknown(x.path(), {"k", "v", "same_kv", "one_pair", "skip_layers", "arch"});
  }
  keep_unknown("/request", {"budget", "uniform", "target", "profile", "context_tokens", "batch", "budget_bytes", "max_kl", "metric", "candidates",
                            "window_per_layer", "imported", "restrictions"});
}

void Reader::read_summary() {
  const JsonValue v = root().at("summary");
  plan::Summary& s = plan_.summary;
  s.effective_bits = v.at("effective_bits").number();
  s.bytes = count(v.at("bytes"));
  s.elements = count(v.at("elements"));
  s.bytes_per_token = v.at("bytes_per_token").number();
  s.compression = v.at("compression").number();
  s.constants_bytes = count(v.at("constants_bytes"));
  s.gap = v.at("gap").number();
  s.proven = v.at("proven").boolean();
  if (v.has("predicted")) {
    const JsonValue p = v.at("predicted");
    s.predicted = plan::Prediction{p.at("metric").string(), p.at("score").number(), p.at("se").number(), p.at("in_nats").boolean(), p.at("unfitted").boolean(), {}};
    if (p.has("joint")) {
      const JsonValue j = p.at("joint");
      s.predicted->joint = plan::JointFit{static_cast<std::size_t>(count(j.at("runs"))), positive(j.at("slope")), j.at("kappa").number(), j.at("r2").number(),
                                          j.at("spearman").number(), positive(j.at("worst_factor"))};
      keep_unknown("/summary/predicted/joint", {"runs", "slope", "kappa", "r2", "spearman", "worst_factor", "reliable"});
    }
    if (p.has("isolated")) {
      const JsonValue i = p.at("isolated");
      s.predicted->isolated =
          plan::IsolatedUse{static_cast<std::size_t>(count(i.at("units"))), positive(i.at("above")), positive(i.at("slope_k")), positive(i.at("slope_v"))};
      keep_unknown("/summary/predicted/isolated", {"units", "above", "slope_k", "slope_v"});
    }
    keep_unknown("/summary/predicted", {"metric", "score", "se", "in_nats", "kl", "ppl_ratio", "unfitted", "joint", "isolated"});
  }
  if (v.has("measured")) {
    const JsonValue m = v.at("measured");
    s.measured = plan::Measured{m.at("kl").number(), m.at("kl_se").number(), positive(m.at("ppl_ratio")), m.at("ppl_ratio_se").number(), count(m.at("documents")),
                                count(m.at("tokens")), count(m.at("seq_len")), m.at("documents_sha256").string()};
    keep_unknown("/summary/measured", {"kl", "kl_se", "ppl_ratio", "ppl_ratio_se", "documents", "tokens", "seq_len", "documents_sha256"});
  }
  if (v.has("valid_to_position")) s.valid_to_position = count(v.at("valid_to_position"));
  keep_unknown("/summary", {"effective_bits", "bytes", "elements", "bytes_per_token", "compression", "constants_bytes", "gap", "proven", "predicted",
                            "measured", "valid_to_position"});
}

void Reader::read_lists() {
  const JsonValue frontier = root().at("frontier");
  for (std::size_t i = 0; i < frontier.size(); ++i) {
    const JsonValue p = frontier.element(i);
    plan_.frontier.push_back({count(p.at("bytes")), p.at("effective_bits").number(), p.at("score").number()});
    keep_unknown(p.path(), {"effective_bits", "bytes", "score"});
  }
  const JsonValue baselines = root().at("baselines");
  for (std::size_t i = 0; i < baselines.size(); ++i) {
    const JsonValue b = baselines.element(i);
    const bool uniform = b.has("pair");
    plan_.baselines.push_back({b.at("name").string(), b.at("description").string(), b.at("feasible").boolean(), count(b.at("bytes")),
                               b.at("effective_bits").number(), b.at("score").number(), uniform ? b.at("pair").string() : "",
                               uniform ? count(b.at("window_tokens")) : 0, {}, {}});
    if (b.has("measured_kl"))
      plan_.baselines.back().measured_kld = b.at("measured_kl").number(), plan_.baselines.back().measured_se = b.at("measured_kl_se").number();
    keep_unknown(b.path(), {"name", "description", "feasible", "effective_bits", "bytes", "score", "pair", "window_tokens", "measured_kl", "measured_kl_se"});
  }
  if (root().has("decision")) plan_.decision = read_reasons(root().at("decision"));
  const JsonValue fallback = root().at("fallback");
  for (std::size_t i = 0; i < fallback.size(); ++i) {
    const JsonValue r = fallback.element(i), changes = r.at("changes");
    plan::Rung rung;
    rung.effective_bits = r.at("effective_bits").number();
    rung.bytes = count(r.at("bytes"));
    rung.score = r.at("score").number();
    for (std::size_t c = 0; c < changes.size(); ++c) {
      const JsonValue change = changes.element(c);
      const std::string side = change.at("side").string();
      if (side != "k" && side != "v") change.at("side").wrong("k or v");
      rung.changes.push_back({small(change.at("layer")), side == "k" ? Side::kK : Side::kV, scheme(change.at("scheme"))});
      keep_unknown(change.path(), {"layer", "side", "scheme"});
    }
    keep_unknown(r.path(), {"effective_bits", "bytes", "score", "changes"});
    plan_.fallback.push_back(std::move(rung));
  }
}

plan::Plan Reader::read() {
  plan_.model = io::model_from_json(root().at("model"));
  if (plan_.model.layers.empty()) root().at("model").at("layers").wrong("at least one layer");
  for (std::size_t l = 1; l < plan_.model.layers.size(); ++l)
    if (plan_.model.layers[l].index <= plan_.model.layers[l - 1].index)
      root().at("model").at("layers").element(l).at("index").wrong("ascending layer numbers");
  plan_.provenance = io::provenance_from_json(root().at("provenance"));
  keep_unknown("/model", {"architecture", "name", "n_layers", "hidden_size", "vocab_size", "max_positions", "weights_sha256", "fast_identity",
                          "tokenizer_sha256", "layers"});
  for (std::size_t l = 0; l < plan_.model.layers.size(); ++l)
    keep_unknown(fmt::format("/model/layers/{}", l), {"index", "n_q_heads", "n_kv_heads", "head_dim", "rotary_dim", "rope_style", "attention_factor",
                                                      "softmax_scale", "sliding_window", "k_bias_norm", "llamacpp_adjacent_pairs", "inv_freq"});
  keep_unknown("/provenance", {"tool", "version", "argv", "started_utc", "seconds", "seed", "device", "dtype", "parents"});
  read_request();
  read_summary();
  read_lists();

  read_tiers();
  read_layers();

  const JsonValue runtime = root().at("runtime"), page = runtime.at("page_tokens");
  plan_.page_tokens = small(page);
  if (plan_.page_tokens != 32 && plan_.page_tokens != 64 && plan_.page_tokens != 128) page.wrong("32, 64 or 128");
  plan_.scale_refresh_tokens = small(runtime.at("scale_refresh_tokens"));
  expect(runtime, "rope", rope_classes_json(plan_.model), "as /model/layers says");
  keep_unknown("/runtime", {"page_tokens", "scale_refresh_tokens", "rope"});

  const JsonValue monitor = root().at("monitor");
  plan::Monitor& m = plan_.monitor;
  m.kl_max = positive(monitor.at("kl_max"));
  m.ppl_ratio_max = positive(monitor.at("ppl_ratio_max"));
  m.ttft_ratio_max = positive(monitor.at("ttft_ratio_max"));
  if (monitor.has("itl_ratio_max")) m.itl_ratio_max = positive(monitor.at("itl_ratio_max"));
  m.hit_rate_min = monitor.at("hit_rate_min").number();
  m.hbm_utilisation_min = monitor.at("hbm_utilisation_min").number();
  if (monitor.has("sm_utilisation_max")) m.sm_utilisation_max = positive(monitor.at("sm_utilisation_max"));
  if (monitor.has("length_limit")) plan_.monitor.length_limit = count(monitor.at("length_limit"));
  keep_unknown("/monitor",
               {"kl_max", "ppl_ratio_max", "ttft_ratio_max", "itl_ratio_max", "hit_rate_min", "hbm_utilisation_min", "sm_utilisation_max", "length_limit"});

  keep_unknown("", {"schema", "model", "provenance", "request", "summary", "frontier", "baselines", "decision", "tiers", "layers", "runtime", "monitor",
                    "fallback", "tensors"});
  plan::Accounting accounting;
  accounting.context_tokens = plan_.request.context_tokens;
  accounting.batch = plan_.request.batch;
  accounting.sink_tokens = plan_.sink_tokens;
  std::int64_t window = plan_.window_tokens;
  for (const plan::LayerPlan& layer : plan_.layers) window = std::max(window, layer.window_tokens.value_or(0));
  if (!plan::countable(plan_.model.layers, window, accounting))
    fail(ErrorKind::kFormat, where_, "/request: {} tokens x batch {} with {} sinks and window {} is beyond what can be counted", accounting.context_tokens,
         accounting.batch, accounting.sink_tokens, window);
  if (n_arrays_used_ != arrays_.size())
    fail(ErrorKind::kMismatch, where_, "the tensor file holds {} arrays, the plan names {} of them", arrays_.size(), n_arrays_used_);
  return std::move(plan_);
}

}  // namespace

plan::Plan plan_from_json(const json& document, const std::vector<io::NamedArray>& arrays, const std::string& where, const LogSink& log) {
  return Reader(document, arrays, where, log).read();
}

}  // namespace calib::artifacts
