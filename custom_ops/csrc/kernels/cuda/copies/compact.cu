// KvCompact on CUDA: kept rows move to the front of their head's cache, in place. From sm_90 on clusters of
// blocks move rows that 16 bytes divide (compact_sm90.cuh, compact_bulk.cuh); here are the others.
//
// Grid: one block per (slice of columns, kv head and K or V, sequence). A block moves its columns of all kept
// rows, in rounds of consecutive rows: every thread loads its vectors of the round, the block meets, every
// thread stores. Narrower slices give more blocks where there are few heads; columns never depend on one
// another.
//
// Why in place is safe. keep is strictly ascending from 0, so keep[k] >= k. Let a round hold the rows k in
// [a, z). Its stores write [a, z). Rows that are read there belong to this round or to an earlier one, and
// their loads lie before this round's barrier. Stores of earlier rounds wrote below a, where this round reads
// nothing: no barrier is needed between one round's stores and the next one's loads. Each target row belongs
// to one thread per column: the result does not depend on timing. An invalid list breaks the order of moves
// but not the bounds: a source or target outside the capacity or the pool is not moved.
#include "compact_bulk.cuh"
#include "compact_rows.cuh"
#include "compact_sm90.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/low_bit_cache/caches.h"
#include "kernels/cuda/operators.generated.h"

namespace ortolan::cuda {
namespace {

constexpr int kRowsPerThread = 4;

template <typename Vector, int kThreads>
__global__ void __launch_bounds__(kThreads)
    move_rows(const KvCompactParams p, int64_t row_bytes, int vectors, int lanes) {
  const CompactRows rows_of_head(p, blockIdx.z, blockIdx.y >> 1);
  char* cache = static_cast<char*>(blockIdx.y & 1 ? p.value_cache : p.key_cache);
  const int column = blockIdx.x * lanes + threadIdx.x % lanes;
  const int row = threadIdx.x / lanes, rows = kThreads / lanes;
  const auto vector_at = [&](int64_t row_in_pool) {
    return reinterpret_cast<Vector*>(cache + row_in_pool * row_bytes) + column;
  };
  bool ended = false;
  for (int64_t first = row; !ended; first += kRowsPerThread * rows) {
    Vector data[kRowsPerThread];
    int64_t target[kRowsPerThread];
    int32_t kept[kRowsPerThread];
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) kept[r] = rows_of_head.kept(first + r * rows);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const int64_t k = first + r * rows;
      ended |= kept[r] < 0;
      target[r] = -1;
      if (kept[r] < 0 || kept[r] == k || column >= vectors) continue;
      const int64_t source = rows_of_head.row(kept[r]);
      if (source < 0) continue;
      target[r] = rows_of_head.row(k);
      data[r] = *vector_at(source);
    }
    ended = __syncthreads_or(ended) || first - row + kRowsPerThread * rows >= p.keep_count;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r)
      if (target[r] >= 0) *vector_at(target[r]) = data[r];
  }
}

template <typename Vector>
cudaError_t launch_moves(const KvCompactParams& p, int vectors, const Launch& launch) {
  const int64_t heads = 2 * p.cache.num_kv_heads * p.num_sequences;
  const int64_t processors = launch.device.num_multiprocessors;
  const int64_t row_bytes = int64_t{sizeof(Vector)} * vectors;
  int lanes = 32;  // vectors of a row that one block moves
  while (lanes > vectors) lanes /= 2;
  const auto blocks = [&] { return heads * divide_up(vectors, lanes); };
  while (lanes * sizeof(Vector) > 32 && blocks() < 4 * processors) lanes /= 2;
  const dim3 grid(static_cast<unsigned>(divide_up(vectors, lanes)),
                  static_cast<unsigned>(2 * p.cache.num_kv_heads), static_cast<unsigned>(p.num_sequences));
  if (blocks() < 2 * processors)
    return launch_alone(move_rows<Vector, 1024>, grid, dim3(1024), launch.stream, p, row_bytes, vectors,
                        lanes);
  return launch_alone(move_rows<Vector, 256>, grid, dim3(256), launch.stream, p, row_bytes, vectors, lanes);
}

cudaError_t compact_rows(const KvCompactParams& p, int64_t row_bytes, const Launch& launch) {
  const int bytes = vector_bytes(row_bytes, {p.key_cache, p.value_cache});
  if (compact_bulk_takes(p, row_bytes, bytes, launch.device)) return compact_bulk(p, row_bytes, launch);
  if (compact_sm90_takes(row_bytes, bytes, launch.device)) return compact_sm90(p, row_bytes, launch);
  return with_vector(bytes, [&](auto vector) {
    return launch_moves<decltype(vector)>(p, static_cast<int>(row_bytes / bytes), launch);
  });
}

}  // namespace

cudaError_t kv_compact(const KvCompactParams& p, const Launch& launch) {
  const int64_t row_bytes = p.cache.head_size * element_bytes(p.cache_element);
  if (p.num_sequences == 0 || p.keep_count == 0 || row_bytes == 0) return cudaSuccess;
  const cudaError_t error = compact_rows(p, row_bytes, launch);
  return error == cudaSuccess ? compact_scales(p, launch) : error;
}

}  // namespace ortolan::cuda
