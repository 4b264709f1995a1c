#pragma once
// The options of every layer, (K scheme, V scheme, window), with bytes and scores from sens.h5.

#include <functional>
#include <string>
#include <vector>

#include "libcalib/base/error.h"
#include "libcalib/plan/cost_model.h"
#include "libcalib/plan/solver.h"
#include "libcalib/sens/sens_result.h"

namespace calib::plan {

/// One way to store a layer. Indices are those of SensResult's schemes and windows.
struct LayerOption {
  std::size_t k = 0, v = 0, window = 0;
  std::int64_t bytes = 0;
  std::int64_t constants = 0;  ///< plan constants, shared by all sequences
  double score = 0;            ///< S_K + S_V
};

/// Everything the search needs of sens.h5, checked once.
class Candidates {
 public:
  /// Which (layer position, side, scheme index) may be used.
  using Filter = std::function<bool(std::size_t layer, Side side, std::size_t scheme)>;

  /// `metric` empty: the first present of logit_kl, fisher_softmax, fisher_vec, lookahead, fisher, attn_out.
  /// Throws: kUsage (unknown metric, a scheme listed twice), kMismatch (a unit of the model is missing, naming it; tables of
  /// other sizes), kNumeric (a score that is not finite, naming layer, side and scheme), kUnsupported (scheme not offered).
  /// Group sizes of 4 and more keep K base at 4 bits (token) or 3 (channel), noted once (METHODS.md 8).
  Candidates(const sens::SensResult& sens, const Accounting& accounting, const std::string& metric, const LogSink& log = {});

  const sens::SensResult& sens() const { return sens_; }
  const Accounting& accounting() const { return accounting_; }
  const std::string& metric() const { return metric_; }
  bool metric_in_nats() const;
  std::size_t n_layers() const { return sens_.model.layers.size(); }
  const kvrt::Scheme& scheme(std::size_t i) const { return schemes_[i]; }
  std::int64_t elements() const { return elements_; }
  /// Model-wide: some layer has four or more query heads per KV head.
  bool wide_groups() const { return wide_groups_; }

  bool allowed(std::size_t layer, Side side, std::size_t scheme) const;
  double score(std::size_t layer, Side side, std::size_t scheme, std::size_t window) const;
  double standard_error(std::size_t layer, Side side, std::size_t scheme, std::size_t window) const;
  std::int64_t bytes(std::size_t layer, std::size_t k, std::size_t v, std::size_t window) const;
  LayerOption option(std::size_t layer, std::size_t k, std::size_t v, std::size_t window) const;

  /// All allowed pairs of every layer for the given windows. An empty set throws kInfeasible naming the layer.
  std::vector<std::vector<LayerOption>> options(const std::vector<std::size_t>& windows, const Filter& filter = {}) const;

 private:
  std::size_t unit(std::size_t layer, Side side) const { return unit_of_[2 * layer + (side == Side::kK ? 0 : 1)]; }

  const sens::SensResult& sens_;
  Accounting accounting_;
  std::string metric_;
  const sens::ScoreTable* table_ = nullptr;
  std::vector<kvrt::Scheme> schemes_;
  std::vector<std::size_t> unit_of_;      ///< [layers, 2]
  std::vector<std::uint8_t> allowed_;     ///< [layers, 2, schemes]
  std::int64_t elements_ = 0;
  bool wide_groups_ = false;
};

/// The groups of the knapsack. Memory budgets count the constants too, once.
std::vector<OptionGroup> knapsack(const std::vector<std::vector<LayerOption>>& options, bool with_constants = false);

}  // namespace calib::plan
