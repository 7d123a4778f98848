// The inverse of a unit lower triangle [64, 64] in shared memory, for the gated delta rule by chunks.
//
// Blocks of 16 x 16. Those on the diagonal are inverted by substitution in float32. Below it
//     T_IJ = -T_II times the sum over J <= K < I of A_IK T_KJ,
// where a column of blocks J needs nothing of the others: a warp takes one, by tensor cores. A float32 factor
// is the sum of two of tf32, and of the products of their parts only the smallest is left out.
// Source: arXiv 2203.03341.
#pragma once

#include "kernels/cuda/common/ptx.cuh"

namespace ortolan::cuda {

constexpr int kBlock = 16;  // rows of a block of the matrix
constexpr int kBlocks = 4;  // blocks in a row

struct SplitTf32 {
  uint32_t high;
  uint32_t low;

  __device__ __forceinline__ explicit SplitTf32(float x) {
    asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(high) : "f"(x));
    const float rest = x - __uint_as_float(high);
    asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(low) : "f"(rest));
  }
};

__device__ __forceinline__ void multiply_add_tf32(float (&sums)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The matrix holds A below its diagonal and then T, on the diagonal too. Above it lies what no one else
// needs: until all of A has been read, T_KJ at block [J, K], and sums on their way to other lanes in the last
// column.
template <int kStride>
class TriangleInverse {
 public:
  using Matrix = float[kBlocks * kBlock][kStride];

  __device__ explicit TriangleInverse(Matrix& matrix) : matrix_(matrix), lane_(threadIdx.x % 32) {}

  // For all threads of a block, of which there are 96 at least. A is there; so is T afterwards.
  __device__ __forceinline__ void run() {
    invert_diagonal();
    const int column = threadIdx.x / 32;
    float found[kBlocks - 1][2][4];
    if (column < kBlocks - 1) {
#pragma unroll
      for (int row = 1; row < kBlocks; ++row)
        if (row > column) find(row, column, found[row - 1]);
    }
    __syncthreads();  // A has been read
    if (column < kBlocks - 1) {
#pragma unroll
      for (int row = 1; row < kBlocks; ++row)
        if (row > column) store(found[row - 1], row, column);
    }
    __syncthreads();
  }

 private:
  // Each of 64 threads finds a column of the inverse of 1 + block.
  __device__ __forceinline__ void invert_diagonal() {
    const int block = threadIdx.x / kBlock * kBlock, column = threadIdx.x % kBlock;
    const bool has_column = threadIdx.x < kBlocks * kBlock;
    float x[kBlock];
    if (has_column) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < i; ++j) x[i] = fmaf(-matrix_[block + i][block + j], x[j], x[i]);
      }
    }
    __syncthreads();
    if (has_column) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) matrix_[block + i][block + column] = x[i];
    }
    __syncthreads();
  }

  // T_(row)(column), in the layout of sums: rows lane / 4 and 8 more, two columns of each of two tiles.
  __device__ __forceinline__ void find(int row, int column, float (&result)[2][4]) {
    float sums[2][4] = {};
#pragma unroll
    for (int k = 0; k < kBlocks - 1; ++k)
      if (k >= column && k < row) add_product(row, k, column, k, sums);
    store(sums, column, kBlocks - 1);
    __syncwarp();
    float negative[2][4] = {};
    add_product(row, row, column, kBlocks - 1, negative);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) result[n][i] = -negative[n][i];
    __syncwarp();
    if (row < kBlocks - 1) store(result, column, row);
    __syncwarp();
  }

  // sums += block [left_row, left_column] times block [right_row, right_column].
  __device__ __forceinline__ void add_product(int left_row, int left_column, int right_row, int right_column,
                                              float (&sums)[2][4]) const {
    const float* left = &matrix_[left_row * kBlock + lane_ / 4][left_column * kBlock + lane_ % 4];
    const float* right = &matrix_[right_row * kBlock + lane_ % 4][right_column * kBlock + lane_ / 4];
#pragma unroll
    for (int k = 0; k < kBlock; k += 8) {
      uint32_t a_high[4], a_low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const SplitTf32 split(left[i % 2 * 8 * kStride + k + i / 2 * 4]);
        a_high[i] = split.high, a_low[i] = split.low;
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint32_t b_high[2], b_low[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const SplitTf32 split(right[(k + 4 * i) * kStride + 8 * n]);
          b_high[i] = split.high, b_low[i] = split.low;
        }
        multiply_add_tf32(sums[n], a_low, b_high);
        multiply_add_tf32(sums[n], a_high, b_low);
        multiply_add_tf32(sums[n], a_high, b_high);
      }
    }
  }

  __device__ __forceinline__ void store(const float (&values)[2][4], int row, int column) {
    float* target = &matrix_[row * kBlock + lane_ / 4][column * kBlock + lane_ % 4 * 2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float2*>(target + half * 8 * kStride + 8 * n) =
            make_float2(values[n][2 * half], values[n][2 * half + 1]);
  }

  Matrix& matrix_;
  int lane_;
};

}  // namespace ortolan::cuda
