// Linear layers of up to 8 tokens of 16-bit elements on sm_90: weights stream through shared memory once,
// for all tokens.
//
// A group is eight or sixteen rows of weights, in a gated layer half as many outputs' gates and factors.
// Blocks take groups in turn; a block's warps take the slices of their rows in turn, and fetch them by tensor
// copies into a ring of their own, before the kernel in front has ended (no kernel writes weights). The
// tokens' inputs stay in shared memory; where they are too long for one block, the blocks of a cluster share
// the slices. Tensor cores multiply 16 rows of inputs, half of them zeros, by eight rows of weights. A sum is
// that of gemv_sm90.cuh, instruction by instruction: the eight parts of a slice, apart, then the slices in
// their order. The bits that a token gets depend neither on the other tokens nor on which of the two kernels
// takes it.
//
// Where a layer's bits must not depend on any number of rows (kChain), a slice's sum is one chain of 16
// inputs after 16, as wgmma sums in rows_sm90.cuh.
#pragma once

#include "few_weights_sm90.cuh"

namespace ortolan::cuda {

// Products of a group's rows and the tokens' inputs over a slice. Lane 4 g + t has two sums of token g of
// each tile, those of the rows whose places are 2 t and 2 t + 1.
template <int kTiles>
struct FewLanes {
  // Where a row of a tile stands among the tensor cores' columns, and the other way round: its bits reversed.
  // So the lanes that read together read different banks.
  static __device__ __forceinline__ int place(int row) { return row % 2 * 4 + row / 2 % 2 * 2 + row / 4; }
  // The row that the lane reads.
  static __device__ __forceinline__ int row() { return place(static_cast<int>(threadIdx.x) % 32 / 4); }
  // Writes sums [tiles, 2] to `target` [tokens, stride] of a group, rows in the order of their places, in the
  // shared memory of a block of the cluster.
  static __device__ __forceinline__ void store(const float (&sums)[kTiles][2], const float* target,
                                               int tokens, int stride, int block) {
    const int lane = threadIdx.x % 32;
    if (lane / 4 >= tokens) return;
    const uint32_t first = shared_address(target + lane / 4 * stride + lane % 4 * 2);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      store_pair_at(first + tile * FewStream::kTileRows * static_cast<int>(sizeof(float)), block,
                    sums[tile][0], sums[tile][1]);
  }
};

// The parts of a slice apart: lanes read pieces t of the parts.
template <typename Element, int kTiles, bool kChain>
struct FewProducts {
  float sums[kTiles][RowSlices::kParts][2][4] = {};

  // Where the lane's piece of the first part lies in a tile, and of the inputs.
  static __device__ __forceinline__ int lane_place() {
    const int row = FewLanes<kTiles>::row();
    return row * 128 + (threadIdx.x % 4 ^ row) * 16;
  }
  static __device__ __forceinline__ int input_place() { return threadIdx.x % 4 * 16; }
  // `place`: that of the lane in the copy's tiles; `input`: the lane's first piece.
  __device__ __forceinline__ void multiply(const char* copy, int place, const char* input) {
    const auto piece = [](const char* at) { return *reinterpret_cast<const uint4*>(at); };
#pragma unroll
    for (int part = 0; part < RowSlices::kParts; ++part) {
      const uint4 x = piece(input + part * 64);
      const uint32_t left[] = {x.x, 0, x.y, 0}, right[] = {x.z, 0, x.w, 0};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4 w = piece(copy + tile * FewStream::kTileBytes + part / 2 * 1024 +
                              (part % 2 == 0 ? place : place ^ 64));
        Half<Element>::multiply_add(sums[tile][part][0], left, w.x, w.y);
        Half<Element>::multiply_add(sums[tile][part][1], right, w.z, w.w);
      }
    }
  }
  // The lane's sum `n` of the slice.
  __device__ __forceinline__ float sum(int tile, int n) const {
    return sum_of_slice([&](int part) { return sums[tile][part][0][n] + sums[tile][part][1][n]; });
  }
};

// One chain: lanes read inputs 4 t .. 4 t + 4 of each 16. Which of an instruction's inputs is which does not
// change its sum.
template <typename Element, int kTiles>
struct FewProducts<Element, kTiles, true> {
  float sums[kTiles][4] = {};

  static __device__ __forceinline__ int lane_place() {
    const int row = FewLanes<kTiles>::row(), t = threadIdx.x % 4;
    return row * 128 + (t / 2 ^ row) * 16 + t % 2 * 8;
  }
  static __device__ __forceinline__ int input_place() { return threadIdx.x % 4 * 8; }
  __device__ __forceinline__ void multiply(const char* copy, int place, const char* input) {
    const auto half_piece = [](const char* at) { return *reinterpret_cast<const uint2*>(at); };
#pragma unroll
    for (int k = 0; k < RowSlices::kStepBytes / 32; ++k) {
      const uint2 x = half_piece(input + k * 32);
      const uint32_t inputs[] = {x.x, 0, x.y, 0};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint2 w = half_piece(copy + tile * FewStream::kTileBytes + k / 4 * 1024 + (place ^ k % 4 * 32));
        Half<Element>::multiply_add(sums[tile], inputs, w.x, w.y);
      }
    }
  }
  __device__ __forceinline__ float sum(int tile, int n) const { return sums[tile][n]; }
};

