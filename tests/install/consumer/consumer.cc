// A program outside the repository that uses the installed kvrt: stores two tokens of one head in 4 bits and reads them back.
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/core/scheme.h"
#include "kernels/write/fake_quant.h"

int main() {
  kvrt::FakeQuantArgs args;
  std::string error;
  if (!kvrt::parse_scheme("int4.token.g32", &args.scheme, &error)) {
    std::printf("parse_scheme: %s\n", error.c_str());
    return 1;
  }
  std::vector<float> x(2 * 32), y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  args.n_tokens = 2;
  args.n_heads = 1;
  args.head_dim = 32;
  args.x = x.data();
  args.out = y.data();
  if (const kvrt::Status status = kvrt::fake_quant(args); !status.ok()) {
    std::printf("fake_quant failed\n");
    return 1;
  }
  // Range 2 in 15 steps: at most half a step away, plus the rounding of scale and minimum to 16 bits.
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::fabs(x[i] - y[i]) > 0.5 * 2.0 / 15 + 0.01) {
      std::printf("element %zu: %g came back as %g\n", i, x[i], y[i]);
      return 1;
    }
  }
  std::printf("consumer: ok\n");
  return 0;
}
