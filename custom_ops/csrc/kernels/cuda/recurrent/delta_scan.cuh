// The second kernel of the gated delta rule by chunks: walks each sequence's chunks with its state.
//
// Grid: one block per (32 columns of Dv, value head, sequence). The state's columns lie in the accumulators
// of eight warps, 16 rows of Dk each, and as elements in shared memory for the products that read it. Of
// products with a chunk's 64 rows a warp takes 16 rows and half of the columns. Where shared memory holds two
// chunks, copies of the next one start behind a chunk's first products, which need not wait for them to be
// issued.
#pragma once

#include "delta_chunks.cuh"

namespace ortolan::cuda {

constexpr int kScanThreads = 256;
constexpr int kScanStride = kScanColumns + kSharedPad;

template <typename Element, int kKeySize>
struct ScanStage {
  Element solved[kChunk][kKeySize + kSharedPad];  // W
  Element queries[kChunk][kKeySize + kSharedPad];
  Element keys[kChunk][kKeySize + kSharedPad];
  Element products[kChunk][kChunk + kSharedPad];  // P
  Element updates[kChunk][kScanStride];           // U
  ChunkScalars rows;
};

template <typename Element, int kKeySize>
struct ScanShared {
  Element state[kKeySize][kScanStride];
  Element updates[kChunk][kScanStride];  // u
  Element decayed[kChunk][kScanStride];  // u, as the state takes it
};

template <typename Element, int kKeySize>
class ChunkScan {
 public:
  using Stage = ScanStage<Element, kKeySize>;
  using Shared = ScanShared<Element, kKeySize>;
  static constexpr int kTiles = kKeySize / 16;
  static_assert(kTiles <= kScanThreads / 32);

  __device__ ChunkScan(const GatedDeltaRuleParams& p, const DeltaSequence& sequence, Shared& shared,
                       Stage* stages, int num_stages)
      : p_(p),
        sequence_(sequence),
        shared_(shared),
        stages_(stages),
        num_stages_(num_stages),
        head_(blockIdx.y),
        column_(blockIdx.x * int64_t{kScanColumns}),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        tile_row_(warp_ % 4 * 16),
        half_(warp_ / 4 * 16) {}

  // Chunks first .. end of the sequence; number `first` is the round's `offset`th.
  __device__ __forceinline__ void run(int64_t first, int64_t end, int64_t offset, void* workspace) {
    load_state();
    share_state();
    const auto next = [&](int64_t chunk) {
      return StageCopy(*this, chunk, ChunkScratch<Element>(p_, workspace, offset + chunk - first, head_),
                       chunk < end);
    };
    next(first).template copy<0, kCopies>();
    for (int64_t chunk = first; chunk < end; ++chunk) {
      copy_async_commit();
      copy_async_wait<0>();
      __syncthreads();  // the stage is there, and the other one has been read
      if (num_stages_ == 2) {
        advance(chunk, next(chunk + 1));
      } else {
        advance(chunk, next(end));
        __syncthreads();  // the stage has been read
        next(chunk + 1).template copy<0, kCopies>();
      }
    }
    copy_async_wait<0>();
    store_state();
  }

 private:
  __device__ __forceinline__ Stage& stage(int64_t chunk) { return stages_[chunk % num_stages_]; }

  // What a chunk needs is copied in kCopies parts, of which a thread copies 16 bytes each: first those of W,
  // queries and keys, then P, and U with the scalars as the last one.
  static constexpr int kKeyPieces = kKeySize / 8, kKeyParts = kChunk * kKeyPieces / kScanThreads;
  static constexpr int kProductParts = kChunk * (kChunk / 8) / kScanThreads;
  static constexpr int kCopies = 3 * kKeyParts + kProductParts + 1;
  static_assert(kChunk * kKeyPieces % kScanThreads == 0 && kChunk * kScanColumns / 8 == kScanThreads);

  struct StageCopy {
    Stage& to;
    bool exists;     // whether there is such a chunk
    int rows;        // tokens of it; rows of queries and keys from there on become zeros
    int64_t stride;  // of queries and keys
    const Element* solved;
    const Element* queries;
    const Element* keys;
    const Element* products;
    const Element* updates;
    const ChunkScalars* scalars;

