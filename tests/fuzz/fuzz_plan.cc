// plan.json + plan.safetensors. What is accepted must be countable; everything else must be a Status, not an exception.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "kernels/core/plan_loader.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 4) return 0;
  std::uint32_t length = 0;
  std::memcpy(&length, data, 4);
  if (length > size - 4) return 0;
  const auto* text = reinterpret_cast<const char*>(data) + 4;
  kvrt::Plan plan;
  const kvrt::Status status = kvrt::read_plan(std::string_view(text, length), std::string_view(text + length, size - 4 - length), &plan);
  if (!status.ok()) {
    if (status.text().empty() || status.code() == kvrt::Code::kInternal) std::abort();
    return 0;
  }
  for (const kvrt::LayerPlan& layer : plan.layers) {
    for (const kvrt::CacheSide side : {kvrt::CacheSide::kK, kvrt::CacheSide::kV}) {
      if (kvrt::cache_bytes(layer.layout, side, std::int64_t{1} << 32) < 0) std::abort();
      kvrt::missing_part(plan, layer, side);
    }
  }
  return 0;
}
