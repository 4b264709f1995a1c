#pragma once
// Global memory as vectors of 32-bit words. Cache bytes are read once: no L1 allocation.

#include "kernels/cuda/portable.h"

namespace kvrt::cuda {

/// N words at p, which must be aligned to 4 N bytes. N: 1, 2, 4.
template <int N>
KVRT_DEVICE void load_stream(const std::uint8_t* p, std::uint32_t (&w)[N]) {
  static_assert(N == 1 || N == 2 || N == 4, "one vector load");
#if defined(__CUDACC__)
  if constexpr (N == 4) {
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p));
  } else if constexpr (N == 2) {
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p));
  } else {
    asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(w[0]) : "l"(p));
  }
#else
  executor::access(p, 4 * N, false);
  std::memcpy(w, p, sizeof w);
#endif
}

/// N words to p, aligned as for load_stream.
template <int N>
KVRT_DEVICE void store_words(std::uint8_t* p, const std::uint32_t (&w)[N]) {
  static_assert(N == 1 || N == 2 || N == 4, "one vector store");
#if defined(__CUDACC__)
  if constexpr (N == 4) {
    *reinterpret_cast<uint4*>(p) = make_uint4(w[0], w[1], w[2], w[3]);
  } else if constexpr (N == 2) {
    *reinterpret_cast<uint2*>(p) = make_uint2(w[0], w[1]);
  } else {
    *reinterpret_cast<std::uint32_t*>(p) = w[0];
  }
#else
  executor::access(p, 4 * N, true);
  std::memcpy(p, w, sizeof w);
#endif
}

/// One word that neighbouring lanes read too: cached. p aligned to 4 bytes.
KVRT_DEVICE std::uint32_t load_shared_word(const std::uint8_t* p) {
#if defined(__CUDACC__)
  std::uint32_t w;
  asm("ld.global.nc.u32 %0, [%1];" : "=r"(w) : "l"(p));
  return w;
#else
  executor::access(p, 4, false);
  std::uint32_t w;
  std::memcpy(&w, p, sizeof w);
  return w;
#endif
}

/// 16 bits that neighbouring lanes read too: cached. p aligned to 2 bytes.
KVRT_DEVICE std::uint32_t load_shared_half(const std::uint8_t* p) {
#if defined(__CUDACC__)
  std::uint16_t h;
  asm("ld.global.nc.u16 %0, [%1];" : "=h"(h) : "l"(p));
  return h;
#else
  executor::access(p, 2, false);
  std::uint16_t h;
  std::memcpy(&h, p, sizeof h);
  return h;
#endif
}

/// 4 floats at p, aligned to 16 bytes: what another kernel reads or wrote.
KVRT_DEVICE void store_floats(float* p, const float (&w)[4]) {
#if defined(__CUDACC__)
  *reinterpret_cast<float4*>(p) = make_float4(w[0], w[1], w[2], w[3]);
#else
  executor::access(p, 16, true);
  std::memcpy(p, w, sizeof w);
#endif
}
KVRT_DEVICE void load_floats(const float* p, float (&w)[4]) {
#if defined(__CUDACC__)
  const float4 v = *reinterpret_cast<const float4*>(p);
  w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
#else
  executor::access(p, 16, false);
  std::memcpy(w, p, sizeof w);
#endif
}

/// A value in shared memory, read at every call: the compiler may not keep it in a register from one call to the next.
template <class T>
KVRT_DEVICE T reread(const T& shared) {
  return *static_cast<const volatile T*>(&shared);
}

/// Words of shared memory that one instruction moves.
struct alignas(16) Words4 {
  std::uint32_t x, y, z, w;
};
struct alignas(8) Words2 {
  std::uint32_t x, y;
};

/// Two words in shared memory, aligned to 8 bytes, read at every call.
KVRT_DEVICE void reread_pair(const std::uint32_t* shared, std::uint32_t (&w)[2]) {
#if defined(__CUDACC__)
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(shared))));
#else
  w[0] = shared[0], w[1] = shared[1];
#endif
}

/// One element of an array in global memory.
template <class T>
KVRT_DEVICE T load(const T* p) {
#if !defined(__CUDACC__)
  executor::access(p, sizeof(T), false);
#endif
  return *p;
}
template <class T>
KVRT_DEVICE void store(T* p, T value) {
#if !defined(__CUDACC__)
  executor::access(p, sizeof(T), true);
#endif
  *p = value;
}

/// *p += value, at once for all who see the memory. The order of additions is open: integers only.
KVRT_DEVICE void atomic_add(std::int64_t* p, std::int64_t value) {
#if defined(__CUDACC__)
  atomicAdd(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(value));
#else
  __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
#endif
}

}  // namespace kvrt::cuda
