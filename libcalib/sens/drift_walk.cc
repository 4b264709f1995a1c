#include "libcalib/sens/drift_walk.h"

#include <memory>

#include "libcalib/base/error.h"
#include "libcalib/quant/fake_quant.h"

namespace calib::sens {
namespace {

class DriftTap final : public model::LayerTap {
 public:
  DriftTap(const ReferenceLayer& reference, const Contender* plan, ThreadPool& pool) : reference_(reference), plan_(plan), pool_(pool) {}

  void begin_layer(const LayerGeometry& layer) override {
    geometry_ = layer;
    drift_ = std::make_unique<stats::LayerDrift>(reference_(position_));
  }
  void on_document(const model::LayerCapture& capture) override {
    drift_->add_document(capture.tensors, pool_);
    if (!plan_) return;
    const LayerChange& layer = plan_->layers[position_];
    if (layer.k) add_saturation(*layer.k, Side::kK, layer.tiers, capture.tensors, layer.k->scheme.pre ? capture.tensors.k_pre : capture.tensors.k_post);
    if (layer.v) add_saturation(*layer.v, Side::kV, layer.tiers, capture.tensors, capture.tensors.v);
  }
  void end_layer(const LayerGeometry&) override {
    for (stats::UnitDrift& unit : drift_->finish()) units.push_back(std::move(unit));
    drift_.reset();
    ++position_;
  }

  std::vector<stats::UnitDrift> units;

 private:
  void add_saturation(const UnitCandidate& unit, Side side, const kvrt::Tiers& tiers, const stats::DocumentTensors& tensors, const float* x) {
    if (unit.params.clip_lo.empty() && unit.params.clip_hi.empty()) return;
    const std::int64_t row = std::int64_t{geometry_.n_kv_heads} * geometry_.head_dim, n_coded = std::max<std::int64_t>(0, tensors.n_tokens - tiers.n_sinks);
    if (n_coded == 0) return;
    coded_.resize(static_cast<std::size_t>(tensors.n_tokens * row));
    std::int64_t saturated = 0;
    quant::fake_quant_document(unit.scheme, side, geometry_, unit.params, tiers.n_sinks, kvrt::encodes_bf16(tiers), tensors.n_tokens, x, coded_.data(), pool_,
                               &saturated);
    drift_->add_saturation(side, saturated, n_coded * row);
  }

  const ReferenceLayer& reference_;
  const Contender* plan_;
  ThreadPool& pool_;
  LayerGeometry geometry_;
  std::size_t position_ = 0;
  std::unique_ptr<stats::LayerDrift> drift_;
  std::vector<float> coded_;
};

}  // namespace

std::vector<stats::UnitDrift> measure_drift(const model::StreamingModel& model, const std::vector<text::Document>& documents, const ReferenceLayer& reference,
                                            const Contender* plan, const model::RunnerOptions& options, ThreadPool& pool, const model::ProgressFn& progress) {
  DriftTap tap(reference, plan, pool);
  model::RunnerOptions walk = options;
  walk.attention_rows = 0, walk.reference_nll = false;
  model::run_streaming(model, documents, walk, &tap, progress);
  return std::move(tap.units);
}

double unseen_share(const std::vector<text::Document>& documents, const std::vector<std::int64_t>& calibrated_rows) {
  std::int64_t unseen = 0, total = 0;
  for (const text::Document& document : documents) {
    for (std::int64_t t = 0; t < static_cast<std::int64_t>(document.ids.size()); ++t) {
      const auto bucket = static_cast<std::size_t>(position_bucket(t));
      unseen += bucket >= calibrated_rows.size() || calibrated_rows[bucket] == 0 ? 1 : 0, ++total;
    }
  }
  return total > 0 ? static_cast<double>(unseen) / static_cast<double>(total) : 0.0;
}

}  // namespace calib::sens
