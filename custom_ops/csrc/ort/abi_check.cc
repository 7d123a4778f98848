// Compares abi.h with the official header, where one is given (-DORT_INCLUDE_DIR=...).
#define OrtCustomOp OrtCustomOpOfficial
#include <onnxruntime_c_api.h>
#undef OrtCustomOp

#include "abi.h"
#include "kernels/element_types.h"

namespace {

namespace abi = ortolan::abi;

#define ORTOLAN_CHECK_SLOT(name) \
  static_assert(offsetof(OrtApi, name) == abi::name::index * sizeof(void*), #name)

ORTOLAN_CHECK_SLOT(CreateStatus);
ORTOLAN_CHECK_SLOT(GetErrorMessage);
ORTOLAN_CHECK_SLOT(CreateCustomOpDomain);
ORTOLAN_CHECK_SLOT(CustomOpDomain_Add);
ORTOLAN_CHECK_SLOT(AddCustomOpDomain);
ORTOLAN_CHECK_SLOT(GetTensorMutableData);
ORTOLAN_CHECK_SLOT(GetTensorElementType);
ORTOLAN_CHECK_SLOT(GetDimensionsCount);
ORTOLAN_CHECK_SLOT(GetDimensions);
ORTOLAN_CHECK_SLOT(GetTensorTypeAndShape);
ORTOLAN_CHECK_SLOT(KernelInfoGetAttribute_float);
ORTOLAN_CHECK_SLOT(KernelInfoGetAttribute_int64);
ORTOLAN_CHECK_SLOT(KernelInfoGetAttribute_string);
ORTOLAN_CHECK_SLOT(KernelContext_GetInputCount);
ORTOLAN_CHECK_SLOT(KernelContext_GetOutputCount);
ORTOLAN_CHECK_SLOT(KernelContext_GetInput);
ORTOLAN_CHECK_SLOT(KernelContext_GetOutput);
ORTOLAN_CHECK_SLOT(ReleaseStatus);
ORTOLAN_CHECK_SLOT(ReleaseTensorTypeAndShapeInfo);
ORTOLAN_CHECK_SLOT(AddSessionConfigEntry);
ORTOLAN_CHECK_SLOT(KernelContext_GetGPUComputeStream);
ORTOLAN_CHECK_SLOT(HasSessionConfigEntry);
ORTOLAN_CHECK_SLOT(KernelInfo_GetNodeName);
ORTOLAN_CHECK_SLOT(KernelContext_ParallelFor);

using ortolan::ElementType;
using ortolan::facts_of;
static_assert(facts_of(ElementType::kFloat32).onnx == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
static_assert(facts_of(ElementType::kFloat16).onnx == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16);
static_assert(facts_of(ElementType::kBFloat16).onnx == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16);
static_assert(facts_of(ElementType::kInt32).onnx == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32);
static_assert(facts_of(ElementType::kInt64).onnx == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
static_assert(facts_of(ElementType::kUint8).onnx == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8);

static_assert(offsetof(OrtCustomOpOfficial, CreateKernelV2) == offsetof(abi::CustomOp, CreateKernelV2));
static_assert(offsetof(OrtCustomOpOfficial, GetStartVersion) == offsetof(abi::CustomOp, GetStartVersion));
static_assert(offsetof(OrtCustomOpOfficial, ReleaseAliasMap) == offsetof(abi::CustomOp, ReleaseAliasMap));

}  // namespace
