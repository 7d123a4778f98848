// Sizes of an sm_90a decode block, its shared memory, and the products that only it has.
#pragma once

#include "kernels/cuda/common/tile_copy_sm90.cuh"
#include "plan.cuh"

namespace ortolan::cuda {

constexpr int kSm90DecodeRows = 64;  // query rows of an entry, at most: those of one wgmma

template <int kHeadSize>
struct Sm90DecodeShape {
  static constexpr int kGroups = kHeadSize <= 128 ? 1 : 2;  // warpgroups, each with columns of the sums
  static constexpr int kColumns = kHeadSize / kGroups;      // of a warpgroup
  static constexpr int kKeys = kHeadSize <= 128 ? 128 : kHeadSize <= 256 ? 64 : 32;  // of a step
  static constexpr int kSteps = kHeadSize <= 256 ? 1 : 4;                            // of a tile
  static constexpr int kTileKeys = kKeys * kSteps;
  // Registers hold a span's sums beside those of a tile, or a longer tile's alone.
  static constexpr PowerOfTwo kSpanTiles{kHeadSize <= 256 ? 3 : 0};
  static constexpr int kBoxes = kHeadSize / 64;               // of 64 columns, 128 bytes
  static constexpr int kBufferBytes = kKeys * kHeadSize * 2;  // keys or values of a step
  static constexpr int kQueryBytes = kSm90DecodeRows * kHeadSize * 2;
  // Two warpgroups multiply, one loads. Without columns to share, each has a stream of spans for itself.
  static constexpr int kStreams = 2 / kGroups;
  static constexpr int kThreads = 384;
  // Of a thread; together what the block is launched with.
  static constexpr int kEvenRegisters = 168, kLoadRegisters = 56, kComputeRegisters = 224;
};

// What the host prepares: tensor maps, and how many rows of a step one copy takes (pages may be smaller).
struct Sm90DecodeMaps {
  CUtensorMap keys;    // [N * Hkv, P, D], boxes of box_rows slots
  CUtensorMap values;  // the same
  int box_rows;
};

// An address in the block's own shared memory as descriptors hold it: without the block's rank in its
// cluster.
__device__ __forceinline__ uint32_t descriptor_address(uint32_t address) { return address & 0x3ffff; }

// What the warps of a stream share. Streams lie one after another: queries [kSm90DecodeRows, D], then a ring
// of keys and values by turns.
struct Sm90DecodeShared {
  unsigned char* memory;
  Barrier* full;   // [stages]
  Barrier* empty;  // [stages]

  template <int kHeadSize>
  static __host__ __device__ int stream_bytes(const DecodeShape& shape) {
    using Shape = Sm90DecodeShape<kHeadSize>;
    return Shape::kQueryBytes + shape.stages * Shape::kBufferBytes;
  }
  template <int kHeadSize>
  static __host__ __device__ int bytes(const DecodeShape& shape) {
    constexpr int kAlignment = 1024;
    return kAlignment + shape.table_size() * static_cast<int>(sizeof(int)) +
           shape.streams *
               (stream_bytes<kHeadSize>(shape) + 2 * shape.stages * static_cast<int>(sizeof(Barrier)));
  }
  template <int kHeadSize>
  static __device__ __forceinline__ Sm90DecodeShared of(unsigned char* memory, const DecodeShape& shape,
                                                        int stream) {
    Sm90DecodeShared shared;
    memory += -shared_address(memory) & 1023u;
    shared.memory = memory + stream * stream_bytes<kHeadSize>(shape);
    shared.full = reinterpret_cast<Barrier*>(memory + shape.streams * stream_bytes<kHeadSize>(shape)) +
                  stream * 2 * shape.stages;
    shared.empty = shared.full + shape.stages;
    return shared;
  }
  // Behind the last stream: [DecodeShape::table_size].
  template <int kHeadSize>
  static __device__ __forceinline__ int* starts(unsigned char* memory, const DecodeShape& shape) {
    return reinterpret_cast<int*>(of<kHeadSize>(memory, shape, 0).full + shape.streams * 2 * shape.stages);
  }
  __device__ __forceinline__ uint32_t queries() const { return shared_address(memory); }
  template <int kHeadSize>
  __device__ __forceinline__ uint32_t buffer(int place) const {
    using Shape = Sm90DecodeShape<kHeadSize>;
    return queries() + Shape::kQueryBytes + place * Shape::kBufferBytes;
  }
};

// Products of 64 rows and as many keys as a step has.
template <typename Element, int kKeys>
struct StepProducts : Wgmma<Element, kKeys> {};

// clang-format off
#define ORTOLAN_PRODUCTS_OF_32(Element, type)                                                            \
  template <>                                                                                            \
  struct StepProducts<Element, 32> {                                                                     \
    static __device__ __forceinline__ void products(float (&d)[16], uint64_t a, uint64_t b, int accumulate) { \
      asm volatile(                                                                                      \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"                                                   \
          "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " {%0, %1, %2, %3, %4, %5, %6, %7, " \
          "%8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0;\n}\n"                         \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),          \
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),      \
            "+f"(d[14]), "+f"(d[15])                                                                     \
          : "l"(a), "l"(b), "r"(accumulate));                                                            \
    }                                                                                                    \
  };
ORTOLAN_PRODUCTS_OF_32(__nv_bfloat16, "bf16")
ORTOLAN_PRODUCTS_OF_32(__half, "f16")
#undef ORTOLAN_PRODUCTS_OF_32
// clang-format on

}  // namespace ortolan::cuda
