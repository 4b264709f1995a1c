#include "kernels/core/plan_constants.h"

#include <string>

#include "tests/kernels/fake_quant_fixture.h"

namespace kvrt {
namespace {

using testing::parse;

std::string listed(const std::string& scheme) {
  std::string text;
  for (const PlanConstant& c : plan_constants(parse(scheme), 2, 64)) {
    text += (text.empty() ? "" : " ") + std::string(c.name) + "[" + std::to_string(c.shape[0]) + (c.shape[1] ? "," + std::to_string(c.shape[1]) : "") + "]";
    if (c.positive) text += ">0";
    if (c.integer) text += "int";
  }
  return text;
}

TEST(PlanConstants, FollowFromTheScheme) {
  struct Row { const char *scheme, *constants; };
  for (const Row& r : {Row{"int4.token.g.had", ""},
                       Row{"lm4.token.g.had", ""},
                       Row{"q4_0", ""},
                       Row{"mxfp4", ""},
                       Row{"int4.token.g.center", "mean[2,64]"},
                       Row{"int4.token.g.smooth", "smooth[2,64]>0"},
                       Row{"fp8e4m3.tensor", "clip_hi[1]>0"},
                       Row{"fp8e5m2.head", "clip_hi[2]>0"},
                       Row{"nvfp4.had", "clip_hi[1]>0"},
                       Row{"int8.tensor", "clip_lo[1] clip_hi[1]"},
                       Row{"sint4.head", "clip_lo[2] clip_hi[2]"},
                       Row{"int8.channel.static.pre", "clip_lo[2,64] clip_hi[2,64]"},
                       Row{"nuq3.token.g", "codebook[8]"},
                       Row{"nuq2.channel.static.pre.center", "mean[2,64] clip_lo[2,64] clip_hi[2,64] codebook[4]"},
                       Row{"int4.channel.g64.pre.clip.out1.pair", "clip_alpha[1]>0"},
                       Row{"nuq3.token.g.clip.out1", "clip_alpha[1]>0 codebook[8]"},
                       Row{"int4.head.clip", "clip_lo[2] clip_hi[2]"},
                       Row{"int4.token.g.out1", ""},
                       Row{"int4.channel.g64.pre.ef", "ef_u[2,2080] ef_order[2,64]int"},
                       Row{"int4.token.g.pre.lowrank48", "basis_mean[2,64] basis_in[2,3072] basis[2,3072]"}}) {
    EXPECT_EQ(listed(r.scheme), r.constants) << r.scheme;
    // needs_calibration() says the same.
    EXPECT_EQ(needs_calibration(parse(r.scheme)), r.constants[0] != 0) << r.scheme;
  }
}

}  // namespace
}  // namespace kvrt
