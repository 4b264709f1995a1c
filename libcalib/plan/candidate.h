#pragma once
// The options of every layer, (K scheme, V scheme, tier class), with bytes and scores from sens.h5.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "libcalib/base/error.h"
#include "libcalib/plan/cost_model.h"
#include "libcalib/plan/plan.h"
#include "libcalib/plan/restrictions.h"
#include "libcalib/plan/solver.h"
#include "libcalib/plan/tier_rules.h"
#include "libcalib/sens/sens_result.h"

namespace calib::plan {

/// One way to store a layer. Indices are those of SensResult's schemes and tier classes.
struct LayerOption {
  std::size_t k = 0, v = 0, tier_class = 0;
  std::int64_t bytes = 0;
  std::int64_t constants = 0;  ///< plan constants, shared by all sequences
  double score = 0;            ///< S_K + S_V, those of isolated runs where they took the unit up, times the slope of joint runs where sens.h5 holds them
};

/// Layers that are decided together, and the ways to store them: bytes, constants and score are sums over the layers.
struct LayerGroup {
  std::vector<std::size_t> layers;  ///< positions in the model
  std::vector<LayerOption> options;
};

/// Whether a low-rank scheme may be chosen for a unit (METHODS.md 5.6): only where, at equal or fewer bytes, attn_out (keys: attn_kl too) of
/// text that it was not fitted on is lower than that of the best plain scheme by more than 2 SE, in every window.
struct LowRankVerdict {
  std::size_t layer = 0;  ///< position in the model
  Side side = Side::kK;
  std::size_t scheme = 0;
  bool accepted = false;
  std::string text;       ///< one sentence, with the scheme
  std::vector<std::pair<std::string, double>> numbers;
};

/// Everything the search needs of sens.h5, checked once.
class Candidates {
 public:
  /// Which (layer position, side, scheme index) may be used.
  using Filter = std::function<bool(std::size_t layer, Side side, std::size_t scheme)>;

  /// `metric` empty: the first present of logit_kl, fisher_softmax, fisher_vec, lookahead, fisher, attn_out.
  /// With isolated runs: the metric that they were made for, and no other.
  /// Throws: kUsage (unknown metric, another one than that of the isolated runs, a scheme listed twice, restrictions that name what is not there), kMismatch (a
  /// unit of the model is missing, naming it; tables of other sizes), kNumeric (a score that is not finite, naming layer, side and scheme), kUnsupported
  /// (scheme not offered), kInfeasible (restrictions leave a unit nothing, naming layer and rule). Group sizes of 4 and more keep K base at 4 bits (token) or 3
  /// (channel), noted once (METHODS.md 8). Classes with a salient tier are for the layers that `tiers` allows; a layer's base is narrower than 8 bits there, on
  /// both sides.
  Candidates(const sens::SensResult& sens, const Accounting& accounting, const std::string& metric, const LogSink& log = {},
             const Restrictions& restrictions = {}, const TierRules& tiers = {});

  const sens::SensResult& sens() const { return sens_; }
  const Accounting& accounting() const { return accounting_; }
  const Restrictions& restrictions() const { return restrictions_; }
  const TierRules& tier_rules() const { return tier_rules_; }
  TierClass tier_class(std::size_t i) const { return {sens_.windows[i], sens_.salient_fraction(i), salient_}; }
  /// "window 128", "window 128, salient 0.2 at fp8e4m3.token.g".
  std::string class_text(std::size_t i) const;
  bool class_allowed(std::size_t layer, std::size_t tier_class) const;
  /// Whether some layer may take a salient tier.
  bool any_tier() const;
  const std::string& metric() const { return metric_; }
  /// Isolated runs of sens.h5 whose losses stand in place of the scores of the units that they took up; null without any.
  const sens::IsolatedRuns* isolated() const { return sens_.isolated ? &*sens_.isolated : nullptr; }
  bool taken_up(std::size_t layer, Side side) const { return sens_.isolated && sens_.isolated->taken_up[unit(layer, side)]; }
  /// What the metric said of an option before isolated runs, in the scale of score().
  double estimate(std::size_t layer, Side side, std::size_t scheme, std::size_t tier_class) const;
  /// How many units the isolated runs took up, which, and by what slope they were brought to the metric's scale.
  std::string isolated_summary() const;
  bool metric_in_nats() const;
  /// What the joint runs of sens.h5 say of sums of this metric; empty without them, or if it is not in nats.
  const std::optional<JointFit>& fit() const { return fit_; }
  /// Scores and standard errors here are those of sens.h5 times this, by the window of the tier class.
  double slope(std::size_t tier_class) const { return fit_ ? level_ * fit_->slope_of(sens_.windows[tier_class]) : 1.0; }
  /// Takes the curve of the joint runs at a plan whose sum of scores is `score` now, so that sums near it are losses as measured. False if
  /// that changes next to nothing.
  bool predict_near(double score);
  /// ln PPL ratio over KL; 1 where nothing (or nothing positive) was measured.
  double kappa() const { return fit_ && fit_->kappa > 0 ? fit_->kappa : 1.0; }
  std::size_t n_layers() const { return sens_.model.layers.size(); }
  const kvrt::Scheme& scheme(std::size_t i) const { return schemes_[i]; }
  std::int64_t elements() const { return elements_; }
  /// Model-wide: some layer has four or more query heads per KV head.
  bool wide_groups() const { return wide_groups_; }
  /// Kept in bf16 by the restrictions.
  bool skipped(std::size_t layer) const { return skipped_[layer] != 0; }
  /// Schemes that a restriction took away from some unit, by index, each with the rule; for reports.
  const std::vector<std::pair<std::size_t, std::string>>& excluded() const { return excluded_; }
  /// One for each low-rank scheme of each unit; those that are not accepted are not allowed.
  const std::vector<LowRankVerdict>& low_rank() const { return low_rank_; }
  /// How many were accepted, and why the first one was not.
  std::string low_rank_summary() const;

