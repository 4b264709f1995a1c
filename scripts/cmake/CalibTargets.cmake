# A missing package is one line that says what to install.
function(calib_missing what package)
  message(FATAL_ERROR "${what} not found. Install it (Debian/Ubuntu: apt-get install ${package}) or run scripts/setup.")
endfunction()

# Manual pages and the layer check are made with it; its standard library is enough.
find_package(Python3 QUIET COMPONENTS Interpreter)
if(NOT Python3_FOUND)
  calib_missing("Python 3" python3)
endif()

# calib_add_module(name SOURCES … PUBLIC … PRIVATE …): static library calib_<name>, alias calib::<name>; include path is the repository root.
function(calib_add_module name)
  cmake_parse_arguments(ARG "" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  add_library(calib_${name} STATIC ${ARG_SOURCES})
  add_library(calib::${name} ALIAS calib_${name})
  target_include_directories(calib_${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
  target_link_libraries(calib_${name} PUBLIC ${ARG_PUBLIC} PRIVATE ${ARG_PRIVATE} calib_warnings)
endfunction()

add_library(calib_warnings INTERFACE)
# nvcc has warnings of its own.
target_compile_options(calib_warnings INTERFACE $<$<NOT:$<COMPILE_LANGUAGE:CUDA>>:-Wall;-Wextra;-Wno-unused-parameter>)
# g++ 12 sees overlapping copies in std::string operations that cannot overlap (GCC bug 105651).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(calib_warnings INTERFACE $<$<NOT:$<COMPILE_LANGUAGE:CUDA>>:-Wno-restrict>)
endif()
if(CALIB_SANITIZE)
  list(JOIN CALIB_SANITIZE "," calib_sanitize_list)
  target_compile_options(calib_warnings INTERFACE -fsanitize=${calib_sanitize_list} -fno-omit-frame-pointer)
  target_link_options(calib_warnings INTERFACE -fsanitize=${calib_sanitize_list})
endif()

# calib_add_test(name LABELS unit SOURCES … LINK …): one GoogleTest program; every TEST becomes a ctest entry with the labels.
function(calib_add_test name)
  cmake_parse_arguments(ARG "" "" "LABELS;SOURCES;LINK" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  target_link_libraries(${name} PRIVATE ${ARG_LINK} GTest::gmock GTest::gtest_main calib_warnings)
  target_compile_definitions(${name} PRIVATE
    CALIB_SOURCE_DIR="${PROJECT_SOURCE_DIR}" CALIB_BIN_DIR="${CMAKE_RUNTIME_OUTPUT_DIRECTORY}")
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT 900)
endfunction()
