#pragma once
// Hot loops over floats are built twice where the compiler can choose at load time (GCC on x86-64); elsewhere once.

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CALIB_WIDE_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define CALIB_WIDE_CLONES
#endif
