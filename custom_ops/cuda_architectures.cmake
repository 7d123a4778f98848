# Refuses GPU architectures that the CUDA kernels cannot be compiled for. Runs by itself, too:
#   cmake -D ORTOLAN_CUDA_ARCHS="80-real;90a" -P custom_ops/cuda_architectures.cmake
foreach(architecture IN LISTS ORTOLAN_CUDA_ARCHS)
  if(architecture MATCHES "^90(-real|-virtual)?$")
    message(FATAL_ERROR "ORTOLAN_CUDA_ARCHS names ${architecture}; the kernels for compute capability 9.0 need "
      "the instructions of 90a: write 90a-real in its place")
  elseif(architecture MATCHES "^(native|all|all-major)$")
    message(FATAL_ERROR "ORTOLAN_CUDA_ARCHS is ${architecture}, which stands for 90 on compute capability 9.0, and "
      "the kernels for it need 90a: list architectures, as in 80-real;90a-real;100-real;120")
  endif()
endforeach()
