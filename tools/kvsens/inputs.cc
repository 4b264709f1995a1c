#include "tools/kvsens/inputs.h"

#include <algorithm>
#include <filesystem>

#include "kernels/core/layout.h"
#include "libcalib/base/plural.h"
#include "libcalib/base/sha256.h"
#include "libcalib/base/utf8.h"
#include "libcalib/model/streaming_runner.h"
#include "libcalib/plan/verify.h"
#include "libcalib/quant/calibrated_params.h"
#include "libcalib/quant/expected_attention.h"
#include "libcalib/sens/damage_curve.h"
#include "tools/common/option_values.h"

namespace calib::tools {
namespace {
sens::UnitCandidate unit_of(const plan::UnitPlan& unit) { return {0, unit.scheme, unit.params}; }
}  // namespace

Inputs open_inputs(const RunOptions& options, const Invocation& call, const LogSink& log) {
  require_model_and_data(options);
  Inputs in;
  in.model.emplace(model::StreamingModel::open(options.model, model_options(options, call), log));
  const auto tokenizer = in.model->load_tokenizer(log);
  in.identity = in.model->identity();
  in.identity.tokenizer_sha256 = tokenizer->sha256();
  in.end_token = tokenizer->eos();
  in.corpus = text::load_corpus(corpus_request(options, in.identity.max_positions), *tokenizer, log);
  in.provenance = {"kvsens", version(), call.argv, call.started_utc, 0.0, static_cast<std::uint64_t>(options.seed), in.model->device(),
                   in.model->dtype(), {}};
  return in;
}

Statistics::Statistics(const std::string& path, const ModelIdentity& model, const std::string& model_name) {
  if (path.empty()) return;
  reader_ = std::make_unique<artifacts::StatsReader>(path);
  plan::check_same_model(reader_->header().model, path, model, model_name);
}

const stats::LayerStats& Statistics::layer(std::size_t i) const {
  if (layer_ == nullptr || layer_idx_ != i) {
    layer_.reset();  // before the next one is read: a layer's sketches are large
    layer_ = std::make_unique<stats::LayerStats>(reader_->layer(i));
    layer_idx_ = i;
  }
  return *layer_;
}

sens::ParamsProvider Statistics::provider() const {
  return [this](std::size_t layer_idx, Side side, const kvrt::Scheme& scheme, std::int64_t n_sinks) {
    if (!given())
      fail(ErrorKind::kUsage, kvrt::to_string(scheme), "needs calibrated numbers: give --stats with a file made by kvcalib for this model");
    const auto key = std::make_tuple(layer_idx, side, kvrt::to_string(scheme), n_sinks);
    auto found = fitted_.find(key);
    if (found == fitted_.end())
      found = fitted_.emplace(key, quant::fit_params(scheme, side, layer(layer_idx), n_sinks, nullptr, std::max<std::int64_t>(header().data.seq_len, 1))).first;
    return found->second;
  };
}

sens::SaliencyProvider Statistics::saliency() const {
  if (!given()) return {};
  return [this](std::size_t layer_idx) { return quant::saliency_factors(layer(layer_idx)); };
}

sens::RotationProvider Statistics::rotations(quant::RotationKind kind) const {
  using Made = std::map<std::pair<std::size_t, Side>, std::shared_ptr<const quant::RowRotation>>;
  return [this, kind, made = std::make_shared<Made>()](std::size_t layer_idx, Side side) {
    if (!given()) fail(ErrorKind::kUsage, "--rotate", "takes its matrices from statistics: give --stats with a file made by kvcalib for this model");
    std::shared_ptr<const quant::RowRotation>& rotation = (*made)[{layer_idx, side}];
    if (rotation == nullptr) rotation = std::make_shared<const quant::RowRotation>(quant::row_rotation(kind, layer(layer_idx), side));
    return rotation;
  };
}

double forward_seconds(const model::StreamingModel& model, const std::vector<text::Document>& documents) {
  return model::estimate_run(model, documents, model::RunnerOptions{}, false).forward_seconds;
}

double forward_seconds(const Inputs& in) { return forward_seconds(*in.model, in.corpus.documents); }

double damage_passes(const Inputs& in, std::int64_t n_sinks) {
  double tokens = 0;
  for (const text::Document& d : sens::damage_documents(in.corpus.documents, n_sinks)) tokens += static_cast<double>(d.ids.size());
  return static_cast<double>(sens::kDamageRuns + 1) * tokens / static_cast<double>(in.corpus.identity.n_tokens);
}

sens::Contender plan_contender(const std::string& path, const plan::Plan& plan, const ModelIdentity& model, const std::string& model_name) {
  plan::check_same_model(plan.model, path, model, model_name);
  if (plan.layers.size() != model.layers.size())
    fail(ErrorKind::kMismatch, path, "plans {}, the model has {} with attention", counted(plan.layers.size(), "layer"), model.layers.size());
  sens::Contender out;
  out.header.name = path;
  out.header.kind = "plan";
  out.header.plan_sha256 = sha256_of_file(path);
  out.header.n_sinks = plan.sink_tokens;
  out.header.window = plan.window_tokens;
  bool uniform = true;
  std::size_t n_tiers = 0;
  for (std::size_t l = 0; l < plan.layers.size(); ++l) {
    const plan::LayerPlan& from = plan.layers[l];
    if (from.index != model.layers[l].index)
      fail(ErrorKind::kMismatch, path, "its layer number {} is {}, the model's is {}", l, from.index, model.layers[l].index);
    sens::LayerChange layer;
    layer.k = unit_of(from.k);
    layer.v = unit_of(from.v);
    layer.tiers = kvrt::finish_tiers(from.k.scheme, from.v.scheme, plan.sink_tokens, plan.window_of(from), from.salient_fraction);
    if (from.salient_fraction > 0) layer.salient = std::make_shared<const quant::SalientTier>(quant::SalientTier{plan.salient->scheme, from.saliency}), ++n_tiers;
    uniform = uniform && from.k.scheme == plan.layers[0].k.scheme && from.v.scheme == plan.layers[0].v.scheme;
    out.layers.push_back(std::move(layer));
  }
  if (plan.scale_refresh_tokens > 0) sens::refresh_scales(out.layers, plan.scale_refresh_tokens);
  if (uniform) {
    out.header.k = kvrt::to_string(plan.layers[0].k.scheme);
    out.header.v = kvrt::to_string(plan.layers[0].v.scheme);
  }
  out.header.description =
      fmt::format("plan of {}, sinks {}, window {}{}{}{}", counted(plan.layers.size(), "layer"), plan.sink_tokens, plan.window_tokens,
                  plan.scale_refresh_tokens > 0 ? fmt::format(", static ranges raised every {}", counted(plan.scale_refresh_tokens, "token")) : "",
                  n_tiers > 0 ? fmt::format(", salient tier at {} in {}", kvrt::to_string(plan.salient->scheme), counted(n_tiers, "layer")) : "",
                  plan.request.budget.empty() ? "" : fmt::format(", budget {}", plan.request.budget));
  out.header.effective_bits_2048 = sens::effective_bits(model, out.layers, 2048);
  out.header.effective_bits_8192 = sens::effective_bits(model, out.layers, 8192);
  return out;
}

void check_something_is_coded(const sens::Contender& contender, std::int64_t longest) {
  for (const sens::LayerChange& layer : contender.layers)
    if (kvrt::blocks_out(layer.tiers, longest) > 0) return;
  fail(ErrorKind::kInfeasible, "--data", "the longest document has {}; {} keeps all of it exact (sinks {}, window {}), so nothing would be "
       "measured; give longer text or a larger --seq-len", counted(longest, "token"), to_valid_utf8(contender.header.name), contender.header.n_sinks,
       contender.header.window);
}

bool same_text(const DataIdentity& a, const DataIdentity& b) {
  if (!a.documents_sha256.empty() && a.documents_sha256 == b.documents_sha256) return true;
  return std::any_of(a.files.begin(), a.files.end(), [&](const DataFile& f) {
    return std::any_of(b.files.begin(), b.files.end(), [&](const DataFile& g) { return !f.sha256.empty() && f.sha256 == g.sha256; });
  });
}

void warn_untested_positions(const ModelIdentity& model, const DataIdentity& data, const LogSink& log) {
  for (const LayerGeometry& layer : model.layers)
    if (layer.sliding_window > 0 && data.seq_len <= layer.sliding_window) {
      log.warning(fmt::format("windows of {} fit into the sliding window of {} (layer {}): late positions are untested", counted(data.seq_len, "token"),
                              counted(layer.sliding_window, "token"), layer.index));
      return;
    }
}

void PhaseProgress::update(const std::string& phase, std::int64_t done, std::int64_t total) {
  throw_if_interrupted();
  if (phase != phase_) {
    phase_ = phase;
    started_ = last_;
    last_tenth_ = -1;
  }
  last_ = call_.seconds();
  const double seconds = std::max(last_ - started_, 1e-9), share = static_cast<double>(done) / static_cast<double>(std::max<std::int64_t>(1, total));
  const std::int64_t tenth = 10 * done / std::max<std::int64_t>(1, total);
  // The first report of a phase may come before any of its work is done; it has no rate yet.
  const double rate = seconds < 0.05 ? 0.0 : static_cast<double>(n_tokens_) * share / seconds;
  progress_.update(phase, done, total, rate, share > 0 ? seconds * (1 - share) / share : 0.0, tenth != last_tenth_);
  last_tenth_ = tenth;
}

}  // namespace calib::tools
