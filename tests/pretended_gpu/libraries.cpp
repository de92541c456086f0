// Takes the place of cuBLAS, cuBLASLt and NCCL: products and collectives are counted with their sizes.
//
// A product has the name "FUNCTION mM nN kK inDTYPE outDTYPE", in column-major order, as cuBLAS sees it; cuBLASLt's
// also "alignD", the multiple of bytes at which torch says that the result and the bias begin.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <nccl.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "counters.h"

#define API extern "C" __attribute__((visibility("default")))
#define DOES_NOTHING(name, ...) \
  API cublasStatus_t name(__VA_ARGS__) { return CUBLAS_STATUS_SUCCESS; }

namespace {

const char* dtype_name(int dtype) {
  switch (dtype) {
    case CUDA_R_32F: return "fp32";
    case CUDA_R_16BF: return "bf16";
    case CUDA_R_16F: return "fp16";
    case CUDA_R_64F: return "fp64";
    default: return "other";
  }
}

cublasStatus_t product(const char* function, long m, long n, long k, int in, int out, const char* more = "") {
  char name[128];
  snprintf(name, sizeof name, "%s m%ld n%ld k%ld in%s out%s%s", function, m, n, k, dtype_name(in), dtype_name(out),
           more);
  pretended_count("product", name, 0);
  return CUBLAS_STATUS_SUCCESS;
}

template <typename Handle>
cublasStatus_t new_handle(Handle* handle) {
  *handle = static_cast<Handle>(calloc(1, 256));
  return CUBLAS_STATUS_SUCCESS;
}

struct Layout {
  cudaDataType dtype;
  uint64_t rows, columns;
};

// Alignment that the last preference asked for; torch makes the preference just before the product.
thread_local unsigned alignment_of_result = 0;

}  // namespace

// cuBLAS.

API cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) { return new_handle(handle); }
DOES_NOTHING(cublasDestroy_v2, cublasHandle_t)
DOES_NOTHING(cublasSetStream_v2, cublasHandle_t, cudaStream_t)
DOES_NOTHING(cublasSetWorkspace_v2, cublasHandle_t, void*, size_t)
DOES_NOTHING(cublasSetMathMode, cublasHandle_t, cublasMath_t)
DOES_NOTHING(cublasSetPointerMode_v2, cublasHandle_t, cublasPointerMode_t)
DOES_NOTHING(cublasSetSmCountTarget, cublasHandle_t, int)
API cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t* mode) {
  return *mode = CUBLAS_DEFAULT_MATH, CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t* mode) {
  return *mode = CUBLAS_POINTER_MODE_HOST, CUBLAS_STATUS_SUCCESS;
}
#undef cublasGemmEx
API cublasStatus_t cublasGemmEx(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void*,
                                const void*, cudaDataType in, int, const void*, cudaDataType, int, const void*, void*,
                                cudaDataType out, int, cublasComputeType_t, cublasGemmAlgo_t) {
  return product("gemm", m, n, k, in, out);
}
API cublasStatus_t cublasSgemm_v2(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                  const float*, const float*, int, const float*, int, const float*, float*, int) {
  return product("gemm", m, n, k, CUDA_R_32F, CUDA_R_32F);
}
#undef cublasGemmStridedBatchedEx
API cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                              const void*, const void*, cudaDataType in, int, long long, const void*,
                                              cudaDataType, int, long long, const void*, void*, cudaDataType out, int,
                                              long long, int batch, cublasComputeType_t, cublasGemmAlgo_t) {
  return product("batched gemm", m, n, static_cast<long>(k) * batch, in, out);
}
API cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                             const float*, const float*, int, long long, const float*, int, long long,
                                             const float*, float*, int, long long, int batch) {
  return product("batched gemm", m, n, static_cast<long>(k) * batch, CUDA_R_32F, CUDA_R_32F);
}

// cuBLASLt.

