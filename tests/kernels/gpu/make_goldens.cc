// Writes the goldens of context_check.h, made by ref. Usage: make_context_goldens FILE

#include <cstdio>
#include <fstream>

#include "tests/kernels/gpu/context_check.h"

int main(int argc, char** argv) {
  using namespace kvrt::testing;
  if (argc != 2) return 2;
  std::vector<ContextResult> results;
  for (const ContextSpec& spec : context_specs()) {
    results.emplace_back();
    if (const kvrt::Status status = run_context(spec, KVRT_BACKEND_REF, &results.back()); !status.ok()) {
      std::fprintf(stderr, "%s: %s\n", name_of(spec).c_str(), status.text().c_str());
      return 1;
    }
  }
  std::ofstream file(argv[1], std::ios::binary);
  write_goldens(file, results);
  return file ? 0 : 1;
}
