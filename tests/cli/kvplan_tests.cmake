if(TARGET kvplan AND TARGET kvsens AND TARGET kvcalib)
  calib_add_test(kvplan_cli_test LABELS cli SOURCES kvplan_import_test.cc kvplan_test.cc LINK calib::artifacts calib_test_support)
  add_dependencies(kvplan_cli_test kvplan kvsens kvcalib)
endif()
