// Products of codes of int4 and int8 with rounded inputs. What a group of a unit adds up is exact: whole
// numbers of 32 bits. They are scaled and added in float32, group by group, so a product has one order of
// sums whatever the other rows and inputs are, and whichever of two ways computes it.
//
// With few inputs a register holds codes of one row, which are multiplied as they are read; the sums of as
// many rows as it has lanes are then gathered in one. With many, codes are first turned so that each lane
// holds another row, and every number of the inputs meets all lanes.
#pragma once

#include <utility>

#include "aligned_floats.h"
#include "code_vectors.h"
#include "experts_impl.h"
#include "integer_lanes.h"
#include "isa.h"
#include "rounded_inputs.h"

namespace ortolan::cpu::ORTOLAN_ISA {

constexpr int64_t kManyRegisters = 2;  // of rows, which share the numbers that are read
// The most inputs that meet codes as these are read, and what many are taken by, as registers allow.
#if defined(__AVX512VNNI__)
constexpr int64_t kFewInputs = 4, kManyInputs = 6;
#elif defined(__AVX512F__)
constexpr int64_t kFewInputs = 3, kManyInputs = 8;
#else
constexpr int64_t kFewInputs = 3, kManyInputs = 4;
#endif
constexpr int64_t kManyTile = 8 * kManyInputs;  // inputs that stay in the cache while rows pass

// The scales and zero points of a register of rows, group by group.
struct GroupLanes {
  const Register* scales;
  const IntRegister* zeros;

  GroupLanes from(int64_t group) const { return {scales + group, zeros + group}; }

