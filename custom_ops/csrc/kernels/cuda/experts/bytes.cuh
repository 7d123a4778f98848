// Experts of codes of 4 bits and few pairs of token and choice: the weights of the chosen experts stream
// through shared memory once for up to four pairs, and are multiplied as bytes.
//
// The tiles of all chosen experts are one list, of which each block has an equal share. It takes them in
// turns, whose parts wait in shared memory: a turn ends with its expert. The warps of a team share a tile's
// columns, always the same ones: each rounds the inputs that it multiplies and waits for no other warp before
// a turn ends. Its units of codes go through a ring of its own, which is filled across turns and experts. A
// pair's sum is that of a warp's slices in their order, then of the warps in one order; both depend on the
// layer alone.
#pragma once

#include "byte_pairs.cuh"
#include "byte_products.cuh"
#include "gate_product.cuh"

namespace ortolan::cuda {

// Fetches a warp's units into its ring.
template <typename Kind>
struct ByteExpertFetcher {
  const ByteExpertParams& p;
  uint32_t ring;
  ByteExpertCursor at;
  uint64_t policy;
  uint32_t targets[2];            // of the lane's first line and the fourth after it, in the first stage
  const uint8_t* codes;           // of the lane's first line and bytes, in the tile's first slice
  const uint8_t *scales, *zeros;  // of the row whose words the lane copies

  __device__ __forceinline__ ByteExpertFetcher(const ByteExpertParams& p, uint32_t ring,
                                               const ByteExpertCursor& first)
      : p(p), ring(ring), at(first), policy(evict_first_policy()) {
    const int lane = threadIdx.x % 32;
    targets[0] = ring + lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16;
    targets[1] = ring + 512 + lane / 8 * 128 + (lane % 8 ^ lane / 8 ^ 4) * 16;
    if (!at.done()) aim();
  }
  __device__ __forceinline__ void aim() {
    const int lane = threadIdx.x % 32, output = at.expert_tile() * p.plan.outputs, line = lane % 16;
    const LowBitWeight w = p.weights.of(at.turn.pairs.expert);
    codes = w.codes + (int64_t{output} + lane / 8) * p.plan.row_bytes + lane % 8 * 16;
    const int row = output + line % 8 + (line < 8 ? 0 : p.plan.later_row);
    scales = (Kind::kFloats ? w.scale_codes : static_cast<const uint8_t*>(w.scales)) +
             int64_t{row} * p.plan.scale_row_bytes;
    if constexpr (Kind::kZeros) zeros = w.zero_points + int64_t{row} * p.plan.zero_row_bytes;
  }
  // Words of a row from a byte on, [word, line]; what lies behind the row is zero.
  template <int kWords>
  static __device__ __forceinline__ void fetch_words(uint32_t target, const uint8_t* row, int first,
                                                     int row_bytes) {
    const int lane = threadIdx.x % 32;
    const auto* word =
        reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(row + first) & ~uintptr_t{3});
    const auto left = static_cast<int>(row + row_bytes - word);
#pragma unroll
    for (int n = 0; n < kWords; n += 2)
      if (const int own = n + lane / 16; own < kWords)
        copy_async_4(target + own * 64 + lane % 16 * 4, word + 4 * own, 4 * own < left);
  }
  __device__ __forceinline__ void fetch_codes(uint32_t stage) const {
    const int four = 4 * p.plan.row_bytes, byte = at.slice * ByteExpertPlan::kRowBytes;
    const uint8_t* source = codes + byte;
    const uint8_t* later = source + p.plan.later_bytes;
    if (byte + ByteExpertPlan::kRowBytes <= p.plan.row_bytes) {
      copy_async_16_at<0, 0>(targets[0] + stage, source, policy);
      copy_async_16_at<0, 0>(targets[1] + stage, source + four, policy);
      copy_async_16_at<1024, 0>(targets[0] + stage, later, policy);
      copy_async_16_at<1024, 0>(targets[1] + stage, later + four, policy);
    } else {
      const bool exists = byte + static_cast<int>(threadIdx.x % 8) * 16 < p.plan.row_bytes;
      copy_async_16(targets[0] + stage, source, exists);
      copy_async_16(targets[1] + stage, source + four, exists);
      copy_async_16(targets[0] + stage + 1024, later, exists);
      copy_async_16(targets[1] + stage + 1024, later + four, exists);
    }
  }
  __device__ __forceinline__ void fetch(int place) {
    if (!at.done()) {
      const int stage = place * p.plan.stage_bytes(), group = p.plan.first_group(at.slice);
      const uint32_t words = ring + stage + ByteExpertPlan::kCodesBytes;
      fetch_codes(stage);
      fetch_words<Kind::kScaleWords>(words, scales, group * (Kind::kFloats ? 1 : 2), p.plan.scale_row_bytes);
      if constexpr (Kind::kZeros)
        fetch_words<Kind::kZeroWords>(words + Kind::kScaleWords * 64, zeros, group / 2,
                                      p.plan.zero_row_bytes);
      if (at.advance() && !at.done()) aim();
    }
    copy_async_commit();
  }
};

