#include "libcalib/plan/ladder.h"

#include <algorithm>
#include <limits>
#include <optional>

namespace calib::plan {
namespace {

constexpr double kTopBits = 8;

/// Units that rise together: one, both sides of a layer (`same_kv`), one side of all layers (`one_pair`), or everything.
struct Tie {
  std::vector<std::size_t> layers;
  bool k = false, v = false;
  std::size_t n_units() const { return layers.size() * (k && v ? 2 : 1); }
};

struct Raise {
  std::size_t tie = 0, scheme = 0;
  double price = 0;  ///< score saved per byte
};

double bits_of(const Candidates& c, std::size_t layer, std::size_t scheme) { return channel_bits(c.scheme(scheme), c.sens().model.layers[layer].head_dim); }
/// Of a scheme that needs no constants: the same in every layer.
double bits_of(const Candidates& c, std::size_t scheme) { return kvrt::code_bits(c.scheme(scheme).format); }

std::vector<Tie> ties_of(const Candidates& c) {
  std::vector<Tie> ties;
  std::vector<std::vector<std::size_t>> together;
  std::vector<std::size_t> tied;
  for (std::size_t l = 0; l < c.n_layers(); ++l) {
    if (c.skipped(l)) continue;  // in bf16 already
    if (c.restrictions().one_pair) tied.push_back(l);
    else together.push_back({l});
  }
  if (!tied.empty()) together.push_back(tied);
  for (const std::vector<std::size_t>& layers : together) {
    if (c.restrictions().same_kv) {
      ties.push_back({layers, true, true});
      continue;
    }
    ties.push_back({layers, true, false});
    ties.push_back({layers, false, true});
  }
  return ties;
}

bool usable(const Candidates& c, const Tie& tie, std::size_t scheme) {
  if (kvrt::needs_calibration(c.scheme(scheme))) return false;
  for (const std::size_t l : tie.layers)
    if ((tie.k && !c.allowed(l, Side::kK, scheme)) || (tie.v && !c.allowed(l, Side::kV, scheme))) return false;
  return true;
}

LayerOption raised(const Candidates& c, const LayerOption& now, const Tie& tie, std::size_t layer, std::size_t scheme) {
  return c.option(layer, tie.k ? scheme : now.k, tie.v ? scheme : now.v, now.tier_class);
}

/// Best raise of one tie; empty if it is at the top or nothing wider is offered.
std::optional<Raise> best_raise(const Candidates& c, const std::vector<LayerOption>& now, const std::vector<Tie>& ties, std::size_t t) {
  const Tie& tie = ties[t];
  double current = kTopBits;
  for (const std::size_t l : tie.layers) {
    if (tie.k) current = std::min(current, bits_of(c, l, now[l].k));
    if (tie.v) current = std::min(current, bits_of(c, l, now[l].v));
  }
  if (current >= kTopBits) return std::nullopt;
  bool has_eight = false;
  for (std::size_t s = 0; s < c.sens().schemes.size(); ++s) has_eight = has_eight || (bits_of(c, s) == kTopBits && usable(c, tie, s));
  std::optional<Raise> best;
  for (std::size_t s = 0; s < c.sens().schemes.size(); ++s) {
    const double bits = bits_of(c, s);
    if (bits <= current || (bits > kTopBits && has_eight) || !usable(c, tie, s)) continue;
    std::int64_t more = 0;
    double saved = 0;
    for (const std::size_t l : tie.layers) {
      const LayerOption to = raised(c, now[l], tie, l, s);
      more += to.bytes - now[l].bytes;
      saved += now[l].score - to.score;
    }
    if (more <= 0) continue;  // rungs rise in bytes; a cheaper wider scheme cannot occur in an optimal plan
    const double price = saved / static_cast<double>(more);
    if (!best || price > best->price) best = Raise{t, s, price};
  }
  return best;
}

}  // namespace

std::vector<Rung> fallback_ladder(const Candidates& candidates, const std::vector<LayerOption>& choice) {
  std::vector<LayerOption> now = choice;
  const std::vector<Tie> ties = ties_of(candidates);
  const std::size_t per_rung = std::max<std::size_t>(1, 2 * now.size() / 10);
  std::vector<Rung> rungs;
  for (;;) {
    Rung rung;
    std::vector<std::uint8_t> raised_now(ties.size(), 0);
    for (;;) {
      std::optional<Raise> best;
      for (std::size_t t = 0; t < ties.size(); ++t) {
        // Ties that hold more units than a rung may raise go up alone.
        if (raised_now[t] || (!rung.changes.empty() && rung.changes.size() + ties[t].n_units() > per_rung)) continue;
        const std::optional<Raise> raise = best_raise(candidates, now, ties, t);
        if (raise && (!best || raise->price > best->price)) best = raise;
      }
      if (!best) break;
      const Tie& tie = ties[best->tie];
      raised_now[best->tie] = 1;
      for (const std::size_t l : tie.layers) {
        now[l] = raised(candidates, now[l], tie, l, best->scheme);
        for (const Side side : {Side::kK, Side::kV})
          if (side == Side::kK ? tie.k : tie.v) rung.changes.push_back({candidates.sens().model.layers[l].index, side, candidates.scheme(best->scheme)});
      }
    }
    if (rung.changes.empty()) return rungs;
    std::sort(rung.changes.begin(), rung.changes.end(), [](const RungChange& a, const RungChange& b) {
      return a.layer != b.layer ? a.layer < b.layer : a.side < b.side;
    });
    for (const LayerOption& o : now) {
      rung.bytes += o.bytes;
      rung.score += o.score;
    }
    rung.effective_bits = effective_bits(rung.bytes, candidates.elements());
    rungs.push_back(std::move(rung));
  }
}

}  // namespace calib::plan
