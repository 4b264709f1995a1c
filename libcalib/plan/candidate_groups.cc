#include <algorithm>

#include "libcalib/plan/candidate.h"
#include "libcalib/quant/token_tiers.h"

namespace calib::plan {
namespace {

/// Keeps the options that no other beats or equals.
void keep_undominated(std::vector<LayerOption>& options, bool with_constants) {
  OptionGroup costs;
  for (const LayerOption& o : options) costs.push_back({o.bytes + (with_constants ? o.constants : 0), o.score});
  std::vector<LayerOption> kept;
  for (const std::size_t i : undominated(costs)) kept.push_back(options[i]);
  options = std::move(kept);
}

}  // namespace

std::vector<std::size_t> Candidates::side_list(std::size_t layer, Side side, const Filter& filter) const {
  std::vector<std::size_t> list;
  for (std::size_t s = 0; s < schemes_.size(); ++s)
    if (allowed(layer, side, s) && (!filter || filter(layer, side, s))) list.push_back(s);
  if (list.empty())
    fail(ErrorKind::kInfeasible, fmt::format("layer {} {}", sens_.model.layers[layer].index, side_name(side)),
         "no candidate scheme is left; give kvsens a longer --candidates list");
  return list;
}

/// Both sides are pruned apart before they are paired: schemes with the same exit block cost the same beside any partner.
void Candidates::add_layer_options(std::size_t layer, std::size_t tier_class, const Filter& filter, bool with_constants, std::vector<LayerOption>& out) const {
  std::vector<std::size_t> of_side[2] = {side_list(layer, Side::kK, filter), side_list(layer, Side::kV, filter)};
  if (!class_allowed(layer, tier_class)) return;
  if (sens_.salient_fraction(tier_class) > 0)
    for (std::vector<std::size_t>& list : of_side) std::erase_if(list, [&](std::size_t s) { return !quant::takes_tier(schemes_[s]); });
  if (restrictions_.same_kv && !skipped(layer)) {
    for (const std::size_t k : of_side[0])
      if (std::find(of_side[1].begin(), of_side[1].end(), k) != of_side[1].end()) out.push_back(option(layer, k, k, tier_class));
    return;
  }
  const std::size_t l = geometry_of_[layer];
  const auto kept = [&](Side side, std::size_t own_exit, std::size_t exit) {
    std::vector<std::size_t> list;
    OptionGroup costs;
    for (const std::size_t s : of_side[side == Side::kK ? 0 : 1])
      if (exit_class_[s] == own_exit) {
        list.push_back(s);
        costs.push_back({side_bytes_[cost_index(l, side, s, tier_class, exit)] + (with_constants ? constants_[l * schemes_.size() + s] : 0),
                         score(layer, side, s, tier_class)});
      }
    std::vector<std::size_t> best;
    for (const std::size_t i : undominated(costs)) best.push_back(list[i]);
    return best;
  };
  for (std::size_t ke = 0; ke < exits_.size(); ++ke)
    for (std::size_t ve = 0; ve < exits_.size(); ++ve) {
      const std::size_t exit = std::max(ke, ve);
      const std::vector<std::size_t> v_list = kept(Side::kV, ve, exit);
      for (const std::size_t k : kept(Side::kK, ke, exit))
        for (const std::size_t v : v_list) out.push_back(option(layer, k, v, tier_class));
    }
}

LayerGroup Candidates::tied_group(const std::vector<std::size_t>& layers, const std::vector<std::size_t>& classes, const Filter& filter) const {
  LayerGroup group{layers, {}};
  const auto common = [&](Side side) {
    std::vector<std::size_t> list = side_list(layers.front(), side, filter);
    for (const std::size_t l : layers)
      list.erase(std::remove_if(list.begin(), list.end(), [&](std::size_t s) { return !allowed(l, side, s) || (filter && !filter(l, side, s)); }), list.end());
    return list;
  };
  const std::vector<std::size_t> k_list = common(Side::kK), v_list = common(Side::kV);
  for (const std::size_t w : classes) {
    if (!std::all_of(layers.begin(), layers.end(), [&](std::size_t l) { return class_allowed(l, w); })) continue;
    for (const std::size_t k : k_list)
      for (const std::size_t v : v_list) {
        if (restrictions_.same_kv && k != v) continue;
        if (sens_.salient_fraction(w) > 0 && !(quant::takes_tier(schemes_[k]) && quant::takes_tier(schemes_[v]))) continue;
        LayerOption sum{k, v, w, 0, 0, 0};
        for (const std::size_t l : layers) {
          const LayerOption o = option(l, k, v, w);
          sum.bytes += o.bytes;
          sum.constants += o.constants;
          sum.score += o.score;
        }
        group.options.push_back(sum);
      }
  }
  return group;
}

std::vector<LayerGroup> Candidates::groups(const std::vector<std::size_t>& classes, const Filter& filter, bool with_constants) const {
  std::vector<LayerGroup> all;
  std::vector<std::size_t> tied;
  for (std::size_t l = 0; l < n_layers(); ++l) {
    if (restrictions_.one_pair && !skipped(l)) {
      tied.push_back(l);
      continue;
    }
    LayerGroup group{{l}, {}};
    for (const std::size_t w : classes) add_layer_options(l, w, filter, with_constants, group.options);
    all.push_back(std::move(group));
  }
  if (!tied.empty()) all.push_back(tied_group(tied, classes, filter));
  for (LayerGroup& group : all) {
    if (group.options.empty())
      fail(ErrorKind::kInfeasible, fmt::format("layer {}", sens_.model.layers[group.layers.front()].index),
           "no scheme is a candidate of {}; allow more, or score more with kvsens --candidates",
           restrictions_.one_pair ? "every layer" : "both sides, as --same-kv asks");
    keep_undominated(group.options, with_constants);
  }
  return all;
}

std::vector<OptionGroup> knapsack(const std::vector<LayerGroup>& groups, bool with_constants) {
  std::vector<OptionGroup> problem;
  for (const LayerGroup& group : groups) {
    OptionGroup options;
    for (const LayerOption& o : group.options) options.push_back({o.bytes + (with_constants ? o.constants : 0), o.score});
    problem.push_back(std::move(options));
  }
  return problem;
}

}  // namespace calib::plan
