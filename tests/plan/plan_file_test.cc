#include "libcalib/artifacts/plan_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <locale>

#include <nlohmann/json.hpp>

#include "kernels/core/plan_constants.h"
#include "libcalib/plan/planner.h"
#include "libcalib/plan/verify.h"
#include "synthetic_sens.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace calib::artifacts {
namespace {

using nlohmann::json;
using test::expect_error;
using testing::HasSubstr;

plan::Plan searched_plan(int n_layers = 3) {
  plan::SearchRequest request;
  request.limits.budget = plan::parse_budget("5");
  request.limit_text = "5";
  plan::EvidenceByLayer evidence;
  for (int l = 0; l < n_layers; ++l) evidence[l] = {14.2, 3.0, 2.0, 0.4, 1.5, 0.1};
  plan::Plan p = plan::search_plan(
      plan_test::synthetic_sens(plan_test::tiny_model(n_layers), {"bf16", "fp8e4m3.head", "int8.token.g", "int4.token.g64.center.had", "int4.channel.g64.pre"},
                                {0, 32}, [](int l, Side s) { return std::exp(2 * std::sin(3.7 * l + (s == Side::kK ? 1 : 0))); }),
      evidence, request);
  p.provenance = {"kvplan", "0.1.0", {"kvplan", "--budget", "5"}, "2026-01-01T00:00:00Z", 0.25, 0, "cpu", "fp64", {{"sens", std::string(64, 'c')}}};
  return p;
}

/// fp8-vllm with clip_hi of every unit as given.
plan::Plan fp8_plan(float clip_hi = 18.265625f) {
  plan::Plan p = plan::uniform_plan(plan_test::tiny_model(3), quant::resolve_preset("fp8-vllm", 64), plan::Accounting{}, {},
                                    [=](const LayerGeometry&, Side, const kvrt::Scheme&, std::vector<std::string>*) {
                                      quant::SchemeParams params;
                                      params.clip_hi = {clip_hi};
                                      return params;
                                    });
  return p;
}

class PlanFile : public testing::Test {
 protected:
  std::string path() const { return folder_.file("plan.json"); }
  std::string text() const { return test::read_file(path()); }
  json document() const { return json::parse(text()); }
  void put(const json& document) const { test::write_file(path(), document.dump()); }
  /// The plan's text with one piece of it replaced.
  void replace(const std::string& from, const std::string& to) const {
    std::string all = text();
    const std::size_t at = all.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    all.replace(at, from.size(), to);
    test::write_file(path(), all);
  }
  plan::Plan read() const { return read_plan(path()); }

