// The part of ONNX Runtime's C ABI that custom operators use, as a table of numbered slots.
//
// The published API is a struct of function pointers that only grows, so a slot's number is its name for
// good. Build with -DORT_INCLUDE_DIR=<folder of onnxruntime_c_api.h> to have every number compared.
// Source: onnxruntime/core/session/onnxruntime_c_api.cc (order of the table), API version 20.
#pragma once

#include <cstddef>
#include <cstdint>

struct OrtApi;
struct OrtStatus;
struct OrtValue;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtTensorTypeAndShapeInfo;
struct OrtShapeInferContext;

namespace ortolan::abi {

constexpr uint32_t kApiVersion = 20;

// OrtErrorCode, OrtMemType and OrtCustomOpInputOutputCharacteristic, the values in use.
enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };
enum MemoryType : int { kHostInput = -2, kDefaultMemory = 0 };
enum Characteristic : int { kRequired = 0, kOptional = 1 };

struct ApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// OrtCustomOp of API version 20.
struct CustomOp {
  uint32_t version;
  void* (*CreateKernel)(const CustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const CustomOp*);
  const char* (*GetExecutionProviderType)(const CustomOp*);
  int (*GetInputType)(const CustomOp*, size_t);
  size_t (*GetInputTypeCount)(const CustomOp*);
  int (*GetOutputType)(const CustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const CustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const CustomOp*, size_t);
  int (*GetOutputCharacteristic)(const CustomOp*, size_t);
  int (*GetInputMemoryType)(const CustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const CustomOp*);
  int (*GetVariadicInputHomogeneity)(const CustomOp*);
  int (*GetVariadicOutputMinArity)(const CustomOp*);
  int (*GetVariadicOutputHomogeneity)(const CustomOp*);
  OrtStatus* (*CreateKernelV2)(const CustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const CustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const CustomOp*);
  int (*GetEndVersion)(const CustomOp*);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};

// One slot of the API table: its number and its function type.
template <size_t kIndex, typename Function>
struct Slot {
  static constexpr size_t index = kIndex;

  static Function* of(const OrtApi* api) {
    return reinterpret_cast<Function*>(reinterpret_cast<void* const*>(api)[kIndex]);
  }
};

using CreateStatus = Slot<0, OrtStatus*(int, const char*)>;
using GetErrorMessage = Slot<2, const char*(const OrtStatus*)>;
using CreateCustomOpDomain = Slot<26, OrtStatus*(const char*, OrtCustomOpDomain**)>;
using CustomOpDomain_Add = Slot<27, OrtStatus*(OrtCustomOpDomain*, const CustomOp*)>;
using AddCustomOpDomain = Slot<28, OrtStatus*(OrtSessionOptions*, OrtCustomOpDomain*)>;
using GetTensorMutableData = Slot<51, OrtStatus*(OrtValue*, void**)>;
using GetTensorElementType = Slot<60, OrtStatus*(const OrtTensorTypeAndShapeInfo*, int*)>;
using GetDimensionsCount = Slot<61, OrtStatus*(const OrtTensorTypeAndShapeInfo*, size_t*)>;
using GetDimensions = Slot<62, OrtStatus*(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t)>;
using GetTensorTypeAndShape = Slot<65, OrtStatus*(const OrtValue*, OrtTensorTypeAndShapeInfo**)>;
using KernelInfoGetAttribute_float = Slot<85, OrtStatus*(const OrtKernelInfo*, const char*, float*)>;
using KernelInfoGetAttribute_int64 = Slot<86, OrtStatus*(const OrtKernelInfo*, const char*, int64_t*)>;
using KernelInfoGetAttribute_string = Slot<87, OrtStatus*(const OrtKernelInfo*, const char*, char*, size_t*)>;
using KernelContext_GetInputCount = Slot<88, OrtStatus*(const OrtKernelContext*, size_t*)>;
using KernelContext_GetOutputCount = Slot<89, OrtStatus*(const OrtKernelContext*, size_t*)>;
using KernelContext_GetInput = Slot<90, OrtStatus*(const OrtKernelContext*, size_t, const OrtValue**)>;
using KernelContext_GetOutput =
    Slot<91, OrtStatus*(OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**)>;
using ReleaseStatus = Slot<93, void(OrtStatus*)>;
using ReleaseTensorTypeAndShapeInfo = Slot<99, void(OrtTensorTypeAndShapeInfo*)>;
using AddSessionConfigEntry = Slot<130, OrtStatus*(OrtSessionOptions*, const char*, const char*)>;
using KernelContext_GetGPUComputeStream = Slot<193, OrtStatus*(const OrtKernelContext*, void**)>;
using HasSessionConfigEntry = Slot<237, OrtStatus*(const OrtSessionOptions*, const char*, int*)>;
using KernelInfo_GetNodeName = Slot<244, OrtStatus*(const OrtKernelInfo*, char*, size_t*)>;
using KernelContext_ParallelFor =
    Slot<274, OrtStatus*(const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t, void*)>;

}  // namespace ortolan::abi
