#!/usr/bin/env bash
# Checks the CUDA kernels on this machine's GPU: builds them for it, compares decode, and append and decode through contexts, with the
# reference and its committed goldens, directly and from a captured graph, and measures time and bandwidth. Needs a GPU with its driver, nvcc (PATH or /usr/local/cuda) and a C++ compiler; no network, no Python, no CMake.
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
# The library but for its JSON reader, the vector paths of wider CPUs and the refusals of builds without CUDA; then the check.
mapfile -t sources < <(cd "$root" && find kernels -name '*.cc' ! -path 'kernels/examples/*' ! -name '*_avx*' ! -name '*_neon*' ! -name plan_loader.cc ! -name no_cuda.cc &&
                       find kernels -name '*.cu' && ls tests/kernels/decode_problem.cc tests/kernels/gpu/{context_check,device_problem,gpu_check,no_plan_loader}.cc)
# Decode kernels of the default build, a file for each line of instances.txt (kernels/instances.cmake does the same).
mkdir "$build/instances"
while IFS= read -r line; do
  [[ $line =~ ^KVRT_([A-Z_]+)\(([A-Z0-9]+),\ ([A-Za-z0-9]+),\ ([A-Za-z0-9]+)(,\ ([0-9]+))?\)$ ]] || continue
  kind=${BASH_REMATCH[1]} a=${BASH_REMATCH[2]} b=${BASH_REMATCH[3]} c=${BASH_REMATCH[4]} d=${BASH_REMATCH[6]:-}
  launch=${kind,,} family=kvrt::DecodeFamily::k
  case $kind in
    SCORE_PRE) (( b <= 128 )) && [[ $c == kSplit || $c == kAdjacent ]] || continue; header=decode_fused_pre types="$family$a, $b, kvrt::KeyPairs::$c" ;;
    FUSED*) (( c <= 128 && d == 1 )) || continue; header=decode_$launch types="$family$a, $family$b, $c, $d" ;;
    *) (( b <= 128 && c == 0 )) || continue; header=decode_two_pass types="$family$a, $b, $c != 0" ;;
  esac
  printf '#include "kernels/read/%s.h"\ntemplate kvrt::Status kvrt::launch_%s<%s>(const DecodeArgs&, void*);\n' "$header" "$launch" "$types" \
    > "$build/instances/${launch}_${a}_${b}_${c}_$d.cu"
done < "$root/kernels/instances.txt"
sources+=("$build"/instances/*.cu)
object() { echo "$build/$(echo "$1" | tr '/' '_').o"; }
compile() {
  local flags=() file=$1 virtual=80  # as kernels/CMakeLists.txt does
  if (( arch >= 100 )); then virtual=100; elif [[ $1 == *_E8_* ]] && (( arch >= 89 )); then virtual=89; fi
  [[ $file == /* ]] || file=$root/$file
  # Encoders and rotations: one rounding per written operation, as on the host.
  case $1 in /*|kernels/read/decode*|kernels/read/combine*|kernels/read/stream*) ;; *.cu) flags=(-fmad=false) ;; esac
  timeout 300 "$nvcc" -ccbin "$cxx" -std=c++17 -O3 -gencode "arch=compute_$virtual,code=sm_$arch" "${flags[@]}" -I"$root" -Xcompiler -ffp-contract=off -c "$file" -o "$(object "$1")" > "$(object "$1").log" 2>&1
}
jobs_at_once=$(nproc)
for source in "${sources[@]}"; do
  while (( $(jobs -rp | wc -l) >= jobs_at_once )); do wait -n; done
  compile "$source" &
done
wait
for source in "${sources[@]}"; do
  [[ -f $(object "$source") ]] || { cat "$(object "$source").log" >&2; end 1 failed "$source does not compile for sm_$arch"; }
done
"$nvcc" -ccbin "$cxx" -arch="sm_$arch" -o "$build/gpu_check" "$build"/*.o || end 1 failed "the check does not link"

timeout 280 "$build/gpu_check" --seconds "${GPU_CHECK_SECONDS:-120}" --goldens "$root/tests/kernels/goldens/contexts.bin" > "$build/result.json"
code=$?
[[ $code -eq 77 ]] && end 77 skipped "no usable GPU"
grep -q '"verdict"' "$build/result.json" || end 1 failed "the check ended with code $code before its verdict"
compiler=$("$nvcc" --version | tail -1 | tr -d '"\\')
{ printf '{\n  "revision": "%s", "nvcc": "%s",\n' "$revision" "$compiler"; tail -n +2 "$build/result.json"; } > "$output"
echo "gpu_check: $([[ $code -eq 0 ]] && echo pass || echo FAIL), see $output" >&2
exit "$code"
