// What the blocks of token.cuh send of their tiles, and how it is merged: merge.cuh and combine.cuh in fewer
// instructions, with the same sums.
#pragma once

#include "merge.cuh"
#include "token_shared.cuh"

namespace ortolan::cuda {

// What the parts of a tile count in four rows.
struct alignas(16) QuadWeights {
  float of[kParts][4];
};

// Sums of a tile. Each warp finds the weights of its own rows, so that none waits for another.
template <typename Rows>
struct TokenTile : DecodeMerge<Rows, 1> {
  using Base = DecodeMerge<Rows, 1>;

  template <typename Target>
  __device__ __forceinline__ void send(QuadWeights& weights, const Target& target, const TokenLine& line,
                                       int tile) const {
    // Of a tile that is summed with the last one, rows behind the token's are of that.
    const int rows = line.own.rows, joined_rows = line.distance && tile == 0 ? rows : kDecodeTileRows;
    static_assert(4 * kParts == 32);
    const int lane = this->thread % 32, part = lane % kParts;
#pragma unroll
    for (int q = 0; q < Base::kQuads; ++q) {
      const int first_row = this->quad(q) * 4;
      if (first_row >= line.summed.rows) continue;
      const PartWeight own = this->weigh_part(first_row + lane / kParts, part, 0);
      __syncwarp();  // all have read the last ones
      weights.of[part][lane / kParts] = own.weight;
      __syncwarp();
      float4 sums[Base::kColumns];
      this->template sum_tile<4>(sums, weights.of[0], this->quad(q), 0);
      const int source = lane % 4 * kParts;
      const SoftmaxState state{__shfl_sync(~0u, own.tile.maximum, source),
                               __shfl_sync(~0u, own.tile.total, source)};
      const int row = first_row + lane % 4;
      const bool is_last = row >= joined_rows;
      this->send_partial(state, target, is_last ? line.own.tiles.count() - 1 : tile,
                         is_last ? row - rows : row, rows, sums);
    }
  }
};

// Merges what a block has received, in the order that plan.cuh fixes. Threads own four columns of a span, and
// then one of all spans.
template <typename Rows>
struct TokenMerge {
  using Element = typename Rows::Element;

  const SwaAttentionParams& params;
  const DecodeShape& shape;
  const TokenLine& line;
  const ClusterMerge& merge;
  const SpanRound& spans;  // of merge.units.columns columns

  // Tiles are merged in ascending order.
  __device__ __forceinline__ PartialSum sum_span(const SpanTiles& span, int turn, int column) const {
    PartialSum sum;
#pragma unroll 1
    for (int tile = span.begin; tile < span.end; ++tile) {
      const ReceivedUnit unit{merge.received, turn, column};
      PartialSum part;
      part.state = unit.state(tile);
      part.sums = load_shared_quad(unit.sum(tile));
      sum.merge(part);
    }
    return sum;
  }

  __device__ __forceinline__ float inverse(int row, SoftmaxState state) const {
    return Denominator::of(state.total, state.maximum, params.sink_logits,
                           line.own.kv_head * shape.group + row)
        .inverse;
  }
  template <typename Value>
  __device__ __forceinline__ void store(int row, int column, const Value& value) const {
    const int head = line.own.kv_head * shape.group + row;
    auto* output = static_cast<Element*>(params.output) + head * Rows::kHeadSize + column;
    *reinterpret_cast<Value*>(output) = value;
  }

  __device__ __forceinline__ void run() const {
    int turn = 0;
#pragma unroll 1
    for (int unit = merge.rank; unit < merge.units.count; unit += shape.cluster, ++turn) run_unit(unit, turn);
  }
  __device__ __forceinline__ void run_unit(int unit, int turn) const {
    const PowerOfTwo quads{merge.units.columns.shift - 2};
    const int columns = 1 << merge.units.columns.shift, row = unit / merge.units.groups;
    const int first_column = (unit << merge.units.columns.shift) & (Rows::kHeadSize - 1);
    const int thread = threadIdx.x, lane = thread % 32, quad = thread & (columns / 4 - 1);
    const KeyTiles& tiles = line.own.tiles;
    const VisitedSpans visited = VisitedSpans::of(tiles, shape.span_tiles);
    const int first_span = tiles.at(0) / shape.span_tiles;
    const SpanTiles first = SpanTiles::of(tiles, first_span, shape.span_tiles);
    if (first.end - first.begin == tiles.count()) {  // a few threads have it all
      if (thread >= columns / 4) return;
      const PartialSum sum = sum_span(first, turn, quad * 4);
      const float factor = inverse(row, sum.state);
      // All that a round would do to it is to drop the sign of a zero.
      const auto pack = [&](float x, float y) {
        return Half<Element>::pack((x + 0.0f) * factor, (y + 0.0f) * factor);
      };
      return store(row, first_column + quad * 4,
                   make_uint2(pack(sum.sums.x, sum.sums.y), pack(sum.sums.z, sum.sums.w)));
    }
    SoftmaxState state = kNoKeys;
    float total = 0;
#pragma unroll 1
    for (int round = visited.next_round(-1); round * kRoundSpans < visited.end;
         round = visited.next_round(round)) {
      const int count = min(kRoundSpans, visited.end - round * kRoundSpans);
      __syncthreads();  // what the round or unit before has read may be overwritten
#pragma unroll 1
      for (int n = thread / quads; n < count; n += static_cast<int>(blockDim.x) / quads) {
        const int span = round * kRoundSpans + n;
        const PartialSum sum = visited.hold(span)
                                   ? sum_span(SpanTiles::of(tiles, span, shape.span_tiles), turn, quad * 4)
                                   : PartialSum{};
        reinterpret_cast<float4*>(spans.sums)[(n << quads.shift) + quad] = sum.sums;
        if (quad == 0) spans.states[n] = sum.state;
      }
      __syncthreads();
      float weights[2];
      const SoftmaxState added = spans.weigh(weights, count, lane);
      float added_sum = 0;
#pragma unroll 1
      for (int part = 0; part < min(kSpanParts, count); ++part) {
        float part_sum = 0;
#pragma unroll 1
        for (int span = part; span < count; span += kSpanParts) {
          const float weight = __shfl_sync(~0u, span < 32 ? weights[0] : weights[1], span % 32);
          part_sum = fmaf(spans.sums[span * columns + (thread & (columns - 1))], weight, part_sum);
        }
        added_sum += part_sum;
      }
      const Merge both = Merge::of(state, added);
      state = both.state;
      total = both.apply(total, added_sum);
    }
    if (thread < columns) store(row, first_column + thread, Element(total * inverse(row, state)));
  }
};

}  // namespace ortolan::cuda
