#include "libcalib/sens/retrieval.h"

#include <algorithm>

#include <c10/core/GradMode.h>

#include "libcalib/sens/joint_run.h"

namespace calib::sens {
namespace {

/// [run][case]: answers found; runs[0] is null, the reference.
std::vector<std::vector<std::int64_t>> count_hits(const model::StreamingModel& model, const std::vector<RetrievalCase>& cases,
                                                  const std::vector<const Contender*>& runs, const EvaluateOptions& options, ThreadPool& pool,
                                                  const EvaluateProgressFn& progress) {
  const c10::NoGradGuard no_grad;
  const std::vector<text::Document> documents = documents_of(cases);
  std::vector<WalkRun> walk_runs;
  for (const Contender* run : runs) walk_runs.push_back({run, options.query_tile, options.packed && run != nullptr});
  JointWalk walk(model, documents, std::move(walk_runs), options.hidden_memory_bytes, pool, progress);
  walk.through_blocks();
  const auto head = model.load_head();
  std::vector<std::vector<std::int64_t>> hits(runs.size(), std::vector<std::int64_t>(cases.size(), 0));
  for (std::size_t r = 0; r < runs.size(); ++r)
    for (std::size_t d = 0; d < cases.size(); ++d) {
      const at::Tensor x = walk.states(r, d);
      for (const RetrievalAnswer& a : cases[d].answers) {
        const auto chosen = greedy_choices(*head, x.slice(0, a.first - 1, a.end - 1), runs[r] ? runs[r]->header.name : "reference");
        hits[r][d] += std::equal(chosen.begin(), chosen.end(), documents[d].ids.begin() + a.first) ? 1 : 0;
      }
      walk.advance(static_cast<std::int64_t>(documents[d].ids.size()));
    }
  return hits;
}

EvalRetrieval by_cell(const std::vector<RetrievalCase>& cases, const std::vector<std::int64_t>& hits) {
  EvalRetrieval out;
  for (std::size_t d = 0; d < cases.size(); ++d) {
    const auto length = static_cast<std::int64_t>(cases[d].document.ids.size());
    if (out.cells.empty() || out.cells.back().length != length || out.cells.back().depth != cases[d].depth) out.cells.push_back({length, cases[d].depth, 0, 0});
    out.cells.back().n += static_cast<std::int64_t>(cases[d].answers.size());
    out.cells.back().hits += hits[d];
  }
  return out;
}

}  // namespace

void retrieve(const model::StreamingModel& model, const std::vector<RetrievalCase>& cases, const std::vector<Contender>& contenders,
              const EvaluateOptions& options, ThreadPool& pool, EvalResult* result, const LogSink& log, const EvaluateProgressFn& progress) {
  CALIB_CHECK(!cases.empty() && contenders.size() == result->contenders.size());
  check_retrieval(cases, contenders);
  std::vector<const Contender*> runs = {nullptr};
  for (const Contender& c : contenders) runs.push_back(&c);
  const auto hits = count_hits(model, cases, runs, options, pool, progress);
  result->reference_retrieval = by_cell(cases, hits[0]);
  for (std::size_t c = 0; c < contenders.size(); ++c) {
    EvalRetrieval& out = result->contenders[c].retrieval.emplace(by_cell(cases, hits[c + 1]));
    out.pass = retrieval_passes(*result->reference_retrieval, out);
  }
  for (std::string& text : retrieval_warnings(*result, cases)) warn(result, log, std::move(text));
}

EvaluateEstimate estimate_retrieval(const model::StreamingModel& model, const std::vector<RetrievalCase>& cases, std::size_t n_contenders,
                                    const EvaluateOptions& options) {
  return estimate_walk(model, documents_of(cases), n_contenders + 1, options);
}

}  // namespace calib::sens
