#include "kernels/codec/hadamard.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "libcalib/base/rng.h"

namespace kvrt {
namespace {

std::vector<float> rotated(const HadamardOrder& order, std::vector<float> x, bool inverse = false) {
  hadamard_rotate(order, x.data(), static_cast<int>(x.size()), inverse);
  return x;
}

TEST(Hadamard, SylvesterOfG29) {
  const std::vector<float> y = rotated(hadamard_order(8), {1, 2, 3, 4, 5, 6, 7, 8});
  const double expected[] = {12.727922, -1.414214, -2.828427, 0, -5.656854, 0, 0, 0};
  for (std::size_t i = 0; i < 8; ++i) EXPECT_NEAR(y[i], expected[i], 1e-6);
}

TEST(Hadamard, PaleyTwelveOfG30) {
  const std::string row = "-+-+---+++-+";
  for (int j = 0; j < 12; ++j) EXPECT_EQ(paley_negative(12, 1, j), row[static_cast<std::size_t>(j)] == '-') << j;
  for (int i = 0; i < 12; ++i) {
    int sum = 0;
    for (int j = 0; j < 12; ++j) sum += paley_negative(12, i, j) ? -1 : 1;
    EXPECT_EQ(sum, i == 0 ? 12 : 0);
  }
}

TEST(Hadamard, PaleyMatricesAreOrthogonalExactly) {
  for (const int m : {12, 20, 28, 36, 60}) {
    for (int a = 0; a < m; ++a) {
      for (int b = 0; b < m; ++b) {
        int dot = 0;
        for (int j = 0; j < m; ++j) dot += paley_negative(m, a, j) == paley_negative(m, b, j) ? 1 : -1;
        ASSERT_EQ(dot, a == b ? m : 0) << m;
      }
      ASSERT_EQ(paley_row(m, a, true) >> 3 & 1, paley_row(m, 3, false) >> a & 1);
    }
  }
}

// H H^T = I, from the images of the unit vectors (G29, QZ-02), and the inverse undoes it.
TEST(Hadamard, EveryOfferedOrderIsOrthonormal) {
  for (const int d : {8, 12, 20, 28, 36, 60, 64, 72, 80, 96, 112, 128, 192, 240, 256, 88}) {
    const HadamardOrder order = hadamard_order(d);
    ASSERT_GT(order.size, 0) << d;
    std::vector<std::vector<float>> columns;
    for (int j = 0; j < d; ++j) {
      std::vector<float> unit(static_cast<std::size_t>(d), 0.0f);
      unit[static_cast<std::size_t>(j)] = 1;
      columns.push_back(rotated(order, unit));
      const std::vector<float> back = rotated(order, columns.back(), true);
      for (int i = 0; i < d; ++i) ASSERT_NEAR(back[static_cast<std::size_t>(i)], i == j ? 1 : 0, 1e-6) << d;
      for (const float v : columns.back()) ASSERT_TRUE(v == 0 || std::abs(std::abs(v) * std::sqrt(order.size) - 1) < 1e-6);
    }
    for (int a = 0; a < d; ++a) {
      for (int b = a; b < d; ++b) {
        double dot = 0;
        for (std::size_t i = 0; i < static_cast<std::size_t>(d); ++i) {
          dot += static_cast<double>(columns[static_cast<std::size_t>(a)][i]) * columns[static_cast<std::size_t>(b)][i];
        }
        ASSERT_NEAR(dot, a == b ? 1 : 0, 1e-6) << d;
      }
    }
  }
}

TEST(Hadamard, DotProductsSurviveToRounding) {
  calib::Rng rng(3);
  for (const int d : {64, 80, 96, 128, 192, 256}) {
    std::vector<float> q(static_cast<std::size_t>(d)), k(q.size());
    for (float& v : q) v = static_cast<float>(rng.normal());
    for (float& v : k) v = static_cast<float>(rng.normal());
    const std::vector<float> qh = rotated(hadamard_order(d), q), kh = rotated(hadamard_order(d), k);
    double plain = 0, turned = 0, size = 0;
    for (std::size_t i = 0; i < q.size(); ++i) {
      plain += static_cast<double>(q[i]) * k[i], turned += static_cast<double>(qh[i]) * kh[i], size += std::abs(static_cast<double>(q[i]) * k[i]);
    }
    EXPECT_NEAR(turned, plain, 1e-6 * size) << d;
  }
}

/// One matrix of ../shared/data/misc/hadamards.safetensors: entries +-1, row-major; empty if it is not there.
std::vector<std::int8_t> read_matrix(const std::string& file, int order) {
  std::ifstream in(file, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  const std::string bytes = text.str();
  std::uint64_t header = 0;
  if (bytes.size() < 8) return {};
  std::memcpy(&header, bytes.data(), 8);
  const std::string json = bytes.substr(8, header), key = "\"" + std::to_string(order) + "\":{\"dtype\"";
  const std::size_t at = json.find(key), offsets = json.find("data_offsets\":[", at);
  if (at == std::string::npos || offsets == std::string::npos) return {};
  const std::size_t begin = std::stoul(json.substr(offsets + 15)), n = static_cast<std::size_t>(order) * static_cast<std::size_t>(order);
  std::vector<std::int8_t> matrix(n);
  std::memcpy(matrix.data(), bytes.data() + 8 + header + begin, n);
  return matrix;
}

// QZ-02. Published matrices of the same orders: Hadamard matrices, too, and where theirs is Sylvester's, the same one.
TEST(Hadamard, AgreesWithPublishedMatrices) {
  const char* shared = std::getenv("KVCALIB_SHARED");
  const std::string file = (shared ? std::string(shared) : std::string(CALIB_SOURCE_DIR) + "/../shared") + "/data/misc/hadamards.safetensors";
  if (read_matrix(file, 64).empty()) GTEST_SKIP() << "SKIP AgreesWithPublishedMatrices: ../shared/data/misc/hadamards.safetensors not found";
  for (const int d : {64, 72, 80, 96, 112, 128, 192, 256}) {
    const std::vector<std::int8_t> theirs = read_matrix(file, d);
    ASSERT_EQ(theirs.size(), static_cast<std::size_t>(d) * static_cast<std::size_t>(d));
    const bool sylvester = d == 64 || d == 128 || d == 256;
    for (int j = 0; j < d; ++j) {
      std::vector<float> unit(static_cast<std::size_t>(d), 0.0f);
      unit[static_cast<std::size_t>(j)] = 1;
      const std::vector<float> column = rotated(hadamard_order(d), unit);
      for (int i = 0; i < d; ++i) {
        const int entry = theirs[static_cast<std::size_t>(i * d + j)];
        ASSERT_EQ(std::abs(entry), 1);
        ASSERT_EQ(sylvester ? column[static_cast<std::size_t>(i)] < 0 : entry < 0, entry < 0) << d << " " << i << " " << j;
      }
    }
  }
}

}  // namespace
}  // namespace kvrt