// Makes outputs of a turn's parts [tile, warp of the team, pair, line].
template <typename Element>
struct ByteExpertOutputs {
  const ByteExpertParams& p;
  float gate_bias = 0, factor_bias = 0;  // of the thread's first output of a turn

  // An output of a turn: outputs of a tile come first, then tiles, then pairs.
  struct Place {
    int row, tile, pair, output;
  };
  __device__ __forceinline__ Place place_of(const ByteTurn& turn, int i) const {
    const int row = i & (p.plan.outputs - 1), rest = i >> p.plan.outputs_shift;
    // Exact, since there are few.
    const int pair =
        static_cast<int>(__fdividef(static_cast<float>(rest) + 0.5f, static_cast<float>(turn.tiles)));
    const int tile = rest - pair * turn.tiles;
    return {row, tile, pair, ((turn.first_tile + tile) << p.plan.outputs_shift) + row};
  }
  __device__ __forceinline__ void load_bias(const ByteTurn& turn, int output) {
    const int64_t row = turn.pairs.expert * p.weights.first.rows + output;
    gate_bias = element_at<Element>(p.gated ? p.step.gate_up_bias : p.step.down_bias, row);
    if (p.gated) factor_bias = element_at<Element>(p.step.gate_up_bias, row + p.num_outputs);
  }
  // Starts to load what the turn will need.
  __device__ __forceinline__ void prepare(const ByteTurn& turn) {
    if (const Place at = place_of(turn, static_cast<int>(threadIdx.x)); at.pair < turn.pairs.count)
      load_bias(turn, at.output);
  }
  __device__ __forceinline__ float sum_of(const float* part, int stride) const {
    constexpr int kMost = ByteExpertPlan::kMostWarps;
    float values[kMost];
#pragma unroll
    for (int n = 0; n < kMost; ++n)
      if (n < p.plan.span) values[n] = part[n * stride];
    float sum = values[0];
#pragma unroll
    for (int n = 1; n < kMost; ++n)
      if (n < p.plan.span) sum += values[n];
    return sum;
  }
  __device__ __forceinline__ void finish(const float* parts, const ByteTurn& turn) {
    const int stride = turn.pairs.count * ByteExpertPlan::kLines;
    const int count = turn.tiles * p.plan.outputs * turn.pairs.count;
#pragma unroll 1
    for (auto i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
      const Place at = place_of(turn, i);
      if (i != static_cast<int>(threadIdx.x)) load_bias(turn, at.output);
      const float* part = parts + at.tile * p.plan.span * stride + at.pair * ByteExpertPlan::kLines + at.row;
      const float gate = sum_of(part, stride) + gate_bias;
      const int64_t place = turn.pairs.pair_of(p, at.pair) * int64_t{p.num_outputs} + at.output;
      if (p.gated)
        static_cast<Element*>(p.scratch.inner)[place] =
            Element(gate_product(p.step, gate, sum_of(part + 8, stride) + factor_bias));
      else
        static_cast<Element*>(p.scratch.products)[place] = Element(gate);
    }
  }
};

// What a warp does with its units.
template <typename Kind>
struct ByteExpertWarp {
  using Element = typename Kind::Element;
  const ByteExpertParams& p;
  int member, team;
  uint32_t ring;
  unsigned char* memory;  // for its inputs
  ByteExpertProducts<Kind> products;
  int place = 0;          // in the ring
  int known_rows = -1;    // whose inputs are there
  int fetched_rows = -1;  // whose inputs are on their way
  using Inputs = SliceInputs<Element, !Kind::kFloats>;

