// KvCompact on CUDA: kept rows move to the front of their head's cache, in place.
//
// Grid: one block per (slice of columns, kv head and K or V, sequence). A block moves its columns of all kept
// rows, in rounds of consecutive rows: every thread loads its vectors of the round, the block meets, every
// thread stores. Loads run a round ahead of stores, and what they follow, the list, two. Narrower slices give
// more blocks where there are few heads; columns never depend on one another.
//
// Why in place is safe. keep is strictly ascending from 0, so keep[k] >= k. Let a round hold the rows k in
// [a, z):
//   - a store of an earlier round wrote a row below a, and this round reads rows keep[k] >= k >= a: it never
//     reads a row that was overwritten. So its loads need not wait for earlier stores;
//   - a store of this round writes a row in [a, z), which may be a source of this round or of an earlier one;
//     all those loads lie before the round's barrier. It is no source of a later round, whose sources are at
//     or past z.
// Each target row belongs to one thread per column: the result does not depend on timing. An invalid list
// breaks the order of moves but not the bounds: a source or target outside the capacity or the pool is not
// moved.
#include "kernels.h"
#include "launch.cuh"
#include "ptx.cuh"
#include "row_vectors.cuh"

namespace ortolan::cuda {
namespace {

// Element offset of one row of a head's cache, or -1 where the cache has no such row.
__device__ int64_t checked_row(const CacheLayout& cache, int64_t sequence, int64_t head, int64_t slot) {
  if (slot < 0 || slot >= cache.capacity) return -1;
  const int64_t page = cache.page(sequence, slot);
  if (page < 0 || page >= cache.num_pages) return -1;
  return cache.row_offset(sequence, head, slot);
}

// A thread's part of a round.
template <typename Vector, int kRows>
struct Round {
  Vector data[kRows];
  Vector* targets[kRows];  // null: nothing to move
  bool ended;              // the list ends here
};

template <typename Vector, int kThreads, int kRows>
__global__ void __launch_bounds__(kThreads)
    move_rows(const __grid_constant__ KvCompactParams p, int element_size, int vectors, int lanes) {
  const int64_t head = blockIdx.y >> 1, sequence = blockIdx.z;
  char* cache = static_cast<char*>(blockIdx.y & 1 ? p.value_cache : p.key_cache);
  const int column = blockIdx.x * lanes + threadIdx.x % lanes;
  const int rows = kThreads / lanes, step = kRows * rows;
  const int32_t* keep = p.keep + (sequence * p.keep_heads + (p.keep_heads == 1 ? 0 : head)) * p.keep_count;
  const auto vector_at = [&](int64_t offset) {
    return reinterpret_cast<Vector*>(cache + offset * element_size) + column;
  };
  launch_dependents();
  wait_for_previous_kernel();

  int32_t kept[kRows];  // of the next round to load
  const auto look_up = [&](int64_t first) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) kept[r] = first + r * rows < p.keep_count ? keep[first + r * rows] : -1;
  };
  const auto load = [&](Round<Vector, kRows>& round, int64_t first) {
    round.ended = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t k = first + r * rows;
      round.ended |= kept[r] < 0;
      round.targets[r] = nullptr;
      if (kept[r] < 0 || kept[r] == k || column >= vectors) continue;
      const int64_t source = checked_row(p.cache, sequence, head, kept[r]);
      const int64_t target = checked_row(p.cache, sequence, head, k);
      if (source < 0 || target < 0) continue;
      round.targets[r] = vector_at(target);
      round.data[r] = *vector_at(source);
    }
  };

  int64_t first = threadIdx.x / lanes;
  Round<Vector, kRows> loaded;
  look_up(first);
  load(loaded, first);
  look_up(first + step);
  for (bool ended = false; !ended; first += step) {
    Round<Vector, kRows> next;
    load(next, first + step);
    look_up(first + 2 * step);
    ended = __syncthreads_or(loaded.ended);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (loaded.targets[r]) *loaded.targets[r] = loaded.data[r];
    loaded = next;
  }
}

template <typename Vector>
cudaError_t launch_moves(const KvCompactParams& p, int vectors, const Launch& launch) {
  const int64_t heads = 2 * p.cache.num_kv_heads * p.num_sequences;
  const int64_t processors = launch.device.num_multiprocessors;
  const int element_size = static_cast<int>(element_bytes(p.element));
  int lanes = 32;  // vectors of a row that one block moves
  while (lanes > vectors) lanes /= 2;
  const auto blocks = [&] { return heads * divide_up(vectors, lanes); };
  while (lanes * sizeof(Vector) > 32 && blocks() < 4 * processors) lanes /= 2;
  const dim3 grid(static_cast<unsigned>(divide_up(vectors, lanes)),
                  static_cast<unsigned>(2 * p.cache.num_kv_heads), static_cast<unsigned>(p.num_sequences));
  if (blocks() < 2 * processors)
    return launch_overlapped(move_rows<Vector, 1024, 2>, grid, dim3(1024), 0, launch, p, element_size,
                             vectors, lanes);
  return launch_overlapped(move_rows<Vector, 256, 4>, grid, dim3(256), 0, launch, p, element_size, vectors,
                           lanes);
}

}  // namespace

size_t kv_compact_workspace(const KvCompactParams&, const Device&) { return 0; }

cudaError_t kv_compact(const KvCompactParams& p, const Launch& launch) {
  const int64_t row_bytes = p.cache.head_size * element_bytes(p.element);
  if (p.num_sequences == 0 || p.keep_count == 0 || row_bytes == 0) return cudaSuccess;
  const int bytes = vector_bytes(row_bytes, {p.key_cache, p.value_cache});
  return with_vector(bytes, [&](auto vector) {
    return launch_moves<decltype(vector)>(p, static_cast<int>(row_bytes / bytes), launch);
  });
}

}  // namespace ortolan::cuda
