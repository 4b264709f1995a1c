# cmake -DKERNELS=<kernels folder> -DSET=<few|default|all> -DFOLDER=<folder> -P: writes the translation units of instances.txt.
cmake_minimum_required(VERSION 3.22)
include(${KERNELS}/instances.cmake)
kvrt_instance_sources(sources ${SET} ${FOLDER})