  test::TempFolder folder_;
};

// Every kind of constant, int32 included, comes back; each with the shape that its scheme asks for.
TEST_F(PlanFile, ConstantsOfEveryKindComeBack) {
  const plan::FitUnit fit = [](const LayerGeometry& layer, Side, const kvrt::Scheme& scheme, std::vector<std::string>*) {
    quant::SchemeParams params;
    for (const kvrt::PlanConstant& c : kvrt::plan_constants(scheme, layer.n_kv_heads, layer.head_dim))
      for (std::int64_t i = 0; i < c.count(); ++i) params.find(c.name)->push_back(c.integer ? static_cast<float>(i % layer.head_dim) : 0.5f + static_cast<float>(i));
    return params;
  };
  for (const char* pair : {"int4.channel.static.pre.center.ef:int8.tensor", "int3.token.g.smooth.had.ef:nvfp4", "sint8.head:fp8e4m3.head"}) {
    const plan::Plan a = plan::uniform_plan(plan_test::tiny_model(2), quant::resolve_preset(pair, 64), plan::Accounting{}, {}, fit);
    write_plan(a, path());
    const plan::Plan b = read();
    EXPECT_THAT(plan::verify_plan(b), testing::IsEmpty()) << pair;
    for (std::size_t l = 0; l < 2; ++l) {
      EXPECT_FALSE(a.layers[l].k.params.empty());
      EXPECT_EQ(a.layers[l].k.params, b.layers[l].k.params) << pair;
      EXPECT_EQ(a.layers[l].v.params, b.layers[l].v.params) << pair;
    }
  }
}

TEST_F(PlanFile, RoundTrip) {
  const plan::Plan a = searched_plan();
  write_plan(a, path());
  const plan::Plan b = read();
  EXPECT_THAT(plan::verify_plan(b), testing::IsEmpty());
  plan::check_same_model(a.model, "a", b.model, "b");
  ASSERT_EQ(a.layers.size(), b.layers.size());
  for (std::size_t l = 0; l < a.layers.size(); ++l)
    for (const Side side : {Side::kK, Side::kV}) {
      const plan::UnitPlan &x = a.layers[l].unit(side), &y = b.layers[l].unit(side);
      EXPECT_EQ(x.scheme, y.scheme);
      EXPECT_EQ(x.params, y.params);
      EXPECT_EQ(x.chan_perm, y.chan_perm);
      ASSERT_EQ(x.why.size(), y.why.size());
      for (std::size_t i = 0; i < x.why.size(); ++i) EXPECT_EQ(x.why[i].text, y.why[i].text);
    }
  EXPECT_EQ(a.summary.bytes, b.summary.bytes);
  EXPECT_EQ(a.summary.predicted->score, b.summary.predicted->score);
  EXPECT_EQ(a.frontier.size(), b.frontier.size());
  EXPECT_EQ(a.baselines.size(), b.baselines.size());
  ASSERT_EQ(a.fallback.size(), b.fallback.size());
  for (std::size_t r = 0; r < a.fallback.size(); ++r) EXPECT_EQ(a.fallback[r].changes.size(), b.fallback[r].changes.size());
  EXPECT_EQ(b.provenance.parents, a.provenance.parents);
  // Writing what was read gives the same bytes.
  const std::string first = text(), tensors = test::read_file(plan_tensor_path(path()));
  write_plan(b, path());
  EXPECT_EQ(text(), first);
  EXPECT_EQ(test::read_file(plan_tensor_path(path())), tensors);
  EXPECT_THAT(plan_schema_problems(path()), testing::IsEmpty());
}

TEST_F(PlanFile, NoTensorFileWithoutConstants) {
  write_plan(plan::uniform_plan(plan_test::tiny_model(2), quant::resolve_preset("kivi4", 64), plan::Accounting{}, {}, {}), path());
  EXPECT_FALSE(std::filesystem::exists(plan_tensor_path(path())));
  EXPECT_EQ(read().window_tokens, 128);
  EXPECT_THAT(plan_schema_problems(path()), testing::IsEmpty());
}

TEST_F(PlanFile, TensorsMustBeThePlansOwn) {
  write_plan(searched_plan(), path());
  const std::string tensors = plan_tensor_path(path());
  std::string bytes = test::read_file(tensors);
  bytes.back() ^= 1;
  test::write_file(tensors, bytes);
  expect_error([&] { read(); }, ErrorKind::kMismatch, {"plan.safetensors", "sha256"});
  std::filesystem::remove(tensors);
  expect_error([&] { read(); }, ErrorKind::kNotFound, {"plan.safetensors", "/plan.json needs it"});
}

TEST_F(PlanFile, TensorFileNameStaysInTheFolder) {
  write_plan(searched_plan(), path());
  for (const char* name : {"../plan.safetensors", "/etc/passwd", "a/b", "..", "", "a\\\\b", "a\\u0000b"}) {
    std::filesystem::remove(plan_tensor_path(path()));  // the damaged plan no longer names it as its own
    write_plan(searched_plan(), path());
    replace("\"file\": \"plan.safetensors\"", std::string("\"file\": \"") + name + "\"");
    expect_error([&] { read(); }, ErrorKind::kFormat, {"plan.json", "/tensors/file"});
  }
}

// CASES.md PJ-01.
TEST_F(PlanFile, NumbersAreTypedStrictlyAndSpeltFreely) {
  write_plan(fp8_plan(448.0f), path());  // scale 1
  const std::string scale = "\"scale\": 1.0";
  for (const char* spelling : {"1", "1.0", "1e0", "0.1e1"}) {
    write_plan(fp8_plan(448.0f), path());
    replace(scale, std::string("\"scale\": ") + spelling);
    EXPECT_EQ(read().layers[0].k.params.clip_hi.at(0), 448.0f) << spelling;
  }
  for (const char* wrong : {"\"1.0\"", "true", "[1]", "null", "{}"}) {
    write_plan(fp8_plan(448.0f), path());
    replace(scale, std::string("\"scale\": ") + wrong);
    expect_error([&] { read(); }, ErrorKind::kFormat, {"plan.json", "/layers/0/k/params/scale"});
  }
  for (const auto& [spelling, ok] :
       std::vector<std::pair<std::string, bool>>{{"0", true}, {"0.0", true}, {"4.5", false}, {"\"4\"", false}, {"-1", false}, {"true", false}}) {
    write_plan(fp8_plan(448.0f), path());
    replace("\"sink_tokens\": 0", "\"sink_tokens\": " + spelling);
    if (ok) {
      EXPECT_EQ(read().sink_tokens, 0);
      EXPECT_THAT(plan_schema_problems(path()), testing::IsEmpty()) << spelling;
    } else {
      expect_error([&] { read(); }, ErrorKind::kFormat, {"/tiers/sink_tokens"});
      EXPECT_THAT(plan_schema_problems(path()), testing::Contains("/tiers/sink_tokens")) << spelling;
    }
  }
}

// CASES.md QZ-08: one name, two encodings. absmax 18.265625 over 448 and over 240.
TEST_F(PlanFile, ScalesOfTheOtherFp8EncodingAreAMismatch) {
  write_plan(fp8_plan(), path());
  EXPECT_THAT(text(), HasSubstr("\"scale\": 0.040771484375"));
  replace("\"scale\": 0.040771484375", "\"scale\": 0.07610677083333333");
  expect_error([&] { read(); }, ErrorKind::kMismatch, {"fp8e4m3fnuz (largest value 240)", "fp8e4m3.tensor (largest value 448"});
  write_plan(fp8_plan(), path());
  replace("\"scheme\": \"fp8e4m3.tensor\"", "\"scheme\": \"fp8e4m3fnuz.tensor\"");
  expect_error([&] { read(); }, ErrorKind::kUnsupported, {"fp8e4m3fnuz", "fp8e4m3 (largest value 448)"});
}

// CASES.md PJ-02, PJ-03.
TEST_F(PlanFile, IndependentOfTheGlobalLocale) {
  struct Comma : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
  };
  write_plan(fp8_plan(), path());
  const std::string classic = text();
  EXPECT_THAT(classic, HasSubstr("\"scale\": 0.040771484375"));
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new Comma));
  write_plan(fp8_plan(), path());
  EXPECT_EQ(text(), classic);
  EXPECT_EQ(read().layers[2].v.params.clip_hi.at(0), 18.265625f);
  std::locale::global(before);
}

