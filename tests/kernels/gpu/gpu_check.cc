// What scripts/gpu_check.sh runs on a machine with a GPU: decode on the device against the double reference, graph capture against
// direct launches, time and bandwidth. Writes one JSON object to standard output, progress to standard error.
// Usage: gpu_check [--seconds LIMIT] [--goldens FILE]. Exit 0 all inside their tolerance, 1 otherwise, 77 no device.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>

#include "tests/kernels/gpu/context_check.h"
#include "tests/kernels/gpu/device_problem.h"

namespace kvrt::gpu {
namespace {

constexpr int kLaunchesPerSample = 20, kSamples = 40;

struct Stream {
  cudaStream_t stream = nullptr;
  Stream() { check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"); }
  ~Stream() { cudaStreamDestroy(stream); }
};

/// A captured sequence of launches.
class Graph {
 public:
  template <class Launches>
  Graph(cudaStream_t stream, Launches launches) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    launches();
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    const cudaError_t error = cudaGraphInstantiate(&exec_, graph, 0);
    cudaGraphDestroy(graph);
    check(error, "cudaGraphInstantiate");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(exec_); }
  void run(cudaStream_t stream) const { check(cudaGraphLaunch(exec_, stream), "cudaGraphLaunch"); }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

struct Times {
  double median, p10, p90;  ///< microseconds a launch
};

template <class Launch>
Times measure(cudaStream_t stream, Launch launch) {
  const Graph graph(stream, [&] { for (int i = 0; i < kLaunchesPerSample; ++i) launch(); });
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<double> samples;
  for (int i = -2; i < kSamples; ++i) {  // two to warm up
    check(cudaEventRecord(begin, stream), "cudaEventRecord");
    graph.run(stream);
    check(cudaEventRecord(end, stream), "cudaEventRecord");
    check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    if (i >= 0) samples.push_back(1e3 * static_cast<double>(ms) / kLaunchesPerSample);
  }
  cudaEventDestroy(begin), cudaEventDestroy(end);
  std::sort(samples.begin(), samples.end());
  return {samples[kSamples / 2], samples[kSamples / 10], samples[kSamples - 1 - kSamples / 10]};
}

struct Families {
  const char *k, *v;
};
constexpr Families kFamilies[] = {
    {"bf16", "bf16"},                 {"fp16", "fp16"},                     {"int8.token.g", "int8.token.g"}, {"int8.token.g64", "int8.token.g32"},
    {"int8.token.g", "int4.token.g"}, {"int4.token.g", "int4.token.g"},     {"int4.token.g64", "int4.token.g32"},
};

/// JSON members of one comparison; false if it is out of tolerance.
bool compare(const Families& f, int head_dim, int heads, bool is_first) {
  testing::DecodeSpec spec;
  spec.head_dim = head_dim, spec.n_query_heads = heads;
  spec.sequences = {{{"bf16", "bf16", 4, 16}, {f.k, f.v, 391}, {"bf16", "bf16", 30, 16, true}}, {{f.k, f.v, 64}}, {{f.k, f.v, 1}}, {{f.k, f.v, 2000}}};
  const testing::DecodeProblem problem(spec);
  const DeviceProblem device(problem);
  const Stream stream;
  device.launch(stream.stream);
  const testing::DecodeResult direct = device.result();
  const Graph graph(stream.stream, [&] { device.launch(stream.stream); });
  graph.run(stream.stream);
  const testing::DecodeResult captured = device.result();
  const double ratio = problem.worst_ratio(direct), lse_ratio = problem.worst_log_sum_exp_ratio(direct);
  const bool same = std::memcmp(direct.out.data(), captured.out.data(), direct.out.size() * sizeof(float)) == 0;
  const bool is_right = ratio <= 1 && lse_ratio <= 1 && same;
  std::printf("%s    {\"k\": \"%s\", \"v\": \"%s\", \"head_dim\": %d, \"query_heads\": %d, \"error_over_tolerance\": %.4g, "
              "\"lse_error_over_tolerance\": %.4g, \"graph_equals_direct\": %s, \"verdict\": \"%s\"}",
              is_first ? "" : ",\n", f.k, f.v, head_dim, heads, std::min(ratio, 1e9), std::min(lse_ratio, 1e9), same ? "true" : "false",
              is_right ? "pass" : "fail");
  std::fprintf(stderr, "%-16s %-16s D %3d G %2d: %.3f of the tolerance, %s\n", f.k, f.v, head_dim, heads, ratio, is_right ? "pass" : "FAIL");
  return is_right;
}

/// Contexts: append in bulk and one by one, decode, directly and from a graph, against ref on this machine and the committed goldens.
bool compare_contexts(const char* goldens_path) {
  std::ifstream file(goldens_path, std::ios::binary);
  const std::vector<testing::ContextResult> goldens = testing::read_goldens(file);
  if (goldens.empty()) std::fprintf(stderr, "no goldens in %s\n", goldens_path);
  bool is_right = !goldens.empty();
  for (std::size_t i = 0; i < testing::context_specs().size() && is_right; ++i) {
    const testing::ContextSpec& spec = testing::context_specs()[i];
    testing::ContextResult reference, direct, captured;
    const Stream stream;
    const auto run_directly = [&](const std::function<Status(void*)>& calls) {
      const Status status = calls(stream.stream);
      check(cudaStreamSynchronize(stream.stream), "cudaStreamSynchronize");
      return status;
    };
    const auto run_captured = [&](const std::function<Status(void*)>& calls) {
      Status status;
      const Graph graph(stream.stream, [&] { status = calls(stream.stream); });
      graph.run(stream.stream);
      check(cudaStreamSynchronize(stream.stream), "cudaStreamSynchronize");
      return status;
    };
    check(testing::run_context(spec, KVRT_BACKEND_REF, &reference));
    const Status status = testing::run_context(spec, KVRT_BACKEND_CUDA, &direct, run_directly);
    double worst = 0, worst_golden = 0;
    std::string verdict = status.ok() ? "" : status.text();
    if (verdict.empty()) verdict = testing::compare_contexts(reference, direct, &worst);
    if (verdict.empty()) verdict = testing::compare_contexts(goldens[i], direct, &worst_golden);
    if (verdict.empty()) {
      check(testing::run_context(spec, KVRT_BACKEND_CUDA, &captured, run_captured));
      if (captured.out != direct.out || captured.log_sum_exp != direct.log_sum_exp || captured.pages[1][0] != direct.pages[1][0])
        verdict = "the graph gives other results";
    }
    for (char& c : verdict) c = c == '"' || c == '\\' ? ' ' : c;
    is_right = is_right && verdict.empty();
    std::printf("%s    {\"case\": \"%s\", \"error_over_tolerance\": %.4g, \"error_over_tolerance_of_goldens\": %.4g, \"verdict\": \"%s\", \"reason\": \"%s\"}",
                i == 0 ? "" : ",\n", testing::name_of(spec).c_str(), worst, worst_golden, verdict.empty() ? "pass" : "fail", verdict.c_str());
    std::fprintf(stderr, "context %s: %s\n", testing::name_of(spec).c_str(), verdict.empty() ? "pass" : verdict.c_str());
  }
  return is_right;
}

void time_shape(const Families& f, int kv_heads, int heads, std::int64_t length, const cudaDeviceProp& device, double peak, bool is_first) {
  testing::DecodeSpec spec;
  spec.n_kv_heads = kv_heads, spec.n_query_heads = heads, spec.has_reference = false;
  spec.sequences = {{{f.k, f.v, length}}};
  testing::DecodeProblem problem(spec);
  // At least three times the L2, so that a launch finds nothing of the one before; then chunks for about four waves of CTAs.
  const std::int64_t bytes = problem.cache_bytes(), wanted = std::max<std::int64_t>(3 * static_cast<std::int64_t>(device.l2CacheSize), 64 << 20);
  const int n_copies = static_cast<int>((wanted + bytes - 1) / bytes);
  const std::int64_t tiles = static_cast<std::int64_t>(n_copies) * kv_heads * (length / kTileSlots);
  problem.replan(std::max<std::int64_t>(16, tiles / (16 * static_cast<std::int64_t>(device.multiProcessorCount)) / 16 * 16));
  const DeviceProblem on_device(problem, n_copies);
  const Stream stream;
  const Times decode = measure(stream.stream, [&] { on_device.launch(stream.stream); });
  const Times plain = measure(stream.stream, [&] { on_device.launch_stream(stream.stream, 8 * device.multiProcessorCount); });
  const double gigabytes = static_cast<double>(on_device.cache_bytes()) * 1e-9, rate = gigabytes / (decode.median * 1e-6);
  const double yardstick = gigabytes / (plain.median * 1e-6);
  std::printf("%s    {\"k\": \"%s\", \"v\": \"%s\", \"head_dim\": 128, \"kv_heads\": %d, \"query_heads\": %d, \"tokens\": %lld, \"batch\": %d, "
              "\"cache_bytes\": %lld, \"us_median\": %.2f, \"us_p10\": %.2f, \"us_p90\": %.2f, \"gb_per_s\": %.1f, \"stream_gb_per_s\": %.1f, "
              "\"percent_of_stream\": %.1f, \"percent_of_datasheet\": %.1f}",
              is_first ? "" : ",\n", f.k, f.v, kv_heads, heads, static_cast<long long>(length), n_copies,
              static_cast<long long>(on_device.cache_bytes()), decode.median, decode.p10, decode.p90, rate, yardstick, 100 * rate / yardstick,
              peak > 0 ? 100 * rate / peak : 0.0);
  std::fprintf(stderr, "%-16s %-16s H %2d G %2d T %6lld batch %3d: %8.1f us, %7.1f GB/s, %5.1f %% of stream\n", f.k, f.v, kv_heads, heads,
               static_cast<long long>(length), n_copies, decode.median, rate, 100 * rate / yardstick);
}

int attribute(cudaDeviceAttr what) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, what, 0), "cudaDeviceGetAttribute");
  return value;
}

