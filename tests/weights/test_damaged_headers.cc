// Truncation at every byte, seeded bit flips, and what a hostile header may cost (CASES.md 1: under 0.1 s and 10 MB).
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <limits>
#include <new>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "libcalib/base/rng.h"
#include "libcalib/weights/checkpoint.h"
#include "libcalib/weights/gguf.h"
#include "libcalib/weights/safetensors.h"
#include "tests/support/expect_error.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/safetensors_writer.h"
#include "tests/support/temp_folder.h"

namespace {

std::atomic<std::size_t> live_bytes{0}, peak_bytes{0};

void* counted(std::size_t size) {
  void* p = std::malloc(size == 0 ? 1 : size);
  if (p == nullptr) throw std::bad_alloc();
  const std::size_t now = live_bytes += malloc_usable_size(p);
  std::size_t peak = peak_bytes;
  while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
  }
  return p;
}
void forget(void* p) noexcept {
  if (p != nullptr) live_bytes -= malloc_usable_size(p);
  std::free(p);
}

}  // namespace

void* operator new(std::size_t size) { return counted(size); }
void* operator new[](std::size_t size) { return counted(size); }
void operator delete(void* p) noexcept { forget(p); }
void operator delete[](void* p) noexcept { forget(p); }
void operator delete(void* p, std::size_t) noexcept { forget(p); }
void operator delete[](void* p, std::size_t) noexcept { forget(p); }

