#include "libcalib/quant/scheme.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "layer_stats.h"

namespace calib::quant {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;

Error error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e;
  }
  ADD_FAILURE() << "accepted";
  return Error(ErrorKind::kInternal, "", "");
}

// CASES.md PL-02.
TEST(Scheme, BadPartsAreNamed) {
  for (const char* text : {"channel.g48", "int4.channel.g48", "int4.token.g0", "int4.token.g32.foo", "nvfp4.channel.g32", "int4", "", "INT4.token.g32"}) {
    const Error e = error_of([&] { parse_scheme(text); });
    EXPECT_EQ(e.kind(), ErrorKind::kUsage) << text;
    EXPECT_EQ(e.where(), text);
  }
  EXPECT_THAT(error_of([] { parse_scheme("int4.token.g32.foo"); }).what(), HasSubstr("foo"));
}

TEST(Scheme, ShapesAgainstTheModel) {
  for (const int head_dim : {96, 80, 100, 72}) {
    const Error e = error_of([&] { check_scheme(parse_scheme("int4.token.g64"), quant_test::geometry(2, head_dim), Side::kV); });
    EXPECT_EQ(e.kind(), ErrorKind::kUsage);
    EXPECT_THAT(e.what(), HasSubstr("token.g64"));
    EXPECT_THAT(e.what(), HasSubstr(fmt::format("head_dim {}", head_dim)));
  }
  check_scheme(parse_scheme("int4.token.g48"), quant_test::geometry(2, 96), Side::kK);
  EXPECT_EQ(error_of([] { check_scheme(parse_scheme("int4.channel.g32.pre"), quant_test::geometry(), Side::kV); }).kind(), ErrorKind::kUsage);
  LayerGeometry no_rope = quant_test::geometry();
  no_rope.rope_style = RopeStyle::kNone;
  EXPECT_THAT(error_of([&] { check_scheme(parse_scheme("int4.channel.g32.pre"), no_rope, Side::kK); }).what(), HasSubstr("RoPE"));
}

TEST(Scheme, LowRankIsScoredWhereItFits) {
  check_scheme(parse_scheme("int4.token.g.lowrank8"), quant_test::geometry(2, 128), Side::kV);
  check_scheme(parse_scheme("lm4.token.g16.pre.lowrank48"), quant_test::geometry(2, 128), Side::kK);
  struct Row { const char* scheme; Side side; const char* part; };
  for (const Row& r : {Row{"int4.token.g.pre.lowrank129", Side::kK, "wider than head_dim 128"}, Row{"int4.token.g32.lowrank48", Side::kV, "does not divide rank 48"},
                       Row{"int4.token.g.lowrank32", Side::kK, "needs 'pre'"}, Row{"int4.token.g.pre.lowrank32", Side::kV, "for keys only"}}) {
    const Error e = error_of([&] { check_scheme(parse_scheme(r.scheme), quant_test::geometry(2, 128), r.side); });
    EXPECT_EQ(e.kind(), ErrorKind::kUsage) << r.scheme;
    EXPECT_THAT(e.what(), HasSubstr(r.part));
  }
  // Off by default.
  const CandidateList list = resolve_candidates("default");
  for (const std::vector<std::string>* side : {&list.k, &list.v})
    for (const std::string& text : *side) EXPECT_EQ(parse_scheme(text).lowrank, 0) << text;
}

TEST(Scheme, TheOtherFp8EncodingIsUnsupported) {  // CASES.md QZ-08
  const std::function<void()> calls[] = {[] { parse_scheme("fp8e4m3fnuz.head"); }, [] { resolve_candidates("fp8e4m3fnuz.head"); },
                                         [] { resolve_preset("fp8e4m3fnuz.head", 64); }, [] { resolve_preset("bf16:fp8e5m2fnuz.tensor", 64); }};
  for (const auto& call : calls) {
    const Error e = error_of(call);
    EXPECT_EQ(exit_code(e.kind()), 7);
    EXPECT_THAT(e.what(), HasSubstr("another encoding than fp8e"));
  }
}

