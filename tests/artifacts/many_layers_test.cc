// CASES.md H5-05: limits of a container format that only large models hit.

#include <gtest/gtest.h>

#include "libcalib/artifacts/stats_file.h"
#include "tests/artifacts/example_artifacts.h"
#include "tests/support/temp_folder.h"

namespace calib::artifacts {
namespace {

using stats::LayerStats;
using test::TempFolder;

TEST(StatsFile, ManyLayers) {
  const TempFolder folder;
  ModelIdentity model = test::example_model(512, 1, 1, 16);
  StatsFile s = test::example_stats(test::example_model(1, 1, 1, 16), 1, 1, 70);
  s.header.model = model;
  s.header.provenance.argv.assign(10000, "word");
  for (std::size_t i = 1; i < model.layers.size(); ++i) {
    LayerStats layer(model.layers[i], 4);
    layer.k_pre = s.layers[0].k_pre;
    layer.v = s.layers[0].v;
    s.layers.push_back(layer);
  }
  write_stats_file(folder.file("a.h5"), s);
  const StatsReader reader(folder.file("a.h5"));
  EXPECT_EQ(reader.n_layers(), 512u);
  EXPECT_EQ(reader.header().provenance.argv.size(), 10000u);
  EXPECT_EQ(reader.layer(511).geometry().index, 1022);
  EXPECT_EQ(reader.layer(511).v.body.n_tokens(), 66);
}

}  // namespace
}  // namespace calib::artifacts
