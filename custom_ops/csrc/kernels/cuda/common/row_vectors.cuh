// The widest vectors in which rows of any size can be copied.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

namespace ortolan::cuda {

// Bytes of the widest vector, up to 16, that divides a row and to which every buffer is aligned.
inline int vector_bytes(int64_t row_bytes, std::initializer_list<const void*> buffers) {
  uint64_t bits = static_cast<uint64_t>(row_bytes) | 16;
  for (const void* buffer : buffers) bits |= reinterpret_cast<uint64_t>(buffer);
  return static_cast<int>(bits & (~bits + 1));
}

// Whether rows of so many bytes at these addresses are whole pieces of 16 bytes; null is one too.
inline bool has_whole_pieces(int64_t row_bytes, std::initializer_list<const void*> buffers) {
  return vector_bytes(row_bytes, buffers) == 16;
}

// Calls launch with a value of the vector type of that many bytes; elements have 2 bytes at least.
template <typename Launcher>
cudaError_t with_vector(int bytes, Launcher launch) {
  switch (bytes) {
    case 16:
      return launch(uint4{});
    case 8:
      return launch(uint2{});
    case 4:
      return launch(uint32_t{});
    case 2:
      return launch(uint16_t{});
    default:
      return cudaErrorMisalignedAddress;
  }
}

inline int64_t divide_up(int64_t count, int64_t size) { return (count + size - 1) / size; }

}  // namespace ortolan::cuda
