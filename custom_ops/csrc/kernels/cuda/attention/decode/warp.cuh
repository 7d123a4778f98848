// A warp of decode attention that multiplies: all query rows of an entry with its own keys of a tile.
//
// Keys are the rows of the first product, [keys, queries], and the columns of values those of the second,
// [columns, queries], so that 8 queries cost no more than they must. Logits, weights and sums stay in the
// warp's registers; the sums end in a buffer, so that keys and values leave their stage as soon as they are
// multiplied. It meets no other warp: those of merge.cuh take the sums from there.
#pragma once

#include "cursor.cuh"
#include "kernels/cuda/attention/key_rows.cuh"
#include "kernels/cuda/common/warp.cuh"
#include "shared.cuh"

namespace ortolan::cuda {

// What such warps have in common, whatever their rows are. Some may share the same keys: kColumnWarps, each
// with columns of the values.
template <typename Rows, int kRowTiles, int kColumnWarps = 1>
struct DecodeWarpBase {
  using Stage = DecodeStage<Rows>;
  using Sums = DecodeSums<Rows>;
  static constexpr int kHeadSize = Rows::kHeadSize;
  static constexpr int kRows = kDecodeTileRows * kRowTiles;
  static constexpr int kSteps = kHeadSize / 16;
  static constexpr int kColumns = kHeadSize / kColumnWarps;  // of the warp's sums
  // Of these, in registers at once.
  static constexpr int kPassColumns = kHeadSize < 128 || kRowTiles == 2 || kColumnWarps == 2 ? 64 : 128;
  static constexpr int kKeys = Rows::kWarpKeys;
  static constexpr int kKeyTiles = kKeys / 16;
  using LogitTile = float[kRowTiles][4];              // keys lane / 4 and + 8, queries lane % 4 * 2 and + 1
  using Weights = uint32_t[kRowTiles][kKeyTiles][2];  // right operands of products

  const SwaAttentionParams& params;
  const DecodeShape& shape;
  const DecodeShared& shared;
  Logits logits;
  int warp;  // of those with other keys
  int lane;
  int first_column = 0;                  // of the warp's sums
  uint32_t query[kRowTiles][kSteps][2];  // right operand of a product
  int32_t positions[kRowTiles][2];       // of queries lane % 4 * 2 and + 1

  // Addresses of the warp's own rows in a stage.
  __device__ __forceinline__ uint32_t keys(int stage) const {
    return shared_address(shared.stages) + stage * Stage::bytes(shape.tile_keys) +
           warp * kKeys * Stage::kRowBytes;
  }
  __device__ __forceinline__ uint32_t values(int stage) const {
    return keys(stage) + shape.tile_keys * Stage::kRowBytes;
  }
  __device__ __forceinline__ int state(int buffer) const { return (buffer * shape.warps + warp) * kRows; }

  __device__ __forceinline__ void wait_merged(const DecodeCursor& cursor) const {
    shared.merged[cursor.buffer.place].wait(cursor.buffer.parity ^ 1);
  }

  __device__ __forceinline__ void take_positions(const DecodeEntry& entry) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        positions[t][e] = entry.first_position + entry.token(shape, t * 8 + lane % 4 * 2 + e);
  }

  // First position of the warp's keys.
  __device__ __forceinline__ int32_t first_key(const DecodeCursor& cursor) const {
    return cursor.key_tile() * shape.tile_keys + warp * kKeys;
  }

  // Leaves the sums of no keys, where no query sees one of the warp's; returns whether that is so.
  __device__ __forceinline__ bool skip(const DecodeCursor& cursor, int32_t first) const {
    if (cursor.of.seen().hold_any(first, first + kKeys)) return false;
    shared.multiplied[cursor.stage.place].arrive_once(lane);
    wait_merged(cursor);
    store_none(cursor.of.rows, cursor.buffer.place);
    return true;
  }
  // The sums of no keys.
  __device__ __forceinline__ void store_none(int rows, int buffer) const {
    if (lane < kRows) {
      shared.maxima[state(buffer) + lane] = -INFINITY;
      shared.totals[state(buffer) + lane] = 0;
    }
    clear_sums(rows, buffer);
  }

  // Sets logits to -inf where the query does not see the key.
  __device__ __forceinline__ void mask_logits(LogitTile& z, const DecodeEntry& entry, int32_t first) const {
    if (entry.seen_by_each().hold_all(first, first + 16)) return;
#pragma unroll
    for (int n = 0; n < 2 * kRowTiles; ++n) {
      const SeenPositions own = entry.visibility.of_query(positions[n / 2][n % 2]);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (!own.holds(first + half * 8 + lane / 4)) z[n / 2][half * 2 + n % 2] = -INFINITY;
    }
  }