  // sum + the exact `products` of a group, whose inputs' numbers add up to number_sum, scaled.
  [[gnu::always_inline]] Register add_scaled(Register sum, int64_t group, IntRegister products,
                                             int32_t number_sum, float step) const {
    return sum + to_floats(products - zeros[group] * number_sum) * (scales[group] * step);
  }
};

// Asks for codes to come, which are read once, and twice, first from far ahead: to L1 alone where that is
// fastest, else to L2. The one takes twice as long on servers of Intel's, the other 15 % longer on AMD's.
[[gnu::always_inline]] inline void prefetch_codes(const uint8_t* ahead, bool past_caches) {
  constexpr int kToL2 = 2, kPastCaches = 0;
  if (past_caches) {
    __builtin_prefetch(ahead, 0, kPastCaches);
    __builtin_prefetch(ahead + 4096, 0, kPastCaches);
  } else {
    __builtin_prefetch(ahead, 0, kToL2);
    __builtin_prefetch(ahead + 2048, 0, kToL2);
  }
}

// Adds the products of a unit of as many rows as a register has lanes, whose codes lie `stride` bytes apart.
template <int64_t kBits, int64_t kGroups, int64_t kInputs>
[[gnu::always_inline]] inline void add_few(const uint8_t* codes, int64_t stride, const uint8_t* ahead,
                                           bool past_caches, const RoundedUnit* const (&inputs)[kInputs],
                                           GroupLanes lanes, Register (&sums)[kInputs]) {
  using Layout = UnitLayout<kBits>;
  constexpr int64_t kGroupWords = Layout::kWords / kGroups;
  constexpr int64_t kGroupSteps = std::max<int64_t>(1, kGroupWords / kRegisterLanes);
  constexpr int64_t kStepGroups = std::max<int64_t>(1, kRegisterLanes / kGroupWords);
  for (int64_t first = 0; first < kGroups; first += kStepGroups) {
    IntRegister quads[kInputs][kBlocks];
    for (int64_t q = 0; q < kBlocks; ++q) {
      IntRegister products[kInputs][4];
      for (int64_t r = 0; r < 4; ++r) {
        PlaneSums<Layout::kPlanes> dots[kInputs];
        for (int64_t i = 0; i < kGroupSteps; ++i) {
          const int64_t step = first / kStepGroups * kGroupSteps + i;
          const uint8_t* place = codes + (4 * q + r) * stride + step * 4 * kRegisterLanes;
          prefetch_codes(ahead, past_caches);
          ahead += 4 * kRegisterLanes;
          const IntRegister words = load_words(place);
          for (int64_t part = 0; part < Layout::kParts; ++part)
            for (int64_t t = 0; t < kInputs; ++t)
              dots[t].add(words >> (part * kBits) & Layout::kMask,
                          inputs[t]->words + Layout::place(step, part));
        }
        for (int64_t t = 0; t < kInputs; ++t) products[t][r] = dots[t].total();
      }
      for (int64_t t = 0; t < kInputs; ++t) {
        const auto& p = products[t];
        quads[t][q] = fold_lanes(fold_lanes(p[0], p[1]), fold_lanes(p[2], p[3]));
      }
    }
    for (int64_t t = 0; t < kInputs; ++t) {
      IntRegister groups[kStepGroups];
      gather_rows<kStepGroups>(quads[t], groups);
      for (int64_t g = 0; g < kStepGroups; ++g)
        sums[t] = lanes.add_scaled(sums[t], first + g, groups[g],
                                   inputs[t]->template group_sum<kGroups>(first + g), inputs[t]->scale);
    }
  }
}

// Rows of codes, and how their units are grouped.
struct CodeSpan {
  const uint8_t* codes;
  int64_t stride;  // bytes between rows
  int64_t ahead;   // bytes to what is read next
  int64_t units;
  int64_t group_units;  // units that share their groups
  bool past_caches;     // how what is read next is asked for
};

using FewKernel = void (*)(const CodeSpan&, const RoundedUnit* const*, GroupLanes, Register*);

template <int64_t kBits, int64_t kGroups, int64_t kInputs>
[[gnu::noinline]] void multiply_few(const CodeSpan& span, const RoundedUnit* const* inputs, GroupLanes lanes,
                                    Register* totals) {
  const RoundedUnit* units[kInputs];
  Register sums[kInputs];
  for (int64_t t = 0; t < kInputs; ++t) {
    units[t] = inputs[t];
    sums[t] = totals[t];
  }
  const uint8_t *codes = span.codes, *ahead = codes + span.ahead;
  for (int64_t unit = 0; unit < span.units;) {
    const int64_t end = std::min(unit + span.group_units, span.units);
    for (; unit < end; ++unit) {
      add_few<kBits, kGroups, kInputs>(codes, span.stride, ahead, span.past_caches, units, lanes, sums);
      codes += UnitLayout<kBits>::kBytes;
      ahead += kRegisterLanes * UnitLayout<kBits>::kBytes;
      for (int64_t t = 0; t < kInputs; ++t) ++units[t];
    }
    lanes = lanes.from(kGroups);
  }
  for (int64_t t = 0; t < kInputs; ++t) totals[t] = sums[t];
}

// Turns a unit of as many rows as a register has lanes: each of its words' parts, with a row in each lane.
template <int64_t kBits>
void turn_codes(const uint8_t* codes, int64_t stride, const uint8_t* ahead, IntRegister* words,
                int64_t words_apart) {
  using Layout = UnitLayout<kBits>;
  for (int64_t place = 0; place < Layout::kBytes; place += 16) {
    IntRegister rows[4];
    for (int64_t i = 0; i < 4; ++i) rows[i] = load_blocks(codes + i * stride + place, 4 * stride);
    for (int64_t i = 0; i < kRegisterLanes / 4; ++i) __builtin_prefetch(ahead + 64 * i);
    ahead += kRegisterLanes * 16;
    turn_blocks(rows);
    for (const IntRegister word : rows)
      for (int64_t part = 0; part < Layout::kParts; ++part, words += words_apart)
        *words = word >> (part * kBits) & Layout::kMask;
  }
}

// Adds the products of a unit of kManyRegisters registers of rows, turned, with kInputs inputs.
template <int64_t kBits, int64_t kInputs>
[[gnu::noinline]] void add_many(const IntRegister* codes, const RoundedUnit* const* inputs, int64_t groups,
                                const GroupLanes (&lanes)[kManyRegisters], Register (*sums)[kManyRegisters]) {
  using Layout = UnitLayout<kBits>;
  const int64_t group_words = Layout::kWords / groups;
  for (int64_t group = 0; group < groups; ++group) {
    PlaneSums<Layout::kPlanes> dots[kInputs][kManyRegisters];
    for (int64_t word = group * group_words; word < (group + 1) * group_words; ++word) {
#pragma GCC unroll 1  // else products of several parts are added up first, in memory
      for (int64_t part = 0; part < Layout::kParts; ++part, codes += kManyRegisters) {
        const int64_t place = Layout::word_place(word, part);
        for (int64_t t = 0; t < kInputs; ++t)
          for (int64_t v = 0; v < kManyRegisters; ++v)
            dots[t][v].add_broadcast(codes[v], inputs[t]->words + place);
      }
    }
    const auto add = [&]<int64_t kGroups>() {
      for (int64_t t = 0; t < kInputs; ++t)
        for (int64_t v = 0; v < kManyRegisters; ++v)
          sums[t][v] = lanes[v].add_scaled(sums[t][v], group, dots[t][v].total(),
                                           inputs[t]->template group_sum<kGroups>(group), inputs[t]->scale);
    };
    groups == 1   ? add.template operator()<1>()
    : groups == 2 ? add.template operator()<2>()
                  : add.template operator()<4>();
  }
}

template <int64_t kBits, int64_t kInputs = kManyInputs>
void add_many(int64_t count, const IntRegister* codes, const RoundedUnit* const* inputs, int64_t groups,
              const GroupLanes (&lanes)[kManyRegisters], Register (*sums)[kManyRegisters]) {
  if constexpr (kInputs > 1)
    if (count < kInputs) return add_many<kBits, kInputs - 1>(count, codes, inputs, groups, lanes, sums);
  add_many<kBits, kInputs>(codes, inputs, groups, lanes, sums);
}

// Products with a weight that takes rounded inputs.
template <typename Element>
class IntegerRows {
 public:
  explicit IntegerRows(const LowBitWeight& weight)
      : w_(weight),
        bits_(code_bits(weight.format)),
        groups_(weight.groups()),
        units_(num_units(weight.columns)),
        unit_groups_(groups_ > 1 && w_.group_size < kUnitColumns ? kUnitColumns / w_.group_size : 1),
        group_units_(groups_ == 1 ? units_ : std::max<int64_t>(1, w_.group_size / kUnitColumns)),
        lane_groups_((units_ + group_units_ - 1) / group_units_ * unit_groups_),
        scales_(kManyRegisters * lane_groups_ * kRegisterLanes),
        zeros_(kManyRegisters * lane_groups_ * kRegisterLanes) {
    const int32_t middle = bits_ == 4 ? 8 : 128;
    std::fill_n(scales_.get(), kManyRegisters * lane_groups_ * kRegisterLanes,
                0.0f);  // behind the last group
    std::fill_n(zeros(), kManyRegisters * lane_groups_ * kRegisterLanes, middle);
  }

