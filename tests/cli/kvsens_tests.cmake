if(TARGET kvsens AND TARGET kvcalib AND TARGET kvplan)
  calib_add_test(kvsens_cli_test LABELS cli SOURCES kvsens_test.cc kvsens_isolate_test.cc kvsens_subcommands_test.cc salient_tier_test.cc LINK calib::artifacts calib_test_support calib_test_programs nlohmann_json::nlohmann_json)
  add_dependencies(kvsens_cli_test kvsens kvcalib kvplan)
endif()
