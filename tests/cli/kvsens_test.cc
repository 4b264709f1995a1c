// The grid of kvsens and kvsens evaluate: exit codes, files, messages.

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>

#include "libcalib/artifacts/eval_file.h"
#include "libcalib/artifacts/plan_file.h"
#include "libcalib/artifacts/sens_file.h"
#include "tests/cli/kvsens_fixture.h"

namespace calib {
namespace {

TEST_F(Kvsens, GridWritesTheSameScoresTwice) {
  const std::string call = "kvsens " + inputs() + " --stats " + file("stats.h5") + " --window 0,32 --candidates default -o ";
  const Outcome first = run(call + file("a.h5"));
  ASSERT_EQ(first.exit_code, 0) << first.text;
  ASSERT_EQ(run(call + file("b.h5")).exit_code, 0);
  const sens::SensResult a = artifacts::read_sens_file(file("a.h5")), b = artifacts::read_sens_file(file("b.h5"));
  EXPECT_EQ(a.candidate_list, "default-2");
  EXPECT_EQ(a.windows, (std::vector<std::int64_t>{0, 32}));
  ASSERT_EQ(a.scores.size(), 5u);
  for (const auto& [metric, table] : a.scores)
    for (std::size_t i = 0; i < table.mean.size(); ++i) {
      const double other = b.scores.at(metric).mean[i];
      EXPECT_TRUE(table.mean[i] == other || (std::isnan(table.mean[i]) && std::isnan(other))) << metric << " " << i;
    }
  EXPECT_FALSE(a.params.empty());  // static scales and means travel with the scores
  EXPECT_NE(first.text.find("left out"), std::string::npos) << "head_dim 16 rules out token.g32 and g64";
}

TEST_F(Kvsens, StatisticsOfAnotherModelAreRefused) {
  const Outcome o = run("kvsens " + inputs("other") + " --stats " + file("stats.h5") + " -o " + file("no.h5"));
  EXPECT_EQ(o.exit_code, 5) << o.text;
  EXPECT_NE(o.text.find("stats.h5"), std::string::npos);
  EXPECT_FALSE(exists("no.h5"));
}

TEST_F(Kvsens, UncalibratedSchemeIsNamed) {
  const Outcome grid = run("kvsens " + inputs() + " --candidates fp8e4m3.head -o " + file("no.h5"));
  EXPECT_EQ(grid.exit_code, 2) << grid.text;
  EXPECT_NE(grid.text.find("fp8e4m3.head"), std::string::npos);
  const Outcome evaluate = run("kvsens evaluate " + inputs() + " --uniform fp8-head -o " + file("no.json"));
  EXPECT_EQ(evaluate.exit_code, 2) << evaluate.text;
  EXPECT_NE(evaluate.text.find("fp8e4m3.head"), std::string::npos);
  EXPECT_FALSE(exists("no.h5"));
  EXPECT_FALSE(exists("no.json"));
}

TEST_F(Kvsens, EvaluateMeasuresSeveralContenders) {
  const Outcome o = run("kvsens evaluate " + inputs() + " --stats " + file("stats.h5") +
                        " --uniform fp8-head,int8.token.g:int4.token.g,bf16:bf16 --sinks 2 --window 8 -o " + file("e.json"));
  ASSERT_EQ(o.exit_code, 0) << o.text;
  const sens::EvalResult e = artifacts::read_eval_file(file("e.json"));
  ASSERT_EQ(e.contenders.size(), 3u);
  EXPECT_EQ(e.contenders[0].window, 128);
  EXPECT_EQ(e.contenders[1].window, 8);
  EXPECT_EQ(e.contenders[1].n_sinks, 2);
  EXPECT_GT(e.contenders[1].total.kld.mean, e.contenders[2].total.kld.mean);
  EXPECT_TRUE(e.same_text_as_calibration);
  for (const char* part : {"mean KLD", "bits@8192", "length slope", "int8.token.g:int4.token.g", "noise floor", "negative control"})
    EXPECT_NE(o.text.find(part), std::string::npos) << part;
  EXPECT_EQ(o.text.find("greedy replies"), std::string::npos);
}

TEST_F(Kvsens, AttentionObjectiveRanksByOutputError) {
  const Outcome o =
      run("kvsens evaluate " + inputs() +
          " --uniform int2.token.g:int8.token.g,int8.token.g:int8.token.g,int8.token.g:int2.token.g --sinks 2 --window 8 --objective attention -o " +
          file("at.json"));
  ASSERT_EQ(o.exit_code, 0) << o.text;
  const sens::EvalResult e = artifacts::read_eval_file(file("at.json"));
  ASSERT_EQ(e.contenders.size(), 3u);
  for (const sens::EvalContender& c : e.contenders) {
    ASSERT_TRUE(c.attention);
    EXPECT_EQ(c.attention->layer_e_out.size(), e.model.layers.size());
    EXPECT_GT(c.attention->e_out.mean, 0.0);
  }
  const auto& coarse_keys = *e.contenders[0].attention;
  const auto& fine = *e.contenders[1].attention;
  const auto& coarse_values = *e.contenders[2].attention;
  EXPECT_GT(coarse_keys.kl.mean, 10 * fine.kl.mean);
  EXPECT_NEAR(coarse_values.kl.mean, fine.kl.mean, 1e-9 * fine.kl.mean) << "values do not enter the probabilities";
  EXPECT_NEAR(coarse_values.e_mass.mean, fine.e_mass.mean, 1e-9 * fine.e_mass.mean);
  EXPECT_GT(coarse_values.e_out.mean, 10 * fine.e_out.mean);
  const std::size_t table = o.text.find("least output error first");
  ASSERT_NE(table, std::string::npos) << o.text;
  EXPECT_LT(o.text.find("int8.token.g:int8.token.g", table), o.text.find("int2.token.g:int8.token.g", table));
}

TEST_F(Kvsens, StaticRangesAreMeasuredOnceMoreWithARefresh) {
  const Outcome o =
      run("kvsens evaluate " + inputs() + " --stats " + file("stats.h5") + " --uniform fp8-head,int8-token --scale-refresh 160,64 -o " + file("sr.json"));
  ASSERT_EQ(o.exit_code, 0) << o.text;
  const sens::EvalResult e = artifacts::read_eval_file(file("sr.json"));
  std::vector<std::string> names;
  for (const sens::EvalContender& c : e.contenders) names.push_back(c.name);
  EXPECT_EQ(names, (std::vector<std::string>{"fp8-head", "fp8-head refresh 64", "fp8-head refresh 160", "int8-token"}));
  EXPECT_GT(*e.contenders[1].effective_bits_8192, *e.contenders[0].effective_bits_8192) << "a page keeps its ranges";
}

// Ranges of other text: some values lie beyond them.
TEST_F(Kvsens, APlanThatRefreshesIsMeasuredSo) {
  test::write_file(file("narrow.txt"), test::txt(9000).substr(8200));
  ASSERT_EQ(
      run("kvcalib --model " + file("m") + " --data " + file("narrow.txt") + " --seq-len 128 --num-samples 1 --threads 1 -o " + file("narrow.h5")).exit_code,
      0);
  ASSERT_EQ(run("kvplan --uniform fp8-head --stats " + file("narrow.h5") + " -o " + file("fixed.json")).exit_code, 0);
  std::string text = test::read_file(file("fixed.json"));
  const std::string never = "\"scale_refresh_tokens\": 0";
  ASSERT_NE(text.find(never), std::string::npos);
  text.replace(text.find(never), never.size(), "\"scale_refresh_tokens\": 64");
  test::write_file(file("raised.json"), text);
  std::filesystem::copy_file(file("fixed.safetensors"), file("raised.safetensors"));
  const std::string plans = " --plan " + file("fixed.json") + " --plan " + file("raised.json"), call = "evaluate " + inputs() + " --stats " + file("narrow.h5");
  const Outcome o = run("kvsens " + call + plans + " --uniform fp8-head --scale-refresh 64 -o " + file("raised_eval.json"));
  ASSERT_EQ(o.exit_code, 0) << o.text;
  const sens::EvalResult e = artifacts::read_eval_file(file("raised_eval.json"));
  const auto kld = [&](const std::string& name) {
    const auto at = std::find_if(e.contenders.begin(), e.contenders.end(), [&](const sens::EvalContender& c) { return c.name == name; });
    return at == e.contenders.end() ? -1.0 : at->total.kld.mean;
  };
  EXPECT_EQ(kld(file("fixed.json")), kld("fp8-head"));
  EXPECT_EQ(kld(file("raised.json")), kld("fp8-head refresh 64"));
  EXPECT_NE(kld("fp8-head"), kld("fp8-head refresh 64"));
  // Where nothing raises ranges, such a plan is refused by name.
  for (const char* other : {" --backend kvrt", " --generate 8 --depth 64"})
    expect(call + " --plan " + file("raised.json") + other + " -o " + file("no.json"), 7, "static ranges");
  EXPECT_FALSE(exists("no.json"));
}

// 4 KV heads of 8 channels. A rotation that is not undone, or undone in another frame, would lose as much as the negative control.
TEST_F(Kvsens, RotationsAndCarriedErrorsAreMeasuredOnceMore) {
  const std::string call = "kvsens evaluate " + inputs() + " --stats " + file("stats.h5") + " --sinks 2 --window 8 --uniform ";
  const std::string keys = "int8.token.g.had:bf16", both = "int8.token.g.had:int4.token.g.had", pre = "int8.token.g.pre:bf16";
  const auto measured = [&](const std::string& options) {
    const Outcome o = run(call + options + " -o " + file("ro.json"));
    EXPECT_EQ(o.exit_code, 0) << o.text;
    return artifacts::read_eval_file(file("ro.json"));
  };
  const auto names = [](const sens::EvalResult& e) {
    std::vector<std::string> out;
    for (const sens::EvalContender& c : e.contenders) out.push_back(c.name);
    return out;
  };
  const sens::EvalResult query = measured(keys + "," + both + "," + pre + " --rotate query");
  EXPECT_EQ(names(query), (std::vector<std::string>{keys, keys + " rotate query", both, both + " rotate query", pre}));
  EXPECT_NE(query.contenders[3].description.find("query in the place of had on the keys of 4 layers and the values of 4 layers"), std::string::npos)
      << query.contenders[3].description;
  const sens::EvalResult grouped = measured(keys + "," + both + ",bf16:int4.token.g.had --rotate grouped4");
  EXPECT_EQ(names(grouped), (std::vector<std::string>{keys, keys + " rotate grouped4", both, both + " rotate grouped4", "bf16:int4.token.g.had"}));
  EXPECT_NE(grouped.contenders[3].description.find("the values of 0 layers"), std::string::npos) << grouped.contenders[3].description;
  for (const sens::EvalResult* e : {&query, &grouped})
    for (const std::size_t i : {0u, 2u}) {
      const sens::EvalContender &plain = e->contenders[i], &rotated = e->contenders[i + 1];
      EXPECT_NE(rotated.total.kld.mean, plain.total.kld.mean) << rotated.name;
      EXPECT_LT(rotated.total.kld.mean, 2 * plain.total.kld.mean) << rotated.name;
      if (plain.name == keys) {
        EXPECT_LT(100 * rotated.total.kld.mean, e->negative_control->total.kld.mean) << rotated.name;
      }
      EXPECT_EQ(rotated.effective_bits_2048, plain.effective_bits_2048) << rotated.name;
    }
  const sens::EvalResult carry = measured(both + "," + pre + " --rotate grouped2 --carry-value-error 0.5,0.25");
  EXPECT_EQ(names(carry), (std::vector<std::string>{both, both + " carry 0.25", both + " carry 0.5", both + " rotate grouped2", both + " rotate grouped2 carry 0.25",
                                                    both + " rotate grouped2 carry 0.5", pre}));
  EXPECT_EQ(carry.contenders[0].total.kld.mean, query.contenders[2].total.kld.mean);
  for (const std::size_t i : {1u, 2u, 4u, 5u}) {
    EXPECT_NE(carry.contenders[i].total.kld.mean, carry.contenders[i < 3 ? 0 : 3].total.kld.mean) << carry.contenders[i].name;
    EXPECT_EQ(carry.contenders[i].effective_bits_8192, carry.contenders[0].effective_bits_8192);
  }
}

TEST_F(Kvsens, RotationsAndCarriedErrorsThatCannotBeMeasuredAreRefused) {
  const std::string to = " -o " + file("no.json"), plain = "evaluate " + inputs(), call = plain + " --stats " + file("stats.h5") + to + " --uniform ";
  expect(call + "int4.token.g.had:bf16 --rotate grouped3", 2, "expected query, grouped2 or grouped4");
  expect(plain + to + " --uniform int4.token.g.had:bf16 --rotate query", 2, "give --stats");
  expect(call + "int4.token.g.pre:int4.token.g --rotate query", 2, "no contender has had");
  expect(call + "bf16:int4.token.g.had --rotate grouped4", 2, "no contender has keys with had");
  expect(call + "int4.token.g.center.had:bf16 --rotate query", 2, "layer 0 K int4.token.g.center.had: its constants were fitted for the Hadamard rotation");
  expect("evaluate " + inputs("other") + to + " --uniform int4.token.g.had:bf16 --rotate grouped4", 2, "layer 0: has 2 KV heads, no multiple of 4");
  expect(call + "int4.token.g.had:bf16 --rotate query --backend kvrt", 7, "a rotation of --rotate is not offered by the runtime");
  expect(call + "int4.token.g.had:bf16 --rotate query --generate 8 --depth 64", 7, "a rotation of --rotate is not offered where replies are written");
  expect(call + "bf16:int4.token.g --carry-value-error 0.25 --backend kvrt", 7, "carrying the errors of values is not offered by the runtime");
  expect(call + "bf16:int4.token.g --carry-value-error 0", 2, "which is no carry");
  expect(call + "bf16:int4.token.g --carry-value-error 1.5", 2, "--carry-value-error");
  expect(call + "int4.token.g:bf16,bf16:int4.token.g.ef --carry-value-error 0.25", 2, "no contender has values in token groups");
  expect(call + "tiered4 --carry-value-error 0.25", 7, "not offered beside a salient tier");
  EXPECT_FALSE(exists("no.json"));
}

// Both backends write the same replies; where the reference itself is the contender nothing differs but BF16 rounding.
TEST_F(Kvsens, GreedyRepliesFromADepth) {
  const std::string call = "kvsens evaluate " + inputs() + " --uniform int4.token.g:int4.token.g,bf16:bf16 --sinks 2 --window 8 --generate 24 --depth 64 -o ";
  const Outcome fake = run(call + file("g.json")), packed = run(call + file("gp.json") + " --backend kvrt");
  ASSERT_EQ(fake.exit_code, 0) << fake.text;
  ASSERT_EQ(packed.exit_code, 0) << packed.text;
  for (const char* part : {"greedy replies of up to 24 tokens from depth 64", "rep-4", "agreeing prefix", "catastrophic (95 %)", "loops show"})
    EXPECT_NE(fake.text.find(part), std::string::npos) << part << "\n" << fake.text;
  const sens::EvalResult a = artifacts::read_eval_file(file("g.json")), b = artifacts::read_eval_file(file("gp.json"));
  ASSERT_TRUE(a.generation && a.reference_replies && a.contenders[0].generation && a.contenders[1].generation);
  EXPECT_EQ(a.generation->depth, 64);
  EXPECT_EQ(a.generation->n_tokens, 24);
  EXPECT_EQ(a.generation->n_documents, a.settings.n_documents);
  EXPECT_GE(a.contenders[1].generation->agreeing_prefix.mean, a.contenders[0].generation->agreeing_prefix.mean);
  EXPECT_LT(a.contenders[1].generation->row_kld.mean, a.contenders[0].generation->row_kld.mean);
  for (std::size_t i = 0; i < 2; ++i)
    EXPECT_EQ(a.contenders[i].generation->replies.document_rep_4, b.contenders[i].generation->replies.document_rep_4) << i;
}

// Random weights find nothing: no verdict, and the report says so.
TEST_F(Kvsens, RetrievalIsMeasuredForEveryContender) {
  const std::string text = "--model " + file("m") + " --data " + file("a.txt") + " --seq-len 1000 --num-samples 5 --threads 1";
  const std::string call = "kvsens evaluate " + text + " --uniform int4.token.g:int4.token.g,bf16:bf16 --sinks 2 --window 8 --retrieval 1300,1200 ";
  const Outcome dry = run(call + "--dry-run");
  EXPECT_EQ(dry.exit_code, 0) << dry.text;
  EXPECT_NE(dry.text.find("retrieval  14 texts of 1200 to 1300 tokens"), std::string::npos) << dry.text;
  const Outcome o = run(call + "-o " + file("r.json"));
  ASSERT_EQ(o.exit_code, 0) << o.text;
  for (const char* part : {"retrieval: 5-digit numbers", "T=1200", "T=1300", "10 %", "4 keys", "(reference)", "0/20  not judged", "says nothing for this model"})
    EXPECT_NE(o.text.find(part), std::string::npos) << part << "\n" << o.text;
  const sens::EvalResult e = artifacts::read_eval_file(file("r.json"));
  ASSERT_TRUE(e.reference_retrieval && e.contenders[0].retrieval && e.contenders[1].retrieval);
  ASSERT_EQ(e.reference_retrieval->cells.size(), 8u);
  for (std::size_t i = 0; i < 8; ++i) {
    const sens::RetrievalCell& cell = e.contenders[1].retrieval->cells[i];
    EXPECT_EQ(cell.length, i < 4 ? 1200 : 1300);
    EXPECT_EQ(cell.n, i % 4 == 3 ? 4 : 2);
    EXPECT_EQ(cell.depth.has_value(), i % 4 != 3);
  }
  EXPECT_FALSE(e.contenders[0].retrieval->pass.has_value());
  // What cannot be measured is refused before any work.
  const std::string dry_call = "evaluate " + text + " --uniform bf16:bf16 --dry-run ";
  expect(dry_call + "--retrieval 1024", 2, "one length, expected two or more");
  expect(dry_call + "--retrieval 1200,1200", 2, "one length, expected two or more");
  expect(dry_call + "--retrieval 1200,long", 2, "--retrieval");
  expect(dry_call + "--retrieval 64,1200", 2, "expected lengths of at least");
  expect(dry_call + "--retrieval 1200,5000", 2, "the model knows 4096 positions");
  expect("evaluate " + inputs() + " --uniform bf16:bf16 --dry-run --retrieval 1200,1300", 6, "the windows of --data hold 768 tokens");
  const std::string long_windows = "--model " + file("m") + " --data " + file("a.txt") + " --seq-len 2000 --num-samples 2 --threads 1";
  expect("evaluate " + long_windows + " --uniform bf16:bf16 --window 1500 --dry-run --retrieval 1200,1300", 6, "1200, all of which bf16:bf16 keeps exact");
}

TEST_F(Kvsens, EvaluateReportsTheDamageCurve) {
  const std::string call = "kvsens evaluate " + inputs() + " --uniform int2.token.g:bf16,int8.token.g:bf16 --sinks 4 --window 8 --damage-curve -o ";
  const Outcome o = run(call + file("dc.json"));
  ASSERT_EQ(o.exit_code, 0) << o.text;
  for (const char* part :
       {"damage curve: noise on every key, 2 documents, 512 tokens", "0.005", "the curve never reaches a ratio of 5: it rejects nothing", "worst layer"})
    EXPECT_NE(o.text.find(part), std::string::npos) << part << "\n" << o.text;
  const sens::EvalResult r = artifacts::read_eval_file(file("dc.json"));
  ASSERT_TRUE(r.damage_curve);
  EXPECT_EQ(r.damage_curve->points.size(), 9u);
  EXPECT_EQ(r.damage_curve->n_documents, 2);
  ASSERT_TRUE(r.contenders[0].damage);
  EXPECT_GT(r.contenders[0].damage->x, 10 * r.contenders[1].damage->x);
  EXPECT_FALSE(r.contenders[0].damage->rejected);
  EXPECT_EQ(run(call + file("dc2.json") + " --json").exit_code, 0);
  EXPECT_EQ(artifacts::read_eval_file(file("dc2.json")).contenders[0].damage->x, r.contenders[0].damage->x);
  const Outcome plain = run("kvsens evaluate " + inputs() + " --uniform bf16:bf16 -o " + file("dc3.json"));
  EXPECT_FALSE(artifacts::read_eval_file(file("dc3.json")).damage_curve);
  expect("evaluate " + inputs() + " --uniform bf16:bf16 --damage-curve --backend kvrt", 7, "leave --backend kvrt out");
  expect("evaluate --model " + file("m") + " --data " + file("a.txt") +
             " --seq-len 60 --num-samples 2 --threads 1 --uniform int4.token.g:bf16 --window 0 --damage-curve -o " + file("no.json"),
         6, "rows that see 64 keys");
  EXPECT_FALSE(exists("no.json"));
}

// The number scored is the number stored: the runtime's pages, written and read token by token, lose what fake quantisation does.
TEST_F(Kvsens, ThePackedCacheLosesWhatFakeQuantisationDoes) {
  const std::string call = "kvsens evaluate " + inputs() + " --stats " + file("stats.h5") +
                           " --uniform int4.token.g:int3.token.g,int3.channel.g32.pre:int4.token.g.had,int2.token.g.center:int8.token.g,"
                           "int3.channel.g32.pre.clip.out1.pair.ef:nuq3.token.g.out1,nuq2.channel.static.pre.out2:int3.token.g.clip.ef --sinks 4 --window 32 -o ";
  const Outcome fake = run(call + file("fake.json")), packed = run(call + file("packed.json") + " --backend kvrt");
  ASSERT_EQ(fake.exit_code, 0) << fake.text;
  ASSERT_EQ(packed.exit_code, 0) << packed.text;
  const sens::EvalResult a = artifacts::read_eval_file(file("fake.json")), b = artifacts::read_eval_file(file("packed.json"));
  EXPECT_EQ(b.settings.backend, "kvrt");
  for (std::size_t i = 0; i < a.contenders.size(); ++i) {
    const double one = a.contenders[i].total.kld.mean, other = b.contenders[i].total.kld.mean;
    EXPECT_NEAR(other, one, std::max(3 * a.noise_floor.kld.mean, 0.02 * one)) << a.contenders[i].name;
    EXPECT_GT(one, 10 * a.noise_floor.kld.mean);
  }
}

// The runtime has no sliding windows yet: named, not measured as if there were none.
TEST_F(Kvsens, SlidingWindowsInThePackedCacheAreRefused) {
  test::write_hf_folder(test::make_tiny_model("m-gemma3"), file("gemma"));
  const std::string call = "kvsens evaluate " + inputs("gemma") + " --uniform int4.token.g:int4.token.g -o " + file("gemma.json");
  const Outcome packed = run(call + " --backend kvrt");
  EXPECT_EQ(packed.exit_code, 7) << packed.text;
  EXPECT_NE(packed.text.find("layer 0 K int4.token.g: a sliding window (8 keys) is not offered"), std::string::npos) << packed.text;
  EXPECT_FALSE(exists("gemma.json"));
  const Outcome fake = run(call);
  EXPECT_EQ(fake.exit_code, 0) << fake.text;
  EXPECT_NE(fake.text.find("sets no BOS"), std::string::npos) << fake.text;
  // Windows of text that end within the model's tell nothing of what comes after: SN-05.
  test::TinyModel wide = test::make_tiny_model("m-gemma3");
  wide.sliding_window = 256;
  test::write_hf_folder(wide, file("wide"));
  const Outcome blind = run("kvsens evaluate " + inputs("wide") + " --uniform int4.token.g:int4.token.g -o " + file("wide.json"));
  EXPECT_EQ(blind.exit_code, 0) << blind.text;
  EXPECT_NE(blind.text.find("late positions are untested"), std::string::npos) << blind.text;
}

// A cache of which nothing is coded would measure as free.
TEST_F(Kvsens, TextThatNothingOfWouldBeCodedIsRefused) {
  const std::string common = inputs() + " --stats " + file("stats.h5");
  const Outcome grid = run("kvsens " + common + " --window 0,192 --candidates bf16,int4.channel.g64 -o " + file("no.h5"));
  EXPECT_EQ(grid.exit_code, 6) << grid.text;
  EXPECT_NE(grid.text.find("256 tokens, too short for int4.channel.g64 behind 4 sinks and a window of 192"), std::string::npos) << grid.text;
  const Outcome evaluate = run("kvsens evaluate " + common + " --uniform int8.token.g:int8.token.g --sinks 100 --window 156 -o " + file("no.json"));
  EXPECT_EQ(evaluate.exit_code, 6) << evaluate.text;
  EXPECT_NE(evaluate.text.find("sinks 100, window 156"), std::string::npos) << evaluate.text;
  const Outcome statistics = run("kvcalib " + inputs() + " --sinks 256 -o " + file("no.h5"));
  EXPECT_EQ(statistics.exit_code, 6) << statistics.text;
  EXPECT_NE(statistics.text.find("the first 256 are sinks"), std::string::npos) << statistics.text;
  EXPECT_FALSE(exists("no.h5"));
  EXPECT_FALSE(exists("no.json"));
}

TEST_F(Kvsens, OutputsAreCheckedBeforeTheWorkBegins) {
  const std::string common = inputs() + " --stats " + file("stats.h5"), old = test::read_file(file("stats.h5"));
  for (const std::string& call :
       {"kvsens " + common + " -o " + file("stats.h5"), "kvsens evaluate " + common + " --uniform int8.token.g:int8.token.g -o " + file("a.txt"),
        "kvcalib " + inputs() + " -o " + file("m/config.json")}) {
    const Outcome o = run(call);
    EXPECT_EQ(o.exit_code, 2) << call << "\n" << o.text;
    EXPECT_NE(o.text.find("would replace an input"), std::string::npos) << o.text;
  }
  EXPECT_EQ(test::read_file(file("stats.h5")), old);
  const Outcome null = run("kvsens " + common + " -o /dev/null");
  EXPECT_EQ(null.exit_code, 3) << null.text;
  EXPECT_EQ(null.text.find("forward"), std::string::npos) << "refused only after the walk:\n" << null.text;
  const Outcome sinks = run("kvsens " + common + " --sinks 16 -o " + file("no.h5"));
  EXPECT_EQ(sinks.exit_code, 5) << sinks.text;
  EXPECT_NE(sinks.text.find("the statistics keep 4"), std::string::npos) << sinks.text;
  EXPECT_FALSE(exists("no.h5"));
}

TEST_F(Kvsens, FilesThatAPlanNamesAreInputs) {
  ASSERT_EQ(run("kvplan --uniform fp8-head --stats " + file("stats.h5") + " -o " + file("in.json")).exit_code, 0);
  const std::string tensors = test::read_file(file("in.safetensors"));
  const Outcome o = run("kvsens evaluate " + inputs() + " --plan " + file("in.json") + " -o " + file("in.safetensors"));
  EXPECT_EQ(o.exit_code, 2) << o.text;
  EXPECT_NE(o.text.find("would replace an input"), std::string::npos) << o.text;
  EXPECT_EQ(test::read_file(file("in.safetensors")), tensors);
  test::write_file(file("notes.json"), "{}");
  for (const std::string& call :
       {"kvsens evaluate " + inputs() + " --plan " + file("in.json") + " -o " + file("notes.json"),
        "kvsens " + inputs() + " --stats " + file("stats.h5") + " -o " + file("notes.json"), "kvcalib " + inputs() + " -o " + file("notes.json")}) {
    const Outcome other = run(call);
    EXPECT_EQ(other.exit_code, 2) << other.text;
    EXPECT_NE(other.text.find("would be replaced"), std::string::npos) << other.text;
  }
  EXPECT_EQ(test::read_file(file("notes.json")), "{}");
  std::filesystem::remove(file("in.safetensors"));
  const Outcome lost = run("kvsens evaluate " + inputs() + " --plan " + file("in.json") + " -o " + file("no.json"));
  EXPECT_EQ(lost.exit_code, 3) << lost.text;
  EXPECT_NE(lost.text.find("in.json needs it"), std::string::npos) << lost.text;
}

TEST_F(Kvsens, SchemesThatAreNotOfferedAreNamed) {
  const std::string evaluate = "evaluate " + inputs() + " --stats " + file("stats.h5") + " -o " + file("no.json") + " --uniform ";
  expect(evaluate + "fp8e4m3fnuz.head:bf16", 7, "fp8e4m3fnuz");
  expect(evaluate + "bf16:int4.token.g.lowrank8 --backend kvrt", 7, "modifier 'lowrank8' is not offered by this build");
  EXPECT_FALSE(exists("no.json"));
  const Outcome sinks = run("kvsens evaluate " + inputs() + " --stats " + file("stats.h5") + " --uniform kvquant4 -o " + file("no.json"));
  EXPECT_NE(sinks.exit_code, 0);
  EXPECT_NE(sinks.text.find("sink"), std::string::npos) << sinks.text;
}

// Scored like any scheme: in a grid, jointly, through plans; rank 8 of 8 channels at 8 bits loses next to nothing, rank 1 a lot.
TEST_F(Kvsens, LowRankIsMeasured) {
  const std::string ranks[] = {"int8.token.g.pre.lowrank8:int8.token.g.lowrank8", "int8.token.g.pre.lowrank4:int8.token.g.lowrank4",
                               "int8.token.g.pre.lowrank1:int8.token.g.lowrank1"};
  const std::string common = inputs() + " --stats " + file("stats.h5") + " --sinks 4 --window 32";
  const Outcome joint =
      run("kvsens evaluate " + common + " --uniform int8.token.g:int8.token.g," + ranks[0] + "," + ranks[1] + "," + ranks[2] + " -o " + file("lr.json"));
  ASSERT_EQ(joint.exit_code, 0) << joint.text;
  const sens::EvalResult e = artifacts::read_eval_file(file("lr.json"));
  const auto kld = [&](std::size_t i) { return e.contenders[i].total.kld.mean; };
  EXPECT_LT(kld(1), 2 * kld(0));
  EXPECT_LT(kld(1), 0.1 * kld(2));
  EXPECT_LT(kld(2), kld(3));
  EXPECT_LT(e.contenders[2].effective_bits_8192, e.contenders[1].effective_bits_8192);

  test::write_file(file("lr.txt"), test::txt(6000).substr(2000));
  const std::string scored =
      "--model " + file("m") + " --threads 1 --seq-len 256 --num-samples 3 --data " + file("lr.txt") + " --stats " + file("stats.h5") + " --window 32";
  const Outcome grid =
      run("kvsens " + scored +
          " --candidates int8.token.g,int4.token.g,int2.token.g,int8.token.g.pre.lowrank1,int8.token.g.lowrank1,int8.token.g.lowrank6 -o " + file("lr.h5"));
  ASSERT_EQ(grid.exit_code, 0) << grid.text;
  EXPECT_NE(grid.text.find("int8.token.g.lowrank1 left out for K: lowrank1 on keys needs 'pre'"), std::string::npos) << grid.text;
  const sens::SensResult s = artifacts::read_sens_file(file("lr.h5"));
  const auto scheme = static_cast<std::size_t>(std::find(s.schemes.begin(), s.schemes.end(), "int8.token.g.lowrank6") - s.schemes.begin());
  ASSERT_LT(scheme, s.schemes.size());
  for (const char* metric : {"fisher_softmax", "attn_out"}) EXPECT_GT(s.scores.at(metric).mean[s.index(1, scheme, 0)], 0.0) << metric;
  const auto arrays = s.params.find("00/v/int8.token.g.lowrank6");
  ASSERT_NE(arrays, s.params.end());
  ASSERT_EQ(arrays->second.size(), 3u);
  const LayerGeometry& g = s.model.layers[0];
  for (const sens::FittedArray& a : arrays->second)
    EXPECT_EQ(a.shape, (std::vector<std::int64_t>{g.n_kv_heads, a.what == "basis_mean" ? g.head_dim : 6 * g.head_dim})) << a.what;

  // One direction of a head does not pay: the plan says so, and stores something else.
  const Outcome made = run("kvplan --sens " + file("lr.h5") + " --budget 11 --context 4096 -o " + file("lrp.json"));
  ASSERT_EQ(made.exit_code, 0) << made.text;
  const plan::Plan plan = artifacts::read_plan(file("lrp.json"));
  for (const plan::LayerPlan& layer : plan.layers) EXPECT_EQ(layer.k.scheme.lowrank, 0);
  EXPECT_TRUE(std::any_of(plan.decision.begin(), plan.decision.end(),
                          [](const plan::Reason& r) { return r.rule == "lowrank" && r.text.find("left out") != std::string::npos; }));
  // A plan that holds a basis is measured as its pair is.
  ASSERT_EQ(run("kvplan --uniform " + ranks[1] + " --stats " + file("stats.h5") + " --window 32 -o " + file("lru.json")).exit_code, 0);
  const Outcome planned = run("kvsens evaluate " + common.substr(0, common.find(" --sinks")) + " --plan " + file("lru.json") + " -o " + file("lrq.json"));
  ASSERT_EQ(planned.exit_code, 0) << planned.text;
  EXPECT_DOUBLE_EQ(artifacts::read_eval_file(file("lrq.json")).contenders[0].total.kld.mean, kld(2));
}

TEST_F(Kvsens, DryRunWritesNothing) {
  const Outcome grid = run("kvsens " + inputs() + " --stats " + file("stats.h5") + " --dry-run -o " + file("dry.h5"));
  EXPECT_EQ(grid.exit_code, 0) << grid.text;
  EXPECT_NE(grid.text.find("memory"), std::string::npos);
  const Outcome evaluate = run("kvsens evaluate " + inputs() + " --uniform bf16:bf16 --dry-run -o " + file("dry.json"));
  EXPECT_EQ(evaluate.exit_code, 0) << evaluate.text;
  EXPECT_FALSE(exists("dry.h5"));
  EXPECT_FALSE(exists("dry.json"));
}

TEST_F(Kvsens, WrongCommandLines) {
  expect("--help", 0, "evaluate");
  expect("evaluate --help", 0, "--uniform");
  expect("--version", 0, "kvsens");
  expect("", 2, "--model");
  expect(inputs() + " --metric mse", 2, "mse");
  expect(inputs() + " --window a", 2, "--window");
  expect(inputs() + " --window 128,,64", 2, "--window: is \"128,,64\", which has an empty item");
  expect(inputs() + " --metric fisher,", 2, "--metric: is \"fisher,\", which has an empty item");
  expect(inputs() + " --candidates ''", 2, "--candidates: is empty");
  expect(inputs() + " --candidates bf16,,int8.token.g", 2, "--candidates");
  expect("evaluate " + inputs() + " --uniform bf16,,kivi4", 2, "--uniform");
  expect(inputs() + " --layers -1", 2, "--layers -1: expected a layer number");
  expect(inputs() + " --layers 5-3", 2, "--layers 5-3: a range goes upwards; write 3-5");
  expect(inputs() + " --layers 0-2,1", 2, "names layer 1 twice");
  expect("drift " + inputs() + " --candidates foo --metric bar", 2, "--candidates: is not an option of kvsens drift");
  expect("drift " + inputs() + " -o x.json", 2, "--output: is not an option of kvsens drift");
  expect("evaluate " + inputs() + " --uniform bf16 --draws 5", 2, "--draws: is not an option of kvsens evaluate");
  expect("--seed 3 evaluate " + inputs() + " --uniform bf16", 2, "--seed: stands before evaluate");
  expect("--help > /dev/full", 3, "");
  expect("evaluate --help > /dev/full", 3, "");
  expect("evaluate " + inputs() + " --uniform bf16:bf16 --dry-run > /dev/full", 3, "");
  expect(inputs() + " --layers 77 --candidates int4.token.g -o " + file("x.h5"), 2, "77");
  expect(inputs() + " --candidates int5.token.g", 2, "int5");
  expect("evaluate " + inputs(), 2, "--plan");
  expect("evaluate " + inputs() + " --uniform bf16:bf16 --depth 64", 2, "--generate");
  expect("evaluate " + inputs() + " --uniform bf16:bf16 --objective loss", 2, "expected logits or attention");
  expect("evaluate " + inputs() + " --uniform bf16:bf16 --objective attention --backend kvrt", 7, "measured in place");
  expect("evaluate " + inputs() + " --uniform int8-token --scale-refresh 64 -o " + file("no.json"), 2, "no contender has static ranges");
  expect("evaluate " + inputs() + " --uniform fp8-head --stats " + file("stats.h5") + " --scale-refresh 100000 -o " + file("no.json"), 6,
         "nothing would be refreshed");
  expect("evaluate " + inputs() + " --uniform fp8-head --stats " + file("stats.h5") + " --scale-refresh 0 -o " + file("no.json"), 2, "--scale-refresh");
  expect("evaluate " + inputs() + " --uniform bf16:bf16 --generate 8 --depth 300 --dry-run", 6, "no document has as many tokens");  // before any work
  expect("evaluate " + inputs() + " --uniform bf16:bf16 --generate 8 --depth 3 --sinks 4 --dry-run", 6, "not past the 4 sinks");
  expect("evaluate " + inputs() + " --plan " + file("absent.json"), 3, "absent.json");
  expect("evaluate " + inputs() + " --uniform bf16:bf16 --backend gguf", 2, "expected fake or kvrt");
  expect("evaluate " + inputs() + " --uniform bf16:bf16 -o " + file("no/such/e.json"), 3, "no/such");
  expect("--model " + file("absent") + " --data " + file("a.txt"), 3, "absent");
  expect("refine " + inputs(), 2, "--plan");
  expect("drift " + inputs(), 2, "--stats");
  expect("drift " + inputs() + " --stats " + file("absent.h5"), 3, "absent.h5");
  expect("drift " + inputs() + " --stats " + file("stats.h5"), 6, "too few");
}

}  // namespace
}  // namespace calib