  template <typename Store>
  void multiply(int64_t first, int64_t count, const InputRows& inputs, Store store) {
    bits_ == 4 ? multiply_bits<4>(first, count, inputs, store)
               : multiply_bits<8>(first, count, inputs, store);
  }

 private:
  template <int64_t kBits, typename Store>
  void multiply_bits(int64_t first, int64_t count, const InputRows& inputs, Store store) {
    if (inputs.count <= kFewInputs) return multiply_few_inputs<kBits>(first, count, inputs, store);
    for (int64_t token = 0; token < inputs.count; token += kManyTile)
      multiply_tile<kBits>(first, count, inputs, token, std::min(kManyTile, inputs.count - token), store);
  }

  static const RoundedUnit* units_of(const float* row) { return reinterpret_cast<const RoundedUnit*>(row); }

  template <int64_t kBits, typename Store>
  void multiply_few_inputs(int64_t first, int64_t count, const InputRows& inputs, Store store) {
    const RoundedUnit* units[kFewInputs];
    for (int64_t t = 0; t < inputs.count; ++t) units[t] = units_of(inputs.rows[t]);
    const FewKernel multiply = few_kernel<kBits>(inputs.count);
    for (int64_t row = 0; row < count; row += kRegisterLanes) {
      const int64_t rows = std::min(kRegisterLanes, count - row);
      const GroupLanes lanes = place_groups(first + row, rows, 0);
      Register sums[kFewInputs] = {};
      const int64_t whole = rows == kRegisterLanes ? w_.columns / kUnitColumns : 0;
      const uint8_t* codes = codes_of(first + row);
      multiply({codes, row_bytes(), kRegisterLanes * row_bytes(), whole, group_units_, past_caches_}, units,
               lanes, sums);
      for (int64_t unit = whole; unit < units_; ++unit) {
        const RoundedUnit* one[kFewInputs];
        for (int64_t t = 0; t < inputs.count; ++t) one[t] = units[t] + unit;
        constexpr int64_t kBytes = UnitLayout<kBits>::kBytes;
        alignas(64) uint8_t padded[kRegisterLanes * kBytes];
        pad_unit<kBits>(codes, rows, unit, padded);
        multiply({padded, kBytes, 0, 1, 1, past_caches_}, one, lanes.from(unit / group_units_ * unit_groups_),
                 sums);
      }
      for (int64_t t = 0; t < inputs.count; ++t)
        for (int64_t r = 0; r < rows; ++r) store(t, row + r, sums[t][r]);
    }
  }

