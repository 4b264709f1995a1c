if(TARGET kvcalib)
  add_library(calib_test_programs STATIC run_program.cc)
  target_link_libraries(calib_test_programs PUBLIC GTest::gtest PRIVATE calib_warnings)
  target_compile_definitions(calib_test_programs PRIVATE CALIB_BIN_DIR="${CMAKE_RUNTIME_OUTPUT_DIRECTORY}")
  target_include_directories(calib_test_programs PUBLIC ${PROJECT_SOURCE_DIR})
  calib_add_test(kvcalib_cli_test LABELS cli SOURCES kvcalib_test.cc
    LINK calib_test_programs calib_test_support calib::artifacts nlohmann_json::nlohmann_json)
  add_dependencies(kvcalib_cli_test kvcalib)
endif()
