#include "libcalib/plan/ladder.h"

#include <algorithm>
#include <limits>
#include <optional>

namespace calib::plan {
namespace {

constexpr int kTopBits = 8;

struct Raise {
  std::size_t layer = 0;
  Side side = Side::kK;
  LayerOption to;
  double price = 0;  ///< score saved per byte
};

int bits_of(const Candidates& c, std::size_t scheme) { return kvrt::code_bits(c.scheme(scheme).format); }

/// Best raise of one unit; empty if it is at the top or nothing wider is offered.
std::optional<Raise> best_raise(const Candidates& c, const LayerOption& now, std::size_t layer, Side side) {
  const std::size_t current = side == Side::kK ? now.k : now.v;
  if (bits_of(c, current) >= kTopBits) return std::nullopt;
  bool has_eight = false;
  for (std::size_t s = 0; s < c.sens().schemes.size(); ++s)
    has_eight = has_eight || (c.allowed(layer, side, s) && !kvrt::needs_calibration(c.scheme(s)) && bits_of(c, s) == kTopBits);
  std::optional<Raise> best;
  for (std::size_t s = 0; s < c.sens().schemes.size(); ++s) {
    if (!c.allowed(layer, side, s) || kvrt::needs_calibration(c.scheme(s))) continue;
    const int bits = bits_of(c, s);
    if (bits <= bits_of(c, current) || (bits > kTopBits && has_eight)) continue;
    Raise raise{layer, side, c.option(layer, side == Side::kK ? s : now.k, side == Side::kV ? s : now.v, now.window), 0};
    const std::int64_t more = raise.to.bytes - now.bytes;
    if (more <= 0) continue;  // rungs rise in bytes; a cheaper wider scheme cannot occur in an optimal plan
    raise.price = (now.score - raise.to.score) / static_cast<double>(more);
    if (!best || raise.price > best->price) best = raise;
  }
  return best;
}

}  // namespace

std::vector<Rung> fallback_ladder(const Candidates& candidates, const std::vector<LayerOption>& choice) {
  std::vector<LayerOption> now = choice;
  const std::size_t n_units = 2 * now.size(), per_rung = std::max<std::size_t>(1, n_units / 10);
  std::vector<Rung> rungs;
  for (;;) {
    Rung rung;
    std::vector<std::uint8_t> raised(n_units, 0);
    while (rung.changes.size() < per_rung) {
      std::optional<Raise> best;
      for (std::size_t u = 0; u < n_units; ++u) {
        if (raised[u]) continue;
        const std::optional<Raise> raise = best_raise(candidates, now[u / 2], u / 2, u % 2 == 0 ? Side::kK : Side::kV);
        if (raise && (!best || raise->price > best->price)) best = raise;
      }
      if (!best) break;
      raised[2 * best->layer + (best->side == Side::kK ? 0 : 1)] = 1;
      now[best->layer] = best->to;
      rung.changes.push_back({candidates.sens().model.layers[best->layer].index, best->side,
                              candidates.scheme(best->side == Side::kK ? best->to.k : best->to.v)});
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