  // The kernel of 1 to kFewInputs inputs.
  template <int64_t kBits>
  FewKernel few_kernel(int64_t inputs) const {
    const auto of_groups = [&]<int64_t kGroups, int64_t... kLess>(std::integer_sequence<int64_t, kLess...>) {
      static constexpr FewKernel kKernels[] = {multiply_few<kBits, kGroups, kLess + 1>...};
      return kKernels[inputs - 1];
    };
    constexpr std::make_integer_sequence<int64_t, kFewInputs> kAll;
    if (unit_groups_ == 4) return of_groups.template operator()<4>(kAll);
    return unit_groups_ == 2 ? of_groups.template operator()<2>(kAll)
                             : of_groups.template operator()<1>(kAll);
  }

  // Products of some inputs, which stay in the cache while all the rows pass.
  template <int64_t kBits, typename Store>
  void multiply_tile(int64_t first, int64_t count, const InputRows& inputs, int64_t token, int64_t tokens,
                     Store store) {
    using Layout = UnitLayout<kBits>;
    constexpr int64_t kRows = kManyRegisters * kRegisterLanes;
    for (int64_t row = 0; row < count; row += kRows) {
      const uint8_t* ahead = codes_of(first + row + kRows);  // a little at a time
      Register sums[kManyTile][kManyRegisters] = {};
      GroupLanes lanes[kManyRegisters];
      int64_t rows[kManyRegisters];
      for (int64_t v = 0; v < kManyRegisters; ++v) {
        rows[v] = std::clamp<int64_t>(count - row - v * kRegisterLanes, 0, kRegisterLanes);
        lanes[v] = place_groups(first + row + v * kRegisterLanes, rows[v], v);
      }
      for (int64_t unit = 0; unit < units_; ++unit) {
        IntRegister codes[Layout::kWords * Layout::kParts * kManyRegisters];
        GroupLanes group_lanes[kManyRegisters];
        for (int64_t v = 0; v < kManyRegisters; ++v) {
          turn_unit<kBits>(first + row + v * kRegisterLanes, rows[v], unit, ahead, codes + v);
          ahead += kRegisterLanes * Layout::kBytes;
          group_lanes[v] = lanes[v].from(unit / group_units_ * unit_groups_);
        }
        for (int64_t t = 0, some; t < tokens; t += some) {
          const int64_t rest = tokens - t, shares = (rest + kManyInputs - 1) / kManyInputs;
          some = (rest + shares - 1) / shares;  // alike, so that none is left alone
          const RoundedUnit* units[kManyInputs];
          for (int64_t i = 0; i < some; ++i) units[i] = units_of(inputs.rows[token + t + i]) + unit;
          add_many<kBits>(some, codes, units, unit_groups_, group_lanes, sums + t);
        }
      }
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t v = 0; v < kManyRegisters; ++v)
          for (int64_t r = 0; r < rows[v]; ++r) store(token + t, row + v * kRegisterLanes + r, sums[t][v][r]);
    }
  }

