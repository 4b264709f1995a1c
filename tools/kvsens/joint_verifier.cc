#include "tools/kvsens/joint_verifier.h"

#include <utility>

#include "kernels/core/layout.h"
#include "libcalib/plan/planner.h"
#include "libcalib/sens/kld_block.h"

namespace calib::tools {

sens::Contender contender_of(const plan::Candidates& candidates, const std::vector<plan::LayerOption>& choice, const std::string& name, const text::Corpus& corpus) {
  const sens::SensResult& sens = candidates.sens();
  sens::Contender out;
  out.header.name = name;
  out.header.kind = "plan";
  out.header.n_sinks = sens.n_sinks;
  out.header.window = sens.windows[choice.front().tier_class];
  for (std::size_t l = 0; l < choice.size(); ++l) {
    const auto unit = [&](Side side, std::size_t scheme) {
      sens::UnitCandidate u{scheme, candidates.scheme(scheme), {}};
      if (kvrt::needs_calibration(u.scheme)) u.params = plan::params_from_sens(sens, sens.model.layers[l], side, sens.schemes[scheme]);
      return u;
    };
    sens::LayerChange layer;
    layer.k = unit(Side::kK, choice[l].k), layer.v = unit(Side::kV, choice[l].v);
    layer.tiers =
        kvrt::finish_tiers(layer.k->scheme, layer.v->scheme, sens.n_sinks, sens.windows[choice[l].tier_class], sens.salient_fraction(choice[l].tier_class));
    if (layer.tiers.block_salient > 0) layer.salient = sens::salient_tier_of(sens, sens.model.layers[l].index);
    out.layers.push_back(std::move(layer));
  }
  if (const std::int64_t interval = candidates.accounting().scale_refresh_tokens; interval > 0) sens::refresh_scales(out.layers, interval);
  check_something_is_coded(out, corpus.longest());
  return out;
}

void check_disjoint(const Inputs& in, const sens::SensResult& sens) {
  if (same_text(in.corpus.identity, sens.data) || same_text(in.corpus.identity, sens.calibration_data) ||
      (sens.isolated && same_text(in.corpus.identity, sens.isolated->data)))
    fail(ErrorKind::kMismatch, "--data", "is the text of the statistics or of the scores; a plan counts as measured only on text that neither has seen");
}

const std::optional<sens::DamageGate>& JointVerifier::gate() {
  if (std::exchange(gate_tried_, true)) return gate_;
  const std::int64_t n_sinks = candidates_.sens().n_sinks;
  std::vector<text::Document> documents = sens::damage_documents(in_.corpus.documents, n_sinks);
  if (documents.empty()) return gate_;
  sens::DamageOptions options;
  options.n_sinks = n_sinks;
  options.seed = settings_.seed;
  options.hidden_memory_bytes = settings_.hidden_memory_bytes;
  PhaseProgress phases(progress_, call_, static_cast<std::int64_t>(damage_passes(in_, n_sinks) * static_cast<double>(in_.corpus.identity.n_tokens)));
  gate_.emplace(*in_.model, std::move(documents), options, pool_, [&](const sens::EvaluateProgress& p) { phases.update("damage curve", p.done, p.total); });
  progress_.clear();
  return gate_;
}

std::vector<sens::EvalDamage> JointVerifier::judge(const std::vector<std::vector<plan::LayerOption>>& choices) {
  if (!gate()) return std::vector<sens::EvalDamage>(choices.size());
  std::vector<sens::Contender> contenders;
  for (const std::vector<plan::LayerOption>& choice : choices) contenders.push_back(contender_of(candidates_, choice, "combination", in_.corpus));
  return gate_->judge(contenders);
}

std::vector<sens::EvalContender> JointVerifier::measure(const std::vector<sens::Contender>& contenders, const std::string& phase) {
  return measure(contenders, phase, settings_);
}

std::vector<sens::EvalContender> JointVerifier::measure(const std::vector<sens::Contender>& contenders, const std::string& phase,
                                                         const sens::EvaluateOptions& settings) {
  PhaseProgress phases(progress_, call_, in_.corpus.identity.n_tokens * static_cast<std::int64_t>(contenders.size() + 3));
  sens::EvalResult result;
  sens::evaluate(*in_.model, in_.corpus.documents, contenders, settings, pool_, &result, log_,
                 [&](const sens::EvaluateProgress& p) { phases.update(phase, p.done, p.total); });
  progress_.clear();
  return std::move(result.contenders);
}

std::vector<plan::Measured> JointVerifier::measure(const std::vector<std::vector<plan::LayerOption>>& choices, const std::string& phase) {
  std::vector<sens::Contender> contenders;
  for (std::size_t i = 0; i < choices.size(); ++i) contenders.push_back(contender_of(candidates_, choices[i], fmt::format("combination {}", i), in_.corpus));
  sens::EvaluateOptions settings = settings_;
  settings.contender_warnings = false;  // many combinations are far from any plan
  std::vector<plan::Measured> out;
  for (const sens::EvalContender& c : measure(contenders, phase, settings)) out.push_back(measured(c));
  return out;
}

plan::Measured JointVerifier::measured(const sens::EvalContender& c) const {
  return {c.total.kld.mean, c.total.kld.se, c.total.ppl_ratio.mean, c.total.ppl_ratio.se, c.total.n_documents, in_.corpus.identity.n_tokens,
          in_.corpus.identity.seq_len, in_.corpus.identity.documents_sha256, sens::length_limit(c.buckets, ppl_ratio_max_)};
}

}  // namespace calib::tools
