// What the library says of itself: the loader asks before it registers anything, `python -m jaxprims doctor` prints it.
#include <cuda_runtime.h>

#include <cstdio>

#include "xla/ffi/api/c_api.h"

#ifndef JAXPRIMS_ARCHS
#define JAXPRIMS_ARCHS "unknown"
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
__global__ void touch(int* p) {
  if (p != nullptr) *p = 1;
}
}  // namespace

// 1000 * major + minor of the headers this library was built on. A runtime refuses a library newer than itself.
EXPORT int jaxprims_ffi_api_version() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }

// "archs=sm_80,compute_80,sm_90a; cuda=13.0": the loader compares the architectures with the GPU.
EXPORT const char* jaxprims_build_info() {
  static char text[256];
  std::snprintf(text, sizeof(text), "archs=%s; cuda=%d.%d", JAXPRIMS_ARCHS, CUDART_VERSION / 1000,
                CUDART_VERSION % 1000 / 10);
  return text;
}

// Can kernels of this library run on GPU `ordinal`? Launches one that does nothing. Returns "" or the reason why not.
EXPORT const char* jaxprims_device_check(int ordinal) {
  static char text[256];
  text[0] = '\0';
  int before = 0;
  cudaError_t e = cudaGetDevice(&before);
  if (e == cudaSuccess) e = cudaSetDevice(ordinal);
  if (e == cudaSuccess) {
    touch<<<1, 1>>>(nullptr);
    e = cudaGetLastError();
    if (e == cudaSuccess) e = cudaDeviceSynchronize();
    cudaSetDevice(before);
  }
  if (e != cudaSuccess) std::snprintf(text, sizeof(text), "%s: %s", cudaGetErrorName(e), cudaGetErrorString(e));
  return text;
}
