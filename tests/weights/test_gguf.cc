// Rows GG-01 to GG-06, GG-08 and GG-09 of the case catalogue, on the parser.
#include "libcalib/weights/gguf.h"

#include <cmath>
#include <cstring>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/support/expect_error.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/shared_data.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib::weights {
namespace {

using test::expect_error;
using test::GgmlType;
using test::GgufWriter;

class Gguf : public ::testing::Test {
 protected:
  GgufFile parse(const std::string& bytes) {
    test::write_file(path_, bytes);
    return parse_gguf(MappedFile(path_));
  }
  void refused(const std::string& bytes, std::vector<std::string> parts, ErrorKind kind = ErrorKind::kFormat,
               std::source_location at = std::source_location::current()) {
    parts.push_back(path_);
    expect_error([&] { parse(bytes); }, kind, parts, at);
  }
  std::string model(const test::GgufOptions& options = {}) {
    return test::read_file(test::write_gguf(test::make_tiny_model("m-llama"), folder_.file("m.gguf"), options).at(0));
  }
  test::TempFolder folder_;
  std::string path_ = folder_.file("under-test.gguf");
};

std::string text_bytes(const std::string& text) {
  const std::uint64_t n = text.size();
  return std::string(reinterpret_cast<const char*>(&n), 8) + text;
}
template <typename T>
std::string raw(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}
GgufWriter small() {
  GgufWriter w;
  w.add<std::string>("general.architecture", "llama");
  const std::vector<float> values = {1, 2, 3, 4};
  w.add_f32("a", {4}, values);
  w.add_f32("b", {2, 2}, values);
  return w;
}

TEST_F(Gguf, EveryMetadataTypeIsRead) {
  GgufWriter w;
  w.add<std::uint8_t>("u8", 200);
  w.add<std::int8_t>("i8", -100);
  w.add<std::uint16_t>("u16", 60000);
  w.add<std::int16_t>("i16", -30000);
  w.add<std::uint32_t>("u32", 4'000'000'000u);
  w.add<std::int32_t>("i32", -2'000'000'000);
  w.add<std::uint64_t>("u64", 1ull << 62);
  w.add<std::int64_t>("i64", -(1ll << 62));
  w.add<float>("f32", 0.25f);
  w.add<double>("f64", 1e-300);
  w.add<bool>("yes", true);
  w.add<std::string>("text", std::string("a\0b", 3));
  w.add<std::uint64_t>("huge", ~0ull);
  w.add_array<std::string>("texts", {"x", "", "yz"});
  w.add_array<float>("floats", {1.5f, -2.5f});
  w.add_array<std::int32_t>("ints", {3, -4});
  w.add_array<std::uint64_t>("longs", {5, 6});
  w.add_array<std::string>("none", {});
  const std::string inner = raw<std::uint32_t>(0) + raw<std::uint64_t>(2) + "ab";
  w.add_raw("nested", 9, raw<std::uint32_t>(9) + raw<std::uint64_t>(1) + inner);
  w.add<std::int32_t>("last", 7);
  const GgufMetadata m = parse(w.bytes()).metadata;
  EXPECT_EQ(m.integer("u8"), 200);
  EXPECT_EQ(m.integer("i8"), -100);
  EXPECT_EQ(m.integer("u16"), 60000);
  EXPECT_EQ(m.integer("i16"), -30000);
  EXPECT_EQ(m.integer("u32"), 4'000'000'000);
  EXPECT_EQ(m.integer("i32"), -2'000'000'000);
  EXPECT_EQ(m.integer("u64"), 1ll << 62);
  EXPECT_EQ(m.integer("i64"), -(1ll << 62));
  EXPECT_EQ(m.number("f32"), 0.25);
  EXPECT_EQ(m.number("f64"), 1e-300);
  EXPECT_EQ(m.number("u8"), 200.0);
  EXPECT_EQ(m.boolean("yes"), true);
  EXPECT_EQ(m.text("text"), std::string("a\0b", 3));
  EXPECT_EQ(*m.texts("texts"), (std::vector<std::string>{"x", "", "yz"}));
  EXPECT_EQ(*m.numbers("floats"), (std::vector<double>{1.5, -2.5}));
  EXPECT_EQ(*m.integers("ints"), (std::vector<std::int64_t>{3, -4}));
  EXPECT_EQ(*m.integers("longs"), (std::vector<std::int64_t>{5, 6}));
  EXPECT_TRUE(m.texts("none")->empty());
  EXPECT_TRUE(m.has("nested"));
  EXPECT_EQ(m.integer("last"), 7);
  EXPECT_FALSE(m.integer("absent"));
  EXPECT_EQ(m.texts("absent"), nullptr);
  expect_error([&] { m.integer("text"); }, ErrorKind::kFormat, {"key text", "a string", "an integer", path_});
  expect_error([&] { m.integer("f32"); }, ErrorKind::kFormat, {"key f32"});
  expect_error([&] { m.integer("huge"); }, ErrorKind::kFormat, {"key huge"});
  expect_error([&] { m.text("u8"); }, ErrorKind::kFormat, {"key u8", "an integer", "a string"});
  expect_error([&] { m.texts("ints"); }, ErrorKind::kFormat, {"key ints"});
}

TEST_F(Gguf, TensorsHaveShapeAndPlace) {
  const GgufFile f = parse(model());
  EXPECT_EQ(f.version, 3u);
  EXPECT_EQ(f.alignment, 32u);
  EXPECT_EQ(f.tensors.size(), 39u);
  for (const auto& t : f.tensors) {
    EXPECT_EQ(t.offset % 32, 0u);
    if (t.name == "blk.0.attn_k.weight") {
      EXPECT_EQ(t.shape, (std::vector<std::int64_t>{32, 64}));
    }
  }
}

TEST_F(Gguf, Gg01RealDamagedFile) {
  CALIB_SHARED_FILE(path, "vocab/corrupt-phi-3.gguf");
  const double seconds = test::seconds_of([&] {
    expect_error([&] { parse_gguf(MappedFile(path)); }, ErrorKind::kFormat, {"offset 443", "108299533759", "855771"});
  });
  EXPECT_LT(seconds, 0.1);
}

TEST_F(Gguf, Gg01TransportDamage) {
  std::string utf8, crlf;
  for (char c : model()) {
    if (static_cast<unsigned char>(c) >= 0x80) utf8 += "\xEF\xBF\xBD";
    else utf8 += c;
    if (c == '\n') crlf += '\r';
    crlf += c;
  }
  refused(utf8, {"offset"});
  refused(crlf, {});
}

TEST_F(Gguf, Gg02CountsAreBoundedByTheFile) {
  const auto padded = [](std::string bytes) {
    bytes.resize(std::max<std::size_t>(bytes.size(), 200), '\0');
    return bytes;
  };
  const auto head = [](std::uint64_t n_tensors, std::uint64_t n_keys) { return "GGUF" + raw<std::uint32_t>(3) + raw(n_tensors) + raw(n_keys); };
  refused(padded(head(0, 1) + raw<std::uint64_t>(1u << 30) + "abc"), {"key 1 of 1", "offset 24", "1073741824"});
  GgufWriter aligned = small();
  aligned.add<std::uint32_t>("general.alignment", 1u << 30);
  refused(padded(aligned.bytes()), {"general.alignment", "1073741824", "offset"});
  refused(padded(head(0, 1ull << 60)), {"key count", "offset 16", "1152921504606846976"});
  refused(padded(head(1ull << 60, 0)), {"tensor count", "offset 8", "1152921504606846976"});
  refused(padded(head(0, 1) + text_bytes("k") + raw<std::uint32_t>(9) + raw<std::uint32_t>(0) + raw<std::uint64_t>(1ull << 60)),
          {"key k", "element count", "1152921504606846976", "offset"});
  std::string deep;
  for (int i = 0; i < 10'000; ++i) deep += raw<std::uint32_t>(9) + raw<std::uint64_t>(1);
  refused(head(0, 1) + text_bytes("k") + raw<std::uint32_t>(9) + deep, {"key k", "nested"});
  refused(padded(head(0, 1) + text_bytes("k") + raw<std::uint32_t>(99)), {"key k", "value type 99", "offset"});
  refused(padded(head(0, 1) + text_bytes("k") + raw<std::uint32_t>(7) + "\x02"), {"key k", "boolean", "2"});
}

TEST_F(Gguf, Gg03Alignment) {
  for (std::uint32_t a : {0u, 3u, 4u, 48u}) {
    GgufWriter w = small();
    w.add<std::uint32_t>("general.alignment", a);
    refused(w.bytes(), {"general.alignment", fmt::format("is {}", a)});
  }
  GgufWriter wide = small();
  wide.add<std::uint64_t>("general.alignment", 32);
  refused(wide.bytes(), {"general.alignment", "type 10"});
  for (std::size_t a : {8, 16, 32, 64, 4096}) {
    test::GgufOptions options;
    options.alignment = a;
    const GgufFile f = parse(model(options));
    EXPECT_EQ(f.alignment, a);
    EXPECT_EQ(f.tensors.size(), 39u);
  }
  GgufWriter odd;
  const std::vector<float> values(4);
  odd.add_f32("a", {4}, values);
  odd.add_tensor("b", {4}, GgmlType::kF32, std::string(16, '\0'), 36);
  refused(odd.bytes(), {"tensor b", "36", "alignment 32"});
}

TEST_F(Gguf, Gg04SizesDoNotWrap) {
  const auto with = [](std::vector<std::uint64_t> dims, GgmlType type = GgmlType::kF32) {
    GgufWriter w;
    w.add_tensor("big", std::move(dims), type, std::string(64, '\0'));
    return w.bytes();
  };
  refused(with({32, (1ull << 42) + 1}), {"tensor big", "32, 4398046511105"});
  refused(with({32, (1ull << 42) + 1}, GgmlType::kQ4_0), {"tensor big", "32, 4398046511105"});
  refused(with({1ull << 63, 2}), {"tensor big", "9223372036854775808"});
  refused(with({1ull << 32, 1ull << 32}), {"tensor big", "4294967296, 4294967296"});
  refused(with({1, 1, 1, 1, 1}), {"tensor big", "5 dimensions"});
  refused(with({16}, GgmlType::kQ4_0), {"tensor big", "16", "Q4_0"});
}

TEST_F(Gguf, Gg05DegenerateDescriptors) {
  const auto with = [](const std::string& name, std::vector<std::uint64_t> dims) {
    GgufWriter w = small();
    w.add_tensor(name, std::move(dims), GgmlType::kF32, std::string(16, '\0'));
    return w.bytes();
  };
  refused(with("z", {4, 0}), {"tensor z", "4, 0"});
  refused(with("", {4}), {"tensor 3 of 3, name", "0 bytes"});
  refused(with(std::string(65, 'n'), {4}), {"65 bytes", "1 to 64"});
  EXPECT_EQ(parse(with(std::string(64, 'n'), {4})).tensors.size(), 3u);
  refused(with("a", {4}), {"tensor a", "twice"});
  const auto with_key = [](const std::string& key) {
    GgufWriter w = small();
    w.add<std::uint32_t>(key, 1);
    return w.bytes();
  };
  refused(with_key(""), {"key 2 of 2", "0 bytes"});
  refused(with_key("general.architecture"), {"key general.architecture", "twice"});
  refused(with_key("bad\xC3\x28"), {"UTF-8", "bad\xEF\xBF\xBD("});
}

TEST_F(Gguf, Gg06Versions) {
  for (std::uint32_t v : {2u, 3u}) {
    test::GgufOptions options;
    options.version = v;
    EXPECT_EQ(parse(model(options)).version, v);
  }
  GgufWriter w = small();
  w.version = 1;
  refused(w.bytes(), {"version 1", "convert", "again"}, ErrorKind::kVersion);
  w.version = 4;
  refused(w.bytes(), {"version 4", "2 and 3"}, ErrorKind::kVersion);
  w.version = 0x03000000;
  refused(w.bytes(), {"big-endian"}, ErrorKind::kVersion);
  for (const char* magic : {"ggjt", "ggla", "ggml", "tjgg"}) {
    w.magic = magic;
    refused(w.bytes(), {"old GGML format"});
  }
}

TEST_F(Gguf, Gg08CountsAgainstContent) {
  std::string bytes = model();
  refused(bytes.substr(0, bytes.size() - 1), {"cut off", std::to_string(bytes.size()), std::to_string(bytes.size() - 1)});
  const std::uint64_t more = 40, fewer = 38;
  std::memcpy(bytes.data() + 8, &more, 8);
  refused(bytes, {"40"});
  std::memcpy(bytes.data() + 8, &fewer, 8);
  refused(bytes, {"38 tensors"});  // the last tensor's bytes would otherwise be read as those of its neighbours
  bytes = model();
  refused(bytes + std::string(64, '\0'), {"64 bytes follow"});
}

TEST_F(Gguf, PaddingAfterTheLastTensorIsLegal) {
  GgufWriter w;
  const std::vector<float> values(3);
  w.add_f32("a", {3}, values);
  const std::string bytes = w.bytes();
  EXPECT_EQ(parse(bytes + std::string(20, '\0')).tensors.size(), 1u);
  refused(bytes + std::string(21, '\0'), {"21 bytes follow"});
}

TEST_F(Gguf, TensorsMayNotOverlapOrLeaveHoles) {
  const std::string data(64, '\0');
  GgufWriter overlap, hole, reversed;
  overlap.add_tensor("a", {16}, GgmlType::kF32, data);
  overlap.add_tensor("b", {16}, GgmlType::kF32, data, 32);
  refused(overlap.bytes(), {"tensor b", "overlaps a"});
  hole.add_tensor("a", {16}, GgmlType::kF32, data);
  hole.add_tensor("b", {16}, GgmlType::kF32, data, 96);
  refused(hole.bytes(), {"tensor b", "unused bytes after a"});
  reversed.add_tensor("a", {16}, GgmlType::kF32, data, 64);
  reversed.add_tensor("b", {16}, GgmlType::kF32, data, 0);
  EXPECT_EQ(parse(reversed.bytes()).tensors.size(), 2u);
}

TEST_F(Gguf, UnknownTensorTypeIsNamed) {
  GgufWriter w;
  w.add_tensor("t", {4}, static_cast<GgmlType>(99), std::string(16, '\0'));
  refused(w.bytes(), {"tensor t", "unknown tensor type 99"});
}

TEST_F(Gguf, Gg09ForeignContent) {
  refused("PK\x03\x04 and so on", {"zip"});
  refused("\x1f\x8b\x08 and so on", {"gzip"});
  refused("\x7f" "ELF\x02\x01", {"ELF"});
  refused("<html><head>", {"HTML"});
  refused("just some words\n", {"plain text"});
  refused("\x89HDF\r\n\x1a\n", {"HDF5"});
  refused("", {"empty file"});
  refused(std::string("\x01\x02\x03\x04\x05", 5), {"bytes 01 02 03 04"});
  refused(std::string("\x02\0\0\0\0\0\0\0{}", 10), {"safetensors", "pass the folder"});
}

TEST_F(Gguf, RealFiles) {
  CALIB_SHARED_FILE(path, "models/llama-2-tiny-random.gguf");
  const GgufFile f = parse_gguf(MappedFile(path));
  EXPECT_EQ(f.tensors.size(), 12u);
  EXPECT_EQ(f.metadata.integer("llama.block_count"), 1);
  EXPECT_FALSE(f.metadata.has("llama.rope.freq_base"));
  EXPECT_EQ(f.metadata.texts("tokenizer.ggml.tokens")->size(), 32000u);
}

TEST_F(Gguf, Gg13VocabularyOnlyIsLegalForTheParser) {
  for (const auto& [file, n] :
       {std::pair{"vocab/ggml-vocab-llama-spm.gguf", 32000u}, {"vocab/ggml-vocab-gpt-2.gguf", 50257u}, {"vocab/ggml-vocab-phi-3.gguf", 32064u}}) {
    CALIB_SHARED_FILE(path, file);
    const GgufFile f = parse_gguf(MappedFile(path));
    EXPECT_TRUE(f.tensors.empty());
    EXPECT_EQ(f.metadata.texts("tokenizer.ggml.tokens")->size(), n);
  }
}

}  // namespace
}  // namespace calib::weights
