// The transposing copy in layout.cu.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace jaxprims {

// y[n, b, a] = x[n, a, b] for elements of `bytes` (1, 2, 4 or 8) bytes.
cudaError_t launch_transpose_layout(const void* x, void* y, int bytes, int64_t n, int64_t a, int64_t b, cudaStream_t stream);

}  // namespace jaxprims
