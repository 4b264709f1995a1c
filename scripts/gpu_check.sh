#!/usr/bin/env bash
# Checks the CUDA kernels on this machine's GPU: builds them for it, compares decode with the double-precision reference, and measures
# time and bandwidth. Needs a GPU with its driver, nvcc (PATH or /usr/local/cuda) and a C++ compiler; no network, no Python, no CMake.
# Usage: scripts/gpu_check.sh [OUTPUT, default gpu_check.json]. Environment: CXX, GPU_CHECK_SECONDS (of measuring, default 120).
# Exit 0 all inside their tolerance, 1 failure, 77 nothing to run on. OUTPUT is written in every case.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
output=${1:-gpu_check.json}
revision=$(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

end() {  # exit code, verdict, reason without quotes
  printf '{\n  "revision": "%s",\n  "verdict": "%s",\n  "reason": "%s"\n}\n' "$revision" "$2" "$3" > "$output"
  echo "gpu_check: $2: $3" >&2
  exit "$1"
}

nvcc=$(command -v nvcc || true)
[[ -z $nvcc && -x /usr/local/cuda/bin/nvcc ]] && nvcc=/usr/local/cuda/bin/nvcc
[[ -n $nvcc ]] || end 77 skipped "no nvcc in PATH or /usr/local/cuda/bin"
cxx=${CXX:-$(command -v g++ || command -v clang++ || true)}
[[ -n $cxx ]] || end 77 skipped "no C++ compiler"

# The driver says which architecture to build; without one there is nothing to run on.
cat > "$build/probe.cu" <<'PROBE'
#include <cstdio>
int main() {
  int n = 0, major = 0, minor = 0;
  const cudaError_t error = cudaGetDeviceCount(&n);
  if (error != cudaSuccess || n == 0) { std::printf("%s", error == cudaSuccess ? "no CUDA device" : cudaGetErrorString(error)); return 1; }
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
  std::printf("%d%d", major, minor);
}
PROBE
"$nvcc" -ccbin "$cxx" -o "$build/probe" "$build/probe.cu" > "$build/log" 2>&1 || end 1 failed "nvcc cannot build a program: $(head -c 200 "$build/log" | tr '\n"\\' "  /")"
arch=$("$build/probe") || end 77 skipped "no usable GPU: $arch"

echo "gpu_check: building for sm_$arch" >&2
sources=(kernels/core/scheme.cc kernels/read/decode_families.cc kernels/read/combine_cuda.cu kernels/read/decode_cuda.cu
         kernels/read/stream_cuda.cu tests/kernels/decode_problem.cc tests/kernels/gpu/device_problem.cc tests/kernels/gpu/gpu_check.cc)
for source in "${sources[@]}"; do
  timeout 300 "$nvcc" -ccbin "$cxx" -std=c++17 -O3 -arch="sm_$arch" -I"$root" -Xcompiler -ffp-contract=off -c "$root/$source" \
    -o "$build/$(basename "$source").o" > "$build/$(basename "$source").log" 2>&1 &
done
wait
for source in "${sources[@]}"; do
  [[ -f $build/$(basename "$source").o ]] || { cat "$build/$(basename "$source").log" >&2; end 1 failed "$source does not compile for sm_$arch"; }
done
"$nvcc" -ccbin "$cxx" -arch="sm_$arch" -o "$build/gpu_check" "$build"/*.o || end 1 failed "the check does not link"

timeout 280 "$build/gpu_check" --seconds "${GPU_CHECK_SECONDS:-120}" > "$build/result.json"
code=$?
[[ $code -eq 77 ]] && end 77 skipped "no usable GPU"
grep -q '"verdict"' "$build/result.json" || end 1 failed "the check ended with code $code before its verdict"
compiler=$("$nvcc" --version | tail -1 | tr -d '"\\')
{ printf '{\n  "revision": "%s", "nvcc": "%s",\n' "$revision" "$compiler"; tail -n +2 "$build/result.json"; } > "$output"
echo "gpu_check: $([[ $code -eq 0 ]] && echo pass || echo FAIL), see $output" >&2
exit "$code"