  // Of a value as fold_pair leaves it: that of queries lane % 4 * 2 and + 1.
  __device__ __forceinline__ void spread(float (&pair)[2], float mine) const {
    const float other = __shfl_xor_sync(~0u, mine, 4);
    pair[0] = lane & 4 ? other : mine;
    pair[1] = lane & 4 ? mine : other;
  }

  __device__ __forceinline__ void store_states(const SoftmaxState (&states)[kRowTiles], int buffer) const {
    if (lane >= 8) return;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const int row = state(buffer) + t * 8 + lane % 4 * 2 + lane / 4;
      shared.maxima[row] = states[t].maximum;
      shared.totals[row] = states[t].total;
    }
  }

  // Column of a value of the n-th left row of the sums' products. Two adjacent columns of codes are rows 8
  // apart of a product.
  __device__ __forceinline__ int column(int n) const {
    return Rows::kHasScales ? n / 2 * 16 + lane / 4 * 2 + n % 2 : n * 8 + lane / 4;
  }

  __device__ __forceinline__ void store_sums(const float (&o)[kPassColumns / 16][4], int pass, int tile,
                                             int rows, int buffer) const {
    const int row = tile * 8 + lane % 4 * 2;
    if (row / 4 * 4 >= rows) return;
    float* sums = shared.sums + (buffer * shape.warps + warp) * Sums::floats(shape.entry_rows) +
                  Sums::at(row / 4, first_column + pass + column(0)) + row % 4;
#pragma unroll
    for (int n = 0; n < kPassColumns / 8; ++n)
      *reinterpret_cast<float2*>(sums + (column(n) - column(0)) * 4) =
          make_float2(o[n / 2][n % 2 * 2], o[n / 2][n % 2 * 2 + 1]);
  }

  __device__ __forceinline__ void clear_sums(int rows, int buffer) const {
    const float none[kPassColumns / 16][4] = {};
#pragma unroll 1
    for (int pass = 0; pass < kColumns; pass += kPassColumns)
#pragma unroll 1
      for (int t = 0; t < kRowTiles; ++t) store_sums(none, pass, t, rows, buffer);
  }
};

template <typename Rows, int kRowTiles, int kColumnWarps = 1>
struct DecodeWarp : DecodeWarpBase<Rows, kRowTiles, kColumnWarps> {
  using Base = DecodeWarpBase<Rows, kRowTiles, kColumnWarps>;
  using Element = typename Rows::Element;
  using Base::first_column, Base::lane, Base::logits, Base::params, Base::query, Base::shape, Base::shared;
  using Base::kColumns, Base::kHeadSize, Base::kKeyTiles, Base::kPassColumns, Base::kSteps;
  using typename Base::LogitTile;
  using typename Base::Stage;
  using typename Base::Weights;

  __device__ __forceinline__ void take_queries(const DecodeEntry& entry) {
    this->take_positions(entry);
    const auto* source = static_cast<const Element*>(params.query);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const int row = t * 8 + lane / 4;
      const bool has_row = row < entry.rows;
      const Element* line =
          source + (has_row ? entry.row_number(params, shape, row) * params.cache.head_size : 0);
#pragma unroll
      for (int k = 0; k < 2 * kSteps; ++k) {
        const int column = k * 8 + lane % 4 * 2;
        const bool is_there = has_row && column < params.cache.head_size;
        query[t][k / 2][k % 2] = is_there ? *reinterpret_cast<const uint32_t*>(line + column) : 0;
      }
    }
  }

  // Sums of one tile's keys, and each row's maximum and denominator over them.
  __device__ __forceinline__ void sum(const DecodeCursor& cursor) const {
    const int32_t first = this->first_key(cursor);
    if (this->skip(cursor, first)) return;
    sum_keys(
        cursor.of, first, cursor.stage.place, cursor.buffer.place, [] {},
        [&] { shared.multiplied[cursor.stage.place].arrive_once(lane); }, [&] { this->wait_merged(cursor); });
  }

  // Those of the warp's keys in a stage, from position `first` on, to a buffer. `turn` is called once keys
  // are multiplied, `release` once values are, `acquire` before the buffer is written.
  template <typename Turn, typename Release, typename Acquire>
  __device__ __forceinline__ void sum_keys(const DecodeEntry& entry, int32_t first, int stage, int buffer,
                                           const Turn& turn, const Release& release,
                                           const Acquire& acquire) const {
    LogitTile z[kKeyTiles] = {};
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      multiply_keys(z[m], this->keys(stage) + m * 16 * Stage::kRowBytes);
      finish_logits(z[m], entry, first + m * 16);
    }
    turn();
    Weights weights;
    SoftmaxState states[kRowTiles];
    weigh(z, weights, states);
    multiply_values(weights, states, entry, stage, buffer, release, acquire);
  }

  __device__ __forceinline__ void multiply_keys(LogitTile& z, uint32_t rows) const {
    rows += lane % 16 * Stage::kRowBytes;
    const uint32_t piece = (lane / 16 ^ lane % 8) * 16;
    LogitTile odd = {};  // two chains of sums are done in half the time of one
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t key[4];
      load_matrix_x4(key, rows + k / 4 * 128 + (piece ^ k % 4 * 32));
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
        Half<Element>::multiply_add(k % 2 ? odd[t] : z[t], key, query[t][k][0], query[t][k][1]);
    }