API size_t cublasLtGetVersion() { return 130100; }
API cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return new_handle(handle); }
DOES_NOTHING(cublasLtDestroy, cublasLtHandle_t)
API cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description, cublasComputeType_t, cudaDataType_t) {
  return new_handle(description);
}
API cublasStatus_t cublasLtMatmulDescDestroy(const cublasLtMatmulDesc_t description) {
  return free(description), CUBLAS_STATUS_SUCCESS;
}
DOES_NOTHING(cublasLtMatmulDescSetAttribute, cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void*, size_t)
API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return new_handle(preference);
}
API cublasStatus_t cublasLtMatmulPreferenceDestroy(const cublasLtMatmulPreference_t preference) {
  return free(preference), CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                        cublasLtMatmulPreferenceAttributes_t which, const void* value,
                                                        size_t) {
  if (which == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES) memcpy(&alignment_of_result, value, sizeof(unsigned));
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType dtype, uint64_t rows,
                                              uint64_t columns, int64_t) {
  new_handle(layout);
  *reinterpret_cast<Layout*>(*layout) = {dtype, rows, columns};
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatrixLayoutDestroy(const cublasLtMatrixLayout_t layout) {
  return free(layout), CUBLAS_STATUS_SUCCESS;
}
DOES_NOTHING(cublasLtMatrixLayoutSetAttribute, cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t, const void*,
             size_t)
API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                                  cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                  cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                                  cublasLtMatmulHeuristicResult_t* result, int* count) {
  memset(result, 0, sizeof *result);
  return *count = 1, CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*,
                                  cublasLtMatrixLayout_t first, const void*, cublasLtMatrixLayout_t, const void*,
                                  const void*, cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t result,
                                  const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t) {
  auto* a = reinterpret_cast<Layout*>(first);
  auto* d = reinterpret_cast<Layout*>(result);
  uint64_t inner = a->rows == d->rows ? a->columns : a->rows;
  std::string alignment = " align" + std::to_string(alignment_of_result);
  return product("lt", d->rows, d->columns, inner, a->dtype, d->dtype, alignment.c_str());
}

// NCCL, of one rank: a collective copies its input where the result has another place.

namespace {

size_t element_bytes(ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    default: return 8;
  }
}

ncclResult_t collective(const char* name, const void* from, void* to, size_t count, ncclDataType_t dtype) {
  size_t bytes = count * element_bytes(dtype);
  pretended_count("collective", name, bytes);
  if (from != to && bytes <= (1 << 20)) memmove(to, from, bytes);
  return ncclSuccess;
}

ncclResult_t new_communicator(ncclComm_t* communicator) {
  *communicator = static_cast<ncclComm_t>(calloc(1, 256));
  return ncclSuccess;
}

}  // namespace

API ncclResult_t ncclGetVersion(int* version) { return *version = 22907, ncclSuccess; }
API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { return memset(id, 7, sizeof *id), ncclSuccess; }
API ncclResult_t ncclCommInitRank(ncclComm_t* communicator, int, ncclUniqueId, int) {
  return new_communicator(communicator);
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* communicator, int, ncclUniqueId, int, ncclConfig_t*) {
  return new_communicator(communicator);
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t* communicator, int, int, int, ncclUniqueId*, ncclConfig_t*) {
  return new_communicator(communicator);
}
API ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t* communicator, ncclConfig_t*) {
  return new_communicator(communicator);
}
API ncclResult_t ncclCommAbort(ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclCommCount(const ncclComm_t, int* count) { return *count = 1, ncclSuccess; }
API ncclResult_t ncclCommUserRank(const ncclComm_t, int* rank) { return *rank = 0, ncclSuccess; }
API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) { return *error = ncclSuccess, ncclSuccess; }
API ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void**) { return ncclSuccess; }
API ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
API ncclResult_t ncclGroupStart() { return ncclSuccess; }
API ncclResult_t ncclGroupEnd() { return ncclSuccess; }
API const char* ncclGetErrorString(ncclResult_t) { return "error of the pretended NCCL"; }
API const char* ncclGetLastError(ncclComm_t) { return ""; }
API ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t dtype, ncclRedOp_t, ncclComm_t,
                               cudaStream_t) {
  return collective("all-reduce", from, to, count, dtype);
}
API ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t dtype, ncclRedOp_t, int,
                            ncclComm_t, cudaStream_t) {
  return collective("reduce", from, to, count, dtype);
}
API ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t dtype, ncclRedOp_t,
                                   ncclComm_t, cudaStream_t) {
  return collective("reduce-scatter", from, to, count, dtype);
}
API ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t dtype, ncclComm_t,
                               cudaStream_t) {
  return collective("all-gather", from, to, count, dtype);
}
API ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t dtype, int, ncclComm_t,
                               cudaStream_t) {
  return collective("broadcast", from, to, count, dtype);
}
API ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t dtype, int, ncclComm_t, cudaStream_t) {
  return collective("broadcast", buffer, buffer, count, dtype);
}
