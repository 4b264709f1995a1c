// Writes tiny.json and tiny.safetensors into a folder: a plan for the examples.
#include <cstdio>

#include "tests/kernels/tiny_plan.h"

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "usage: write_tiny_plan FOLDER\n"), 2;
  kvrt::testing::TinyPlan().write(argv[1]);
  return 0;
}