int run(double seconds, const char* goldens) {
  int n_devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&n_devices); error != cudaSuccess || n_devices == 0) {
    std::fprintf(stderr, "SKIPPED: no CUDA driver (%s)\n", cudaGetErrorString(error));
    return 77;
  }
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver), cudaRuntimeGetVersion(&runtime);
  const int memory_khz = attribute(cudaDevAttrMemoryClockRate), bus = attribute(cudaDevAttrGlobalMemoryBusWidth);
  const double peak = 2e-6 * memory_khz * bus / 8;  // GB/s, two transfers a clock
  std::printf("{\n  \"gpu\": \"%s\", \"compute_capability\": \"%d.%d\", \"sm_count\": %d, \"sm_clock_mhz\": %d, \"memory_clock_mhz\": %d,\n"
              "  \"memory_bus_bits\": %d, \"datasheet_gb_per_s\": %.0f, \"l2_bytes\": %d, \"ecc\": %s, \"driver\": %d, \"runtime\": %d,\n",
              device.name, device.major, device.minor, device.multiProcessorCount, attribute(cudaDevAttrClockRate) / 1000, memory_khz / 1000, bus,
              peak, device.l2CacheSize, device.ECCEnabled ? "true" : "false", driver, runtime);

  std::printf("  \"comparisons\": [\n");
  bool is_right = true, is_first = true;
  for (const Families& f : kFamilies) {
    for (const int head_dim : {64, 128}) {
      for (const int heads : {1, 3, 4, 8, 16}) is_right &= compare(f, head_dim, heads, is_first), is_first = false;
    }
  }
  std::printf("\n  ],\n  \"contexts\": [\n");
  is_right &= compare_contexts(goldens);
  std::printf("\n  ],\n  \"times\": [\n");
  const int shapes[][2] = {{8, 4}, {1, 8}, {4, 8}, {32, 1}, {2, 16}};
  const Families headline[] = {{"bf16", "bf16"}, {"int8.token.g", "int8.token.g"}, {"int4.token.g", "int4.token.g"}, {"int4.token.g64", "int4.token.g32"}};
  int n_skipped = 0;
  is_first = true;
  for (const std::int64_t length : {8192, 1024, 32768}) {  // the most telling first
    for (const auto& shape : shapes) {
      for (const Families& f : headline) {
        if (elapsed() > seconds) { ++n_skipped; continue; }
        time_shape(f, shape[0], shape[1], length, device, peak, is_first), is_first = false;
      }
    }
  }
  std::printf("\n  ],\n  \"skipped\": [");
  if (n_skipped > 0) std::printf("\"%d shapes: the limit of %.0f s was reached\"", n_skipped, seconds);
  std::printf("],\n  \"verdict\": \"%s\"\n}\n", is_right ? "pass" : "fail");
  return is_right ? 0 : 1;
}

}  // namespace
}  // namespace kvrt::gpu

int main(int argc, char** argv) {
  double seconds = 120;
  const char* goldens = "context_goldens.bin";
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--seconds") == 0) seconds = std::atof(argv[i + 1]);
    if (std::strcmp(argv[i], "--goldens") == 0) goldens = argv[i + 1];
  }
  try {
    return kvrt::gpu::run(seconds, goldens);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "gpu_check: %s\n", e.what());
    return 1;
  }
}
