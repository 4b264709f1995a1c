#include "libcalib/sens/retrieval.h"

#include <algorithm>
#include <memory>

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
  std::int64_t n_tokens = 0, longest = 0, done = 0;
  for (const text::Document& d : documents) {
    n_tokens += static_cast<std::int64_t>(d.ids.size());
    longest = std::max(longest, static_cast<std::int64_t>(d.ids.size()));
  }
  const std::int64_t total = n_tokens * static_cast<std::int64_t>(runs.size()) * (model.n_layers() + 1);
  const auto advance = [&](std::size_t tokens) {
    done += static_cast<std::int64_t>(tokens);
    if (progress) progress({done, total});
  };
  DocumentStates states(documents, static_cast<std::int64_t>(runs.size()), model.identity().hidden_size, model::tensor_options(model.device(), model.dtype()),
                        options.hidden_memory_bytes);
  std::vector<std::unique_ptr<PackedCache>> packed;
  for (const Contender* run : runs)
    packed.push_back(options.packed && run != nullptr ? std::make_unique<PackedCache>(model.identity(), *run, longest, pool) : nullptr);

  const auto embedding = model.load_embedding();
  for (std::int64_t l = 0; l < model.n_layers(); ++l) {
    const auto layer = static_cast<std::size_t>(l);
    const auto block = model.load_block(l);
    for (std::size_t d = 0; d < documents.size(); ++d) {
      const at::Tensor embedded = l == 0 ? embedding->lookup(documents[d].ids) : at::Tensor{};
      for (std::size_t r = 0; r < runs.size(); ++r) {
        const auto slot = static_cast<std::int64_t>(r);
        const at::Tensor x = l == 0 ? embedded : states.get(slot, d);
        states.put(slot, d,
                   packed[r] ? run_block_packed(*block, x, layer, *packed[r])
                             : run_block(*block, x, runs[r] ? &runs[r]->layers[layer] : nullptr, options.query_tile, pool));
        advance(documents[d].ids.size());
      }
    }
  }
  const auto head = model.load_head();
  std::vector<std::vector<std::int64_t>> hits(runs.size(), std::vector<std::int64_t>(cases.size(), 0));
  for (std::size_t r = 0; r < runs.size(); ++r)
    for (std::size_t d = 0; d < cases.size(); ++d) {
      const at::Tensor x = states.get(static_cast<std::int64_t>(r), d);
      for (const RetrievalAnswer& a : cases[d].answers) {
        const auto chosen = greedy_choices(*head, x.slice(0, a.first - 1, a.end - 1), runs[r] ? runs[r]->header.name : "reference");
        hits[r][d] += std::equal(chosen.begin(), chosen.end(), documents[d].ids.begin() + a.first) ? 1 : 0;
      }
      advance(documents[d].ids.size());
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