  bool allowed(std::size_t layer, Side side, std::size_t scheme) const;
  /// Position of a layer's side among the units of sens.h5.
  std::size_t unit(std::size_t layer, Side side) const { return unit_of_[2 * layer + (side == Side::kK ? 0 : 1)]; }
  double score(std::size_t layer, Side side, std::size_t scheme, std::size_t tier_class) const;
  double standard_error(std::size_t layer, Side side, std::size_t scheme, std::size_t tier_class) const;
  /// Both sides share the tier class and the exit block. Equal to layer_bytes().
  std::int64_t bytes(std::size_t layer, std::size_t k, std::size_t v, std::size_t tier_class) const;
  LayerOption option(std::size_t layer, std::size_t k, std::size_t v, std::size_t tier_class) const;

  /// The groups of layers that are decided together (each its own, or all that are not skipped under `one_pair`), with every
  /// allowed pair for those of the given tier classes that the layer may take, that no other beats or equals in cost and score. Cost:
  /// bytes, with the constants if `with_constants`. An empty set throws kInfeasible naming the layer.
  std::vector<LayerGroup> groups(const std::vector<std::size_t>& classes, const Filter& filter = {}, bool with_constants = false) const;

 private:
  void leave_out(const std::vector<std::uint8_t>& unknown, const LogSink& log);
  void fit_predictions();
  std::size_t cost_index(std::size_t layer, Side side, std::size_t scheme, std::size_t tier_class, std::size_t exit_class) const;
  void restrict(const LogSink& log);
  void judge_low_rank(const LogSink& log);
  std::string low_rank_objection(std::size_t layer, Side side, std::size_t scheme, std::size_t window, const std::string& metric, LowRankVerdict& verdict) const;
  void count_bytes();
  std::vector<std::size_t> side_list(std::size_t layer, Side side, const Filter& filter) const;
  void add_layer_options(std::size_t layer, std::size_t tier_class, const Filter& filter, bool with_constants, std::vector<LayerOption>& out) const;
  LayerGroup tied_group(const std::vector<std::size_t>& layers, const std::vector<std::size_t>& classes, const Filter& filter) const;

  const sens::SensResult& sens_;
  Accounting accounting_;
  Restrictions restrictions_;
  TierRules tier_rules_;
  kvrt::Scheme salient_;
  std::string metric_;
  std::vector<double> mean_, se_;  ///< scores of the metric, index as ScoreTable, as replaced by isolated runs
  std::optional<JointFit> fit_;
  double level_ = 1;                        ///< of the fit's curve
  std::vector<kvrt::Scheme> schemes_;
  std::vector<std::size_t> unit_of_;        ///< [layers, 2]
  std::vector<std::uint8_t> allowed_;       ///< [layers, 2, schemes]
  std::vector<std::uint8_t> skipped_;       ///< [layers]
  std::vector<std::pair<std::size_t, std::string>> excluded_;
  std::vector<LowRankVerdict> low_rank_;
  std::vector<std::size_t> exit_class_;     ///< [schemes]: position of the scheme's exit block in exits_
  std::vector<std::int64_t> exits_;         ///< exit blocks among the candidates, ascending
  std::vector<std::size_t> geometry_of_;    ///< [layers]: first layer with the same geometry
  std::vector<std::int64_t> side_bytes_;    ///< [layers, 2, schemes, classes, exits]; filled for the layers in geometry_of_
  std::vector<std::int64_t> constants_;     ///< [layers, schemes], likewise
  std::int64_t elements_ = 0;
  bool wide_groups_ = false;
};

/// The groups of the knapsack. Memory budgets count the constants too, once.
std::vector<OptionGroup> knapsack(const std::vector<LayerGroup>& groups, bool with_constants = false);

}  // namespace calib::plan
