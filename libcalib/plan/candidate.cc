#include "libcalib/plan/candidate.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "libcalib/quant/scheme.h"

namespace calib::plan {
namespace {

constexpr const char* kMetricOrder[] = {"logit_kl", "fisher_softmax", "fisher_vec", "lookahead", "fisher", "attn_out"};
constexpr std::size_t kNoUnit = static_cast<std::size_t>(-1);

std::string unit_name(const sens::UnitId& unit) { return fmt::format("layer {} {}", unit.layer, side_name(unit.side)); }

std::string choose_metric(const sens::SensResult& sens, const std::string& asked) {
  std::vector<std::string> names;
  for (const auto& entry : sens.scores) names.push_back(entry.first);
  const std::string present = fmt::format("{}", fmt::join(names, ", "));
  if (!asked.empty()) {
    if (asked == "attn_kl")
      fail(ErrorKind::kUsage, "--metric attn_kl", "it is 0 for every V unit, so it cannot rank them; use fisher_softmax or another of: {}", present);
    if (!sens.scores.count(asked)) fail(ErrorKind::kUsage, "--metric " + asked, "the scores hold {}", present.empty() ? "no scores" : present);
    return asked;
  }
  for (const char* name : kMetricOrder)
    if (sens.scores.count(name)) return name;
  fail(ErrorKind::kMismatch, "the scores", "holds {}, none of which ranks K and V units together; run kvsens with --metric fisher_softmax",
       present.empty() ? "no scores" : present);
}

/// K base width that wide query groups keep (METHODS.md 8, GQA-conservative margin).
bool below_wide_group_floor(const kvrt::Scheme& scheme) {
  const int bits = kvrt::code_bits(scheme.format);
  const bool channel = scheme.granularity == kvrt::Granularity::kChannel || scheme.granularity == kvrt::Granularity::kChannelStatic;
  return bits < (channel ? 3 : 4);
}

void check_sizes(const sens::SensResult& sens, const sens::ScoreTable& table, const std::string& metric) {
  const std::size_t cells = sens.units.size() * sens.schemes.size();
  if (sens.valid.size() != cells)
    fail(ErrorKind::kMismatch, "the scores", "/valid holds {} entries, expected {} units x {} schemes", sens.valid.size(), sens.units.size(),
         sens.schemes.size());
  if (sens.windows.empty()) fail(ErrorKind::kMismatch, "the scores", "/windows is empty");
  if (table.mean.size() != cells * sens.windows.size() || table.se.size() != table.mean.size())
    fail(ErrorKind::kMismatch, "the scores", "/score/{} holds {} means and {} standard errors, expected {}", metric, table.mean.size(),
         table.se.size(), cells * sens.windows.size());
}

}  // namespace

Candidates::Candidates(const sens::SensResult& sens, const Accounting& accounting, const std::string& metric, const LogSink& log)
    : sens_(sens), accounting_(accounting), metric_(choose_metric(sens, metric)), table_(&sens.scores.at(metric_)) {
  check_sizes(sens, *table_, metric_);
  accounting_.sink_tokens = sens.n_sinks;
  std::set<std::string> seen;
  for (const std::string& text : sens.schemes) {
    if (!seen.insert(text).second) fail(ErrorKind::kUsage, text, "two candidates of sens.h5 have this string; a scheme may be listed once");
    schemes_.push_back(quant::parse_scheme(text));
  }

  const std::vector<LayerGeometry>& layers = sens.model.layers;
  if (layers.empty()) fail(ErrorKind::kMismatch, "the scores", "names a model without layers");
  unit_of_.assign(2 * layers.size(), kNoUnit);
  for (std::size_t u = 0; u < sens.units.size(); ++u) {
    const auto layer = std::find_if(layers.begin(), layers.end(), [&](const LayerGeometry& g) { return g.index == sens.units[u].layer; });
    if (layer == layers.end()) fail(ErrorKind::kMismatch, unit_name(sens.units[u]), "a unit of sens.h5 that its model does not have");
    std::size_t& slot = unit_of_[2 * static_cast<std::size_t>(layer - layers.begin()) + (sens.units[u].side == Side::kK ? 0 : 1)];
    if (slot != kNoUnit) fail(ErrorKind::kMismatch, unit_name(sens.units[u]), "listed twice in sens.h5");
    slot = u;
  }
  std::vector<std::string> missing;
  for (std::size_t i = 0; i < unit_of_.size(); ++i)
    if (unit_of_[i] == kNoUnit) missing.push_back(unit_name({layers[i / 2].index, i % 2 == 0 ? Side::kK : Side::kV}));
  if (!missing.empty())
    throw Error(ErrorKind::kMismatch, missing.front(),
                fmt::format("sens.h5 has no scores for {} of {} units of its model; run kvsens again", missing.size(), unit_of_.size()), missing);

  allowed_.assign(unit_of_.size() * schemes_.size(), 0);
  std::vector<std::string> held_back, not_finite;
  for (std::size_t i = 0; i < unit_of_.size(); ++i) {
    const LayerGeometry& layer = layers[i / 2];
    const Side side = i % 2 == 0 ? Side::kK : Side::kV;
    const bool wide = layer.n_kv_heads > 0 && layer.n_q_heads / layer.n_kv_heads >= 4;
    wide_groups_ = wide_groups_ || wide;
    for (std::size_t s = 0; s < schemes_.size(); ++s) {
      if (!sens.valid[unit_of_[i] * schemes_.size() + s]) continue;
      quant::check_scheme(schemes_[s], layer, side);
      for (std::size_t w = 0; w < sens.windows.size(); ++w)
        if (!std::isfinite(table_->mean[sens.index(unit_of_[i], s, w)]))
          not_finite.push_back(fmt::format("layer {} {} {} window {}", layer.index, side_name(side), sens.schemes[s], sens.windows[w]));
      if (side == Side::kK && wide && below_wide_group_floor(schemes_[s])) {
        if (std::find(held_back.begin(), held_back.end(), sens.schemes[s]) == held_back.end()) held_back.push_back(sens.schemes[s]);
        continue;
      }
      allowed_[i * schemes_.size() + s] = 1;
    }
  }
  if (!not_finite.empty())
    throw Error(ErrorKind::kNumeric, not_finite.front(),
                fmt::format("{} scores of metric {} are not finite although their scheme is valid there; run kvsens again", not_finite.size(), metric_),
                not_finite);
  if (!held_back.empty())
    log.note(fmt::format("4 or more query heads per KV head: K keeps at least 4 bits (token groups) or 3 (channel groups); left out: {}",
                         fmt::join(held_back, " ")));
  elements_ = cache_elements(layers, accounting_);
}

bool Candidates::metric_in_nats() const {
  return metric_ == "logit_kl" || metric_ == "fisher_softmax" || metric_ == "fisher_vec" || metric_ == "fisher" || metric_ == "fisher_dir";
}

bool Candidates::allowed(std::size_t layer, Side side, std::size_t scheme) const {
  return allowed_[(2 * layer + (side == Side::kK ? 0 : 1)) * schemes_.size() + scheme] != 0;
}

double Candidates::score(std::size_t layer, Side side, std::size_t scheme, std::size_t window) const {
  return table_->mean[sens_.index(unit(layer, side), scheme, window)];
}

double Candidates::standard_error(std::size_t layer, Side side, std::size_t scheme, std::size_t window) const {
  const double se = table_->se[sens_.index(unit(layer, side), scheme, window)];
  return std::isfinite(se) ? se : 0.0;
}

std::int64_t Candidates::bytes(std::size_t layer, std::size_t k, std::size_t v, std::size_t window) const {
  return layer_bytes(sens_.model.layers[layer], schemes_[k], schemes_[v], sens_.windows[window], accounting_);
}

LayerOption Candidates::option(std::size_t layer, std::size_t k, std::size_t v, std::size_t window) const {
  const LayerGeometry& geometry = sens_.model.layers[layer];
  return {k, v, window, bytes(layer, k, v, window), constants_bytes(schemes_[k], geometry) + constants_bytes(schemes_[v], geometry),
          score(layer, Side::kK, k, window) + score(layer, Side::kV, v, window)};
}

std::vector<std::vector<LayerOption>> Candidates::options(const std::vector<std::size_t>& windows, const Filter& filter) const {
  std::vector<std::vector<LayerOption>> all(n_layers());
  for (std::size_t l = 0; l < n_layers(); ++l) {
    std::vector<std::size_t> of_side[2];
    for (const Side side : {Side::kK, Side::kV}) {
      std::vector<std::size_t>& list = of_side[side == Side::kK ? 0 : 1];
      for (std::size_t s = 0; s < schemes_.size(); ++s)
        if (allowed(l, side, s) && (!filter || filter(l, side, s))) list.push_back(s);
      if (list.empty())
        fail(ErrorKind::kInfeasible, fmt::format("layer {} {}", sens_.model.layers[l].index, side_name(side)),
             "no candidate scheme is left; give kvsens a longer --candidates list");
    }
    for (const std::size_t w : windows)
      for (const std::size_t k : of_side[0])
        for (const std::size_t v : of_side[1]) all[l].push_back(option(l, k, v, w));
  }
  return all;
}

std::vector<OptionGroup> knapsack(const std::vector<std::vector<LayerOption>>& options, bool with_constants) {
  std::vector<OptionGroup> groups;
  for (const std::vector<LayerOption>& layer : options) {
    OptionGroup group;
    for (const LayerOption& o : layer) group.push_back({o.bytes + (with_constants ? o.constants : 0), o.score});
    groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace calib::plan
