// Linear layers of one or two tokens of 16-bit elements on sm_90: weights stream through shared memory.
//
// Blocks take groups of rows in turn, so that all read one moving region. A block's rows are cut into units,
// slices of a few rows, which its warps take in turn; bulk copies fill a ring of buffers per warp. They start
// before the kernel in front has ended (no kernel writes weights). Once a block has no more to start and that
// kernel has ended, the next kernel may start: two blocks fit on a multiprocessor, so that memory is read
// across the border of two layers. Tensor cores multiply eight parts of a slice of inputs by the same eight
// of weights; of their 8 x 8 products the diagonal counts. A row's sum is that of its slices in their order,
// a slice's that of its parts; both depend on the row's length alone, and few_sm90.cuh sums alike.
#pragma once

#include "gemv.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/common/wgmma.cuh"

namespace ortolan::cuda {

// How a row of weights is cut: its slices are summed apart, of each the parts.
struct RowSlices {
  static constexpr int kParts = 8;        // of a slice: every eighth 64 bytes
  static constexpr int kStepBytes = 512;  // a piece of 16 bytes for every lane
  static constexpr int kMostBytes = 2048;

  int row_bytes;
  int count;
  int bytes;  // whole steps; the last slice may have less

  static RowSlices of(int64_t row_bytes) {
    const int64_t most = divide_up(row_bytes, kMostBytes);
    const int64_t bytes = divide_up(divide_up(row_bytes, most), kStepBytes) * kStepBytes;
    return {static_cast<int>(row_bytes), static_cast<int>(divide_up(row_bytes, bytes)),
            static_cast<int>(bytes)};
  }
  __device__ __forceinline__ int bytes_of(int slice) const { return min(bytes, row_bytes - slice * bytes); }
};

// The sum of a slice's parts.
template <typename Part>
__device__ __forceinline__ float sum_of_slice(Part part) {
  float sums[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = part(i) + part(i + 4);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Of a layer, so that their numbers are ints.
constexpr int64_t kMaxOutputs = 1 << 29;

// From a unit to the one so many behind it.
struct UnitStep {
  int groups, slices;

  static ORTOLAN_HOST_DEVICE UnitStep of(int units, int slices) { return {units / slices, units % slices}; }
};

// Walks over the units that a warp takes: slice after slice of a group of rows, group after group.
struct GemvUnit {
  int group = 0, slice = 0;

  // Returns whether it passes the end of a group beside the step's whole ones.
  __device__ __forceinline__ bool advance(const UnitStep& step, int slices) {
    group += step.groups;
    slice += step.slices;
    if (slice < slices) return false;
    slice -= slices;
    ++group;
    return true;
  }
};

// How a launch streams its weights. A line is a row's part of a unit: one slice.
struct GemvStream {
  static constexpr int kLines = 2;
  static constexpr int kLineBytes = RowSlices::kMostBytes;
  static constexpr int kBufferBytes = kLines * kLineBytes;
  static constexpr int kParts = RowSlices::kParts;
  static constexpr int kStepBytes = RowSlices::kStepBytes;
  static constexpr int kMaxBuffers = 32 * kGemvWarps;

  int blocks;            // one per multiprocessor
  int groups_per_block;  // or one more, in the first `larger_blocks`; blocks take groups in turn
  int larger_blocks;
  int slices;
  int slice_bytes;
  UnitStep step;        // from a warp's unit to its next one
  int groups_per_turn;  // of kLines rows each: parts wait in shared memory for the end of their turn
  int buffers;          // at least one per warp
  int norm_bytes;

  __device__ __forceinline__ int block_groups() const {
    return groups_per_block + (static_cast<int>(blockIdx.x) < larger_blocks ? 1 : 0);
  }
  __host__ __device__ int rows_per_turn() const { return groups_per_turn * kLines; }
  __host__ __device__ int parts_stride() const { return rows_per_turn() + 1; }  // avoids conflicts of banks
  __host__ __device__ int parts_per_turn(int tokens) const {
    return tokens * slices * kParts * parts_stride();
  }
  __host__ __device__ int norm_offset() const { return buffers * kBufferBytes; }
  __host__ __device__ int inputs_offset() const { return norm_offset() + norm_bytes; }
  __host__ __device__ int barriers_offset(int64_t input_bytes) const {
    return inputs_offset() + static_cast<int>(input_bytes);
  }
  __host__ __device__ int parts_offset(int64_t input_bytes) const {
    return barriers_offset(input_bytes) + buffers * static_cast<int>(sizeof(Barrier));
  }
  __host__ __device__ int shared_bytes(int64_t input_bytes, int tokens) const {  // parts of two turns
    return parts_offset(input_bytes) + 2 * static_cast<int>(sizeof(float)) * parts_per_turn(tokens);
  }
};

// The weights of a block on their way through a warp's ring of buffers. Lines of a gated layer are outputs'
// gates, then their factors.
template <typename Element, int kTokens, bool kGated>
struct GemvWeights {
  static constexpr int kOutputs = kGated ? GemvStream::kLines / 2 : GemvStream::kLines;  // of a group

  const FusedLinearParams& p;
  const GemvStream& stream;
  int row_bytes;
  int groups;  // of the block
  char* buffers;
  Barrier* full;
  int rounds;           // buffers in the ring
  GemvUnit next, unit;  // to be fetched, and to be multiplied
  const char* source;   // of what is to be fetched: its first line
  uint64_t policy = evict_first_policy();
  RingPlace at;

  __device__ __forceinline__ GemvWeights(const FusedLinearParams& p, const GemvStream& stream, char* shared)
      : p(p), stream(stream), row_bytes(static_cast<int>(p.num_inputs * sizeof(Element))) {
    const int warp = threadIdx.x / 32;
    groups = stream.block_groups();
    buffers = shared + warp * GemvStream::kBufferBytes;
    full = reinterpret_cast<Barrier*>(shared + stream.barriers_offset(kTokens * row_bytes)) + warp;
    rounds = (stream.buffers - warp + kGemvWarps - 1) / kGemvWarps;
    next.advance(UnitStep::of(warp, stream.slices), stream.slices);
    unit = next;
    source = static_cast<const char*>(p.weight) + int64_t{first_output(next.group)} * row_bytes +
             next.slice * stream.slice_bytes;
  }
  static __device__ __forceinline__ int first_output(int group) {
    return (group * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) * kOutputs;
  }
  __device__ __forceinline__ bool all_fetched() const { return next.group >= groups; }
  __device__ __forceinline__ int line_bytes(int slice) const {
    return min(stream.slice_bytes, row_bytes - slice * stream.slice_bytes);
  }

  // For the whole warp, like what follows: starts to fill the ring.
  __device__ __forceinline__ void start() {
    if (threadIdx.x % 32 < rounds) full[threadIdx.x % 32 * kGemvWarps].init(1);
    fence_barriers();
    __syncwarp();
    for (int n = 0; n < rounds && !all_fetched(); ++n) fetch(n);
  }
  __device__ __forceinline__ void fetch(int round) {
    static_assert(GemvStream::kLines == 2);
    const int bytes = line_bytes(next.slice);
    const bool has_second = kGated || first_output(next.group) + 1 < p.num_outputs;
    const uint32_t target = shared_address(buffer(round));
    Barrier& barrier = full[round * kGemvWarps];
    if (elect_lane()) {
      barrier.arrive_expecting(has_second ? 2 * bytes : bytes);
      bulk_load(target, source, bytes, barrier, policy);
      if (has_second)
        bulk_load(target + GemvStream::kLineBytes, source + (kGated ? p.num_outputs : 1) * row_bytes, bytes,
                  barrier, policy);
    }
    const int64_t group_bytes = int64_t{row_bytes} * kOutputs * gridDim.x;
    const bool is_past = next.advance(stream.step, stream.slices);
    source += (stream.step.groups + is_past) * group_bytes +
              (stream.step.slices - is_past * stream.slices) * stream.slice_bytes;
  }
  __device__ __forceinline__ char* buffer(int round) const {
    return buffers + round * kGemvWarps * GemvStream::kBufferBytes;
  }
  __device__ __forceinline__ const char* wait() const {
    full[at.place * kGemvWarps].wait(at.parity);
    return buffer(at.place);
  }
  // Hands the unit's buffer to a later one; moves on.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (!all_fetched()) {
      fetch(at.place);
      if (all_fetched()) launch_dependents();
    }
    unit.advance(stream.step, stream.slices);
    at.advance(rounds);
  }
};

// A lane's pieces of a unit's lines, which leave its buffer to a later unit.
struct GemvLines {
  static constexpr int kSteps = GemvStream::kLineBytes / GemvStream::kStepBytes;
  uint4 pieces[kSteps][GemvStream::kLines];

