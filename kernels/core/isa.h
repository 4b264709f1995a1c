#pragma once
// Names of the cpu backend's paths, as KVRT_FORCE_ISA takes them: "avx2", "avx512", and the one for the instruction set of the whole build.

namespace kvrt {

#if defined(__aarch64__)
inline constexpr const char* kBaselineName = "neon";  ///< part of every AArch64
#else
inline constexpr const char* kBaselineName = "baseline";
#endif

}  // namespace kvrt