// CASES.md PJ-04.
TEST_F(PlanFile, NoNumberThatIsNone) {
  for (const char* wrong : {"null", "NaN", "\"NaN\"", "Infinity", "1e999", "-0", "-0.0", "1e-400", "-1"}) {
    std::filesystem::remove(plan_tensor_path(path()));
    write_plan(fp8_plan(448.0f), path());
    replace("\"scale\": 1.0", std::string("\"scale\": ") + wrong);
    expect_error([&] { read(); }, ErrorKind::kFormat, {"plan.json"});
  }
  plan::Plan p = fp8_plan();
  p.summary.predicted = plan::Prediction{"fisher_vec", std::nan(""), 0, true, true};
  std::filesystem::remove(path());
  std::filesystem::remove(plan_tensor_path(path()));
  expect_error([&] { write_plan(p, path()); }, ErrorKind::kNumeric, {"/summary/predicted/score"});
  p = fp8_plan();
  p.layers[1].v.params.clip_hi[0] = INFINITY;
  expect_error([&] { write_plan(p, path()); }, ErrorKind::kNumeric, {});
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));  // neither file, nothing temporary
}

// CASES.md PJ-05.
TEST_F(PlanFile, BytesFromOutsideBecomeValidUtf8) {
  plan::Plan p = fp8_plan();
  p.model.name = std::string("mo\xFF\xFE") + "del \xC3\x28 \"quoted\" \xE2\x80\xA8";
  p.provenance.argv = {"kvplan", "\xC3\x28"};
  write_plan(p, path());
  EXPECT_THAT(read().model.name, HasSubstr("mo\uFFFD\uFFFDdel \uFFFD( \"quoted\" \u2028"));
}

