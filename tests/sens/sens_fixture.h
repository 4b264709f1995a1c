#pragma once
// A tiny model on disk, opened, with documents, for the tests of sweep and evaluate.

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "libcalib/base/rng.h"
#include "libcalib/base/thread_pool.h"
#include "libcalib/model/streaming_model.h"
#include "libcalib/sens/sweep.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib::sens::test_fixture {

struct OpenModel {
  explicit OpenModel(const test::TinyModel& tiny) : model(open(tiny)) {}
  model::StreamingModel open(const test::TinyModel& tiny) {
    test::write_hf_folder(tiny, folder.file("m"));
    model::ModelOptions options;
    options.n_threads = 1;  // the tiny matrices of these models gain nothing from more
    return model::StreamingModel::open(folder.file("m"), options);
  }
  test::TempFolder folder;
  model::StreamingModel model;
};

inline std::vector<text::Document> random_documents(std::size_t n, std::size_t length, std::int64_t vocab, std::uint64_t seed = 1) {
  std::vector<text::Document> documents(n);
  for (std::size_t d = 0; d < n; ++d) {
    Rng rng = Rng::for_item(seed, d);
    for (std::size_t t = 0; t < length; ++t) documents[d].ids.push_back(static_cast<text::TokenId>(rng.below(static_cast<std::uint64_t>(vocab))));
  }
  return documents;
}

/// No scheme of the tests that use it needs constants.
inline ParamsProvider no_params() {
  return [](std::size_t, Side, const kvrt::Scheme& scheme, std::int64_t) -> quant::SchemeParams {
    fail(ErrorKind::kUsage, kvrt::to_string(scheme), "needs calibrated numbers");
  };
}

struct Grid {
  std::vector<std::string> k, v;
  std::vector<int> layers;
};

inline SensResult sweep(const model::StreamingModel& model, const std::vector<text::Document>& documents, const Grid& grid, SweepOptions options) {
  ThreadPool pool(1);
  SensResult result;
  result.model = model.identity();
  result.n_sinks = options.n_sinks;
  lay_out_grid({"custom", grid.k, grid.v}, grid.layers, &result, {});
  run_sweep(model, documents, options, no_params(), pool, &result);
  return result;
}

/// Mean of a metric; window number w.
inline double score(const SensResult& r, const std::string& metric, int layer, Side side, const std::string& scheme, std::size_t w = 0) {
  for (std::size_t u = 0; u < r.units.size(); ++u)
    for (std::size_t s = 0; s < r.schemes.size(); ++s)
      if (r.units[u].layer == layer && r.units[u].side == side && r.schemes[s] == scheme) return r.scores.at(metric).mean[r.index(u, s, w)];
  ADD_FAILURE() << "no such score: layer " << layer << " " << scheme;
  return 0;
}

}  // namespace calib::sens::test_fixture
