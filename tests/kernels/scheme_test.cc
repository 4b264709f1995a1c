#include "kernels/core/scheme.h"

#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/codec/hadamard_order.h"

namespace kvrt {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

Scheme parse(const std::string& text) {
  Scheme s;
  std::string error;
  EXPECT_TRUE(parse_scheme(text, &s, &error)) << text << ": " << error;
  return s;
}
std::string refusal(const std::string& text) {
  Scheme s;
  std::string error;
  EXPECT_FALSE(parse_scheme(text, &s, &error)) << text;
  return error;
}

std::string quoted(const std::string& part) { return std::string("'").append(part).append("'"); }

// Every string that FORMATS.md 2 spells out: examples, presets, the default candidates.
const std::vector<std::string> kDocumented = {
    "bf16", "fp16", "fp8e4m3.head", "fp8e4m3.tensor", "fp8e5m2.tensor", "fp8e4m3.token.g", "int8.token.g", "int4.token.g",
    "int4.token.g32", "int4.token.g64", "int4.token.g128", "int4.token.g64.had", "int4.token.g32.center.had",
    "int4.token.g64.center.had", "int4.token.g.had", "int4.token.g128.smooth", "int8.channel.static.pre", "int8.channel.g64.pre",
    "int4.channel.g32", "int4.channel.g64", "int4.channel.g32.pre", "int4.channel.g64.pre", "int3.channel.g32.pre",
    "int3.channel.g64.pre", "int3.channel.g64.pre.out1", "int2.channel.g32", "int2.token.g32", "int2.channel.g64.pre",
    "int3.token.g64.center.had", "int3.token.g64.had", "nuq3.channel.static.pre.center.out1", "nuq4.channel.static.pre",
    "nuq2.channel.static.pre.out1", "nuq4.token.g", "nuq3.token.g.out1", "lm4.token.g.had", "lm3.token.g.had", "lm2.token.g64.had",
    "lm4.token.g.pre", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "q8_0.had", "q4_0.had", "nvfp4", "mxfp4", "nvfp4.had",
    "sint8.token.g32", "sint4.token.g32", "sint4.token.g32.ef", "int4.channel.g64.pre.ef", "int4.channel.g32.pair",
    "int4.token.g32.pre.lowrank64", "lm4.token.g.lowrank32", "fp8e4m3.token.g.lowrank16", "int2.token.g32.clip",
    "int4.channel.g128.pre.center.smooth.clip.out0.5.pair.ef", "int4.token.g.out2", "bf16.pre", "fp8e4m3.head.pre.center.clip"};

TEST(Scheme, DocumentedStringsSurviveParseThenPrint) {
  for (const std::string& text : kDocumented) EXPECT_EQ(to_string(parse(text)), text);
}

TEST(Scheme, PartsLandInTheirFields) {
  const Scheme s = parse("int3.channel.g64.pre.center.out0.5");
  EXPECT_EQ(s.format, Format::kInt3);
  EXPECT_EQ(s.granularity, Granularity::kChannel);
  EXPECT_EQ(s.group, 64);
  EXPECT_TRUE(s.pre && s.center && !s.had && !s.clip);
  EXPECT_EQ(s.outlier_per_mille, 5);
  EXPECT_EQ(parse("int4.token.g").group, 0);
  EXPECT_EQ(parse("q4_0").granularity, Granularity::kBuiltIn);
  EXPECT_NE(parse("int4.token.g"), parse("int4.token.g64"));
  EXPECT_EQ(parse("int4.token.g64"), parse("int4.token.g64"));
}

TEST(Scheme, UnknownPartsAreNamed) {
  EXPECT_THAT(refusal("int4.token.g32.foo"), HasSubstr("'foo'"));
  EXPECT_THAT(refusal("int5.token.g"), HasSubstr("'int5'"));
  EXPECT_THAT(refusal(""), HasSubstr("''"));
  EXPECT_THAT(refusal("int4.token.g0"), HasSubstr("token.g0"));
  EXPECT_THAT(refusal("int4.token.g064"), HasSubstr("token.g064"));
  EXPECT_THAT(refusal("int4.token.g-4"), HasSubstr("token.g-4"));
  EXPECT_THAT(refusal("int4.token.g999999999999"), HasSubstr("token.g999999999999"));
  EXPECT_THAT(refusal("int4.channel.g48"), AllOf(HasSubstr("channel.g48"), HasSubstr("channel.g32")));
  EXPECT_THAT(refusal("int4.token"), HasSubstr("token."));
  EXPECT_THAT(refusal("int4.token.g32.out3"), HasSubstr("out3"));
  EXPECT_THAT(refusal("int4.token.g32.lowrank"), HasSubstr("lowrank"));
  EXPECT_THAT(refusal("int4.token.g32."), HasSubstr("''"));
  EXPECT_THAT(refusal("INT4.token.g32"), HasSubstr("'INT4'"));
  EXPECT_THAT(refusal("int4"), AllOf(HasSubstr("'int4'"), HasSubstr("granularity")));
  EXPECT_THAT(refusal("int4.had"), AllOf(HasSubstr("'int4'"), HasSubstr("granularity"), HasSubstr("'had'")));
}

TEST(Scheme, OrderAndRepetitionAreNamed) {
  EXPECT_THAT(refusal("int4.token.g32.had.center"), AllOf(HasSubstr("'center'"), HasSubstr("before 'had'")));
  EXPECT_THAT(refusal("int4.token.g32.out1.clip"), AllOf(HasSubstr("'clip'"), HasSubstr("before 'out1'")));
  EXPECT_THAT(refusal("int4.token.g32.pre.pre"), HasSubstr("twice"));
  EXPECT_THAT(refusal("int4.token.g32.channel.g32"), AllOf(HasSubstr("'channel'"), HasSubstr("one granularity")));
  EXPECT_THAT(refusal("int4.had.token.g32"), HasSubstr("'had'"));
}

TEST(Scheme, ContradictionsNameBothParts) {
  struct Case { const char *text, *a, *b; };
  const Case cases[] = {
      {"nvfp4.channel.g32", "nvfp4", "channel.g32"}, {"bf16.token.g", "bf16", "token.g"},      {"q4_0.token.g32", "q4_0", "token.g32"},
      {"fp8e4m3.channel.g32", "fp8e4m3", "channel.g32"}, {"sint4.channel.static", "sint4", "channel.static"},
      {"nuq4.token.g64", "nuq4", "token.g64"},       {"nuq4.tensor", "nuq4", "tensor"},        {"lm4.channel.static", "lm4", "channel.static"},
      {"nuq4.token.g.had", "nuq4", "had"},           {"lm4.token.g.clip", "lm4", "clip"},      {"q8_0.pre", "q8_0", "pre"},
      {"bf16.had", "bf16", "had"},                   {"int8.token.g.ef", "int8", "ef"},        {"sint8.token.g.ef", "sint8", "ef"},
      {"fp8e4m3.token.g.out1", "fp8e4m3", "out1"},   {"int4.token.g.pre.had", "pre", "had"},   {"lm4.token.g.pre.had", "pre", "had"},
      {"fp8e4m3.token.g.pre.had", "pre", "had"},     {"int4.channel.g32.lowrank8", "channel.g32", "lowrank8"},
      {"int4.token.g.center.lowrank8", "center", "lowrank8"}, {"sint8.token.g.lowrank8", "sint8", "lowrank8"}};
  for (const Case& c : cases) {
    EXPECT_THAT(refusal(c.text), AllOf(HasSubstr(quoted(c.a)), HasSubstr(quoted(c.b)))) << c.text;
  }
}

// PL-02: sizes that do not fit are named together with the head and with sizes that do, and those are accepted.
TEST(Scheme, GroupsThatDoNotDivideTheHeadSuggestOnesThatDo) {
  EXPECT_EQ(check_shape(parse("int4.token.g64"), 96, true), "token.g64 does not divide head_dim 96; use 32, 48 or 96");
  for (const int head_dim : {96, 80, 100, 72}) {
    const std::string text = check_shape(parse("int4.token.g64"), head_dim, false);
    ASSERT_THAT(text, AllOf(HasSubstr("token.g64"), HasSubstr("head_dim " + std::to_string(head_dim))));
    std::stringstream words(text.substr(text.find("use ") + 4));
    int n_suggested = 0;
    for (std::string word; words >> word;) {
      if (word == "or") continue;
      ++n_suggested;
      EXPECT_THAT(check_shape(parse("int4.token.g" + std::to_string(std::stoi(word))), head_dim, false), IsEmpty());
    }
    EXPECT_GE(n_suggested, 2) << text;
  }
  EXPECT_THAT(check_shape(parse("int4.token.g"), 100, true), IsEmpty());
  EXPECT_THAT(check_shape(parse("int4.channel.g32"), 100, true), IsEmpty());
  EXPECT_EQ(check_shape(parse("int4.token.g32.lowrank48"), 128, false), "token.g32 does not divide rank 48; use 8, 12, 16, 24 or 48");
  EXPECT_THAT(check_shape(parse("int4.token.g16.pre.lowrank48"), 128, true), IsEmpty());
  EXPECT_EQ(check_shape(parse("int4.token.g.pre.lowrank256"), 128, true), "lowrank256 is wider than head_dim 128; use a rank of at most 128");
}

TEST(Scheme, ShapesOfBlocksAndSides) {
  EXPECT_THAT(check_shape(parse("q4_0"), 80, true), AllOf(HasSubstr("32"), HasSubstr("80")));
  EXPECT_THAT(check_shape(parse("q4_0"), 96, true), IsEmpty());
  EXPECT_THAT(check_shape(parse("nvfp4"), 80, true), IsEmpty());
  EXPECT_THAT(check_shape(parse("mxfp4"), 80, true), HasSubstr("32"));
  EXPECT_THAT(check_shape(parse("int4.channel.g64.pre"), 64, false), HasSubstr("'pre'"));
  EXPECT_THAT(check_shape(parse("int4.token.g.smooth"), 64, false), HasSubstr("'smooth'"));
  EXPECT_THAT(check_shape(parse("int4.channel.g64.pair"), 64, false), HasSubstr("'pair'"));
  EXPECT_THAT(check_shape(parse("int4.token.g.center"), 64, false), IsEmpty());
  EXPECT_THAT(check_shape(parse("int4.token.g.lowrank32"), 64, false), IsEmpty());
  EXPECT_EQ(check_shape(parse("int4.token.g.lowrank32"), 64, true),
            "lowrank32 on keys needs 'pre': RoPE turns keys out of any small basis; use int4.token.g.pre.lowrank32");
}

// QZ-02
TEST(Scheme, HadamardIsOfferedWhereAMatrixExists) {
  const Scheme s = parse("int4.token.g.had");
  for (const int d : {64, 72, 80, 96, 112, 128, 192, 256}) {
    EXPECT_THAT(check_shape(s, d, true), IsEmpty()) << d;
    EXPECT_EQ(hadamard_order(d).size, d);
  }
  for (const int d : {7, 9, 100}) {
    EXPECT_THAT(check_shape(s, d, true), AllOf(HasSubstr("had"), HasSubstr("head_dim " + std::to_string(d))));
  }
  EXPECT_EQ(hadamard_order(88).size, 8);    // 8 * 11: blocks
  EXPECT_EQ(hadamard_order(176).size, 16);  // 16 * 11
  EXPECT_EQ(hadamard_order(72).base, 36);
  EXPECT_EQ(hadamard_order(112).base, 28);
  EXPECT_EQ(hadamard_order(240).base, 60);
  EXPECT_THAT(check_shape(parse("q4_0.had"), 96, true), HasSubstr("64"));
  EXPECT_EQ(llamacpp_hadamard_order(192, true).size, 64);
  EXPECT_EQ(llamacpp_hadamard_order(256, true).size, 256);
  EXPECT_EQ(llamacpp_hadamard_order(256, false).size, 64);
}

TEST(Scheme, TheOtherFp8EncodingsAreNamed) {  // CASES.md QZ-08
  EXPECT_THAT(refusal("fp8e4m3fnuz.head"), AllOf(HasSubstr("'fp8e4m3fnuz' (largest value 240)"), HasSubstr("fp8e4m3 (largest value 448)")));
  EXPECT_THAT(other_encoding("fp8e5m2fnuz"), HasSubstr("fp8e5m2 (exponent bias 15)"));
  EXPECT_THAT(other_encoding("fp8e4m3.head"), IsEmpty());
}

TEST(Scheme, WhatThisBuildOffersIsSaid) {
  for (const char* text : {"bf16",
                           "fp16.pre",
                           "int8.token.g",
                           "int4.token.g64.center.had",
                           "int3.channel.g64.pre",
                           "int2.channel.g32",
                           "int4.channel.g32.pre.center",
                           "fp8e4m3.tensor",
                           "fp8e4m3.head.had",
                           "fp8e4m3.token.g32.pre.center",
                           "q8_0",
                           "q4_0.had",
                           "q5_1",
                           "sint4.token.g32",
                           "fp8e5m2.head",
                           "int4.head",
                           "sint8.tensor",
                           "int8.channel.static.pre",
                           "int4.token.g128.smooth",
                           "lm4.token.g.had",
                           "lm3.token.g.pre",
                           "nuq3.channel.static.pre",
                           "int4.channel.g64.pre.ef",
                           "nvfp4",
                           "mxfp4.had",
                           "int4.channel.g64.out1",
                           "int4.token.g.clip",
                           "int4.channel.g32.pair"}) {
    EXPECT_THAT(check_implemented(parse(text)), IsEmpty()) << text;
  }
  EXPECT_THAT(check_implemented(parse("int4.token.g.lowrank8")), HasSubstr(quoted("lowrank8")));
  EXPECT_THAT(check_shape(parse("int4.token.g.out1"), 576, true), HasSubstr("up to head_dim 512"));
}

TEST(Scheme, CalibrationNeedsFollowFromTheString) {
  for (const char* text : {"fp8e4m3.head", "int4.token.g.center", "nuq4.token.g", "int8.channel.static", "int4.token.g.ef"}) {
    EXPECT_TRUE(needs_calibration(parse(text))) << text;
  }
  for (const char* text : {"bf16", "int4.token.g.had", "q4_0", "int4.channel.g32.pre", "lm4.token.g.had", "fp8e4m3.token.g"}) {
    EXPECT_FALSE(needs_calibration(parse(text))) << text;
  }
}

}  // namespace
}  // namespace kvrt