// CASES.md PJ-06.
TEST_F(PlanFile, VersionLaw) {
  write_plan(fp8_plan(), path());
  json d = document();
  d.erase("schema");
  put(d);
  expect_error([&] { read(); }, ErrorKind::kVersion, {"/schema", "version 1"});
  d = document();
  d["schema"] = {{"name", "kvcalib.plan"}};
  put(d);
  expect_error([&] { read(); }, ErrorKind::kVersion, {"/schema/version", "1 to 1"});
  d["schema"]["version"] = 2;
  put(d);
  expect_error([&] { read(); }, ErrorKind::kVersion, {"/schema/version is 2", "1 to 1"});
  d["schema"] = {{"name", "kvcalib.eval"}, {"version", 1}};
  put(d);
  expect_error([&] { read(); }, ErrorKind::kFormat, {"/schema/name", "kvcalib.eval"});
}

TEST_F(PlanFile, UnknownFieldsWarnAndAreKept) {
  write_plan(searched_plan(), path());
  json d = document();
  d["future"] = {{"a", {1, 2.5}}};
  d["layers"][1]["k"]["colour/~"] = "blue";
  d["tiers"]["extra"] = nullptr;
  std::reverse(d["layers"].begin(), d["layers"].end());  // shuffled layers are fine, and fields follow their layer
  put(d);
  std::vector<std::string> warnings;
  LogSink log;
  log.warning = [&](const std::string& w) { warnings.push_back(w); };
  const plan::Plan p = read_plan(path(), log);
  EXPECT_THAT(warnings, testing::UnorderedElementsAre(HasSubstr("/future"), HasSubstr("/layers/1/k/colour~1~0"), HasSubstr("/tiers/extra")));
  write_plan(p, path());
  d = document();
  EXPECT_EQ(d["future"]["a"], json({1, 2.5}));
  EXPECT_EQ(d["layers"][1]["index"], 1);
  EXPECT_EQ(d["layers"][1]["k"]["colour/~"], "blue");
  EXPECT_TRUE(d["tiers"].contains("extra"));
}

TEST_F(PlanFile, LayerListFaults) {
  write_plan(searched_plan(), path());
  const json good = document();
  const auto fails = [&](const std::function<void(json&)>& change, const std::vector<std::string>& parts) {
    json d = good;
    change(d);
    put(d);
    expect_error([&] { read(); }, ErrorKind::kFormat, parts);
  };
  fails([](json& d) { d["layers"].erase(2); }, {"/layers", "layer 2"});
  fails([](json& d) { d["layers"][2] = d["layers"][1]; }, {"/layers/2/index"});
  fails([](json& d) { d["layers"][2]["index"] = "2"; }, {"/layers/2/index"});
  fails([](json& d) { d["layers"][2]["index"] = 7; }, {"/layers/2/index"});
  fails([](json& d) { d["layers"][0]["k"]["scheme"] = "int4.token.g32.foo"; }, {"/layers/0/k/scheme", "foo"});
  fails([](json& d) { d["layers"][0]["v"]["scheme"] = "int4.token.g48"; }, {"/layers/0/v/scheme", "48", "head_dim 64"});
  fails([](json& d) { d["layers"][0]["v"]["scheme"] = "int4.channel.g64.pre"; }, {"/layers/0/v/scheme"});
  fails([](json& d) { d["layers"][0]["k"]["bits"] = 3; }, {"/layers/0/k/bits is 3"});
  fails([](json& d) { d["layers"][0]["v"].erase("params"); }, {"/layers/0/v/params is missing"});
  fails([](json& d) { d["layers"][0]["k"]["frame"] = "sideways"; }, {"/layers/0/k/frame is \"sideways\", expected \"p"});
  fails([](json& d) { d["runtime"]["rope"][0]["rotary_width"] = 32; }, {"/runtime/rope/0/rotary_width is 32, expected 64 (as /model/layers says)"});
  fails([](json& d) { d["runtime"]["rope"][0]["inv_freq"][3] = 7.5; }, {"/runtime/rope/0/inv_freq/3 is 7.5, expected 0."});
  fails([](json& d) { d["runtime"]["rope"][0]["layers"].erase(1); }, {"/runtime/rope/0/layers has 2 elements, expected 3"});
  fails([](json& d) { d["runtime"]["rope"][0].erase("layout"); }, {"/runtime/rope/0/layout is missing, expected \"half_split\""});
  fails([](json& d) { d["runtime"]["rope"][0] = nullptr; }, {"/runtime/rope/0 is null, expected an object of 5"});
  fails([](json& d) { d["runtime"]["page_tokens"] = 48; }, {"/runtime/page_tokens is 48"});
  fails([](json& d) { d["fallback"][0]["changes"][0]["side"] = "q"; }, {"/fallback/0/changes/0/side"});
  fails([](json& d) { d["model"]["layers"] = json::array(); }, {"/model/layers"});
  fails([](json& d) { d["layers"] = "none"; }, {"/layers"});
  fails([](json& d) { d["request"]["context_tokens"] = INT64_MAX; }, {"/request", "beyond what can be counted"});
  fails([](json& d) { d["layers"][0]["window_tokens"] = INT64_MAX; }, {"/request", "beyond what can be counted"});
  put(good);
  read();
}

