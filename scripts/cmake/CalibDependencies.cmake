# Finds every dependency once and gives each one imported target.
include(FindPkgConfig)

find_package(Threads REQUIRED)
find_package(fmt QUIET)
if(NOT fmt_FOUND)
  calib_missing(fmt libfmt-dev)
endif()
find_package(nlohmann_json QUIET)
if(NOT nlohmann_json_FOUND)
  calib_missing(nlohmann/json nlohmann-json3-dev)
endif()
find_package(Eigen3 QUIET NO_MODULE)
if(NOT Eigen3_FOUND)
  calib_missing(Eigen libeigen3-dev)
endif()
find_package(OpenSSL QUIET)
if(NOT OPENSSL_FOUND)
  calib_missing(OpenSSL libssl-dev)
endif()
find_package(CLI11 QUIET)
if(NOT CLI11_FOUND)
  calib_missing(CLI11 libcli11-dev)
endif()
# HDF5's own find module compiles C programs; this project enables C++ only, so pkg-config does the job.
pkg_check_modules(HDF5 QUIET IMPORTED_TARGET hdf5 hdf5-serial)
if(NOT HDF5_FOUND)
  pkg_check_modules(HDF5 QUIET IMPORTED_TARGET hdf5)
endif()
if(NOT HDF5_FOUND)
  calib_missing(HDF5 libhdf5-dev)
endif()
pkg_check_modules(PCRE2 QUIET IMPORTED_TARGET libpcre2-8)
if(NOT PCRE2_FOUND)
  calib_missing(PCRE2 libpcre2-dev)
endif()
# Unicode normalisation (NFC), which the tokenizers of the Qwen family ask for.
pkg_check_modules(UTF8PROC QUIET IMPORTED_TARGET libutf8proc)
if(NOT UTF8PROC_FOUND)
  calib_missing(utf8proc libutf8proc-dev)
endif()
find_path(CALIB_VALIJSON_INCLUDE_DIR valijson/validator.hpp)
if(NOT CALIB_VALIJSON_INCLUDE_DIR)
  calib_missing(valijson libvalijson-dev)
endif()
add_library(calib_valijson INTERFACE)
add_library(calib::valijson ALIAS calib_valijson)
target_include_directories(calib_valijson SYSTEM INTERFACE ${CALIB_VALIJSON_INCLUDE_DIR})

# libtorch: CALIB_TORCH_DIR is a libtorch folder or the `torch` package of a wheel (scripts/setup makes .venv).
# An own imported target over libtorch_cpu and libc10 instead of find_package(Torch), which enables CUDA and drags its
# toolkit in even for a program that never touches a GPU.
if(NOT CALIB_TORCH_DIR)
  if(DEFINED ENV{KVCALIB_TORCH})
    set(CALIB_TORCH_DIR "$ENV{KVCALIB_TORCH}" CACHE PATH "libtorch folder")
  else()
    file(GLOB calib_torch_candidates ${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch)
    if(calib_torch_candidates)
      list(GET calib_torch_candidates 0 calib_torch_candidate)
      set(CALIB_TORCH_DIR "${calib_torch_candidate}" CACHE PATH "libtorch folder")
    endif()
  endif()
endif()
if(NOT EXISTS "${CALIB_TORCH_DIR}/include/ATen/ATen.h")
  message(FATAL_ERROR "libtorch not found (CALIB_TORCH_DIR is '${CALIB_TORCH_DIR}'). Run scripts/setup, or set "
                      "KVCALIB_TORCH to a libtorch folder or an installed Python package `torch`.")
endif()

set(calib_torch_libraries torch_cpu c10)
set(CALIB_TORCH_HAS_CUDA OFF)
if(NOT CALIB_WITH_CUDA STREQUAL "OFF")
  # libtorch_cuda needs libraries that only the full wheel brings and a driver that only a GPU machine has.
  find_library(calib_cuda_driver NAMES cuda PATHS /usr/lib/x86_64-linux-gnu /usr/lib64 NO_CMAKE_FIND_ROOT_PATH)
  file(GLOB calib_cudnn "${CALIB_TORCH_DIR}/../nvidia/cudnn/lib/libcudnn.so*")
  if(EXISTS "${CALIB_TORCH_DIR}/lib/libtorch_cuda.so" AND EXISTS /dev/nvidiactl AND calib_cudnn)
    set(CALIB_TORCH_HAS_CUDA ON)
    list(APPEND calib_torch_libraries torch_cuda c10_cuda)
  elseif(CALIB_WITH_CUDA STREQUAL "ON")
    message(FATAL_ERROR "CALIB_WITH_CUDA=ON, but libtorch_cuda, its libraries or a CUDA driver are absent "
                        "(looked in ${CALIB_TORCH_DIR}). Use AUTO or OFF for a CPU build.")
  endif()
endif()

add_library(calib_torch INTERFACE)
add_library(calib::torch ALIAS calib_torch)
# After the system's folders: the wheel brings headers of its own fmt, whose symbols no library here has.
target_compile_options(calib_torch INTERFACE
  "SHELL:-idirafter ${CALIB_TORCH_DIR}/include" "SHELL:-idirafter ${CALIB_TORCH_DIR}/include/torch/csrc/api/include")
foreach(name IN LISTS calib_torch_libraries)
  target_link_libraries(calib_torch INTERFACE ${CALIB_TORCH_DIR}/lib/lib${name}.so)
endforeach()
# libtorch_cpu of the CUDA wheel needs libcudart and libcupti at load time; they come from the toolkit or two small wheels.
file(GLOB calib_cuda_runtime_dirs
  ${CALIB_TORCH_DIR}/../nvidia/*/lib /usr/local/cuda/lib64 /usr/local/cuda/extras/CUPTI/lib64)
set(CALIB_TORCH_RPATH "${CALIB_TORCH_DIR}/lib;${calib_cuda_runtime_dirs}")
target_link_options(calib_torch INTERFACE "LINKER:--allow-shlib-undefined")

# Nine seconds of configure time buy one clear line instead of a link error an hour later: C++11 ABI and language check.
message(STATUS "libtorch: ${CALIB_TORCH_DIR} (CUDA ${CALIB_TORCH_HAS_CUDA})")
