# The CUDA half of the operator library. The runtime is linked statically: the library loads on machines without a GPU.
set(CMAKE_CUDA_ARCHITECTURES ${ORTOLAN_CUDA_ARCHS})
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.26 does not know that nvcc has C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
find_package(CUDAToolkit REQUIRED)

file(GLOB_RECURSE ortolan_cuda_kernels CONFIGURE_DEPENDS
  csrc/kernels/cuda/*.cu csrc/kernels/cuda/*.cc csrc/decode_loop/*.cc csrc/queries/*.cc)
target_sources(ortolan_ops PRIVATE
  ${ortolan_cuda_kernels}
  csrc/ort/cuda_operators.cc
  csrc/ort/cuda_operators.generated.cc
  csrc/ort/cuda_workspace.cc)
target_compile_definitions(ortolan_ops PRIVATE ORTOLAN_CUDA)
set_target_properties(ortolan_ops PROPERTIES
  CUDA_STANDARD 20
  CUDA_STANDARD_REQUIRED ON
  CUDA_EXTENSIONS OFF
  CUDA_ARCHITECTURES "${ORTOLAN_CUDA_ARCHS}"
  CUDA_VISIBILITY_PRESET hidden
  CUDA_RUNTIME_LIBRARY Static)
target_compile_options(ortolan_ops PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
target_link_libraries(ortolan_ops PRIVATE CUDA::cudart_static ${CMAKE_DL_LIBS})

# Registers and spills of every kernel go to kernel_report.txt, which is installed beside the library.
find_package(Python3 COMPONENTS Interpreter)
if(Python3_FOUND)
  set_target_properties(ortolan_ops PROPERTIES
    CUDA_COMPILER_LAUNCHER ${CMAKE_CURRENT_SOURCE_DIR}/build_tools/keep_ptxas_output.sh)
  set(kernel_report ${CMAKE_CURRENT_BINARY_DIR}/kernel_report.txt)
  add_custom_command(TARGET ortolan_ops POST_BUILD
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/build_tools/kernel_report.py
      ${CMAKE_CURRENT_BINARY_DIR} ${kernel_report}
    BYPRODUCTS ${kernel_report}
    COMMENT "Writing kernel_report.txt")
  install(FILES ${kernel_report} DESTINATION ortolan/custom_ops/lib)
endif()
