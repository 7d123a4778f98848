// RingKvAppend and SnapKvCapture on CUDA: packed rows go to the slots of their positions, bit for bit.
//
// Layout: a packed row is one token: Hkv * D elements of a key and of a value, or Hq * D of a query. A thread
// owns one vector column of a row (up to 16 bytes) of every buffer: with a row per thread no block holds many
// registers, and blocks of all sizes of work fill the device evenly. Grid: x walks rows, y the columns of
// wide rows. Sizes come from shapes alone; a thread finds the sequence of its row in query_start on the
// device. Where no row can be dropped, loads start before that search ends. Determinism: of the rows of a
// chunk that share a slot only the last is copied, so no two threads write one byte. Safety: rows outside the
// packing, negative positions and pages outside the pool are not copied.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/packed_rows.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/low_bit_cache/caches.h"
#include "kernels/cuda/operators.generated.h"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 256;

// Byte offsets of one vector's move; a negative target: it is not copied.
struct Move {
  int64_t source = 0;
  int64_t target = -1;
};

// The rows of RingKvAppend: token t of a sequence goes to slot(past_len + t), in K and in V.
struct AppendRows {
  static constexpr int kBuffers = 2;
  RingKvAppendParams p;
  int vectors_per_head;
  int element_size;
  bool source_is_unit;  // no chunk can be longer than the ring: every row is copied

  __device__ const void* source(int buffer) const { return buffer == 0 ? p.key : p.value; }
  __device__ void* target(int buffer) const { return buffer == 0 ? p.key_cache : p.value_cache; }

  template <typename Vector>
  __device__ Move locate(int64_t unit, int column, int columns) const {
    Move move{(unit * columns + column) * int64_t{sizeof(Vector)}, -1};
    const int head = column / vectors_per_head;
    const int64_t offset = append_offset(p.cache, p.packing, p.past_len, unit, head);
    if (offset < 0) return move;
    const int64_t lane = column - head * vectors_per_head;
    move.target = offset * element_size + lane * int64_t{sizeof(Vector)};
    return move;
  }
};

// The rows of SnapKvCapture: a sequence's last Wq positions go to rows p mod Wq. A unit is a packed row, or,
// where chunks are long, the n-th row from the end of a sequence.
struct CaptureRows {
  static constexpr int kBuffers = 1;
  SnapKvCaptureParams p;
  int64_t rows_per_sequence;  // min(T, Wq)
  bool source_is_unit;

  __device__ const void* source(int) const { return p.query; }
  __device__ void* target(int) const { return p.capture; }

  template <typename Vector>
  __device__ Move locate(int64_t unit, int column, int columns) const {
    Move move;
    const int64_t sequence = source_is_unit ? sequence_of(p.packing, unit) : unit / rows_per_sequence;
    if (sequence < 0) return move;
    const int64_t first = p.packing.first(sequence), count = p.packing.count(sequence);
    const int64_t token = source_is_unit ? unit - first : count - 1 - unit % rows_per_sequence;
    const int64_t position = p.past_len.at(sequence, 0) + token;
    const bool packed = token >= 0 && first >= 0 && first + token < p.packing.num_tokens;
    if (!packed || position < 0 || token + p.window_rows < count) return move;
    move.source = ((first + token) * columns + column) * sizeof(Vector);
    move.target = ((sequence * p.window_rows + position % p.window_rows) * columns + column) * sizeof(Vector);
    return move;
  }
};

template <typename Vector, typename Rows>
__global__ void __launch_bounds__(kThreads) copy_rows(const Rows rows, int64_t units, int columns) {
  launch_dependents();
  const int column = blockIdx.y * blockDim.x + threadIdx.x;
  const int64_t unit = blockIdx.x * static_cast<int64_t>(blockDim.y) + threadIdx.y;
  if (column >= columns || unit >= units) return;
  wait_for_previous_kernel();
  Vector data[Rows::kBuffers];
  const auto load = [&](int64_t source) {
    for (int buffer = 0; buffer < Rows::kBuffers; ++buffer)
      data[buffer] = *reinterpret_cast<const Vector*>(static_cast<const char*>(rows.source(buffer)) + source);
  };
  if (rows.source_is_unit) load((unit * columns + column) * sizeof(Vector));
  const Move move = rows.template locate<Vector>(unit, column, columns);
  if (move.target < 0) return;
  if (!rows.source_is_unit) load(move.source);
  for (int buffer = 0; buffer < Rows::kBuffers; ++buffer)
    *reinterpret_cast<Vector*>(static_cast<char*>(rows.target(buffer)) + move.target) = data[buffer];
}

template <typename Vector, typename Rows>
cudaError_t launch_rows(const Rows& rows, int64_t units, int64_t columns, const Launch& launch) {
  const int64_t column_blocks = divide_up(columns, kThreads);
  const auto width = static_cast<unsigned>(divide_up(columns, column_blocks));
  const dim3 block(width, kThreads / width);
  const dim3 grid(static_cast<unsigned>(divide_up(units, block.y)), static_cast<unsigned>(column_blocks));
  return launch_overlapped(copy_rows<Vector, Rows>, grid, block, 0, launch, rows, units,
                           static_cast<int>(columns));
}

}  // namespace

cudaError_t ring_kv_append(const RingKvAppendParams& p, const Launch& launch) {
  if (is_code(p.cache_element)) return append_codes(p, launch);
  const CacheLayout& cache = p.cache;
  const int64_t row_bytes = cache.head_size * element_bytes(p.element);
  if (p.packing.num_tokens == 0 || p.packing.num_sequences == 0 || row_bytes == 0) return cudaSuccess;
  const int bytes = vector_bytes(row_bytes, {p.key, p.value, p.key_cache, p.value_cache});
  const bool all_kept = p.packing.num_tokens <= cache.capacity - cache.sink;
  return with_vector(bytes, [&](auto vector) {
    const int vectors = static_cast<int>(row_bytes / bytes);
    const AppendRows rows{p, vectors, static_cast<int>(element_bytes(p.element)), all_kept};
    return launch_rows<decltype(vector)>(rows, p.packing.num_tokens, cache.num_kv_heads * vectors, launch);
  });
}

cudaError_t snap_kv_capture(const SnapKvCaptureParams& p, const Launch& launch) {
  const int64_t row_bytes = p.row_size * element_bytes(p.element);
  const int64_t tokens = p.packing.num_tokens, sequences = p.packing.num_sequences;
  if (tokens == 0 || sequences == 0 || p.window_rows == 0 || row_bytes == 0) return cudaSuccess;
  const int bytes = vector_bytes(row_bytes, {p.query, p.capture});
  const int64_t rows_per_sequence = tokens < p.window_rows ? tokens : p.window_rows;
  const bool by_token = tokens <= sequences * rows_per_sequence;
  return with_vector(bytes, [&](auto vector) {
    const CaptureRows rows{p, rows_per_sequence, by_token};
    const int64_t units = by_token ? tokens : sequences * rows_per_sequence;
    return launch_rows<decltype(vector)>(rows, units, row_bytes / bytes, launch);
  });
}

}  // namespace ortolan::cuda