    __device__ __forceinline__ StageCopy(ChunkScan& scan, int64_t chunk, const ChunkScratch<Element>& scratch,
                                         bool exists)
        : to(scan.stage(chunk)), exists(exists) {
      const GatedDeltaRuleParams& p = scan.p_;
      const int64_t token = scan.sequence_.first + chunk * kChunk,
                    left = scan.sequence_.count - chunk * kChunk;
      const int64_t head = p.key_head(scan.head_);
      rows = static_cast<int>(left < kChunk ? left : kChunk);
      stride = p.num_key_heads * kKeySize;
      solved = scratch.keys, products = scratch.products, scalars = scratch.rows;
      updates = scratch.updates + threadIdx.x / 4 * p.value_size + scan.column_ + threadIdx.x % 4 * 8;
      queries = key_row<Element>(p, p.query, token, head);
      keys = key_row<Element>(p, p.key, token, head);
    }

    template <int kFirst, int kEnd>
    __device__ __forceinline__ void copy() const {
      if (!exists) return;
#pragma unroll
      for (int part = kFirst; part < kEnd; ++part) copy_part(part);
    }
    __device__ __forceinline__ void copy_part(int part) const {
      if (part < 3 * kKeyParts) {
        const int i = part % kKeyParts * kScanThreads + threadIdx.x;
        const int row = i / kKeyPieces, column = i % kKeyPieces * 8;
        if (part < kKeyParts) {
          copy_async_16(&to.solved[row][column], solved + i * 8, true);
        } else {
          const bool of_keys = part >= 2 * kKeyParts, has_row = row < rows;
          copy_async_16(of_keys ? &to.keys[row][column] : &to.queries[row][column],
                        (of_keys ? keys : queries) + (has_row ? row : 0) * stride + column, has_row);
        }
      } else if (part < kCopies - 1) {
        const int i = (part - 3 * kKeyParts) * kScanThreads + threadIdx.x;
        copy_async_16(&to.products[i / 8][i % 8 * 8], products + i * 8, true);
      } else {
        copy_async_16(&to.updates[threadIdx.x / 4][threadIdx.x % 4 * 8], updates, true);
        constexpr int kPieces = sizeof(ChunkScalars) / 16;
        if (threadIdx.x < kPieces)
          copy_async_16(reinterpret_cast<char*>(&to.rows) + threadIdx.x * 16,
                        reinterpret_cast<const char*>(scalars) + threadIdx.x * 16, true);
      }
    }
  };

  // Calls visit(value, next value, state row, state column) for the pairs of columns that this thread holds.
  template <typename Visit>
  __device__ __forceinline__ void each_pair(Visit visit) {
    if (warp_ >= kTiles) return;
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        visit(state_[n][2 * half], state_[n][2 * half + 1], 16 * warp_ + 8 * half + lane_ / 4,
              8 * n + lane_ % 4 * 2);
  }
  __device__ __forceinline__ float2* state_pair(int row, int column) const {
    return reinterpret_cast<float2*>(p_.state + p_.state_row(sequence_.row, head_) + row * p_.value_size +
                                     column_ + column);
  }
  __device__ __forceinline__ void load_state() {
    each_pair([&](float& x, float& y, int row, int column) {
      const float2 pair = *state_pair(row, column);
      x = pair.x, y = pair.y;
    });
  }
  __device__ __forceinline__ void store_state() {
    each_pair([&](float x, float y, int row, int column) { *state_pair(row, column) = make_float2(x, y); });
  }
  __device__ __forceinline__ void share_state() {
    each_pair([&](float x, float y, int row, int column) {
      *reinterpret_cast<uint32_t*>(&shared_.state[row][column]) = Half<Element>::pack(x, y);
    });
  }

  // sums += a tile of 16 rows [16] times rows k .. k + 16 of a matrix, 16 columns from `column` on.
  __device__ __forceinline__ void multiply(const Element (*right)[kScanStride], int k, int column,
                                           const uint32_t (&a)[4], float (*sums)[4]) {
    uint32_t b[4];
    load_matrix_x4_transposed(b, shared_address(&right[k + at_.by_row][column + at_.by_row_column]));
    Half<Element>::multiply_add(sums[0], a, b[0], b[1]);
    Half<Element>::multiply_add(sums[1], a, b[2], b[3]);
  }