TEST(Scheme, PairsNeedRopeThatMapsGroupsOntoGroups) {
  check_scheme(parse_scheme("int4.channel.g64.pre.clip.out1.pair.ef"), quant_test::geometry(), Side::kK);
  check_scheme(parse_scheme("int4.token.g32.pair"), quant_test::geometry(), Side::kK);
  check_scheme(parse_scheme("int4.token.g.ef"), quant_test::geometry(), Side::kV);
  LayerGeometry partial = quant_test::geometry();
  partial.rotary_dim = 48;
  const Error e = error_of([&] { check_scheme(parse_scheme("int4.token.g32.pair"), partial, Side::kK); });
  EXPECT_EQ(e.kind(), ErrorKind::kUsage);
  EXPECT_THAT(e.what(), HasSubstr("groups of 32"));
  partial.rope_style = RopeStyle::kNone;
  EXPECT_THAT(error_of([&] { check_scheme(parse_scheme("int4.channel.g32.pair"), partial, Side::kK); }).what(), HasSubstr("`pair` needs RoPE"));
}

TEST(Presets, TheRuntimeKeepsACacheInEach) {
  for (const Preset& p : presets())
    for (const std::string& text : {p.k, p.v}) EXPECT_EQ(kvrt::check_implemented(parse_scheme(text)), "") << p.name;
}

TEST(Presets, EveryNameResolvesAndParses) {
  std::set<std::string> names;
  for (const Preset& p : presets()) {
    EXPECT_TRUE(names.insert(p.name).second) << p.name;
    const Preset found = resolve_preset(p.name, 128);
    EXPECT_EQ(kvrt::to_string(parse_scheme(found.k)), found.k) << p.name;
    EXPECT_EQ(kvrt::to_string(parse_scheme(found.v)), found.v) << p.name;
  }
  for (const char* name : {"fp8-vllm", "fp8-head", "int8-token", "int8-channel", "int4-gqa", "flexgen4", "smoothattention4", "kivi4", "kivi2",
                           "kvquant4", "kvquant3", "kvquant2", "kvquant4-1pct", "kvquant3-1pct", "kvquant2-1pct", "quarot4", "llamacpp-q8_0",
                           "llamacpp-q8_0-had", "llamacpp-q4_0", "llamacpp-q4_0-had", "turboquant4", "turboquant3", "nvfp4", "bf16"})
    EXPECT_TRUE(names.count(name)) << name;
  EXPECT_EQ(resolve_preset("kvquant3-1pct", 128).k, "nuq3.channel.static.pre.out1");
  const Preset llama = resolve_preset("llamacpp-q4_0-had", 64);
  EXPECT_EQ(llama.k, "q4_0.had");
  EXPECT_EQ(llama.n_sinks, 0);
  EXPECT_EQ(llama.window, 0);
  EXPECT_EQ(resolve_preset("kivi2", 64).n_sinks, 0);
  EXPECT_EQ(resolve_preset("kivi2", 64).window, 128);
}

TEST(Presets, PairsGroupsAndRefusals) {
  const Preset pair = resolve_preset("int4.channel.g64.pre:int3.token.g64.had", 64);
  EXPECT_EQ(pair.k, "int4.channel.g64.pre");
  EXPECT_EQ(pair.v, "int3.token.g64.had");
  EXPECT_EQ(pair.n_sinks, 4);
  EXPECT_EQ(pair.window, 128);
  std::vector<std::string> notes;
  LogSink log;
  log.note = [&](const std::string& text) { notes.push_back(text); };
  EXPECT_EQ(resolve_preset("smoothattention4", 64, log).v, "int4.token.g");
  EXPECT_EQ(notes.size(), 2u);
  const Error importer = error_of([] { resolve_preset("kvtuner", 64); });
  EXPECT_EQ(importer.kind(), ErrorKind::kUsage);
  EXPECT_EQ(importer.where(), "kvtuner");
  EXPECT_THAT(importer.what(), HasSubstr("kvplan import --from kvtuner"));
  const Preset tiered = resolve_preset("tiered4", 128);
  EXPECT_EQ(tiered.k, "int4.token.g128");
  EXPECT_EQ(resolve_preset("tiered4", 64).v, "int4.token.g");
  EXPECT_EQ(tiered.window, 2);
  EXPECT_EQ(tier_text(tiered.salient_fraction, tiered.salient), ", salient 0.2 at fp8e4m3.token.g");
  EXPECT_EQ(tier_text(0, "fp8e4m3.token.g"), "");
  EXPECT_THAT(error_of([] { resolve_preset("kivi5", 64); }).what(), HasSubstr("kivi4"));
  EXPECT_EQ(error_of([] { resolve_preset("kivi5", 64); }).kind(), ErrorKind::kUsage);
  EXPECT_THAT(error_of([] { resolve_preset("int4.token.g", 64); }).what(), HasSubstr("int4.token.g:int4.token.g"));
  EXPECT_EQ(error_of([] { resolve_preset("int4.token.g:foo", 64); }).kind(), ErrorKind::kUsage);
}