namespace calib::weights {
namespace {

std::string small_safetensors() {
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  return test::safetensors_bytes({test::f32_tensor("a.weight", {2, 3}, values), test::f32_tensor("b", {6}, values)}, {{"format", "pt"}});
}

std::string small_gguf() {
  test::GgufWriter w;
  w.add<std::string>("general.architecture", "llama");
  w.add<std::uint32_t>("llama.block_count", 1);
  w.add<float>("llama.rope.freq_base", 1e4f);
  w.add_array<std::string>("tokenizer.ggml.tokens", {"a", "bc", ""});
  w.add_array<float>("tokenizer.ggml.scores", {0, -1, -2});
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  w.add_f32("a", {2, 3}, values);
  w.add_tensor("q", {32}, test::GgmlType::kQ8_0, std::string(34, '\1'));
  return w.bytes();
}

// Opens, reads and hashes whatever the bytes are. Everything may fail, but only with an Error that is not internal.
bool survives(const std::string& model, const std::function<void()>& write) {
  write();
  try {
    const Checkpoint c = Checkpoint::open(model);
    for (const TensorInfo& t : c.tensors()) {
      std::vector<float> values(static_cast<std::size_t>(t.n_elements));
      try {
        c.read_f32(t, values);
      } catch (const Error& e) {
        EXPECT_NE(static_cast<int>(e.kind()), static_cast<int>(ErrorKind::kInternal)) << e.what();
      }
    }
    EXPECT_EQ(c.identity_sha256(false).size(), 64u);
    return true;
  } catch (const Error& e) {
    EXPECT_NE(static_cast<int>(e.kind()), static_cast<int>(ErrorKind::kInternal)) << e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << "not a calib::Error: " << e.what();
  }
  return false;
}

class DamagedHeaders : public ::testing::Test {
 protected:
  void SetUp() override { test::write_file(folder_.file("config.json"), "{}"); }
  bool safetensors(const std::string& bytes) {
    return survives(folder_.path(), [&] { test::write_file(folder_.file("model.safetensors"), bytes); });
  }
  bool gguf(const std::string& bytes) {
    return survives(folder_.file("m.gguf"), [&] { test::write_file(folder_.file("m.gguf"), bytes); });
  }
  test::TempFolder folder_;
};

TEST_F(DamagedHeaders, TruncationAtEveryByteIsRefused) {
  const std::string st = small_safetensors(), gg = small_gguf();
  ASSERT_TRUE(safetensors(st));
  ASSERT_TRUE(gguf(gg));
  for (std::size_t n = 0; n < st.size(); ++n) EXPECT_FALSE(safetensors(st.substr(0, n))) << n << " of " << st.size();
  for (std::size_t n = 0; n < gg.size(); ++n) EXPECT_FALSE(gguf(gg.substr(0, n))) << n << " of " << gg.size();
}

TEST_F(DamagedHeaders, BitFlipsNeverCrash) {
  const std::string st = small_safetensors(), gg = small_gguf();
  Rng rng(11);
  int refused = 0;
  for (int i = 0; i < 400; ++i) {
    std::string bytes = i % 2 ? st : gg;
    for (std::uint64_t flips = 1 + rng.below(3); flips > 0; --flips) bytes[rng.below(bytes.size())] ^= static_cast<char>(1 << rng.below(8));
    refused += (i % 2 ? safetensors(bytes) : gguf(bytes)) ? 0 : 1;
  }
  EXPECT_GT(refused, 100);  // most of both files is header
}

TEST_F(DamagedHeaders, SplicedBytesNeverCrash) {
  Rng rng(12);
  for (int i = 0; i < 200; ++i) {
    std::string bytes = i % 2 ? small_safetensors() : small_gguf();
    const std::size_t at = rng.below(bytes.size()), n = rng.below(24);
    if (rng.below(2)) bytes.erase(at, n);
    else bytes.insert(at, bytes.substr(rng.below(bytes.size()), n));
    i % 2 ? safetensors(bytes) : gguf(bytes);
  }
}

// One parse of a hostile file: time and the growth of the heap, the copy of the path and message included.
void costs_little(const std::string& path, const std::string& bytes, const std::function<void(const MappedFile&)>& parse) {
  test::write_file(path, bytes);
  peak_bytes = live_bytes.load();
  const std::size_t before = live_bytes;
  double seconds = 1;
  for (int i = 0; i < 3 && seconds >= 0.1; ++i)  // a busy machine gets three chances
    seconds = test::seconds_of([&] { EXPECT_THROW(parse(MappedFile(path)), Error); });
  EXPECT_LT(seconds, 0.1);
  EXPECT_LT(peak_bytes - before, 10u << 20);
}

TEST_F(DamagedHeaders, HostileSizesCostNothing) {
  const auto u32 = [](std::uint32_t v) { return std::string(reinterpret_cast<const char*>(&v), 4); };
  const auto u64 = [](std::uint64_t v) { return std::string(reinterpret_cast<const char*>(&v), 8); };
  const auto st = [&](const std::string& bytes) { costs_little(folder_.file("x"), bytes, [](const MappedFile& f) { parse_safetensors(f); }); };
  const auto gg = [&](const std::string& bytes) { costs_little(folder_.file("x"), bytes, [](const MappedFile& f) { parse_gguf(f); }); };
  for (std::uint64_t length :
       {std::uint64_t{0}, std::uint64_t{99'999'999}, std::uint64_t{100'000'001}, std::uint64_t{1} << 40, std::numeric_limits<std::uint64_t>::max()})
    st(test::safetensors_raw(length, "{}", ""));
  st(test::safetensors_raw("{\"a\":" + std::string(100'000, '['), ""));
  st(test::safetensors_raw(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", ""));
  const std::uint64_t huge = std::uint64_t{1} << 60;
  const std::string magic = "GGUF" + u32(3), one_key = magic + u64(0) + u64(1), tail(200, '\0');
  gg(magic + u64(huge) + u64(0) + tail);
  gg(magic + u64(0) + u64(huge) + tail);
  gg(one_key + u64(huge) + tail);
  gg(one_key + u64(1) + "k" + u32(8) + u64(huge) + tail);
  for (std::uint32_t kind = 0; kind < 13; ++kind) gg(one_key + u64(1) + "k" + u32(9) + u32(kind) + u64(huge) + tail);
  std::string deep = one_key + u64(1) + "k" + u32(9);
  for (int i = 0; i < 10'000; ++i) deep += u32(9) + u64(1);
  gg(deep);
  gg(magic + u64(1) + u64(0) + u64(1) + "t" + u32(2) + u64(huge) + u64(huge) + u32(0) + u64(0) + tail);
}

}  // namespace
}  // namespace calib::weights
