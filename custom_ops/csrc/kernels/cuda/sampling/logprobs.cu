// Log-sum-exp, one token's log-probability and the k best of each row of logits, [R, V] float32.
//
// Grid (V / 4096, R), at most 64 blocks per row; each leaves the sum and the k best of its share, and the
// last block of a row to arrive merges them. The k best are found one after another: each thread keeps the
// best of its own tokens, and looks for its next one where that was taken.
//
// Determinism: shares depend on V alone, sums follow fixed trees in float64, and parts are merged in the
// order of their places, whoever arrives last.
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/sampling/logprobs.h"
#include "kernels/cuda/sampling/rows.cuh"

namespace ortolan::cuda {
namespace {

using namespace sampling;

constexpr int kThreads = 256;
constexpr int kPerBlock = 4096;
constexpr int kMaxBlocks = 64;
static_assert(kMaxBlocks <= kThreads);

struct Part {
  double sum;     // of exp(logit - largest)
  float largest;  // -infinity where there are no tokens
};

struct LogprobsWorkspace {
  uint32_t* tickets;  // [R]
  Part* parts;        // [R, blocks]
  Count* best;        // [R, blocks, k]
  size_t bytes;
};

__host__ __device__ inline size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

__host__ __device__ inline LogprobsWorkspace carve_logprobs(void* memory, int64_t rows, int64_t blocks,
                                                            int64_t k) {
  char* bytes = static_cast<char*>(memory);
  const size_t parts = aligned(rows * sizeof(uint32_t));
  const size_t best = parts + aligned(rows * blocks * sizeof(Part));
  return {reinterpret_cast<uint32_t*>(bytes), reinterpret_cast<Part*>(bytes + parts),
          reinterpret_cast<Count*>(bytes + best), best + aligned(rows * blocks * k * sizeof(Count))};
}

int64_t blocks_per_row(int64_t vocab_size) {
  return std::clamp<int64_t>((vocab_size + kPerBlock - 1) / kPerBlock, 1, kMaxBlocks);
}

__device__ double block_sum(double value) {
  __shared__ double warps[kThreads / 32];
  for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0.0;
  for (int warp = 0; warp < kThreads / 32; ++warp) value += warps[warp];
  __syncthreads();
  return value;
}

__device__ float block_largest(float value) {
  return unordered(static_cast<uint32_t>(block_max<kThreads>(ordered(value))));
}

// The ranks of a block's share of the tokens.
struct ShareRanks {
  const float* logits;  // of the whole row
  int64_t begin;

  __device__ Count operator()(int64_t i) const { return rank_of(logits[begin + i], begin + i); }
};

// The ranks that all blocks of a row have found.
struct FoundRanks {
  const Count* best;

  __device__ Count operator()(int64_t i) const { return __ldcg(best + i); }
};

template <typename Ranks>
__device__ Count own_best(const Ranks& ranks, int64_t count, Count bound) {
  Count best = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const Count rank = ranks(i);
    if (rank < bound) best = max(best, rank);
  }
  return best;
}

// Thread 0 calls emit(place, rank) for the k greatest ranks, greatest first; 0 where there are no more.
template <typename Ranks, typename Emit>
__device__ void take_best(const Ranks& ranks, int64_t count, int64_t k, const Emit& emit) {
  if (k == 0) return;
  Count own = own_best(ranks, count, kBad);
  for (int64_t place = 0; place < k; ++place) {
    const Count best = block_max<kThreads>(own);
    if (threadIdx.x == 0) emit(place, best);
    if (own == best && best) own = own_best(ranks, count, best);
  }
}

__device__ Part part_of(const float* logits, int64_t begin, int64_t end) {
  float largest = -INFINITY;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) largest = fmaxf(largest, logits[i]);
  largest = block_largest(largest);
  double sum = 0.0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) sum += expf(logits[i] - largest);
  return {block_sum(sum), largest};
}

__device__ double merged_log_sum(const Part* parts) {
  Part own = {0.0, -INFINITY};
  if (threadIdx.x < gridDim.x) own = {__ldcg(&parts[threadIdx.x].sum), __ldcg(&parts[threadIdx.x].largest)};
  const float largest = block_largest(own.largest);
  return largest + log(block_sum(own.sum * exp(static_cast<double>(own.largest) - largest)));
}

// Called by all threads of a row's last block.
__device__ void finish_row(const TopLogprobsParams& params, int64_t row, const LogprobsWorkspace& workspace) {
  const float* logits = params.logits + row * params.vocab_size;
  int32_t* result = params.results + row * (2 + 2 * params.k);
  const double log_sum = merged_log_sum(workspace.parts + row * gridDim.x);
  const auto logprob = [&](int64_t token) {
    const bool exists = 0 <= token && token < params.vocab_size;
    return __float_as_int(exists ? static_cast<float>(logits[token] - log_sum) : NAN);
  };
  if (threadIdx.x == 0) {
    result[0] = __float_as_int(static_cast<float>(log_sum));
    result[1] = logprob(params.tokens[row]);
  }
  const int64_t found = gridDim.x * params.k;
  take_best(FoundRanks{workspace.best + row * found}, found, params.k, [&](int64_t place, Count rank) {
    const int token = rank ? index_of(rank) : -1;
    result[2 + place] = logprob(token);
    result[2 + params.k + place] = token;
  });
}

__global__ void __launch_bounds__(kThreads) rank_rows(TopLogprobsParams params) {
  const int64_t row = blockIdx.y, blocks = gridDim.x, place = row * blocks + blockIdx.x;
  const LogprobsWorkspace workspace = carve_logprobs(params.workspace, params.num_rows, blocks, params.k);
  const float* logits = params.logits + row * params.vocab_size;
  const int64_t share = (params.vocab_size + blocks - 1) / blocks;
  const int64_t begin = min(share * blockIdx.x, params.vocab_size);
  const int64_t end = min(begin + share, params.vocab_size);

  const Part part = part_of(logits, begin, end);
  if (threadIdx.x == 0) workspace.parts[place] = part;
  Count* best = workspace.best + place * params.k;
  take_best(ShareRanks{logits, begin}, end - begin, params.k, [&](int64_t i, Count rank) { best[i] = rank; });
  __shared__ bool is_last;
  if (threadIdx.x == 0) {  // which alone has written
    __threadfence();
    is_last = atomicAdd(workspace.tickets + row, 1) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  if (is_last) finish_row(params, row, workspace);
}

}  // namespace

size_t top_logprobs_workspace(int64_t num_rows, int64_t vocab_size, int64_t k) {
  return carve_logprobs(nullptr, num_rows, blocks_per_row(vocab_size), k).bytes;
}

cudaError_t top_logprobs(const TopLogprobsParams& params, cudaStream_t stream) {
  if (params.k < 0 || params.k > std::min(kMaxLogprobs, params.vocab_size)) return cudaErrorInvalidValue;
  const cudaError_t error = cudaMemsetAsync(params.workspace, 0, params.num_rows * sizeof(uint32_t), stream);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(blocks_per_row(params.vocab_size)),
                  static_cast<unsigned>(params.num_rows));
  return launch_alone(rank_rows, grid, dim3(kThreads), stream, params);
}

}  // namespace ortolan::cuda