TEST(CandidateLists, DefaultsHoldEachStringOnce) {
  EXPECT_EQ(resolve_candidates("default").name, "default-2");
  EXPECT_EQ(resolve_candidates("default").k, resolve_candidates("default-2").k);
  for (const auto& [name, n_k, n_v] : {std::tuple("default-1", 19u, 15u), std::tuple("default-2", 40u, 18u)}) {
    const CandidateList list = resolve_candidates(name);
    EXPECT_EQ(list.name, name);
    EXPECT_EQ(list.k.size(), n_k);
    EXPECT_EQ(list.v.size(), n_v);
    for (const auto* side : {&list.k, &list.v}) {
      EXPECT_EQ(std::set<std::string>(side->begin(), side->end()).size(), side->size());
      for (const std::string& text : *side) {
        const kvrt::Scheme scheme = parse_scheme(text);
        EXPECT_EQ(kvrt::to_string(scheme), text);
        check_scheme(scheme, quant_test::geometry(3, 64), side == &list.k ? Side::kK : Side::kV);
      }
    }
  }
}

TEST(CandidateLists, DefaultFeedsErrorsBackOnEveryLowKey) {
  const CandidateList list = resolve_candidates("default");
  for (const std::string& text : list.k) {
    kvrt::Scheme scheme = parse_scheme(text);
    const int bits = kvrt::code_bits(scheme.format);
    if (bits > 4) continue;
    scheme.ef = true;
    EXPECT_NE(std::find(list.k.begin(), list.k.end(), kvrt::to_string(scheme)), list.k.end()) << text;
  }
  for (const std::string& text : list.v) EXPECT_FALSE(parse_scheme(text).ef) << text;
}

// METHODS.md 5.3: a rotation undoes what ranges per channel are for. Legal, and said.
TEST(CandidateLists, RotatedChannelRangesAreWarnedAbout) {
  std::vector<std::string> warnings;
  LogSink log;
  log.warning = [&](const std::string& text) { warnings.push_back(text); };
  resolve_candidates("default", log);
  resolve_candidates("int4.token.g.had,int4.channel.g32", log);
  resolve_preset("quarot4", 64, log);
  EXPECT_TRUE(warnings.empty());
  resolve_candidates("int4.token.g.had,int4.channel.g32.had,int8.channel.static.had", log);
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("int4.channel.g32.had: `had`"), HasSubstr("int8.channel.static.had: `had`")));
  resolve_preset("int3.channel.g64.center.had:int4.token.g", 64, log);
  ASSERT_EQ(warnings.size(), 3u);
  EXPECT_THAT(warnings[2], HasSubstr("int3.channel.g64.center.had: `had`"));
}

TEST(CandidateLists, MixedLists) {
  const CandidateList list = resolve_candidates("int4.token.g32,int3.channel.g64.pre,kivi4,int8.token.g:int2.token.g");
  EXPECT_EQ(list.name, "custom");
  EXPECT_THAT(list.k, ElementsAre("int4.token.g32", "int3.channel.g64.pre", "int4.channel.g32", "int8.token.g"));
  EXPECT_THAT(list.v, ElementsAre("int4.token.g32", "int2.token.g"));
  EXPECT_EQ(error_of([] { resolve_candidates("int4.token.g32,int8.token.g,int4.token.g32"); }).where(), "int4.token.g32");
  EXPECT_EQ(error_of([] { resolve_candidates("int4.token.g32,,bf16"); }).kind(), ErrorKind::kUsage);
  EXPECT_EQ(error_of([] { resolve_candidates("nonsense"); }).kind(), ErrorKind::kUsage);
  EXPECT_EQ(error_of([] { resolve_candidates("target:vllm"); }).kind(), ErrorKind::kUnsupported);
  EXPECT_THAT(resolve_candidates("default-1,int2.token.g").v, Contains("int2.token.g"));
}

}  // namespace
}  // namespace calib::quant
