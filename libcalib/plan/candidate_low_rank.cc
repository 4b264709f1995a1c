#include <algorithm>
#include <cmath>
#include <optional>

#include "libcalib/base/plural.h"
#include "libcalib/plan/candidate.h"

namespace calib::plan {
namespace {

bool is_exact(const kvrt::Scheme& s) { return s.format == kvrt::Format::kBf16 || s.format == kvrt::Format::kFp16; }

}  // namespace

/// The verdict on one option of one unit under one metric and window: empty if it may be chosen, else why not.
std::string Candidates::low_rank_objection(std::size_t layer, Side side, std::size_t scheme, std::size_t window, const std::string& metric,
                                           LowRankVerdict& verdict) const {
  const std::size_t u = unit(layer, side), l = geometry_of_[layer];
  const sens::ScoreTable& table = sens_.scores.at(metric);
  const auto bytes_of = [&](std::size_t s) { return side_bytes_[cost_index(l, side, s, window, exit_class_[s])]; };
  const auto is_plain = [&](std::size_t s) { return sens_.valid[u * schemes_.size() + s] && schemes_[s].lowrank == 0 && !is_exact(schemes_[s]); };
  // Plain schemes that cost no more than the cheapest plain one of at least these bytes; where there is none of that size, all.
  std::optional<std::int64_t> most;
  for (std::size_t s = 0; s < schemes_.size(); ++s)
    if (is_plain(s) && bytes_of(s) >= bytes_of(scheme) && (!most || bytes_of(s) < *most)) most = bytes_of(s);
  std::optional<std::size_t> best;
  for (std::size_t s = 0; s < schemes_.size(); ++s) {
    if (!is_plain(s) || (most && bytes_of(s) > *most)) continue;
    if (!best || table.mean[sens_.index(u, s, window)] < table.mean[sens_.index(u, *best, window)]) best = s;
  }
  if (!best) return "no plain scheme was scored beside it";
  const std::size_t own = sens_.index(u, scheme, window), other = sens_.index(u, *best, window);
  const double gain = table.mean[other] - table.mean[own], se = std::hypot(table.se[own], table.se[other]);
  const std::int64_t elements = cache_elements({sens_.model.layers[layer]}, accounting_) / 2;
  const bool accepted = gain > 2 * se;  // false for NaN, too
  const std::string difference = gain < 0 ? fmt::format("{:.2e} more (2 SE {:.1e})", -gain, 2 * se)
                                          : fmt::format("{:.2e} less, {}more than 2 SE ({:.1e})", gain, accepted ? "" : "not ", 2 * se);
  const std::string text =
      fmt::format("{} {:.3e} at {:.3f} bits against {:.3e} of {} at {:.3f}: {}{}", metric, table.mean[own], effective_bits(bytes_of(scheme), elements),
                  table.mean[other], sens_.schemes[*best], effective_bits(bytes_of(*best), elements), difference,
                  sens_.windows.size() > 1 ? fmt::format(", window {}", sens_.windows[window]) : "");
  verdict.numbers.insert(verdict.numbers.end(), {{metric, table.mean[own]}, {metric + "_plain", table.mean[other]}, {metric + "_se", se}});
  if (!accepted) return text;
  verdict.text += (verdict.text.empty() ? "" : "; ") + text;
  return "";
}

void Candidates::judge_low_rank(const LogSink& log) {
  const bool fitted_on_it = !sens_.data.documents_sha256.empty() && sens_.data.documents_sha256 == sens_.calibration_data.documents_sha256;
  for (std::size_t l = 0; l < n_layers(); ++l)
    for (const Side side : {Side::kK, Side::kV})
      for (std::size_t s = 0; s < schemes_.size(); ++s) {
        if (schemes_[s].lowrank == 0 || !allowed(l, side, s)) continue;
        LowRankVerdict verdict{l, side, s, false, "", {}};
        std::vector<std::string> metrics = {"attn_out"};
        if (side == Side::kK) metrics.push_back("attn_kl");
        std::string objection;
        for (const std::string& metric : metrics)
          if (!sens_.scores.count(metric))
            objection = fmt::format("the scores hold no {}, which has to show that it pays; run kvsens with --metric {},attn_kl,attn_out", metric, metric_);
        if (objection.empty() && fitted_on_it) objection = "the scores are of the text that its basis was fitted on; score another text";
        for (std::size_t w = 0; w < sens_.windows.size() && objection.empty(); ++w)
          for (const std::string& metric : metrics)
            if (objection.empty()) objection = low_rank_objection(l, side, s, w, metric, verdict);
        verdict.accepted = objection.empty();
        if (!verdict.accepted) verdict.text = objection;
        verdict.text = fmt::format("{} {}: {}", sens_.schemes[s], verdict.accepted ? "accepted" : "left out", verdict.text);
        if (!verdict.accepted) allowed_[(2 * l + (side == Side::kK ? 0 : 1)) * schemes_.size() + s] = 0;
        low_rank_.push_back(std::move(verdict));
      }
  if (!low_rank_.empty()) log.note(low_rank_summary());
}

std::string Candidates::low_rank_summary() const {
  const auto accepted = static_cast<std::size_t>(std::count_if(low_rank_.begin(), low_rank_.end(), [](const LowRankVerdict& v) { return v.accepted; }));
  std::string text = fmt::format("{} of {} beat the best plain scheme of their unit", accepted, counted(low_rank_.size(), "low-rank option"));
  const auto first = std::find_if(low_rank_.begin(), low_rank_.end(), [](const LowRankVerdict& v) { return !v.accepted; });
  if (first != low_rank_.end())
    text += fmt::format("; {}, first layer {} {} {}", counted(low_rank_.size() - accepted, "option") + " left out", sens_.model.layers[first->layer].index,
                        side_name(first->side), first->text);
  return text;
}

}  // namespace calib::plan
