// Next-token choice and advance of the decode state, [B, V] float32 logits.
//
// Most likely token: grid (V / 2048, B), one 64-bit maximum of (ordered logit, lowest index) per sequence;
// the last block to arrive finishes. Drawing: grid (V / 4096, B), the blocks of a sequence meet at barriers,
// so the launch is cooperative. No sort: probabilities are weighed in fixed point, exp((z - max) /
// temperature) * 2^40, and every question (the k-th largest logit, where the dropped tail ends, which token a
// random number hits) is one search in the order (logit, index): three histograms over the digits of the
// ordered logit, 11, 11 and 10 bits. Among equal logits the lower index comes first, as in a stable ascending
// sort.
//
// Determinism: all sums are integers, so that the order of atomics does not matter; random numbers are a
// function of a seed and of the position of the token to choose. runtime/generate/sampler.py chooses in the
// same way. Workspace: tickets and maxima come back to zero by themselves, histograms are
// cleared per launch. Source: Philox 4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
// (SC 2011); radix selection as in Alabi et al., "Fast k-selection algorithms for graphics processing units"
// (2012).
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/sampling/search.cuh"

namespace ortolan::cuda {
namespace {

using namespace sampling;

constexpr int kGreedyThreads = 256;
constexpr int kGreedyPerBlock = 2048;
constexpr int kMaxGreedyBlocks = 128;
constexpr int kDrawPerBlock = 4096;

__global__ void __launch_bounds__(kGreedyThreads) take_best(DecodeAdvanceParams params) {
  const int64_t sequence = blockIdx.y;
  const Workspace workspace = carve(params.workspace, params.num_sequences);
  const Count best = best_rank<kGreedyThreads>(Row(params, sequence));
  __shared__ bool is_last;
  __shared__ Count winner;
  if (threadIdx.x == 0) {
    atomicMax(workspace.best + sequence, best);
    __threadfence();
    is_last = atomicAdd(workspace.tickets + sequence, 1) == gridDim.x - 1;
    if (is_last) {
      winner = atomicExch(workspace.best + sequence, 0ull);
      workspace.tickets[sequence] = 0;
    }
  }
  __syncthreads();
  if (is_last) finish(params, sequence, winner == kBad ? -1 : index_of(winner));
}

// 64 random bits of (seed, counter).
__device__ uint64_t philox(uint64_t seed, uint64_t counter) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<uint64_t>(c0) << 32 | c1;
}

// Sums the weight of kept keys whose share of the largest is below min_p.
__device__ void add_low_mass(const Row& row, const Weigher& weigher, uint32_t minimum, float min_p,
                             Count* low_mass) {
  Count sum = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kDrawThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kDrawThreads + threadIdx.x; i < row.size; i += step) {
    const uint32_t key = ordered(row.at(i));
    if (key >= minimum && weigher.share(key) < min_p) sum += weigher(key);
  }
  for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (threadIdx.x % 32 == 0 && sum) atomicAdd(low_mass, sum);
}

// Returns the weight at which the kept tokens begin, in ascending order: after the tail of top_p and what
// min_p drops.
__device__ Count dropped_mass(const SamplingRule& rule, const Row& row, const Weigher& weigher,
                              uint32_t minimum, Count total, SequenceState& state, Barrier& barrier) {
  Count dropped = rule.min_p > 0.0f ? __ldcg(&state.low_mass) : 0;
  if (rule.tail_mass <= 0.0) return dropped;
  const Count limit = min(static_cast<Count>(rule.tail_mass * static_cast<double>(total)), total - 1);
  Histograms& h = state.histograms;
  const Place place = search(row, weigher, minimum, limit, h.mass, true, h.tail, barrier);
  const Count weight = weigher(place.key);
  return max(dropped, place.below + (limit - place.below) / weight * weight);
}

