// How held.cuh makes outputs of its warps' sums.
#pragma once

#include "held_inputs.cuh"

namespace ortolan::cuda {

__device__ __forceinline__ float4 load_shared_quad(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

// What the finishing warps do: a turn's sums of warps become sums of the block, and in a cluster those of one
// of its blocks, by turns, which adds them up. A turn has a tile of each team. A lane takes four lines of a
// token; 32 such are a piece of a turn. The warps take one piece after another.
//
// In a cluster a warp takes the same piece of each turn, and finishes a turn of its own block when it has
// sent the sums of the next one, so that no other block waits for that. A block has three places for the sums
// of its turns: before another one sends it those of the third turn after one, it has finished a turn of its
// own that the first one sent sums for after it had finished the one.
template <typename Element, LowBitFormat kFormat>
struct HeldOutputs {
  using Inputs = HeldInputs<Element, kFormat>;
  const HeldParams& p;
  HeldBarriers& barriers;
  const float* warp_sums;  // of two turns
  float* block_sums;       // of HeldPlan::kGathered turns
  const float* squares;
  float* factors;  // the warp's
  int rank;

  // Of `count` sums of four lines.
  static __device__ __forceinline__ float4 sum_of(const float* sums, int count) {
    constexpr int kAtOnce = 4;
    float4 sum{};
    const auto add = [&](const float4& quad) {
      sum.x += quad.x, sum.y += quad.y, sum.z += quad.z, sum.w += quad.w;
    };
    int n = 0;
#pragma unroll 1
    for (; n + kAtOnce <= count; n += kAtOnce, sums += kAtOnce * HeldPlan::kSums) {
      float4 some[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) some[i] = load_shared_quad(sums + i * HeldPlan::kSums);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) add(some[i]);
    }
#pragma unroll 1
    for (; n < count; ++n, sums += HeldPlan::kSums) add(load_shared_quad(sums));
    return sum;
  }
  // Four lines of a token of a tile.
  struct Place {
    int token, team, line;
    int output;   // of the first line
    int outputs;  // how many of them there are

    __device__ __forceinline__ int sums() const { return token * HeldPlan::kTokenStride + line; }
  };
  __device__ __forceinline__ Place place_of(int piece, int first_tile) const {
    const int i = piece * 32 + static_cast<int>(threadIdx.x) % 32;
    Place at{i / 4 % 16, i / 64, i % 4 * 4, 0, 0};
    at.output = (first_tile + at.team) * p.plan.outputs() + at.line;
    const bool exists = at.token < p.pass.num_tokens && at.line < p.plan.outputs();
    at.outputs = exists ? min(static_cast<int>(p.linear.num_outputs) - at.output, 4) : 0;
    return at;
  }
  // Calls visit(n) for those of the four.
  template <typename Visit>
  static __device__ __forceinline__ void each(const Place& at, Visit visit) {
#pragma unroll
    for (int n = 0; n < 4; ++n)
      if (n < at.outputs) visit(n);
  }
  __device__ __forceinline__ int64_t index_of(const Place& at) const {
    return (p.pass.first_token + at.token) * p.linear.num_outputs + at.output;
  }
  // Whether the four are stored, and residuals loaded, at once.
  __device__ __forceinline__ bool is_wide(const Place& at) const {
    return p.plan.wide_outputs && at.outputs == 4;
  }
  // Four elements.
  struct alignas(8) Residuals {
    Element values[4];
  };
  __device__ __forceinline__ void load(Residuals& residuals, const Place& at) const {
    if (!p.linear.residual || at.outputs <= 0) return;
    const Element* source = static_cast<const Element*>(p.linear.residual) + index_of(at);
    if (is_wide(at))
      residuals = *reinterpret_cast<const Residuals*>(source);
    else
      each(at, [&](int n) { residuals.values[n] = source[n]; });
  }
  // The norm's factors, where they come to the sums.
  __device__ __forceinline__ void find_factors() const {
    const int lane = threadIdx.x % 32, token = lane % HeldPlan::kTokens;
    float factor = 1;
    if (p.linear.norm_weight) {
      wait_for_cluster(barriers.squared, 0);
      float sum = Inputs::squares_of(p, squares, token, lane / HeldPlan::kTokens, 2);
      sum += __shfl_xor_sync(~0u, sum, 16);
      factor = rsqrtf(sum * p.plan.input_share + p.linear.epsilon);
    }
    if (lane < HeldPlan::kTokens) factors[token] = factor;
    __syncwarp();
  }
  // Of the sums [team, count].
  __device__ __forceinline__ void finish(const Place& at, const Residuals& residuals, const float* sums,
                                         int count) const {
    if (at.outputs <= 0) return;
    const float* from = sums + at.team * count * HeldPlan::kSums + at.sums();
    const float4 gates = sum_of(from, count), others = p.plan.gated ? sum_of(from + 8, count) : float4{};
    float y[] = {gates.x, gates.y, gates.z, gates.w}, other[] = {others.x, others.y, others.z, others.w};
    const int second = static_cast<int>(p.linear.num_outputs) + at.output;
    if constexpr (Inputs::kFactorLater) {
      const float norm = factors[at.token];
#pragma unroll
      for (int n = 0; n < 4; ++n) y[n] *= norm, other[n] *= norm;
    }
    if constexpr (kFormat == LowBitFormat::kNvfp4)
      each(at, [&](int n) {
        y[n] *= p.weight.float_scales[at.output + n];
        if (p.plan.gated) other[n] *= p.weight.float_scales[second + n];
      });
    if (const auto* bias = static_cast<const Element*>(p.linear.bias))
      each(at, [&](int n) {
        y[n] += to_float(bias[at.output + n]);
        if (p.plan.gated) other[n] += to_float(bias[second + n]);
      });
    if (p.plan.gated)
#pragma unroll
      for (int n = 0; n < 4; ++n) y[n] = activate(p.linear.activation, y[n]) * other[n];
    if (p.linear.residual)
#pragma unroll
      for (int n = 0; n < 4; ++n) y[n] += to_float(residuals.values[n]);
    if (p.linear.output_float32) {
      auto* target = static_cast<float*>(p.linear.output) + index_of(at);
      each(at, [&](int n) { store_kept(target + n, y[n]); });
      return;
    }
    auto* target = static_cast<Element*>(p.linear.output) + index_of(at);
    if (is_wide(at))
      store_kept(reinterpret_cast<uint2*>(target),
                 make_uint2(Half<Element>::pack(y[0], y[1]), Half<Element>::pack(y[2], y[3])));
    else
      each(at, [&](int n) { store_kept(target + n, Element(y[n])); });
  }
  __device__ __forceinline__ const float* sums_of(int turn) const {
    return warp_sums + turn % 2 * p.plan.warps() * HeldPlan::kSums;
  }
  __device__ __forceinline__ void run(int first_tile, int warp) const {
    wait_for_previous_kernel();
    if constexpr (Inputs::kFactorLater) find_factors();
    if (p.plan.cluster == 1)
      run_alone(first_tile, warp);
    else if (warp < p.plan.turn_pieces())
      run_in_cluster(first_tile, warp);
  }
  __device__ __forceinline__ void run_alone(int first_tile, int piece) const {
    const int pieces = p.plan.turn_pieces();
    int turn = 0;
#pragma unroll 1
    for (;; piece += HeldPlan::kFinishers) {
      for (; piece >= pieces; piece -= pieces) ++turn, first_tile += p.plan.stride();
      if (first_tile >= p.plan.tiles) break;
      const Place at = place_of(piece, first_tile);
      Residuals residuals{};
      load(residuals, at);
      barriers.summed[turn % 2].wait(turn / 2 & 1);
      finish(at, residuals, sums_of(turn), p.plan.span);
      barriers.finished[turn % 2].arrive_once(threadIdx.x % 32);
    }
  }
  __device__ __forceinline__ void run_in_cluster(int first_tile, int piece) const {
    const int cluster = p.plan.cluster;
    int owner = 0;       // of the turn
    RingPlace at_owner;  // where its sums lie there
    Place own{};         // the block's last own turn
    RingPlace own_place;
    Residuals residuals{};
    bool has_own = false;
    const auto sums_at = [&](int number, int block) {
      return block_sums + (number * cluster + block) * HeldPlan::kSums;
    };
    const auto finish_own = [&] {
      if (!has_own) return;
      wait_for_cluster(barriers.gathered[own_place.place], own_place.parity);
      finish(own, residuals, sums_at(own_place.place, 0), cluster);
      has_own = false;
    };
#pragma unroll 1
    for (int turn = 0; first_tile < p.plan.tiles; ++turn, first_tile += p.plan.stride()) {
      const Place at = place_of(piece, first_tile);
      barriers.summed[turn % 2].wait(turn / 2 & 1);
      const float4 sum = sum_of(sums_of(turn) + at.sums(), p.plan.span);
      barriers.finished[turn % 2].arrive_once(threadIdx.x % 32);
      Barrier& gathered = barriers.gathered[at_owner.place];
      if (rank == owner && threadIdx.x % 32 == 0)
        gathered.arrive_expecting(cluster * 32 * static_cast<int>(sizeof(float4)));
      send_to(shared_address(sums_at(at_owner.place, rank) + at.sums()), owner, sum, gathered);
      finish_own();
      if (rank == owner) {
        own = at, own_place = at_owner, has_own = true;
        load(residuals, own);
      }
      if (++owner == cluster) {
        owner = 0;
        at_owner.advance(HeldPlan::kGathered);
      }
    }
    finish_own();
  }
};

}  // namespace ortolan::cuda
