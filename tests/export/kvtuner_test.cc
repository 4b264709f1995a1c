#include "libcalib/export/kvtuner.h"

#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "libcalib/plan/verify.h"
#include "tests/plan/synthetic_sens.h"
#include "tests/support/expect_error.h"

namespace calib::exports {
namespace {

using testing::HasSubstr;

constexpr int kLayers = 3, kHeads = 2;

const ModelIdentity& model() {
  static const ModelIdentity identity = plan_test::tiny_model(kLayers, 4, kHeads);
  return identity;
}
KvtunerBits parse(const std::string& yaml) { return parse_kvtuner(yaml, "t.yaml", model().layers); }
std::string layer(int index, const std::string& k, const std::string& v) { return std::to_string(index) + ":\n  nbits_key: " + k + "\n  nbits_value: " + v + "\n"; }
const std::string kPlain = "# sha256 abc, tiny, pertoken\n" + layer(0, "8", "4") + layer(1, "4", "2") + layer(2, "2", "8");
const std::vector<KvtunerLayer> kPlainLayers = {{8, 4, false}, {4, 2, false}, {2, 8, false}};

std::string heads(const std::string& first_of_layer_1) {
  std::string text;
  for (int l = 0; l < kLayers; ++l)
    for (int h = 0; h < kHeads; ++h)
      text += (h == 0 ? std::to_string(l) + ":\n" : "") + "  " + std::to_string(h) + ":\n    nbits_key: " + (l == 1 && h == 0 ? first_of_layer_1 : "4") +
              "\n    nbits_value: " + (h == 0 ? "2" : "4") + "\n";
  return text;
}

/// All of `parts` in the message, and a line number.
void refused(const std::string& yaml, ErrorKind kind, std::vector<std::string> parts) {
  parts.push_back("t.yaml");
  test::expect_error([&] { parse(yaml); }, kind, parts);
}

TEST(Kvtuner, ReadsEveryLayerOnce) {
  const KvtunerBits bits = parse(kPlain);
  EXPECT_EQ(bits.layers, kPlainLayers);
  EXPECT_FALSE(bits.per_head);
  EXPECT_DOUBLE_EQ(bits.mean_bits(), (8 + 4 + 4 + 2 + 2 + 8) / 6.0);
  // Any order, flow style, comments, Windows line ends.
  EXPECT_EQ(parse(layer(2, "2", "8") + layer(0, "8", "4") + "# between\n" + layer(1, "4", "2")).layers, kPlainLayers);
  EXPECT_EQ(parse("{0: {nbits_key: 8, nbits_value: 4}, 1: {nbits_value: 2, nbits_key: 4}, 2: {nbits_key: 2, nbits_value: 8}}").layers, kPlainLayers);
  std::string windows = kPlain;
  for (std::size_t at = 0; (at = windows.find('\n', at)) != std::string::npos; at += 2) windows.replace(at, 1, "\r\n");
  EXPECT_EQ(parse(windows).layers, kPlainLayers);
  EXPECT_EQ(parse("---\n" + kPlain + "...\n").layers, kPlainLayers);
}

TEST(Kvtuner, HeadsTakeTheWidest) {
  const KvtunerBits bits = parse(heads("8"));
  EXPECT_TRUE(bits.per_head);
  EXPECT_EQ(bits.layers, (std::vector<KvtunerLayer>{{4, 4, true}, {8, 4, true}, {4, 4, true}}));
  EXPECT_EQ(bits.n_uneven(), 3u);
  refused(layer(0, "4", "4") + heads("8").substr(heads("8").find("1:\n  0")), ErrorKind::kFormat, {"line 5, layer 1", "each head its own widths"});
  refused("0:\n  0:\n    nbits_key: 4\n    nbits_value: 4\n", ErrorKind::kMismatch, {"line 4, layer 0", "1 head", "2 KV heads"});
  refused("0:\n  2:\n    nbits_key: 4\n    nbits_value: 4\n", ErrorKind::kMismatch, {"line 2, layer 0", "head 2"});
  refused("0:\n  1:\n    nbits_key: 4\n    nbits_value: 4\n  1:\n    nbits_key: 4\n", ErrorKind::kFormat, {"line 5, layer 0", "head 1", "twice"});
  refused("0:\n  0:\n    0:\n      nbits_key: 4\n", ErrorKind::kFormat, {"line 3, layer 0, head 0", "\"0\""});
}

// EXPORTS.md 5.11, K4, and what else could be read in two ways.
TEST(Kvtuner, RefusesWithLineAndKey) {
  const std::string two = layer(0, "8", "4") + layer(1, "4", "2");
  refused(two, ErrorKind::kMismatch, {"layer 2 is missing", "line 6"});
  refused(two + layer(1, "4", "2"), ErrorKind::kFormat, {"line 7, layer 1", "twice"});
  refused(two + layer(3, "4", "2"), ErrorKind::kMismatch, {"line 7", "layer 3 has no cache in this model", "3 layers"});
  refused(two + "\"2\":\n  nbits_key: 4\n  nbits_value: 4\n", ErrorKind::kFormat, {"line 7", "string \"2\"", "layer number"});
  refused(two + "layers.2:\n  nbits_key: 4\n", ErrorKind::kFormat, {"line 7", "\"layers.2\""});
  for (const char* number : {"-1", "02", "0x2", "2.0", "1_0", "+2", "99999999999999999999", "~", "true"})
    refused(two + number + ":\n  nbits_key: 4\n  nbits_value: 4\n", ErrorKind::kFormat, {"line 7"});
  for (const char* width : {"3", "16", "0", "6"})
    refused(two + layer(2, width, "4"), ErrorKind::kUnsupported, {"line 8, layer 2, nbits_key", std::string("is ") + width, "2, 4 and 8"});
  refused(two + layer(2, "4", "1"), ErrorKind::kUnsupported, {"line 9, layer 2, nbits_value"});
  for (const char* width : {"\"4\"", "4.0", "four", "-4", "[4]", "{a: 4}", "", "!!int 4", "&a 4"})
    refused(two + layer(2, width, "4"), ErrorKind::kFormat, {"line 8, layer 2, nbits_key"});
  refused(two + "2:\n  nbits_key: 4\n", ErrorKind::kFormat, {"layer 2", "nbits_value is missing"});
  refused(two + "2:\n  nbits_key: 4\n  nbits_key: 4\n", ErrorKind::kFormat, {"line 9, layer 2, nbits_key", "twice"});
  refused(two + "2:\n  nbits_key: 4\n  nbits_value: 4\n  axis: 1\n", ErrorKind::kFormat, {"line 10, layer 2", "\"axis\""});
  refused(two + "2:\n", ErrorKind::kFormat, {"layer 2", "is empty"});
  refused(two + "2: 4\n", ErrorKind::kFormat, {"line 7, layer 2", "\"4\""});
  refused(two + "2: [4, 4]\n", ErrorKind::kFormat, {"line 7, layer 2", "is a list"});
  refused("- 4\n- 4\n", ErrorKind::kFormat, {"line 1", "a map of layers"});
  refused("8\n", ErrorKind::kFormat, {"line 1", "\"8\""});
  refused("", ErrorKind::kMismatch, {"layer 0, 1, 2 is missing"});
  refused("# nothing\n", ErrorKind::kMismatch, {"layer 0, 1, 2 is missing"});
  refused(kPlain + "---\n" + kPlain, ErrorKind::kFormat, {""});
  refused(kPlain + "--- {}\n", ErrorKind::kFormat, {"second document"});
  refused("0: &a\n  nbits_key: 4\n  nbits_value: 4\n1: *a\n", ErrorKind::kFormat, {"line", "anchor"});
  refused("0:\n  nbits_key: 4\n\tnbits_value: 4\n", ErrorKind::kFormat, {"not YAML"});
  refused("0: {nbits_key: 4\n", ErrorKind::kFormat, {"not YAML"});
}

TEST(Kvtuner, LimitsHold) {
  refused(kPlain + std::string(kMostKvtunerBytes, '#'), ErrorKind::kFormat, {"at most 1048576"});
  refused(kPlain + "#" + std::string(kMostKvtunerLine, 'x') + "\n", ErrorKind::kFormat, {"line 11", "at most 65536"});
  // Depth: what opens a fourth level is refused as it opens, however many follow.
  const auto repeated = [](const std::string& part, std::size_t n) {
    std::string text;
    for (std::size_t i = 0; i < n; ++i) text += part;
    return text;
  };
  for (const char* part : {"[", "{", "- ", "? ", "{a: ", "[\n", "!a ", "&a ", "0: {"}) EXPECT_THROW(parse(repeated(part, 20000)), Error) << part;
  std::string stairs;
  for (int i = 0; i < 1000; ++i) stairs += std::string(static_cast<std::size_t>(i), ' ') + "0:\n";
  refused(stairs, ErrorKind::kFormat, {"line 3"});
}

// Every byte of a small file cut away or with one bit turned: an error that is not internal, or the same widths (no single bit turns one
// of the widths 2, 4, 8 into another).
TEST(Kvtuner, DamagedFilesAreErrors) {
  for (const std::string& whole : {kPlain, heads("8")}) {
    const std::vector<KvtunerLayer> expected = parse(whole).layers;
    std::size_t n_refused = 0;
    const auto survives = [&](const std::string& text, const std::string& what) {
      try {
        EXPECT_EQ(parse(text).layers, expected) << what;
      } catch (const Error& e) {
        EXPECT_NE(e.kind(), ErrorKind::kInternal) << what << ": " << e.what();
        ++n_refused;
      }
    };
    for (std::size_t n = 0; n < whole.size(); ++n) survives(whole.substr(0, n), "cut at " + std::to_string(n));
    EXPECT_EQ(n_refused, whole.size() - 1) << "all but the last line feed matter";
    for (std::size_t i = 0; i < whole.size(); ++i)
      for (int bit = 0; bit < 8; ++bit) {
        std::string text = whole;
        text[i] = static_cast<char>(text[i] ^ (1 << bit));
        survives(text, "byte " + std::to_string(i) + " bit " + std::to_string(bit));
      }
    EXPECT_GT(n_refused, 5 * whole.size());
  }
}

// K1: the schemes of the mode, layer by layer, and a plan that holds when counted again.
TEST(Kvtuner, ModesGiveTheirSchemes) {
  plan::Accounting accounting;
  const KvtunerBits bits = parse(kPlain);
  for (const KvtunerMode mode : {KvtunerMode::kPerToken, KvtunerMode::kKivi}) {
    EXPECT_EQ(parse_kvtuner_mode("--mode", kvtuner_mode_name(mode)), mode);
    const plan::Plan plan = kvtuner_plan(model(), bits, mode, accounting, {});
    EXPECT_EQ(plan::verify_plan(plan), std::vector<std::string>{});
    EXPECT_EQ(plan.sink_tokens, 0);
    EXPECT_EQ(plan.window_tokens, mode == KvtunerMode::kKivi ? 32 : 0);
    EXPECT_EQ(plan.request.uniform, "");
    for (int l = 0; l < kLayers; ++l) {
      const KvtunerLayer& from = kPlainLayers[static_cast<std::size_t>(l)];
      const plan::LayerPlan& to = plan.layers[static_cast<std::size_t>(l)];
      const bool kivi = mode == KvtunerMode::kKivi;
      EXPECT_EQ(kvrt::to_string(to.k.scheme), fmt::format("int{}.{}", from.k_bits, kivi ? "channel.g32" : "token.g"));
      EXPECT_EQ(kvrt::to_string(to.v.scheme), fmt::format("int{}.token.{}", from.v_bits, kivi ? "g32" : "g"));
      EXPECT_THAT(to.k.why.at(0).text, HasSubstr(fmt::format("nbits_key {}", from.k_bits)));
    }
  }
  test::expect_error([] { parse_kvtuner_mode("--mode", "token"); }, ErrorKind::kUsage, {"--mode", "token", "pertoken or kivi"});
  // A shape that the mode does not fit: groups of 32 in head_dim 80.
  test::expect_error([&] { kvtuner_plan(plan_test::tiny_model(kLayers, 4, 2, 80), bits, KvtunerMode::kKivi, accounting, {}); }, ErrorKind::kUsage,
                     {"layer 0 V int4.token.g32", "80"});
}

}  // namespace
}  // namespace calib::exports