  // `line`: the lane's first piece. Of a slice, only so many bytes are there.
  __device__ __forceinline__ void load(const char* line, int bytes) {
    const int lane_bytes = bytes - threadIdx.x % 32 * 16;
#pragma unroll
    for (int n = 0; n < kSteps * GemvStream::kLines; ++n) {
      const int step = n / GemvStream::kLines, l = n % GemvStream::kLines;
      const bool exists = bytes == GemvStream::kLineBytes || step * GemvStream::kStepBytes < lane_bytes;
      pieces[step][l] = exists ? *reinterpret_cast<const uint4*>(line + step * GemvStream::kStepBytes +
                                                                 l * GemvStream::kLineBytes)
                               : uint4{};
    }
  }
};

// Products of a unit's lines and the tokens' inputs. Part g of a slice is what lanes 4 g .. 4 g + 3 read of
// it; its sum for token n is on the diagonal: in lane 4 g + g / 2, sums[..][g % 2 + 2 n].
template <typename Element, int kTokens>
struct GemvProducts {
  float sums[GemvStream::kLines][2][4];

  // `input`: the lane's first piece.
  __device__ __forceinline__ void multiply(const GemvLines& lines, const char* input, int input_bytes,
                                           int bytes) {
    const int lane_bytes = bytes - threadIdx.x % 32 * 16;
#pragma unroll
    for (int n = 0; n < GemvStream::kLines * 8; ++n) sums[n / 8][n / 4 % 2][n % 4] = 0;
    if (bytes == GemvStream::kLineBytes) {
#pragma unroll
      for (int n = 0; n < GemvLines::kSteps; ++n)
        step(lines.pieces[n], input + n * GemvStream::kStepBytes, input_bytes, true);
    } else {
#pragma unroll
      for (int n = 0; n < GemvLines::kSteps; ++n)
        if (n * GemvStream::kStepBytes < bytes)
          step(lines.pieces[n], input + n * GemvStream::kStepBytes, input_bytes,
               n * GemvStream::kStepBytes < lane_bytes);
    }
  }
  __device__ __forceinline__ void step(const uint4 (&pieces)[GemvStream::kLines], const char* input,
                                       int input_bytes, bool exists) {
    const auto piece = [&](const char* at) { return exists ? *reinterpret_cast<const uint4*>(at) : uint4{}; };
    const uint4 x = piece(input), y = kTokens == 2 ? piece(input + input_bytes) : uint4{};
    const uint32_t left[] = {x.x, y.x, x.y, y.y}, right[] = {x.z, y.z, x.w, y.w};
#pragma unroll
    for (int l = 0; l < GemvStream::kLines; ++l) {
      Half<Element>::multiply_add(sums[l][0], left, pieces[l].x, pieces[l].y);
      Half<Element>::multiply_add(sums[l][1], right, pieces[l].z, pieces[l].w);
    }
  }
  // Writes the lane's parts, if it has any, to `parts` [tokens, slices, kParts, stride].
  __device__ __forceinline__ void store(float* parts, int stride, int token_stride) const {
    const int part = threadIdx.x % 32 / 4;
    if (static_cast<int>(threadIdx.x) % 4 != part / 2) return;
#pragma unroll
    for (int n = 0; n < GemvStream::kLines * kTokens; ++n) {
      const int line = n / kTokens, token = n % kTokens;
      const float even = sums[line][0][2 * token] + sums[line][1][2 * token];
      const float odd = sums[line][0][2 * token + 1] + sums[line][1][2 * token + 1];
      parts[token * token_stride + part * stride + line] = part % 2 == 0 ? even : odd;
    }
  }
};

// The sum of a row's slices, from their parts.
__device__ __forceinline__ float sum_of_parts(const float* parts, int slices, int stride) {
  float sum = 0;
#pragma unroll 2
  for (int slice = 0; slice < slices; ++slice, parts += GemvStream::kParts * stride)
    sum += sum_of_slice([&](int part) { return parts[part * stride]; });
  return sum;
}

// The outputs that a thread writes, one at the end of each turn.
template <typename Element, int kTokens, bool kGated>
struct GemvOutputs {
  static constexpr int kTokenThreads = kGemvThreads / kTokens;
  using Weights = GemvWeights<Element, kTokens, kGated>;