// Starts to bring the block's slices of the tokens' inputs to shared memory; where they end amid a step,
// zeros follow. For the whole block.
__device__ __forceinline__ void fetch_few_inputs(const FewParams& p, int first, int bytes, char* inputs,
                                                 Barrier& arrived) {
  const FewStream& stream = p.stream;
  const auto* source = static_cast<const char*>(p.linear.input) +
                       p.pass.first_token * int64_t{stream.slices.row_bytes} + first;
  const int token = threadIdx.x, tokens = p.pass.num_tokens;
  if (token == 0) arrived.arrive_expecting(tokens * bytes);
  __syncwarp();
  if (token < tokens)
    bulk_load(shared_address(inputs) + token * stream.token_stride,
              source + int64_t{token} * stream.slices.row_bytes, bytes, arrived);
  const int missing = (stream.token_stride - bytes) / 16;
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * missing; i += kGemvThreads)
    *reinterpret_cast<uint4*>(inputs + i / missing * stream.token_stride + bytes + i % missing * 16) =
        uint4{};
}

// The factor of a token's RMSNorm, for a whole warp: sums as load_inputs in gemv.cuh does, where thread i of
// 256 adds pieces i, i + 256, ...
template <typename Element>
__device__ __forceinline__ float warp_norm_factor(const FusedLinearParams& p, const uint4* row) {
  const int pieces = static_cast<int>(p.num_inputs) / kPieceSize<Element>;
  float squares[kGemvWarps] = {};
#pragma unroll 1
  for (int first = 0; first < pieces; first += kGemvThreads)
#pragma unroll
    for (int n = 0; n < kGemvWarps; ++n)
      if (const int i = first + n * 32 + static_cast<int>(threadIdx.x) % 32; i < pieces)
        squares[n] = add_products(row[i], row[i], squares[n], Element{});
  fold_lanes<16, 1>(squares, Add());
  float sum = 0;
#pragma unroll
  for (int n = 0; n < kGemvWarps; ++n) sum += squares[n];
  return rsqrtf(sum / static_cast<float>(p.num_inputs) + p.epsilon);
}

// Normalises and rounds the inputs where the layer says so, a warp one token after another. For the whole
// block.
template <typename Element>
__device__ __forceinline__ void normalise_few_inputs(const FewParams& p, int first, int bytes, char* inputs,
                                                     const uint4* norm) {
  const FewStream& stream = p.stream;
  const int lane = threadIdx.x % 32;
  copy_async_wait<0>();
  __syncthreads();
#pragma unroll 1
  for (int token = threadIdx.x / 32; token < p.pass.num_tokens; token += kGemvWarps) {
    auto* row = reinterpret_cast<uint4*>(inputs + token * stream.token_stride);
    const auto* whole =
        reinterpret_cast<const uint4*>(static_cast<const char*>(p.linear.input) +
                                       int64_t{p.pass.first_token + token} * stream.slices.row_bytes);
    const float factor = warp_norm_factor<Element>(p.linear, stream.cluster == 1 ? row : whole);
#pragma unroll 4
    for (int i = lane; i < bytes / 16; i += 32)
      row[i] = scale_piece(row[i], factor, norm[first / 16 + i], Element{});
  }
}

// The outputs that a thread writes at the end of each turn.
template <typename Element, int kTiles, bool kGated, bool kChain>
struct FewOutputs {
  using Weights = FewWeights<kTiles, kGated>;
  static constexpr int kMost = FewStream::kMaxTurnRows * kFewTokens / kGemvThreads;  // of a thread in a turn

  const FewParams& p;
  const Weights& weights;
  Element residual[kMost];