  __device__ __forceinline__ Inputs inputs_of(const ByteTurn& turn) const {
    const int count = (p.plan.slices - member + p.plan.span - 1) / p.plan.span * turn.pairs.count;
    return {shared_address(memory),
            reinterpret_cast<SliceFacts*>(memory + count * SliceBytes::kBytes),
            p.num_inputs,
            member,
            p.plan.span,
            count,
            turn.pairs.count};
  }
  __device__ __forceinline__ const Element* row_of(const ByteTurn& turn, int n) const {
    const int pair = turn.pairs.pair_of(p, n);
    return static_cast<const Element*>(p.gated ? p.step.x : p.scratch.inner) +
           (p.gated ? p.token_of(pair) : pair) * int64_t{p.num_inputs};
  }
  // Starts to load the first inputs of a turn.
  __device__ __forceinline__ typename Inputs::Pieces fetch_inputs(const ByteTurn& turn) {
    if (turn.done()) return {};
    fetched_rows = rows_of(turn);
    return inputs_of(turn).fetch(0, [&](int n) { return row_of(turn, n); });
  }
  // Which inputs a turn has, as a number.
  __device__ __forceinline__ int rows_of(const ByteTurn& turn) const {
    return p.gated && !p.is_shared ? p.token_of(turn.pairs.first) : turn.slot;
  }
  __device__ __forceinline__ void round_inputs(const ByteTurn& turn, typename Inputs::Pieces& first) {
    const int rows = rows_of(turn);
    if (rows == known_rows) return;
    if (rows != fetched_rows) first = fetch_inputs(turn);
    const Inputs inputs = inputs_of(turn);
    inputs.store_all(first, [&](int n) { return row_of(turn, n); });
    products.prepare(inputs.bytes, inputs.facts, inputs.pairs);
    known_rows = rows;
    fetched_rows = -1;
  }
  __device__ __forceinline__ void multiply(const ByteTurn& turn, ByteExpertFetcher<Kind>& fetcher,
                                           float* parts) {
#pragma unroll 1
    for (int tile = team; tile < turn.tiles; tile += p.plan.teams) {
      products.start((turn.first_tile + tile) * p.plan.outputs, p.plan.later_row);
#pragma unroll 1
      for (int slice = member, round = 0; slice < p.plan.slices; slice += p.plan.span, ++round) {
        wait_for_oldest(p.plan.depth);
        __syncwarp();
        products.multiply(ring + place * p.plan.stage_bytes(), slice, round);
        __syncwarp();
        fetcher.fetch(place);
        if (++place == p.plan.depth) place = 0;
      }
      products.store(parts + (tile * p.plan.span + member) * turn.pairs.count * ByteExpertPlan::kLines);
    }
  }
};

// Which experts are chosen is known before the kernel in front of the second product has ended: the first
// product lets the second start when it has seen them.
template <typename Kind>
__global__ void __launch_bounds__(32 * ByteExpertPlan::kMostWarps, 2)
    expert_bytes_kernel(const __grid_constant__ ByteExpertParams p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const ByteExpertPlan& plan = p.plan;
  const ByteExpertLayout layout(plan);
  const int warp = threadIdx.x / 32, member = warp % plan.span, team = warp / plan.span;
  const uint32_t ring = shared_address(shared_memory) + warp * plan.depth * plan.stage_bytes();
  auto* parts = reinterpret_cast<float*>(shared_memory + layout.parts);
  unsigned char* inputs =
      shared_memory + layout.inputs + warp * plan.rounds * plan.pairs * SliceBytes::kAllBytes;
  ByteTurn turn(p);
  touch_parameters(p);
  if (p.gated) wait_for_previous_kernel();
  launch_dependents();

  using Work = ByteExpertWarp<Kind>;
  Work work{p, member, team, ring, inputs, ByteExpertProducts<Kind>(plan)};
  typename Work::Inputs::Pieces first{};
  // In front of the weights, which would hold them up, and of what says which weights.
  if (p.gated && !p.is_shared) first = work.fetch_inputs(turn);
  turn.start();
  if (p.gated && p.is_shared) first = work.fetch_inputs(turn);
  ByteExpertFetcher<Kind> fetcher(p, ring, ByteExpertCursor(turn, team, member));
#pragma unroll 1
  for (int n = 0; n < plan.depth; ++n) fetcher.fetch(n);
  if (!p.gated) {
    wait_for_previous_kernel();
    first = work.fetch_inputs(turn);
  }

  ByteExpertOutputs<typename Kind::Element> outputs{p};
  int turn_parts = plan.turn_parts();  // from this turn's to the next one's
#pragma unroll 1
  for (; !turn.done(); turn.next()) {
    outputs.prepare(turn);
    work.round_inputs(turn, first);
    work.multiply(turn, fetcher, parts);
    __syncthreads();
    outputs.finish(parts, turn);
    parts += turn_parts;
    turn_parts = -turn_parts;
  }
}

}  // namespace ortolan::cuda