#pragma unroll
    for (int n = 0; n < 4 * kRowTiles; ++n) z[n / 4][n % 4] += odd[n / 4][n % 4];
  }

  // Logits in units of log2, -inf where the query does not see the key.
  __device__ __forceinline__ void finish_logits(LogitTile& z, const DecodeEntry& entry, int32_t first) const {
    if (logits.mapped) {
#pragma unroll
      for (int n = 0; n < 4 * kRowTiles; ++n) z[n / 4][n % 4] = logits.map(z[n / 4][n % 4]);
    } else {
#pragma unroll
      for (int n = 0; n < 4 * kRowTiles; ++n) z[n / 4][n % 4] = __fmul_rn(z[n / 4][n % 4], logits.factor);
    }
    this->mask_logits(z, entry, first);
  }

  // `states`: of rows t * 8 + lane % 4 * 2 + lane / 4, in the first 8 lanes.
  __device__ __forceinline__ void weigh(const LogitTile (&z)[kKeyTiles], Weights& weights,
                                        SoftmaxState (&states)[kRowTiles]) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      float highest[2] = {-INFINITY, -INFINITY}, sums[2] = {};
#pragma unroll
      for (int n = 0; n < 4 * kKeyTiles; ++n) highest[n % 2] = fmaxf(highest[n % 2], z[n / 4][t][n % 4]);
      const float maximum = fold_pair(highest[0], highest[1], Max(), lane);
      float base[2];
      this->spread(base, finite_max(maximum));
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float low = fast_exp2(z[m][t][2 * half] - base[0]);
          const float high = fast_exp2(z[m][t][2 * half + 1] - base[1]);
          weights[t][m][half] = transpose_matrix(Half<Element>::pack(low, high));
          sums[0] += low;
          sums[1] += high;
        }
      states[t] = {maximum, fold_pair(sums[0], sums[1], Add(), lane)};
    }
  }

  template <typename Release, typename Acquire>
  __device__ __forceinline__ void multiply_values(const Weights& weights,
                                                  const SoftmaxState (&states)[kRowTiles],
                                                  const DecodeEntry& entry, int stage, int buffer,
                                                  const Release& release, const Acquire& acquire) const {
    const uint32_t rows =
        this->values(stage) + (lane / 16 * 8 + lane % 8) * Stage::kRowBytes + first_column / 64 * 128;
    const uint32_t piece = (lane / 8 % 2 ^ lane % 8) * 16;
#pragma unroll
    for (int pass = 0; pass < kColumns; pass += kPassColumns) {
      float o[kRowTiles][kPassColumns / 16][4] = {};
#pragma unroll
      for (int n = 0; n < kPassColumns / 16; ++n) {
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
          uint32_t value[4];
          const int column = pass + n * 16;
          load_matrix_x4_transposed(
              value, rows + m * 16 * Stage::kRowBytes + column / 64 * 128 + (piece ^ column % 64 * 2));
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t)
            Half<Element>::multiply_add(o[t][n], value, weights[t][m][0], weights[t][m][1]);
        }
      }
      if (pass + kPassColumns >= kColumns) release();
      if (pass == 0) {
        acquire();
        if (first_column == 0) this->store_states(states, buffer);
      }
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) this->store_sums(o[t], pass, t, entry.rows, buffer);
    }
  }
};

}  // namespace ortolan::cuda