  // Calls visit(n, token, group, line) for each of them, `group` in the cluster.
  template <int kUnrolled, typename Visit>
  __device__ __forceinline__ void each(int first_group, Visit visit) const {
    const int per_token = p.stream.groups_per_turn * Weights::kOutputs;
#pragma unroll kUnrolled
    for (int n = 0; n < kMost; ++n) {
      const int place = static_cast<int>(threadIdx.x) + n * kGemvThreads;
      const int token = place / per_token, within = place % per_token;
      const int group = first_group + within / Weights::kOutputs, line = within % Weights::kOutputs;
      if (token < p.pass.num_tokens && group < weights.groups &&
          weights.first_output(group) + line < p.linear.num_outputs)
        visit(n, token, group, line);
    }
  }
  __device__ __forceinline__ void fetch_residual(int first_group) {
    if (!has_beside(p.linear)) return;
    each<kMost>(first_group, [&](int n, int token, int group, int line) {
      residual[n] =
          load_beside<Element>(p.linear, p.pass.first_token + token, weights.first_output(group) + line);
    });
  }
  __device__ __forceinline__ Element residual_of(int place) const {
    Element value = residual[0];
#pragma unroll
    for (int n = 1; n < kMost; ++n)
      if (n == place) value = residual[n];
    return value;
  }
  // `sums` [slices, tokens, stride]: what the turn's units have left. One output after another: inlined
  // as often as a thread has outputs, this is most of the kernel's code.
  __device__ __forceinline__ void finish_turn(int first_group, const float* sums) const {
    const int stride = p.stream.sums_stride();
    each<1>(first_group, [&](int n, int token, int group, int line) {
      const int tile = (group - first_group) * kTiles + line / Weights::kTileOutputs;
      const int row = line % Weights::kTileOutputs;
      const float* first = sums + token * stride + tile * FewStream::kTileRows + FewLanes<kTiles>::place(row);
      const auto sum_of_slices = [&](const float* slice) {
        float sum = *slice;
#pragma unroll 2
        for (int i = 1; i < p.stream.slices.count; ++i) sum += slice[i * p.stream.tokens * stride];
        return sum;
      };
      const float gate = sum_of_slices(first);
      const float factor = kGated ? sum_of_slices(first + 1) : 0.0f;
      store_output<Element, kChain>(p.linear, p.pass.first_token + token, weights.first_output(group) + line,
                                    gate, factor, residual_of(n));
    });
  }
};

template <typename Element, int kTiles, bool kGated, bool kChain>
__global__ void __launch_bounds__(kGemvThreads, kTiles == 1 ? 2 : 1)
    few_stream_kernel(const __grid_constant__ FewParams p) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(128) char shared[];
  const FewStream& stream = p.stream;
  char* ring = shared + (-shared_address(shared) & 1023);
  const int rank = stream.cluster == 1 ? 0 : cluster_rank();
  char* inputs = ring + stream.inputs_offset();
  auto* norm = reinterpret_cast<uint4*>(ring + stream.norm_offset());
  auto* sums = reinterpret_cast<float*>(ring + stream.sums_offset());
  auto* barriers = reinterpret_cast<Barrier*>(ring + stream.barriers_offset());
  Barrier& arrived = barriers[stream.rounds * stream.warps];
  FewWeights<kTiles, kGated> weights(p, ring, barriers, rank);
  FewOutputs<Element, kTiles, kGated, kChain> outputs{p, weights, {}};
  weights.start();
  fetch_norm<Element>(p.linear, norm);
  if (threadIdx.x == 0) arrived.init(1);
  fence_barriers();
  __syncthreads();
  wait_for_previous_kernel();
  if (weights.all_fetched()) launch_dependents();  // not before, as in gemv_sm90.cuh
  const int first = stream.first_slice(rank) * stream.slices.bytes;
  const int bytes = min(stream.first_slice(rank + 1) * stream.slices.bytes, stream.slices.row_bytes) - first;
  fetch_few_inputs(p, first, bytes, inputs, arrived);
  arrived.wait(0);
  if (p.linear.norm_weight) normalise_few_inputs<Element>(p, first, bytes, inputs, norm);
  __syncthreads();
  if (stream.cluster > 1) cluster_sync();  // all have begun: their shared memory can be written

  using Products = FewProducts<Element, kTiles, kChain>;
  const int place = Products::lane_place();
  const int lane_token = min(static_cast<int>(threadIdx.x) % 32 / 4, stream.tokens - 1);
  const char* lane_input = inputs + lane_token * stream.token_stride + Products::input_place();
  int finisher = 0;                    // the block that finishes the turn
  int turn_sums = stream.turn_sums();  // from this turn's to the next one's
  for (int group = 0; group < weights.groups; group += stream.groups_per_turn) {
    const int end = min(group + stream.groups_per_turn, weights.groups);
    if (rank == finisher) outputs.fetch_residual(group);
    while (weights.step.unit.group < end) {
      const GemvUnit unit = weights.step.unit;
      const char* input = lane_input + unit.slice * stream.slices.bytes;
      Products products;
      do {
        const char* copy = weights.wait();
        products.multiply(copy, place, input);
        input += RowSlices::kStepBytes;
        weights.release();
      } while (weights.step.step > 0);
      float unit_sums[kTiles][2];
#pragma unroll
      for (int n = 0; n < 2 * kTiles; ++n) unit_sums[n / 2][n % 2] = products.sum(n / 2, n % 2);
      FewLanes<kTiles>::store(unit_sums,
                              sums +
                                  (weights.first_slice + unit.slice) * stream.tokens * stream.sums_stride() +
                                  (unit.group - group) * kTiles * FewStream::kTileRows,
                              stream.tokens, stream.sums_stride(), finisher);
    }
    if (stream.cluster > 1)
      cluster_sync();
    else
      __syncthreads();
    if (rank == finisher) outputs.finish_turn(group, sums);
    sums += turn_sums;
    turn_sums = -turn_sums;
    if (++finisher == stream.cluster) finisher = 0;
  }
#else
  refuse_architecture();
#endif
}

}  // namespace ortolan::cuda
