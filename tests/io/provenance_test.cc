#include "libcalib/io/provenance.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "libcalib/base/json.h"
#include "tests/io/example_identity.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace calib::io {
namespace {

using test::expect_error;

TEST(ProvenanceJson, RoundTrip) {
  const nlohmann::ordered_json out = {{"provenance", provenance_to_json(test::example_provenance())},
                                      {"model", model_to_json(test::example_model())},
                                      {"data", data_to_json(test::example_data())}};
  const std::string text = json_text(out, "f");
  const auto document = parse_json_strict(text, "f");
  const JsonValue root(document, "f");
  test::expect_equal(provenance_from_json(root.at("provenance")), test::example_provenance());
  test::expect_equal(model_from_json(root.at("model")), test::example_model());
  test::expect_equal(data_from_json(root.at("data")), test::example_data());
}

TEST(ProvenanceJson, WrongMembersAreNamed) {
  nlohmann::json model = nlohmann::json::parse(json_text(model_to_json(test::example_model()), "f"));
  model["layers"][1]["rope_style"] = "spiral";
  expect_error([&] { model_from_json(JsonValue(model, "f")); }, ErrorKind::kFormat, {"/layers/1/rope_style", "half_split"});
  model["layers"][1]["rope_style"] = "none";
  model["layers"][0]["head_dim"] = -2;
  expect_error([&] { model_from_json(JsonValue(model, "f")); }, ErrorKind::kFormat, {"/layers/0/head_dim"});
  model["layers"][0].erase("head_dim");
  expect_error([&] { model_from_json(JsonValue(model, "f")); }, ErrorKind::kFormat, {"/layers/0/head_dim is missing"});
}

TEST(ProvenanceH5, RoundTrip) {
  const test::TempFolder folder;
  const std::string path = folder.file("x.h5");
  {
    H5Writer file(path, "kvcalib.stats", 1);
    write_provenance(file, "/provenance", test::example_provenance());
    write_model(file, "/model", test::example_model());
    write_data(file, "/data", test::example_data());
    file.finish();
  }
  const H5Reader file(path, "kvcalib.stats", 1);
  test::expect_equal(read_provenance(file, "/provenance"), test::example_provenance());
  test::expect_equal(read_model(file, "/model"), test::example_model());
  test::expect_equal(read_data(file, "/data"), test::example_data());
}

TEST(ProvenanceH5, GeometryThatCannotBeIsRefused) {
  const test::TempFolder folder;
  const auto refuse = [&](const ModelIdentity& model, const std::string& part) {
    {
      H5Writer file(folder.file("x.h5"), "kvcalib.stats", 1);
      write_model(file, "/model", model);
      file.finish();
    }
    const H5Reader file(folder.file("x.h5"), "kvcalib.stats", 1);
    expect_error([&] { read_model(file, "/model"); }, ErrorKind::kFormat, {part});
  };
  ModelIdentity model = test::example_model();
  model.layers[0].n_kv_heads = 0;
  refuse(model, "0 KV heads");
  model = test::example_model();
  model.layers[1].head_dim = -64;
  refuse(model, "-64");
  model = test::example_model();
  model.layers[1].rotary_dim = 4096;
  refuse(model, "rotary_dim 4096");
}

}  // namespace
}  // namespace calib::io