  template <int64_t kBits>
  void turn_unit(int64_t row, int64_t rows, int64_t unit, const uint8_t* ahead, IntRegister* words) const {
    constexpr int64_t kBytes = UnitLayout<kBits>::kBytes;
    if (rows == kRegisterLanes && (unit + 1) * kUnitColumns <= w_.columns)
      return turn_codes<kBits>(codes_of(row) + unit * kBytes, row_bytes(), ahead, words, kManyRegisters);
    alignas(64) uint8_t padded[kRegisterLanes * kBytes];
    pad_unit<kBits>(rows ? codes_of(row) : nullptr, rows, unit, padded);
    turn_codes<kBits>(padded, kBytes, ahead, words, kManyRegisters);
  }

  // Copies what there is of a unit; the numbers of other columns are 0.
  template <int64_t kBits>
  void pad_unit(const uint8_t* codes, int64_t rows, int64_t unit, uint8_t* padded) const {
    constexpr int64_t kBytes = UnitLayout<kBits>::kBytes;
    std::memset(padded, 0, kRegisterLanes * kBytes);
    const int64_t bytes = std::min(kBytes, row_bytes() - unit * kBytes);
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(padded + r * kBytes, codes + r * row_bytes() + unit * kBytes, bytes);
  }

  int64_t row_bytes() const { return w_.columns * bits_ / 8; }
  const uint8_t* codes_of(int64_t row) const { return w_.codes + row * row_bytes(); }
  int32_t* zeros() { return reinterpret_cast<int32_t*>(zeros_.get()); }

  // Puts the scales and zero points of some rows into the lanes of one of kManyRegisters registers.
  GroupLanes place_groups(int64_t first, int64_t rows, int64_t place) {
    float* scales = scales_.get() + place * lane_groups_ * kRegisterLanes;
    int32_t* zero_points = zeros() + place * lane_groups_ * kRegisterLanes;
    const Element* stored = static_cast<const Element*>(w_.scales) + first * groups_;
    const char* next = reinterpret_cast<const char*>(stored + 2 * kRegisterLanes * groups_);
    for (int64_t i = 0; i < kRegisterLanes * groups_ * static_cast<int64_t>(sizeof(Element)); i += 64)
      __builtin_prefetch(next + i);
    int64_t turned = 0;
    if (std::is_same_v<Element, float> && rows == kRegisterLanes)
      turned = turn_scales(reinterpret_cast<const float*>(stored), scales);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t g = turned; g < groups_; ++g)
        scales[g * kRegisterLanes + r] = to_float(stored[r * groups_ + g]);
    for (int64_t r = 0; r < rows && w_.zero_points; ++r)
      for (int64_t g = 0; g < groups_; ++g) zero_points[g * kRegisterLanes + r] = zero_point(first + r, g);
    return {reinterpret_cast<const Register*>(scales), reinterpret_cast<const IntRegister*>(zero_points)};
  }

  // Transposes scales [kRegisterLanes, groups], and returns of how many groups.
  int64_t turn_scales(const float* stored, float* scales) const {
    int64_t group = 0;
    const auto turn = [&]<int64_t kCount>() {
      for (; group + kCount <= groups_; group += kCount) {
        Register turned[kRegisterLanes];
        transpose_lanes<kCount>(stored + group, groups_, turned);
        std::memcpy(scales + group * kRegisterLanes, turned, kCount * sizeof(Register));
      }
    };
    turn.template operator()<kRegisterLanes>();
#if defined(__AVX512F__)
    turn.template operator()<8>();
    turn.template operator()<4>();
#endif
    return group;
  }

  int32_t zero_point(int64_t row, int64_t group) const {
    if (bits_ == 8) return w_.zero_points[row * groups_ + group];
    const uint8_t pair = w_.zero_points[row * ((groups_ + 1) / 2) + group / 2];
    return group % 2 ? pair >> 4 : pair & 15;
  }

  const LowBitWeight& w_;
  const int64_t bits_, groups_, units_;
  const int64_t unit_groups_;  // groups of a unit, or 1
  const int64_t group_units_;  // units of a group, or 1
  const int64_t lane_groups_;  // groups of all units
  const bool past_caches_ = reads_past_caches();
  const FewFloats scales_, zeros_;
};

}  // namespace ortolan::cpu::ORTOLAN_ISA
