# Chooses the GPU architectures to compile for, and refuses those that the CUDA kernels cannot be compiled for.
# ORTOLAN_CUDA_ARCHS stays where it is given. Otherwise ORTOLAN_CUDA=ON takes the release's, AUTO those of this
# machine's GPUs: none where nvidia-smi finds none. Runs by itself, too:
#   cmake -D ORTOLAN_CUDA=AUTO -D CMAKE_CUDA_COMPILER=nvcc -P custom_ops/cuda_architectures.cmake
cmake_policy(VERSION 3.24)

# 80 also serves 8.6 and 8.9; the last entry's PTX serves what comes after it. 90a alone has wgmma.
set(release_architectures "80-real;90a-real;100-real;120")

# Lists the architectures of this machine's GPUs, each once; GPUs before compute capability 8.0 are left out.
function(ortolan_architectures_here result)
  set(architectures "")
  set(capabilities "")
  find_program(ORTOLAN_NVIDIA_SMI nvidia-smi HINTS /usr/lib/wsl/lib)
  if(ORTOLAN_NVIDIA_SMI)
    execute_process(COMMAND ${ORTOLAN_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE capabilities ERROR_QUIET TIMEOUT 60)
  endif()
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-code OUTPUT_VARIABLE known ERROR_QUIET)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${capabilities}")
  foreach(capability IN LISTS capabilities)
    string(REPLACE "." "" number ${capability})
    if(number EQUAL 90)
      list(APPEND architectures 90a-real)
    elseif(number GREATER_EQUAL 80 AND known MATCHES "sm_${number}[^0-9]")
      list(APPEND architectures ${number}-real)
    elseif(number GREATER 120)  # nvcc does not know it: the driver compiles PTX for it
      list(APPEND architectures 120-virtual)
    elseif(number GREATER_EQUAL 80)
      list(APPEND architectures 80-virtual)
    endif()
  endforeach()
  list(REMOVE_DUPLICATES architectures)
  set(${result} "${architectures}" PARENT_SCOPE)
endfunction()

if(NOT ORTOLAN_CUDA_ARCHS AND ORTOLAN_CUDA STREQUAL "ON")
  set(ORTOLAN_CUDA_ARCHS "${release_architectures}")
elseif(NOT ORTOLAN_CUDA_ARCHS)
  ortolan_architectures_here(ORTOLAN_CUDA_ARCHS)
endif()
foreach(architecture IN LISTS ORTOLAN_CUDA_ARCHS)
  if(architecture MATCHES "^90(-real|-virtual)?$")
    message(FATAL_ERROR "ORTOLAN_CUDA_ARCHS names ${architecture}; the kernels for compute capability 9.0 need "
      "the instructions of 90a: write 90a-real in its place")
  elseif(architecture MATCHES "^(native|all|all-major)$")
    message(FATAL_ERROR "ORTOLAN_CUDA_ARCHS is ${architecture}, which stands for 90 on compute capability 9.0, and "
      "the kernels for it need 90a: list architectures, as in ${release_architectures}")
  endif()
endforeach()
if(ORTOLAN_CUDA_ARCHS)
  message(STATUS "ortolan: CPU kernels, and CUDA kernels for ${ORTOLAN_CUDA_ARCHS}")
else()
  message(NOTICE "ortolan: CPU kernels only, since nvidia-smi finds no GPU of compute capability 8.0 or later; "
    "for CUDA kernels run: pip install . -C cmake.define.ORTOLAN_CUDA=ON")
endif()
