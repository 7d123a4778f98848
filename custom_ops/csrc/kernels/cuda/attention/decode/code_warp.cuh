// The warp that multiplies, for caches of codes: they become float16 on their way to the products.
//
// Products take codes without their scales: a key's belongs to a column of logits, and a value's joins the
// weight of its key. Queries are brought near 1 by a power of two, and so are weights of a tile's values:
// both are float16 then, whatever the element type, and each depends on its own query alone. The columns of a
// row may be multiplied in any order, so that a lane's codes become operands where they lie: four adjacent
// codes of a key are two pairs of a product's columns; of a value, the columns of a pair are rows 8 apart.
#pragma once

#include "codes.cuh"
#include "warp.cuh"

namespace ortolan::cuda {

// A magnitude's power of two, and its inverse; 1 for those that have none.
struct PowerScale {
  float factor;
  float inverse;

  static __device__ __forceinline__ PowerScale of(float magnitude) {
    const uint32_t power = __float_as_uint(magnitude) & 0x7f800000u;
    const bool is_usual = power != 0 && power < 254u << 23;
    return {is_usual ? __uint_as_float(power) : 1.0f,
            is_usual ? __uint_as_float((254u << 23) - power) : 1.0f};
  }
};

template <typename Code, int kSize, int kRowTiles>
struct DecodeWarp<CodeRows<Code, kSize>, kRowTiles, 1> : DecodeWarpBase<CodeRows<Code, kSize>, kRowTiles> {
  using Base = DecodeWarpBase<CodeRows<Code, kSize>, kRowTiles>;
  using Product = Half<__half>;
  using Base::kHeadSize, Base::kKeys, Base::kKeyTiles, Base::kPassColumns, Base::kSteps;
  using Base::lane, Base::logits, Base::params, Base::query, Base::shape, Base::shared, Base::warp;
  using typename Base::LogitTile;
  using typename Base::Stage;
  using typename Base::Weights;
  using Scales = float[kKeyTiles][2];  // of keys lane / 4 and + 8 of each tile

  float query_factors[kRowTiles][2];  // of queries lane % 4 * 2 and + 1: power of two, and what logits are
                                      // multiplied by

  __device__ __forceinline__ void take_queries(const DecodeEntry& entry) {
    this->take_positions(entry);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const float power = params.element == ElementType::kFloat16 ? take_row<__half>(entry, t)
                                                                  : take_row<__nv_bfloat16>(entry, t);
#pragma unroll
      for (int e = 0; e < 2; ++e)
        query_factors[t][e] = __shfl_sync(~0u, power, (lane % 4 * 2 + e) * 4) * logits.factor;
    }
  }

  // Row lane / 4 of a tile of queries; returns the power of two that it was divided by.
  template <typename Element>
  __device__ __forceinline__ float take_row(const DecodeEntry& entry, int tile) {
    const int row = tile * 8 + lane / 4, head_size = static_cast<int>(params.cache.head_size);
    const bool has_row = row < entry.rows;
    const Element* line = static_cast<const Element*>(params.query) +
                          (has_row ? entry.row_number(params, shape, row) * head_size : 0);
    float largest = 0;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int column = k * 16 + lane % 4 * 4;
      const bool is_there = has_row && column < head_size;
      const uint2 pairs = is_there ? *reinterpret_cast<const uint2*>(line + column) : uint2{};
      query[tile][k][0] = pairs.x;
      query[tile][k][1] = pairs.y;
      const float2 low = Half<Element>::unpack(pairs.x), high = Half<Element>::unpack(pairs.y);
      largest = fmaxf(fmaxf(largest, fmaxf(fabsf(low.x), fabsf(low.y))), fmaxf(fabsf(high.x), fabsf(high.y)));
    }
    const PowerScale scale = PowerScale::of(fold_lanes<1, 2>(largest, Max()));
#pragma unroll
    for (int k = 0; k < 2 * kSteps; ++k) {
      const float2 pair = Half<Element>::unpack(query[tile][k / 2][k % 2]);
      query[tile][k / 2][k % 2] = Product::pack(pair.x * scale.inverse, pair.y * scale.inverse);
    }
    return scale.factor;
  }

  // Sums of one tile's keys, and each row's maximum and denominator over them.
  __device__ __forceinline__ void sum(const DecodeCursor& cursor) const {
    const int32_t first = this->first_key(cursor);
    if (this->skip(cursor, first)) return;
    const int stage = cursor.stage.place;
    LogitTile z[kKeyTiles] = {};
    Scales scales;
    load_scales(scales, stage, false);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      multiply_keys(z[m], this->keys(stage) + m * 16 * Stage::kRowBytes);
      finish_logits(z[m], scales[m]);
      this->mask_logits(z[m], cursor.of, first + m * 16);
    }
    load_scales(scales, stage, true);
    Weights weights;
    float factors[kRowTiles][2];
    SoftmaxState states[kRowTiles];
    weigh(z, scales, weights, factors, states);
    multiply_values(weights, factors, states, cursor);
  }

  __device__ __forceinline__ void load_scales(Scales& scales, int stage, bool is_values) const {
    const auto* of_warp =
        reinterpret_cast<const float*>(shared.stages + stage * Stage::bytes(shape.tile_keys) +
                                       Stage::scales(shape.tile_keys, is_values)) +
        warp * kKeys;
#pragma unroll
    for (int n = 0; n < 2 * kKeyTiles; ++n) scales[n / 2][n % 2] = of_warp[n * 8 + lane / 4];
  }

  __device__ __forceinline__ void multiply_keys(LogitTile& z, uint32_t rows) const {
    rows += lane % 16 * Stage::kRowBytes;
    const uint32_t piece = (lane / 16 ^ Stage::turn(lane % 8)) * 16;
    LogitTile odd = {};  // two chains of sums are done in half the time of one
#pragma unroll
    for (int k = 0; k < kSteps; k += 2) {
      uint32_t codes[4];
      load_matrix_x4(codes, rows + k / 8 * 128 + (piece ^ k % 8 * 16));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t key[4];
        Halves<Code>::of_neighbours(codes[2 * half], key[0], key[2]);
        Halves<Code>::of_neighbours(codes[2 * half + 1], key[1], key[3]);
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t)
          Product::multiply_add(half ? odd[t] : z[t], key, query[t][k + half][0], query[t][k + half][1]);
      }
    }
