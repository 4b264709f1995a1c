#include "tools/kvplan/plan_text.h"

#include <algorithm>

#include <fmt/format.h>

#include "libcalib/base/plural.h"
#include "libcalib/base/utf8.h"
#include "libcalib/plan/budget.h"

namespace calib::tools {

std::string headline(const plan::Plan& plan) {
  const plan::Summary& s = plan.summary;
  std::string text = fmt::format("{} {}, {}, {:.3f} effective bits at T={}{}, {}", to_valid_utf8(plan.model.architecture),
                                 to_valid_utf8(plan.model.name), counted(plan.layers.size(), "layer"), s.effective_bits, plan.request.context_tokens,
                                 plan.request.batch > 1 ? fmt::format(" x {}", plan.request.batch) : "", plan::format_bytes(s.bytes));
  text += fmt::format(" ({:.2f}x smaller), sinks {}, window {}", s.compression, plan.sink_tokens, plan.window_tokens);
  const auto n_tiers = std::count_if(plan.layers.begin(), plan.layers.end(), [](const plan::LayerPlan& l) { return l.salient_fraction > 0; });
  return n_tiers == 0 ? text : text + fmt::format(", salient tier at {} in {}", kvrt::to_string(plan.salient->scheme), counted(n_tiers, "layer"));
}

std::string prediction_line(const plan::Plan& plan) {
  if (!plan.summary.predicted) return "";
  const plan::Prediction& p = *plan.summary.predicted;
  const std::string quality = plan.summary.proven ? "proven optimal" : fmt::format("within {:.2e} of the optimum", plan.summary.gap);
  std::string text = fmt::format(
      "predicted {} {:.4e} +- {:.1e}{} ({}{}), {}", p.in_nats ? "mean KL" : "sum", p.in_nats ? p.kl() : p.score, p.joint ? p.joint->slope * p.se : p.se,
      p.in_nats ? " nats" : "", p.isolated ? fmt::format("{}, {} by isolated runs", p.metric, counted(p.isolated->n_units, "unit")) : p.metric,
      p.joint ? fmt::format(" x {:.2f} from {} joint runs{}", p.joint->slope, p.joint->n_runs, p.joint->reliable() ? "" : ", unreliable") : ", unfitted",
      quality);
  if (const std::optional<plan::Measured>& m = plan.summary.measured)
    text += fmt::format("\nmeasured mean KL {:.4e}{} nats, PPL ratio {:.5f}{}, on {} of {}", m->kld, m->has_error() ? fmt::format(" +- {:.1e}", m->kld_se) : "",
                        m->ppl_ratio, m->has_error() ? fmt::format(" +- {:.5f}", m->ppl_ratio_se) : "", counted(m->n_documents, "document"),
                        counted(m->n_tokens, "token"));
  return text;
}

std::string bits_bar(int bits) {
  std::string bar(static_cast<std::size_t>(bits / 2), '#');
  if (bits % 2 == 1) bar += '-';
  bar.resize(8, '.');
  return bar;
}

std::string limit_text(const plan::Request& r) {
  if (!r.uniform.empty()) return "uniform " + r.uniform;
  if (!r.imported.empty()) return "imported from " + r.imported;
  if (!r.profile.empty()) return "profile " + r.profile;
  const bool plain = !r.budget.empty() && r.budget.find_first_not_of("0123456789.") == std::string::npos;
  return plain ? r.budget + " effective bits" : r.budget;
}

}  // namespace calib::tools
