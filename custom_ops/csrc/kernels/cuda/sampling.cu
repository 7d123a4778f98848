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
// function of seed and counter. Workspace: tickets and maxima come back to zero by themselves, histograms are
// cleared per launch. Source: Philox 4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
// (SC 2011); radix selection as in Alabi et al., "Fast k-selection algorithms for graphics processing units"
// (2012).
#include <algorithm>

#include "sampling.h"

namespace ortolan::cuda {
namespace {

constexpr int kGreedyThreads = 256;
constexpr int kGreedyPerBlock = 2048;
constexpr int kMaxGreedyBlocks = 128;
constexpr int kDrawThreads = 1024;
constexpr int kDrawPerBlock = 4096;
constexpr int kMaxDrawBlocks = 64;
constexpr int kBins = 2048;
constexpr int kLevels = 3;
constexpr float kUnit = 1099511627776.0f;  // 2^40, the weight of the most likely token
constexpr unsigned long long kBad = ~0ull;

using Count = unsigned long long;

// The digits of an ordered logit, most significant first.
__device__ __forceinline__ int digit_bits(int level) { return level == 2 ? 10 : 11; }
__device__ __forceinline__ int digit_shift(int level) { return level == 0 ? 21 : level == 1 ? 10 : 0; }

// Histograms of one sequence's searches; those of the tail and of the draw share the first level of all mass.
struct Histograms {
  Count count[kLevels][kBins];
  Count mass[kBins];
  Count tail[kLevels - 1][kBins];
  Count draw[kLevels - 1][kBins];
};

struct SequenceState {
  Histograms histograms;
  Count best;      // (ordered logit, inverted index)
  Count low_mass;  // of tokens that min_p drops
  uint32_t arrivals;
  uint32_t ties[kMaxDrawBlocks];
};

struct Workspace {
  Count* best;        // [B]
  uint32_t* tickets;  // [B]
  SequenceState* states;
};

__host__ __device__ Workspace carve(void* memory, int64_t num_sequences) {
  char* bytes = static_cast<char*>(memory);
  const int64_t row = (num_sequences * 8 + 255) / 256 * 256;
  return {reinterpret_cast<Count*>(bytes), reinterpret_cast<uint32_t*>(bytes + row),
          reinterpret_cast<SequenceState*>(bytes + 2 * row)};
}

// Maps a float to an integer of the same order; both zeros are one value.
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float unordered(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The logits of one sequence, after the repetition penalty.
struct Row {
  const float* logits;
  const uint8_t* seen;
  float penalty;
  int64_t size;

  __device__ Row(const DecodeAdvanceParams& params, int64_t sequence)
      : logits(params.logits + sequence * params.vocab_size),
        seen(params.rules && params.seen ? params.seen + sequence * params.vocab_size : nullptr),
        penalty(params.rules ? params.rules[sequence].repetition_penalty : 1.0f),
        size(params.vocab_size) {}

  __device__ __forceinline__ float at(int64_t index) const {
    const float logit = logits[index];
    if (!seen || !seen[index]) return logit;
    return logit > 0.0f ? logit / penalty : logit * penalty;
  }

  // Greater for a larger logit, then for a lower index; kBad where the logit is no number.
  __device__ __forceinline__ Count rank(int64_t index) const {
    const float logit = at(index);
    if (!isfinite(logit)) return kBad;
    return static_cast<Count>(ordered(logit)) << 32 | (0xffffffffu - static_cast<uint32_t>(index));
  }
};

__device__ __forceinline__ int index_of(Count rank) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(rank));
}

template <int kThreads>
__device__ Count block_max(Count value) {
  __shared__ Count warps[kThreads / 32];
  for (int offset = 16; offset; offset /= 2) value = max(value, __shfl_xor_sync(~0u, value, offset));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < kThreads / 32; ++warp) value = max(value, warps[warp]);
  __syncthreads();
  return value;
}

template <int kThreads>
__device__ Count best_rank(const Row& row) {
  Count best = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < row.size; i += step) {
    best = max(best, row.rank(i));
  }
  return block_max<kThreads>(best);
}

// Writes the chosen token and moves the sequence on; called by all threads of one block per sequence.
__device__ void finish(const DecodeAdvanceParams& params, int64_t sequence, int token) {
  if (threadIdx.x == 0) {
    params.produced[sequence] = token;
    if (params.token_ids) params.token_ids[sequence] = max(token, 0);
    if (params.positions) params.positions[sequence] += params.advance_tokens;
    if (params.past_len) params.past_len[sequence] += params.advance_tokens;
    if (params.seen && token >= 0) params.seen[sequence * params.vocab_size + token] = 1;
  }
  if (sequence == 0 && params.kv_len) {
    for (int64_t i = threadIdx.x; i < params.num_kv_lens; i += blockDim.x)
      params.kv_len[i] += params.advance_tokens;
  }
}

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

