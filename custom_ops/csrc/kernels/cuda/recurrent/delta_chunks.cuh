// The gated delta rule by chunks of 64 tokens: what both of its kernels share.
//
// With G the sum of decays from a chunk's start, a chunk's updates solve the triangular system
//     u_i + sum over j < i of beta_i exp(G_i - G_j) (k_i k_j) u_j = beta_i (v_i - exp(G_i) k_i S)
// for the state S before it. So u = U - W S, with U and W from one matrix for the values beta v and the keys
// beta exp(G) k (the UT transform of arXiv 2406.06484, with the gates of arXiv 2412.06464). The first kernel
// finds U, W and the products of queries and keys for all chunks at once. The second walks a sequence's
// chunks
//     output = scale (exp(G) q S + P u),   S = exp(G_last) S + sum of exp(G_last - G_j) k_j u_j
// with S in registers as float32. Products have 16-bit factors and float32 sums. Keys and queries enter them
// as they are given; their lengths are divided out in float32.
//
// Chunks are numbered so that no two sequences share a number, whatever their lengths: chunk j of sequence b
// is query_start[b] / 64 + b + j. A round takes as many numbers as its scratch memory holds.
#pragma once

#include "delta_rows.cuh"
#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/ptx.cuh"

namespace ortolan::cuda {

constexpr int kChunk = 64;
constexpr int kSharedPad = 8;  // elements between rows, against bank conflicts
constexpr int kScanColumns = 32;

// Per row of a chunk, and head.
struct ChunkScalars {
  float query[kChunk];  // scale * |q|^-1 * exp(G)
  float key[kChunk];    // |k|^-1 * exp(G_last - G)
  float last;           // exp(G_last)
  float unused[3];      // keeps the size a multiple of 16 bytes
};

// What the first kernel leaves of one chunk and head.
template <typename Element>
struct ChunkScratch {
  Element* keys;      // W [64, Dk]
  Element* updates;   // U [64, Dv]
  Element* products;  // P [64, 64]
  ChunkScalars* rows;

  static __host__ __device__ int64_t bytes(const GatedDeltaRuleParams& p) {
    return kChunk * (p.key_size + p.value_size + kChunk) * int64_t{sizeof(Element)} + sizeof(ChunkScalars);
  }
  __device__ ChunkScratch(const GatedDeltaRuleParams& p, void* workspace, int64_t chunk_in_round,
                          int64_t head) {
    char* base = static_cast<char*>(workspace) + (chunk_in_round * p.num_value_heads + head) * bytes(p);
    keys = reinterpret_cast<Element*>(base);
    updates = keys + kChunk * p.key_size;
    products = updates + kChunk * p.value_size;
    rows = reinterpret_cast<ChunkScalars*>(products + kChunk * kChunk);
  }
};

// The chunk numbers of a round.
struct ChunkRound {
  int64_t first;
  int64_t count;
};

__device__ __forceinline__ int64_t first_chunk(const GatedDeltaRuleParams& p, int64_t sequence) {
  return p.packing.first(sequence) / kChunk + sequence;
}

// The numbers that chunks may have, whatever the sequences' lengths.
inline int64_t count_chunks(const GatedDeltaRuleParams& p) {
  return (p.packing.num_tokens + kChunk - 1) / kChunk + p.packing.num_sequences - 1;
}

// The sequence whose chunk may have this number.
__device__ __forceinline__ int64_t sequence_of_chunk(const GatedDeltaRuleParams& p, int64_t chunk) {
  int64_t low = 0, high = p.packing.num_sequences;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (first_chunk(p, middle) <= chunk ? low : high) = middle;
  }
  return low;
}

// Copies rows of a chunk to shared memory, 16 bytes at a time; rows from `rows` on become zeros.
template <typename Element>
__device__ __forceinline__ void copy_rows_async(Element* target, int target_stride, const Element* source,
                                                int64_t source_stride, int size, int rows, int threads) {
  constexpr int kPiece = 16 / sizeof(Element);
  const int pieces = size / kPiece;
  for (int i = threadIdx.x; i < kChunk * pieces; i += threads) {
    const int row = i / pieces, column = i % pieces * kPiece;
    const bool exists = row < rows;
    copy_async_16(target + row * target_stride + column, source + (exists ? row : 0) * source_stride + column,
                  exists);
  }
}

// Addresses, for ldmatrix, of this lane's row of a 16 x 16 tile that lies row by row in shared memory.
struct TileLane {
  int by_row;  // the lanes of the rows of an A tile, or of a B tile [k, n] when transposed
  int by_row_column;
  int by_column;  // the lanes of a B tile [n, k], or of an A tile [k, m] when transposed
  int by_column_column;

  __device__ TileLane() {
    const int lane = threadIdx.x % 32;
    by_row = lane % 16;
    by_row_column = lane / 16 * 8;
    by_column = lane / 16 * 8 + lane % 8;
    by_column_column = lane / 8 % 2 * 8;
  }
};

}  // namespace ortolan::cuda
