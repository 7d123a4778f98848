// Linear layers: for a few tokens by kernels that read the weights once; for many, gated ones by a kernel of
// our own where wgmma is, and the others by cuBLAS with our norm and epilogue around it.
#include <algorithm>

#include "cublas.h"
#include "few_tokens.h"
#include "gates.cuh"
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/operators.generated.h"

namespace ortolan::cuda {

template <typename Element>
cudaError_t launch_gemvs(const FusedLinearParams& p, const Launch& launch);
template <typename Element>
cudaError_t launch_chains(const FusedLinearParams& p, const Launch& launch);
template <typename Element, bool kGated, bool kSliced>
cudaError_t launch_rows_sm90(const FusedLinearParams& p, const Launch& launch);

namespace {

constexpr int64_t kSliceBytes = int64_t{96} << 20;  // bounds the rows that wait beside cuBLAS's workspace
constexpr int64_t kRowTile = 128;                   // rows that cuBLAS takes together
constexpr int64_t kGatedRowTile = 256;              // rows that our gated product takes together
constexpr int kThreads = 256;

// What an output becomes after its product; `factor` is the gated layer's second product, or given.
template <typename Output>
__device__ __forceinline__ float finish(GatedActivation activation, float product, float factor) {
  if (activation == GatedActivation::kNone) return product;
  return (sizeof(Output) == 2 ? activate_nearly(activation, product) : activate(activation, product)) *
         factor;
}

// Bias, gate and residual for products [rows, N or 2N], of the type of the output, of some rows of the call.
template <typename Element, typename Output>
__global__ void __launch_bounds__(kThreads)
    epilogue_kernel(const __grid_constant__ FusedLinearParams p, const Output* products, int64_t first_row,
                    unsigned rows) {
  launch_dependents();
  wait_for_previous_kernel();
  const auto outputs = static_cast<unsigned>(p.num_outputs);
  const unsigned place = blockIdx.x * kThreads + threadIdx.x;
  if (place >= rows * outputs) return;
  const unsigned row = place / outputs, column = place % outputs;
  const bool two_part = p.is_two_part();
  const auto* bias = static_cast<const Element*>(p.bias);
  const Output* line = products + row * p.num_outputs * (two_part ? 2 : 1) + column;
  const float product = to_float(line[0]) + (bias ? to_float(bias[column]) : 0.0f);
  float factor = 0;
  if (p.factor)
    factor = to_float(static_cast<const Element*>(p.factor)[(first_row + row) * p.factor_stride + column]);
  if (two_part)
    factor = to_float(line[p.num_outputs]) + (bias ? to_float(bias[p.num_outputs + column]) : 0.0f);
  float y = finish<Output>(p.activation, product, factor);
  const int64_t index = first_row * p.num_outputs + place;
  if (p.residual) y += to_float(static_cast<const Element*>(p.residual)[index]);
  static_cast<Output*>(p.output)[index] = Output(y);
}

// The same for gates alone, 16 bytes at a time.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    gate_kernel(GatedActivation activation, const Element* products, Element* output, unsigned row_pieces,
                unsigned pieces) {
  constexpr int kSize = kPieceSize<Element>;
  launch_dependents();
  wait_for_previous_kernel();
  const unsigned place = blockIdx.x * kThreads + threadIdx.x;
  if (place >= pieces) return;
  const unsigned row = place / row_pieces;
  const auto* line = reinterpret_cast<const uint4*>(products) + place + row * row_pieces;
  const uint4 gates = line[0], factors = line[row_pieces];
  Element x[kSize], y[kSize];
  __builtin_memcpy(x, &gates, 16);
  __builtin_memcpy(y, &factors, 16);
#pragma unroll
  for (int e = 0; e < kSize; ++e) x[e] = Element(finish<Element>(activation, to_float(x[e]), to_float(y[e])));
  uint4 rounded;
  __builtin_memcpy(&rounded, x, 16);
  reinterpret_cast<uint4*>(output)[place] = rounded;
}

unsigned blocks_of(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

// Finishes the products of some rows of the call.
template <typename Element, typename Output>
cudaError_t finish_slice(const FusedLinearParams& p, const Output* products, int64_t first_row, int64_t rows,
                         const Launch& launch) {
  if constexpr (sizeof(Element) == sizeof(Output)) {
    auto* output = static_cast<Element*>(p.output) + first_row * p.num_outputs;
    const auto row_bytes = static_cast<int64_t>(p.num_outputs * sizeof(Element));
    if (p.is_two_part() && !p.bias && !p.residual && has_whole_pieces(row_bytes, {p.output})) {
      const int64_t row_pieces = p.num_outputs / kPieceSize<Element>;
      return launch_overlapped(gate_kernel<Element>, dim3(blocks_of(rows * row_pieces)), dim3(kThreads), 0,
                               launch, p.activation, products, output, static_cast<unsigned>(row_pieces),
                               static_cast<unsigned>(rows * row_pieces));
    }
  }
  return launch_overlapped(epilogue_kernel<Element, Output>, dim3(blocks_of(rows * p.num_outputs)),
                           dim3(kThreads), 0, launch, p, products, first_row, static_cast<unsigned>(rows));
}

// Whether the product alone is the result, so that cuBLAS can write it.
bool is_direct(const FusedLinearParams& p) {
  return !p.bias && p.activation == GatedActivation::kNone && !(p.residual && p.output_float32);
}

// Whether the normalised rows of a whole call wait at the end of its output, aligned as cuBLAS likes them.
// Only gates write there, row after row: those before row r end at element r * N, the normalised rows from r
// on begin (T - r) * (N - K) elements further.
bool waits_in_output(const FusedLinearParams& p) {
  const int64_t further = (p.num_outputs - p.num_inputs) * element_bytes(p.element);
  return p.norm_weight && p.activation != GatedActivation::kNone && !p.residual && !p.output_float32 &&
         further >= 0 && further % 16 == 0;
}

// Whether our gated product takes the call. It reads and writes whole pieces of 16 bytes. While its tiles are
// full it is ahead of cuBLAS and a gate, mostly by 7 % or more: a sixteenth of their rows may be wasted.
bool multiplies_gates(const FusedLinearParams& p, const Device& device) {
  const int64_t row_bits = (p.num_inputs | p.num_outputs) * 2;  // of rows of either size
  const int64_t rows = (p.num_tokens + kGatedRowTile - 1) / kGatedRowTile * kGatedRowTile;
  return device.compute_capability == 90 && p.element != ElementType::kFloat32 && !p.output_float32 &&
         p.is_two_part() && !p.bias && !p.residual &&
         has_whole_pieces(row_bits, {p.input, p.weight, p.output}) &&
         (rows - p.num_tokens) * 16 <= p.num_tokens;
}

// Tokens whose products sum in an order that depends on the layer alone, whatever their number; for more,
// cuBLAS chooses. Where it is nearer to the speed of memory from three 16-bit rows on, they are two; none,
// where a row does not fit into shared memory.
int64_t few_tokens(const FusedLinearParams& p, const Device& device) {
  const int64_t row_bytes = p.num_inputs * element_bytes(p.element) * (p.norm_weight ? 2 : 1);
  if (row_bytes > device.shared_bytes_per_block - kThreads * int64_t{4}) return 0;
  const bool is_float32 = p.element == ElementType::kFloat32;
  return is_float32 || (device.compute_capability == 90 && takes_stream(p)) ? kFewTokens : 2;
}

bool is_few(const FusedLinearParams& p, const Device& device) {
  return p.num_tokens <= few_tokens(p, device) || !p.cublas;
}

// How the rows of a call are cut, and what a slice keeps beside cuBLAS's own workspace.
struct Slices {
  int64_t rows;
  int64_t normalised_bytes;
  int64_t product_bytes;

  static Slices of(const FusedLinearParams& p, const Device& device) {
    const int64_t bytes = element_bytes(p.element);
    const bool gates = multiplies_gates(p, device);
    const bool waits_apart = gates || !waits_in_output(p);  // outputs of our product come in no order
    const int64_t normalised = p.norm_weight && waits_apart ? p.num_inputs * bytes : 0;
    const int64_t products = gates || is_direct(p)
                                 ? 0
                                 : p.num_outputs * (p.output_float32 ? 4 : bytes) * (p.is_two_part() ? 2 : 1);
    if (normalised + products == 0) return {p.num_tokens, 0, 0};
    // Slices of about equal size: a small last one would read all weights for a few rows.
    const int64_t tile = gates ? kGatedRowTile : kRowTile;
    const int64_t most = std::max<int64_t>(kSliceBytes / (normalised + products), tile);
    const int64_t count = std::max<int64_t>((p.num_tokens + most - 1) / most, 1);
    const int64_t equal = (p.num_tokens + count - 1) / count;
    const int64_t whole_tiles = (equal + tile - 1) / tile * tile;
    const int64_t rows = std::min(p.num_tokens, whole_tiles <= most ? whole_tiles : equal);
    return {rows, aligned_bytes(rows * normalised), aligned_bytes(rows * products)};
  }
};

template <typename Element>
cudaError_t normalise(const FusedLinearParams& p, int64_t first_row, int64_t rows, void* target,
                      const Launch& launch) {
  RmsNormAddParams norm;
  norm.element = p.element;
  norm.num_tokens = rows;
  norm.row_size = p.num_inputs;
  norm.x = static_cast<const Element*>(p.input) + first_row * p.num_inputs;
  norm.norm_weight = p.norm_weight;
  norm.epsilon = p.epsilon;
  norm.y = target;
  return rms_norm_add(norm, launch);
}

// One slice of rows through cuBLAS; `waiting` are the call's normalised rows, where they lie in its output.
template <typename Element>
cudaError_t multiply_slice(const FusedLinearParams& p, int64_t first_row, int64_t rows, const Slices& slices,
                           const void* waiting, const Launch& launch) {
  auto* workspace = static_cast<unsigned char*>(launch.workspace);
  auto* normalised = workspace + Cublas::kWorkspaceBytes;
  void* products = normalised + slices.normalised_bytes;
  CublasProduct product{};
  product.element = p.element;
  product.rows = rows;
  product.columns = p.is_two_part() ? 2 * p.num_outputs : p.num_outputs;
  product.inner = p.num_inputs;
  product.input = static_cast<const Element*>(waiting ? waiting : p.input) + first_row * p.num_inputs;
  product.weight = p.weight;
  product.output = products;
  if (p.norm_weight && !waiting) {
    if (const cudaError_t error = normalise<Element>(p, first_row, rows, normalised, launch);
        error != cudaSuccess)
      return error;
    product.input = normalised;
  }
  const int64_t offset = first_row * p.num_outputs;
  product.output_float32 = p.output_float32;
  if (is_direct(p)) {
    product.accumulate = p.residual != nullptr;
    product.output = static_cast<unsigned char*>(p.output) +
                     offset * (p.output_float32 ? int64_t{4} : element_bytes(p.element));
    if (p.residual && p.residual != p.output) {
      const cudaError_t error =
          cudaMemcpyAsync(product.output, static_cast<const Element*>(p.residual) + offset,
                          rows * p.num_outputs * sizeof(Element), cudaMemcpyDeviceToDevice, launch.stream);
      if (error != cudaSuccess) return error;
    }
    return p.cublas->multiply(product, launch.stream, workspace);
  }
  if (const cudaError_t error = p.cublas->multiply(product, launch.stream, workspace); error != cudaSuccess)
    return error;
  if (p.output_float32)
    return finish_slice<Element>(p, static_cast<const float*>(products), first_row, rows, launch);
  return finish_slice<Element>(p, static_cast<const Element*>(products), first_row, rows, launch);
}

// All rows through our own product of many, `multiply` that of rows which are normalised already.
template <typename Element>
cudaError_t multiply_rows(const FusedLinearParams& p, int64_t most_rows, void* normalised,
                          cudaError_t (*multiply)(const FusedLinearParams&, const Launch&),
                          const Launch& launch) {
  for (int64_t first = 0; first < p.num_tokens; first += most_rows) {
    FusedLinearParams slice = p;
    slice.num_tokens = std::min(most_rows, p.num_tokens - first);
    slice.input = static_cast<const Element*>(p.input) + first * p.num_inputs;
    const int64_t offset = first * p.num_outputs;
    slice.output = static_cast<unsigned char*>(p.output) + offset * (p.output_float32 ? 4 : sizeof(Element));
    if (p.residual) slice.residual = static_cast<const Element*>(p.residual) + offset;
    if (p.factor) slice.factor = static_cast<const Element*>(p.factor) + first * p.factor_stride;
    cudaError_t error = cudaSuccess;
    if (p.norm_weight) {
      error = normalise<Element>(p, first, slice.num_tokens, normalised, launch);
      slice.input = normalised;
    }
    if (error == cudaSuccess) error = multiply(slice, launch);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Rows from which on, and of which layers, a call whose rows do not know their number is one of
// rows_sm90.cuh.
bool chains_many(const FusedLinearParams& p, const Device& device) {
  constexpr int64_t kMany = 17;
  const bool plain = !p.is_two_part();
  const bool whole =
      has_whole_pieces(plain ? p.num_outputs % 2 * 2 : p.num_outputs * 2, {p.output, p.bias, p.residual});
  return takes_chain(p, device) && p.num_tokens >= kMany && whole &&
         (plain || (!p.output_float32 && !p.bias && !p.residual));
}

// Rows of a slice of such a call, whose normalised rows wait beside it.
int64_t chain_slice_rows(const FusedLinearParams& p) {
  return std::min(p.num_tokens, std::max(kSliceBytes / (p.num_inputs * element_bytes(p.element)), kRowTile));
}

// All rows, each of which gets the same bits whatever their number.
template <typename Element>
cudaError_t multiply_invariantly(const FusedLinearParams& p, const Launch& launch) {
  if constexpr (sizeof(Element) == 2) {
    if (chains_many(p, launch.device))
      return multiply_rows<Element>(
          p, chain_slice_rows(p), launch.workspace,
          p.is_two_part() ? launch_rows_sm90<Element, true, true> : launch_rows_sm90<Element, false, true>,
          launch);
    if (takes_chain(p, launch.device)) return launch_chains<Element>(p, launch);
  }
  return launch_gemvs<Element>(p, launch);
}

// All rows, through cuBLAS where our gated product does not take them.
template <typename Element>
cudaError_t multiply(const FusedLinearParams& p, const Launch& launch) {
  if constexpr (sizeof(Element) == 2)
    if (multiplies_gates(p, launch.device))
      return multiply_rows<Element>(p, Slices::of(p, launch.device).rows,
                                    static_cast<unsigned char*>(launch.workspace) + Cublas::kWorkspaceBytes,
                                    launch_rows_sm90<Element, true, false>, launch);
  const Slices slices = Slices::of(p, launch.device);
  Element* waiting = nullptr;
  if (waits_in_output(p)) {
    waiting = static_cast<Element*>(p.output) + p.num_tokens * (p.num_outputs - p.num_inputs);
    const cudaError_t error = normalise<Element>(p, 0, p.num_tokens, waiting, launch);
    if (error != cudaSuccess) return error;
  }
  for (int64_t first = 0; first < p.num_tokens; first += slices.rows) {
    const int64_t rows = std::min(slices.rows, p.num_tokens - first);
    const cudaError_t error = multiply_slice<Element>(p, first, rows, slices, waiting, launch);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

size_t fused_linear_workspace(const FusedLinearParams& params, const Device& device) {
  if (params.batch_invariant) {
    const bool waits = chains_many(params, device) && params.norm_weight;
    return waits ? chain_slice_rows(params) * params.num_inputs * element_bytes(params.element) : 0;
  }
  if (is_few(params, device)) return 0;
  const Slices slices = Slices::of(params, device);
  return Cublas::kWorkspaceBytes + slices.normalised_bytes + slices.product_bytes;
}

cudaError_t fused_linear(const FusedLinearParams& params, const Launch& launch) {
  if (params.num_tokens == 0 || params.num_outputs == 0) return cudaSuccess;
  return with_element(params.element, [&]<typename Element>() {
    if (params.batch_invariant) return multiply_invariantly<Element>(params, launch);
    return is_few(params, launch.device) ? launch_gemvs<Element>(params, launch)
                                         : multiply<Element>(params, launch);
  });
}

}  // namespace ortolan::cuda
