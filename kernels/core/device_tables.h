#pragma once
// The layers of a context in device memory: one block that is filled once and freed with the context.

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/core/context.h"
#include "kernels/core/device.h"
#include "kernels/core/device_layer.h"

namespace kvrt {

class DeviceTables {
 public:
  /// Codes: kCuda.
  static Status make(int device, const std::vector<LayerContext>& layers, std::unique_ptr<DeviceTables>* out);
  DeviceTables(int device, std::size_t n_layers) : device_(device), layers_(n_layers) {}
  ~DeviceTables();
  DeviceTables(const DeviceTables&) = delete;
  DeviceTables& operator=(const DeviceTables&) = delete;

  /// Device address.
  const DeviceLayer* layer(std::size_t index) const { return layers_[index]; }
  /// Waits for the null stream.
  Status read_counters(std::size_t index, DeviceCounters* out) const;

 private:
  int device_;
  void* memory_ = nullptr;
  const DeviceCounters* counters_ = nullptr;
  std::vector<const DeviceLayer*> layers_;
};

}  // namespace kvrt