// Waits for all blocks of a sequence; `arrivals` counts up and is never reset within a launch.
struct Barrier {
  uint32_t* arrivals;
  uint32_t expected = 0;

  __device__ void wait() {
    expected += gridDim.x;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(arrivals, 1);
      while (*static_cast<volatile uint32_t*>(arrivals) < expected) {
      }
      __threadfence();
    }
    __syncthreads();
  }
};

// The fixed-point weight of a logit.
struct Weigher {
  float largest;
  float inverse_temperature;

  __device__ __forceinline__ float share(uint32_t key) const {
    return expf(__fmul_rn(unordered(key) - largest, inverse_temperature));
  }
  __device__ __forceinline__ Count operator()(uint32_t key) const {
    return __float2ull_rn(share(key) * kUnit);
  }
};

struct Unit {
  __device__ __forceinline__ Count operator()(uint32_t) const { return 1; }
};

// Where a target falls: the bin (or the whole key) that holds it, and the weight below that.
struct Place {
  uint32_t key;
  Count below;
  Count total;
};

// Adds the weights of keys >= minimum whose digits above this level are `prefix` to the level's histogram.
template <typename Weight>
__device__ void fill(const Row& row, const Weight& weight, uint32_t minimum, int level, uint32_t prefix,
                     Count* histogram) {
  __shared__ Count bins[kBins];
  for (int bin = threadIdx.x; bin < kBins; bin += kDrawThreads) bins[bin] = 0;
  __syncthreads();
  const int shift = digit_shift(level), above = shift + digit_bits(level);
  const uint32_t mask = (1u << digit_bits(level)) - 1;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kDrawThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kDrawThreads + threadIdx.x; i < row.size; i += step) {
    const uint32_t key = ordered(row.at(i));
    if (key < minimum || static_cast<uint64_t>(key) >> above != prefix) continue;
    const Count value = weight(key);
    if (value) atomicAdd(&bins[key >> shift & mask], value);
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < kBins; bin += kDrawThreads) {
    if (bins[bin]) atomicAdd(histogram + bin, bins[bin]);
  }
}

// Finds the bin with below <= target < below + its weight; bin 0 where the target is past the end.
__device__ Place find(const Count* histogram, Count target) {
  static_assert(kBins == 2 * kDrawThreads);
  __shared__ Count warps[kDrawThreads / 32];
  __shared__ Place place;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Count first = __ldcg(histogram + 2 * threadIdx.x), second = __ldcg(histogram + 2 * threadIdx.x + 1);
  Count inclusive = first + second;
  for (int offset = 1; offset < 32; offset *= 2) {
    const Count other = __shfl_up_sync(~0u, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  if (lane == 31) warps[warp] = inclusive;
  if (threadIdx.x == 0) place = {0, 0, 0};
  __syncthreads();
  for (int i = 0; i < warp; ++i) inclusive += warps[i];
  const Count middle = inclusive - second, start = middle - first;
  if (start <= target && target < middle) place = {2 * threadIdx.x, start, 0};
  if (middle <= target && target < inclusive) place = {2 * threadIdx.x + 1, middle, 0};
  __syncthreads();
  if (threadIdx.x == kDrawThreads - 1) place.total = inclusive;
  __syncthreads();
  const Place result = place;
  __syncthreads();
  return result;
}

// Finds the key at which the weights of keys >= minimum, ascending, pass the target.
template <typename Weight>
__device__ Place search(const Row& row, const Weight& weight, uint32_t minimum, Count target,
                        Count* first_level, bool first_is_filled, Count (*other_levels)[kBins],
                        Barrier& barrier) {
  Place result = {0, 0, 0};
  for (int level = 0; level < kLevels; ++level) {
    Count* histogram = level ? other_levels[level - 1] : first_level;
    if (level || !first_is_filled) {
      fill(row, weight, minimum, level, result.key, histogram);
      barrier.wait();
    }
    const Place place = find(histogram, target - result.below);
    if (!level) result.total = place.total;
    result.below += place.below;
    result.key = result.key << digit_bits(level) | place.key;
  }
  return result;
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
  const SamplingRule rule = params.rules[sequence];
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
  const Count hit = dropped + __umul64hi(philox(rule.seed, params.draw), total - dropped);
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
  return cudaGetLastError();
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
  take_best<<<grid, kGreedyThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace ortolan::cuda
