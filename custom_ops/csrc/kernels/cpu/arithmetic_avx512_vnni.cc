// The products of integer codes with AVX-512 VNNI; all else is as for AVX-512 without it.
#define ORTOLAN_ISA isa_avx512_vnni
#include "arithmetic.h"
#include "linear_impl.h"
#include "low_bit_experts_impl.h"

namespace ortolan::cpu {

const LowBitArithmetic kLowBitAvx512Vnni = {isa_avx512_vnni::low_bit_linear,
                                            isa_avx512_vnni::low_bit_experts};

}  // namespace ortolan::cpu
