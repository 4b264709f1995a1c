// Rows ST-01 to ST-06 and ST-13 of the case catalogue, on the parser.
#include "libcalib/weights/safetensors.h"

#include <filesystem>
#include <functional>
#include <limits>
#include <numeric>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/support/expect_error.h"
#include "tests/support/safetensors_writer.h"
#include "tests/support/shared_data.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_models.h"

namespace calib::weights {
namespace {

using test::expect_error;
using Json = nlohmann::ordered_json;

class Safetensors : public ::testing::Test {
 protected:
  SafetensorsFile parse(const std::string& bytes) {
    test::write_file(path_, bytes);
    return parse_safetensors(MappedFile(path_));
  }
  void refused(const std::string& bytes, std::vector<std::string> parts, std::source_location at = std::source_location::current()) {
    parts.push_back(path_);
    expect_error([&] { parse(bytes); }, ErrorKind::kFormat, parts, at);
  }
  test::TempFolder folder_;
  std::string path_ = folder_.file("model.safetensors");
};

std::string model_bytes() {
  static const std::string bytes = [] {
    test::TempFolder folder;
    test::write_hf_folder(test::make_tiny_model("m-llama"), folder.path());
    return test::read_file(folder.file("model.safetensors"));
  }();
  return bytes;
}
constexpr const char* kKProj = "model.layers.0.self_attn.k_proj.weight";

TEST_F(Safetensors, ReadsWhatTheWriterWrote) {
  const auto file = parse(model_bytes());
  EXPECT_EQ(file.tensors.size(), 39u);
  EXPECT_EQ(file.metadata.at("format"), "pt");
  EXPECT_EQ(file.tensors.back().offset + file.tensors.back().size_bytes, model_bytes().size());
  for (const auto& t : file.tensors)
    if (t.name == kKProj) {
      EXPECT_EQ(t.shape, (std::vector<std::int64_t>{32, 64}));
      EXPECT_EQ(t.n_elements, 2048);
      EXPECT_EQ(t.type, TensorType::kF32);
      EXPECT_EQ(t.type_name, "F32");
    }
}

TEST_F(Safetensors, St01LengthFieldAgainstTheFile) {
  refused("", {"0 bytes"});
  refused("1234567", {"7 bytes"});
  refused(std::string(8, '\xFF'), {"18446744073709551615", "8 bytes"});
  refused(test::safetensors_raw(std::numeric_limits<std::uint64_t>::max() - 4, "{}", ""), {"18446744073709551611", "10 bytes"});
  refused(test::safetensors_raw(10, "{}", ""), {"header length field 10", "10 bytes"});
  refused(test::safetensors_raw(0, "{}", ""), {"header length field 0", "10"});
  EXPECT_TRUE(parse(test::safetensors_raw(2, "{}", "")).tensors.empty());  // legal: a container without tensors
  refused(test::safetensors_raw(8, "xxxxxxxx", ""), {"8", "16"});
}

TEST_F(Safetensors, St02PlaceholdersAreNamed) {
  refused("version https://git-lfs.github.com/spec/v1\noid sha256:" + std::string(64, 'a') + "\nsize 4979902\n", {"Git LFS pointer", "4979902"});
  refused("<!DOCTYPE html>\n<html><body>404</body></html>", {"HTML page"});
  refused("GGUF\x03", {"GGUF"});
}

TEST_F(Safetensors, St03HeaderLimit) {
  test::write_file(path_, test::safetensors_raw(kMaxSafetensorsHeaderBytes + 1, "{", ""));
  std::filesystem::resize_file(path_, 8 + kMaxSafetensorsHeaderBytes + 1);  // sparse
  expect_error([&] { parse_safetensors(MappedFile(path_)); }, ErrorKind::kFormat, {"100000000", "100000001"});
}

TEST_F(Safetensors, St03ManyEmptyTensors) {
  Json header = Json::object();
  for (int i = 0; i < 20'000; ++i) header[fmt::format("t{}", i)] = {{"dtype", "F32"}, {"shape", {0}}, {"data_offsets", {0, 0}}};
  const std::string bytes = test::safetensors_raw(header.dump(), "");
  EXPECT_LT(test::seconds_of([&] { EXPECT_EQ(parse(bytes).tensors.size(), 20'000u); }), 2.0);
}

TEST_F(Safetensors, St04ShapeDtypeAndSpanMustAgree) {
  const auto edited = [&](const std::function<void(Json&)>& edit) {
    return test::edit_safetensors_header(model_bytes(), [&](Json& h) { edit(h[kKProj]); });
  };
  const auto span = [&](std::int64_t bytes) {
    return edited([&](Json& t) { t["data_offsets"][1] = t["data_offsets"][0].get<std::int64_t>() + bytes; });
  };
  refused(span(4), {kKProj, "8192", "give 4"});
  refused(span(8188), {kKProj, "8192", "8188"});
  refused(span(8196), {kKProj, "8192", "8196"});
  refused(edited([](Json& t) { t["data_offsets"] = {0}; }), {kKProj, "[0]"});
  refused(edited([](Json& t) { t["data_offsets"] = {0, 1, 2}; }), {kKProj, "[0,1,2]"});
  refused(edited([](Json& t) { t["shape"] = {32, -64}; }), {kKProj, "[32,-64]"});
  refused(edited([](Json& t) { t["shape"] = {32.5, 64}; }), {kKProj, "32.5"});
  refused(edited([](Json& t) { t["shape"] = {std::int64_t{1} << 33, std::int64_t{1} << 33}; }), {kKProj, "8589934592, 8589934592"});
  refused(edited([](Json& t) { t["shape"] = {std::int64_t{1} << 31, std::int64_t{1} << 30}; }), {kKProj, "2147483648, 1073741824"});
  refused(edited([](Json& t) { t["dtype"] = "F33"; }), {kKProj, "F33"});
  refused(edited([](Json& t) { t["dtype"] = 32; }), {kKProj, "dtype"});
  refused(edited([](Json& t) { t.erase("shape"); }), {kKProj, "shape"});
  refused(edited([](Json& t) { t["strides"] = {64, 1}; }), {kKProj, "strides"});
  refused(edited([](Json& t) { t = 5; }), {kKProj, "object"});
}

TEST_F(Safetensors, St05OffsetsAreNeverConverted) {
  const std::size_t data_size = 24;
  for (const char* offsets : {"[-8, 8]", "[16, 8]", "[0, 25]", "[18446744073709551615, 0]", R"(["0", "8"])", "[0.0, 8.0]", "[0, 1e3]",
                              "[0, 99999999999999999999]", "[-0, 8]", "[null, 8]", "[true, 8]", "8"}) {
    SCOPED_TRACE(offsets);
    const std::string header = fmt::format(R"({{"first":{{"dtype":"U8","shape":[8],"data_offsets":{}}}}})", offsets);
    refused(test::safetensors_raw(header, std::string(data_size, '\0')), {"first"});
  }
  refused(test::safetensors_raw(R"({"first":{"dtype":"U8","shape":[8],"data_offsets":[16,8]}})", std::string(24, '\0')), {"first", "[16, 8]"});
  refused(test::safetensors_raw(R"({"first":{"dtype":"U8","shape":[25],"data_offsets":[0,25]}})", std::string(24, '\0')), {"first", "25"});
}

TEST_F(Safetensors, St06OneReadingOnly) {
  refused(test::safetensors_raw(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", "12345678"),
          {"\"a\"", "twice"});
  refused(test::safetensors_raw(R"({"a":{"dtype":"U8","shape":[4],"shape":[4],"data_offsets":[0,4]}})", "1234"), {"\"shape\"", "twice"});
  refused(test::safetensors_raw(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})", "123456"),
          {"a and b overlap"});
  refused(test::safetensors_raw(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[68,72]}})",
                                std::string(72, 'x')),
          {"bytes 4 to 68", "between a and b"});
  refused(test::safetensors_raw(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", "12345678"), {"bytes 0 to 4"});
  refused(test::safetensors_raw(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", "1234567"), {"3 bytes after the last tensor"});
  const auto loads = parse(test::safetensors_raw(R"({"__metadata__":{"k":"v"},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}       )", "1234"));
  EXPECT_EQ(loads.metadata.at("k"), "v");
  EXPECT_EQ(loads.tensors.at(0).size_bytes, 4u);
}

TEST_F(Safetensors, St06ManyNamesForOneRange) {
  std::string header = "{";
  for (int i = 0; i < 100'000; ++i) header += fmt::format(R"({}"t{}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", i ? "," : "", i);
  const std::string bytes = test::safetensors_raw(header + "}", "1234");
  EXPECT_LT(test::seconds_of([&] { refused(bytes, {"99999", "overlap"}); }), 2.0);
}

TEST_F(Safetensors, EmptyTensorsAndScalars) {
  const auto file = parse(test::safetensors_bytes({{"empty", "F32", {0, 5}, ""}, {"scalar", "F32", {}, std::string(4, '\0')}, {"none", "I8", {0}, ""}}));
  ASSERT_EQ(file.tensors.size(), 3u);
  for (const auto& t : file.tensors) EXPECT_EQ(t.n_elements, t.name == "scalar" ? 1 : 0);
}

TEST_F(Safetensors, SubByteTypesMustFillBytes) {
  EXPECT_EQ(parse(test::safetensors_raw(R"({"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}})", "12")).tensors[0].type, TensorType::kOther);
  refused(test::safetensors_raw(R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", "12"), {"a", "whole bytes"});
}

TEST_F(Safetensors, MetadataHoldsStringsOnly) {
  refused(test::safetensors_raw(R"({"__metadata__":{"k":5}})", ""), {"__metadata__/k"});
  refused(test::safetensors_raw(R"({"__metadata__":[]})", ""), {"__metadata__"});
}

TEST_F(Safetensors, TensorNamesCannotBreakTheMessage) {
  refused(test::safetensors_raw("{\"a\\nerror: b\\u001b[2J\":{\"dtype\":\"F33\",\"shape\":[],\"data_offsets\":[0,4]}}", "1234"), {"a\\nerror: b\\x1b[2J"});
}

TEST_F(Safetensors, St13RealFileOfMatrices) {
  CALIB_SHARED_FILE(path, "misc/hadamards.safetensors");
  const MappedFile mapped(path);
  const SafetensorsFile file = parse_safetensors(mapped);
  EXPECT_EQ(file.tensors.size(), 66u);
  EXPECT_EQ(file.data_offset, 8u + 5848u);
  EXPECT_FALSE(file.metadata.empty());
  std::size_t end = 0;
  for (const auto& t : file.tensors) {
    EXPECT_EQ(t.type, TensorType::kI8);
    ASSERT_EQ(t.shape.size(), 2u);
    EXPECT_EQ(t.shape[0], t.shape[1]);
    EXPECT_LE(t.shape[0], 256);
    end = std::max(end, t.offset + t.size_bytes);
  }
  EXPECT_EQ(end, 1'436'901u);
}

}  // namespace
}  // namespace calib::weights
