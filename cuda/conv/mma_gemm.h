// The float32 tiles of implicit_gemm.cuh on tensor cores, fed by asynchronous copies.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace jaxprims {
namespace conv {

struct Args;
cudaError_t mma_gemm_launch(const Args& a, int64_t first, unsigned blocks, cudaStream_t stream);

}  // namespace conv
}  // namespace jaxprims