#pragma unroll
    for (int n = 0; n < 4 * kRowTiles; ++n) z[n / 4][n % 4] += odd[n / 4][n % 4];
  }

  // Logits in units of log2.
  __device__ __forceinline__ void finish_logits(LogitTile& z, const float (&scales)[2]) const {
#pragma unroll
    for (int n = 0; n < 4 * kRowTiles; ++n) {
      const float product = z[n / 4][n % 4] * (query_factors[n / 4][n % 2] * scales[n % 4 / 2]);
      z[n / 4][n % 4] = logits.mapped ? logits.map(product) : product;
    }
  }

  // `states`: of rows t * 8 + lane % 4 * 2 + lane / 4, in the first 8 lanes. `factors`: what the sums of
  // queries lane % 4 * 2 and + 1 are to be multiplied by.
  __device__ __forceinline__ void weigh(const LogitTile (&z)[kKeyTiles], const Scales& scales,
                                        Weights& weights, float (&factors)[kRowTiles][2],
                                        SoftmaxState (&states)[kRowTiles]) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      float highest[2] = {-INFINITY, -INFINITY}, sums[2] = {}, largest[2] = {}, base[2];
#pragma unroll
      for (int n = 0; n < 4 * kKeyTiles; ++n) highest[n % 2] = fmaxf(highest[n % 2], z[n / 4][t][n % 4]);
      const float maximum = fold_pair(highest[0], highest[1], Max(), lane);
      this->spread(base, finite_max(maximum));
      float scaled[kKeyTiles][4];
#pragma unroll
      for (int n = 0; n < 4 * kKeyTiles; ++n) {
        const float weight = fast_exp2(z[n / 4][t][n % 4] - base[n % 2]);
        sums[n % 2] += weight;
        scaled[n / 4][n % 4] = weight * scales[n / 4][n % 4 / 2];
        largest[n % 2] = fmaxf(largest[n % 2], scaled[n / 4][n % 4]);
      }
      const PowerScale scale = PowerScale::of(fold_pair(largest[0], largest[1], Max(), lane));
      float inverses[2];
      this->spread(factors[t], scale.factor);
      this->spread(inverses, scale.inverse);
#pragma unroll
      for (int n = 0; n < 2 * kKeyTiles; ++n) {
        const float* pair = scaled[n / 2] + n % 2 * 2;
        weights[t][n / 2][n % 2] =
            transpose_matrix(Product::pack(pair[0] * inverses[0], pair[1] * inverses[1]));
      }
      states[t] = {maximum, fold_pair(sums[0], sums[1], Add(), lane)};
    }
  }

  __device__ __forceinline__ void multiply_values(const Weights& weights,
                                                  const float (&factors)[kRowTiles][2],
                                                  const SoftmaxState (&states)[kRowTiles],
                                                  const DecodeCursor& cursor) const {
    const uint32_t rows = this->values(cursor.stage.place) + lane % 16 * Stage::kRowBytes;
    const uint32_t piece = (lane / 16 ^ Stage::turn(lane % 8)) * 16;
#pragma unroll
    for (int pass = 0; pass < kHeadSize; pass += kPassColumns) {
      float o[kRowTiles][kPassColumns / 16][4] = {};
#pragma unroll
      for (int n = 0; n < kPassColumns / 16; n += 2) {
        const int column = pass + n * 16;
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
          uint32_t codes[4];
          load_matrix_x4_transposed(
              codes, rows + m * 16 * Stage::kRowBytes + column / 128 * 128 + (piece ^ column % 128));
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t value[4];
            Halves<Code>::of_alternate(codes[2 * half], value[0], value[1]);
            Halves<Code>::of_alternate(codes[2 * half + 1], value[2], value[3]);
#pragma unroll
            for (int t = 0; t < kRowTiles; ++t)
              Product::multiply_add(o[t][n + half], value, weights[t][m][0], weights[t][m][1]);
          }
        }
      }
      if (pass + kPassColumns >= kHeadSize) shared.multiplied[cursor.stage.place].arrive_once(lane);
      if (pass == 0) {
        this->wait_merged(cursor);
        this->store_states(states, cursor.buffer.place);
      }
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
        for (int n = 0; n < kPassColumns / 4; ++n) o[t][n / 4][n % 4] *= factors[t][n % 2];
        this->store_sums(o[t], pass, t, cursor.of.rows, cursor.buffer.place);
      }
    }
  }
};

}  // namespace ortolan::cuda