TEST_F(PlanFile, TextFaults) {
  write_plan(fp8_plan(), path());
  const std::string good = text();
  replace("\"sink_tokens\": 0", "\"sink_tokens\": 0, \"sink_tokens\": 4");
  expect_error([&] { read(); }, ErrorKind::kFormat, {"plan.json", "sink_tokens"});
  test::write_file(path(), std::string(200, '[') + std::string(200, ']'));
  expect_error([&] { read(); }, ErrorKind::kFormat, {"plan.json"});
  for (std::size_t cut = 0; cut < good.size(); cut += 97) {
    test::write_file(path(), good.substr(0, cut));
    expect_error([&] { read(); }, ErrorKind::kFormat, {"plan.json"});
  }
  // Every single byte damaged: an error of the file, or a plan (digits of provenance and the like), nothing else.
  for (std::size_t i = 0; i < good.size(); i += 13) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x15);
    test::write_file(path(), bad);
    try {
      read();
    } catch (const Error& e) {
      EXPECT_NE(e.kind(), ErrorKind::kInternal) << i << ' ' << e.what();
    }
  }
  expect_error([&] { read_plan(folder_.file("absent.json")); }, ErrorKind::kNotFound, {"absent.json", "kvplan writes plans"});
}

TEST_F(PlanFile, LargePlansReadFast) {
  write_plan(searched_plan(512), path());
  EXPECT_GT(std::filesystem::file_size(path()), 2u << 20);
  EXPECT_LT(test::seconds_of([&] { read(); }), 1.0);
}

TEST_F(PlanFile, ExamplesOfTheSchema) {
  const std::string examples = std::string(CALIB_SOURCE_DIR) + "/schemas/examples";
  int n_valid = 0, n_invalid = 0;
  for (const auto& entry : std::filesystem::directory_iterator(examples + "/valid")) {
    const std::string file = entry.path().string();
    if (entry.path().extension() != ".json" || entry.path().filename().string().rfind("plan", 0) != 0) continue;
    ++n_valid;
    EXPECT_THAT(plan_schema_problems(file), testing::IsEmpty()) << file;
    EXPECT_THAT(plan::verify_plan(read_plan(file)), testing::IsEmpty()) << file;
  }
  for (const auto& entry : std::filesystem::directory_iterator(examples + "/invalid")) {
    const std::string file = entry.path().string();
    if (entry.path().extension() != ".json" || entry.path().filename().string().rfind("plan", 0) != 0) continue;
    ++n_invalid;
    bool refused = false;
    try {
      refused = !plan_schema_problems(file).empty();
    } catch (const Error&) {
      refused = true;  // not JSON at all
    }
    EXPECT_TRUE(refused) << file;
    try {
      read_plan(file);
      ADD_FAILURE() << file << " was read";
    } catch (const Error& e) {
      EXPECT_EQ(exit_code(e.kind()), 4) << file << ": " << e.what();
    }
  }
  EXPECT_GE(n_valid, 2);
  EXPECT_GE(n_invalid, 5);
}

}  // namespace
}  // namespace calib::artifacts