// Returns the index of the nth token, in index order, whose key is `key`; -1 in all blocks but the one that
// holds it.
__device__ int find_tie(const Row& row, uint32_t key, Count nth, SequenceState& state, Barrier& barrier) {
  const int64_t share = (row.size + gridDim.x - 1) / gridDim.x;
  const int64_t begin = min(share * blockIdx.x, row.size), end = min(begin + share, row.size);
  uint32_t own = 0;
  for (int64_t base = begin; base < end; base += kDrawThreads) {
    const int64_t i = base + threadIdx.x;
    own += __syncthreads_count(i < end && ordered(row.at(i)) == key);
  }
  if (threadIdx.x == 0) state.ties[blockIdx.x] = own;
  barrier.wait();
  for (int block = 0; block < static_cast<int>(blockIdx.x); ++block) {
    const uint32_t count = __ldcg(state.ties + block);
    if (nth < count) return -1;
    nth -= count;
  }
  if (nth >= own) return -1;
  __shared__ uint32_t warps[kDrawThreads / 32];
  __shared__ int found;
  for (int64_t base = begin; base < end; base += kDrawThreads) {
    const int64_t i = base + threadIdx.x;
    const bool equal = i < end && ordered(row.at(i)) == key;
    const uint32_t mask = __ballot_sync(~0u, equal);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = __popc(mask);
    const uint32_t here = __syncthreads_count(equal);
    if (nth >= here) {
      nth -= here;
      continue;
    }
    uint32_t rank = __popc(mask & ((1u << threadIdx.x % 32) - 1));
    for (int warp = 0; warp < static_cast<int>(threadIdx.x / 32); ++warp) rank += warps[warp];
    if (equal && rank == nth) found = static_cast<int>(i);
    __syncthreads();
    return found;
  }
  return -1;
}

__global__ void __launch_bounds__(kDrawThreads)
    draw_token(DecodeAdvanceParams params, int64_t first_sequence) {
  const int64_t sequence = first_sequence + blockIdx.y;
  SequenceState& state = carve(params.workspace, params.num_sequences).states[sequence];
  const SamplingRule rule = params.rules[sequence];  // before the first barrier: finish() changes it
  const Row row(params, sequence);
  Barrier barrier{&state.arrivals};
  Histograms& h = state.histograms;

  const Count best = best_rank<kDrawThreads>(row);
  if (threadIdx.x == 0) atomicMax(&state.best, best);
  barrier.wait();
  const Count largest = __ldcg(&state.best);
  if (largest == kBad) {
    if (blockIdx.x == 0) finish(params, sequence, -1);
    return;
  }
  if (isinf(rule.inverse_temperature)) {
    if (blockIdx.x == 0) finish(params, sequence, index_of(largest));
    return;
  }
  const Weigher weigher{unordered(static_cast<uint32_t>(largest >> 32)), rule.inverse_temperature};

  uint32_t minimum = 0;
  if (rule.top_k > 0 && rule.top_k < row.size) {
    const Count target = row.size - rule.top_k;
    minimum = search(row, Unit{}, 0, target, h.count[0], false, h.count + 1, barrier).key;
  }
  if (rule.min_p > 0.0f) add_low_mass(row, weigher, minimum, rule.min_p, &state.low_mass);
  fill(row, weigher, minimum, 0, 0, h.mass);
  barrier.wait();
  const Count total = find(h.mass, 0).total;
  const Count dropped = dropped_mass(rule, row, weigher, minimum, total, state, barrier);
  const Count hit = dropped + __umul64hi(philox(rule.seed, rule.draw), total - dropped);
  const Place place = search(row, weigher, minimum, hit, h.mass, true, h.draw, barrier);
  const int token = find_tie(row, place.key, (hit - place.below) / weigher(place.key), state, barrier);
  if (token >= 0) finish(params, sequence, token);
}

cudaError_t launch_draws(const DecodeAdvanceParams& params, cudaStream_t stream) {
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  SequenceState* states = carve(params.workspace, params.num_sequences).states;
  error = cudaMemsetAsync(states, 0, sizeof(SequenceState) * params.num_sequences, stream);
  if (error != cudaSuccess) return error;
  const int64_t wanted =
      std::clamp<int64_t>((params.vocab_size + kDrawPerBlock - 1) / kDrawPerBlock, 1, kMaxDrawBlocks);
  const int64_t blocks = std::min<int64_t>(wanted, processors);
  const int64_t together =
      std::max<int64_t>(1, processors / blocks);  // sequences whose blocks fit the chip at once
  for (int64_t first = 0; first < params.num_sequences; first += together) {
    const int64_t count = std::min(together, params.num_sequences - first);
    DecodeAdvanceParams argument = params;
    void* arguments[] = {&argument, &first};
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(count));
    error = cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(draw_token), grid, dim3(kDrawThreads),
                                        arguments, 0, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

size_t decode_advance_workspace(int64_t num_sequences) {
  const Workspace end = carve(nullptr, num_sequences);
  return reinterpret_cast<size_t>(end.states + num_sequences);
}

cudaError_t decode_advance(const DecodeAdvanceParams& params, cudaStream_t stream) {
  if (params.random) return launch_draws(params, stream);
  const int64_t blocks =
      std::clamp<int64_t>((params.vocab_size + kGreedyPerBlock - 1) / kGreedyPerBlock, 1, kMaxGreedyBlocks);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(params.num_sequences));
  return launch_alone(take_best, grid, dim3(kGreedyThreads), stream, params);
}

}  // namespace ortolan::cuda