  const FusedLinearParams& p;
  const GemvStream& stream;
  const int64_t token;
  const int place = threadIdx.x % kTokenThreads;  // in a turn
  int group = place / Weights::kOutputs;
  Element beside;

  __device__ __forceinline__ GemvOutputs(const FusedLinearParams& p, const GemvPass& pass,
                                         const GemvStream& stream)
      : p(p), stream(stream), token(pass.first_token + threadIdx.x / kTokenThreads) {
    if (group >= stream.groups_per_turn) group = stream.block_groups();
  }
  __device__ __forceinline__ int64_t output() const {
    return Weights::first_output(group) + place % Weights::kOutputs;
  }
  __device__ __forceinline__ bool exists() const {
    return group < stream.block_groups() && output() < p.num_outputs;
  }
  __device__ __forceinline__ void fetch_beside() {
    if (has_beside(p) && exists()) beside = load_beside<Element>(p, token, output());
  }
  // `parts`: what the turn's units have left.
  __device__ __forceinline__ void finish_turn(const float* parts) {
    if (!exists()) return;
    const int line = place / Weights::kOutputs * GemvStream::kLines + place % Weights::kOutputs;
    const int stride = stream.parts_stride(), count = stream.slices * GemvStream::kParts;
    const float* row = parts + threadIdx.x / kTokenThreads * count * stride + line;
    const float gate = sum_of_parts(row, stream.slices, stride);
    const float factor = kGated ? sum_of_parts(row + Weights::kOutputs, stream.slices, stride) : 0.0f;
    store_output<Element>(p, token, output(), gate, factor, beside);
    group += stream.groups_per_turn;
    fetch_beside();
  }
};

template <typename Element, int kTokens, bool kGated>
__global__ void __launch_bounds__(kGemvThreads, 3)
    gemv_stream_kernel(const __grid_constant__ FusedLinearParams p, const __grid_constant__ GemvPass pass,
                       const __grid_constant__ GemvStream stream) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(128) char shared[];
  const int lane_bytes = threadIdx.x % 32 * 16;
  char* inputs = shared + stream.inputs_offset();
  auto* norm = reinterpret_cast<uint4*>(shared + stream.norm_offset());
  GemvWeights<Element, kTokens, kGated> weights(p, stream, shared);
  GemvOutputs<Element, kTokens, kGated> outputs(p, pass, stream);
  weights.start();
  fetch_norm<Element>(p, norm);
  wait_for_previous_kernel();
  // Not before: what the kernel in front still reads would have to wait for two layers' weights.
  if (weights.all_fetched()) launch_dependents();
  outputs.fetch_beside();
  load_inputs<Element, kTokens>(p, pass, reinterpret_cast<uint4*>(inputs), norm);

  auto* parts = reinterpret_cast<float*>(shared + stream.parts_offset(kTokens * weights.row_bytes));
  const int slice_stride = GemvStream::kParts * stream.parts_stride();
  int turn_parts = stream.parts_per_turn(kTokens);  // from this turn's to the next one's
  for (int group = 0; group < weights.groups; group += stream.groups_per_turn) {
    const int end = min(group + stream.groups_per_turn, weights.groups);
    while (weights.unit.group < end) {
      const GemvUnit unit = weights.unit;
      const int bytes = weights.line_bytes(unit.slice);
      GemvLines lines;
      lines.load(weights.wait() + lane_bytes, bytes);
      weights.release();
      GemvProducts<Element, kTokens> products;
      products.multiply(lines, inputs + unit.slice * stream.slice_bytes + lane_bytes, weights.row_bytes,
                        bytes);
      products.store(parts + unit.slice * slice_stride + (unit.group - group) * GemvStream::kLines,
                     stream.parts_stride(), stream.slices * slice_stride);
    }
    __syncthreads();
    outputs.finish_turn(parts);
    parts += turn_parts;
    turn_parts = -turn_parts;
  }
#else
  refuse_architecture();
#endif
}

}  // namespace ortolan::cuda