  __device__ __forceinline__ void advance(int64_t chunk, const StageCopy& next) {
    const Stage& from = stage(chunk);
    float found[2][4] = {}, output[2][4] = {};
    const int row = tile_row_ + at_.by_row;
#pragma unroll
    for (int k = 0; k < kKeySize; k += 16) {
      uint32_t a[4], q[4], b[4];
      load_matrix_x4(a, shared_address(&from.solved[row][k + at_.by_row_column]));
      load_matrix_x4(q, shared_address(&from.queries[row][k + at_.by_row_column]));
      load_matrix_x4_transposed(b, shared_address(&shared_.state[k + at_.by_row][half_ + at_.by_row_column]));
      Half<Element>::multiply_add(found[0], a, b[0], b[1]);
      Half<Element>::multiply_add(output[0], q, b[0], b[1]);
      Half<Element>::multiply_add(found[1], a, b[2], b[3]);
      Half<Element>::multiply_add(output[1], q, b[2], b[3]);
    }
    next.template copy<0, kCopies / 3>();
    share_updates(from, found, output);
    next.template copy<kCopies / 3, kCopies>();
    __syncthreads();
    advance_state(from);
    share_state();
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
      if (k > tile_row_) break;
      uint32_t a[4];
      load_matrix_x4(a, shared_address(&from.products[row][k + at_.by_row_column]));
      multiply(shared_.updates, k, half_, a, output);
    }
    write_output(chunk, output);
  }

  __device__ __forceinline__ void share_updates(const Stage& from, const float (&found)[2][4],
                                                float (&output)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile_row_ + 8 * half + lane_ / 4;
      const float query = from.rows.query[row], key = from.rows.key[row];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int column = half_ + 8 * n + lane_ % 4 * 2;
        const float2 solved =
            Half<Element>::unpack(*reinterpret_cast<const uint32_t*>(&from.updates[row][column]));
        const float x = solved.x - found[n][2 * half], y = solved.y - found[n][2 * half + 1];
        *reinterpret_cast<uint32_t*>(&shared_.updates[row][column]) = Half<Element>::pack(x, y);
        *reinterpret_cast<uint32_t*>(&shared_.decayed[row][column]) = Half<Element>::pack(x * key, y * key);
        output[n][2 * half] *= query;
        output[n][2 * half + 1] *= query;
      }
    }
  }

  __device__ __forceinline__ void write_output(int64_t chunk, const float (&output)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t token = chunk * kChunk + tile_row_ + 8 * half + lane_ / 4;
      if (token >= sequence_.count) continue;
      Element* target = static_cast<Element*>(p_.output) +
                        ((sequence_.first + token) * p_.num_value_heads + head_) * p_.value_size + column_;
#pragma unroll
      for (int n = 0; n < 2; ++n)
        *reinterpret_cast<uint32_t*>(target + half_ + 8 * n + lane_ % 4 * 2) =
            Half<Element>::pack(output[n][2 * half], output[n][2 * half + 1]);
    }
  }

  __device__ __forceinline__ void advance_state(const Stage& from) {
    if (warp_ >= kTiles) return;
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) state_[n][c] *= from.rows.last;
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
      uint32_t a[4];
      load_matrix_x4_transposed(
          a, shared_address(&from.keys[k + at_.by_column][16 * warp_ + at_.by_column_column]));
      multiply(shared_.decayed, k, 0, a, &state_[0]);
      multiply(shared_.decayed, k, 16, a, &state_[2]);
    }
  }

  const GatedDeltaRuleParams& p_;
  const DeltaSequence& sequence_;
  Shared& shared_;
  Stage* stages_;
  int num_stages_;
  int64_t head_;
  int64_t column_;
  int warp_;
  int lane_;
  int tile_row_;  // first row of the chunk that this warp multiplies
  int half_;      // first column of its half
  TileLane at_;
  float state_[4][4];
};

template <typename Element, int kKeySize>
__global__ void __launch_bounds__(kScanThreads)
    scan_chunks(const GatedDeltaRuleParams p, ChunkRound round, void* workspace, int num_stages) {
  extern __shared__ __align__(16) unsigned char memory[];
  launch_dependents();
  wait_for_previous_kernel();
  const DeltaSequence sequence(p, blockIdx.z);
  if (p.keeps_updates(sequence.count)) return;
  const int64_t own = first_chunk(p, blockIdx.z), chunks = (sequence.count + kChunk - 1) / kChunk;
  const int64_t first = own < round.first ? round.first - own : 0;
  const int64_t left = round.first + round.count - own;
  const int64_t end = chunks < left ? chunks : left;
  if (first >= end) return;
  using Shared = ScanShared<Element, kKeySize>;
  auto* stages = reinterpret_cast<ScanStage<Element, kKeySize>*>(memory + sizeof(Shared));
  ChunkScan<Element, kKeySize>(p, sequence, *reinterpret_cast<Shared*>(memory), stages, num_stages)
      .run(first, end, own + first - round.first, workspace);
}

}  // namespace ortolan::cuda
