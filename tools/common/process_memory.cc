#include "tools/common/process_memory.h"

#include <cstdio>
#include <cstring>

namespace calib::tools {
namespace {

/// A field of /proc/self/status in bytes; 0 where there is no such file.
std::int64_t status_bytes(const char* field) {
  std::FILE* file = std::fopen("/proc/self/status", "r");
  if (!file) return 0;
  char line[256];
  long long kib = 0;
  while (std::fgets(line, sizeof line, file))
    if (std::strncmp(line, field, std::strlen(field)) == 0) std::sscanf(line + std::strlen(field), ": %lld", &kib);
  std::fclose(file);
  return kib * 1024;
}

}  // namespace

std::int64_t peak_memory_bytes() { return status_bytes("VmHWM"); }
std::int64_t resident_memory_bytes() { return status_bytes("VmRSS"); }

}  // namespace calib::tools
