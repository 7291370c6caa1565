// cuBLASLt: descriptors are empty, each product has one algorithm without a workspace.
#include "no_half.h"

#include <cublasLt.h>

#include <cstring>

extern "C" void simulated_cuda_kernel(void *stream, const char *name);

namespace {
template <typename Descriptor> cublasStatus_t create(Descriptor *it) {
  *it = reinterpret_cast<Descriptor>(new char);
  return CUBLAS_STATUS_SUCCESS;
}
template <typename Descriptor> cublasStatus_t destroy(Descriptor it) {
  delete reinterpret_cast<char *>(it);
  return CUBLAS_STATUS_SUCCESS;
}
} // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { return create(handle); }
size_t cublasLtGetVersion() { return CUBLAS_VERSION; }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *it, cublasComputeType_t, cudaDataType_t) { return create(it); }
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t it) { return destroy(it); }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void *, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *it, cudaDataType, uint64_t, uint64_t, int64_t) { return create(it); }
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t it) { return destroy(it); }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t, const void *, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *it) { return create(it); }
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t it) { return destroy(it); }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                                                    const void *, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t results[],
                                              int *count) {
  std::memset(results, 0, sizeof *results);
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *, cublasLtMatrixLayout_t,
                              const void *, cublasLtMatrixLayout_t, const void *, const void *, cublasLtMatrixLayout_t, void *,
                              cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t stream) {
  simulated_cuda_kernel(stream, "cublasLtMatmul");
  return CUBLAS_STATUS_SUCCESS;
}

} // extern "C"
