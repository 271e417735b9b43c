// Hopper's tensor copy engine: loads of boxes and of im2col columns into swizzled shared memory, stores of boxes.
//   A tensor map describes the array; it is encoded on the host at every call (it holds the address) and is passed to the
//   kernel by value as a __grid_constant__. Coordinates and extents go from the innermost axis out. What lies outside the
//   array reads as zero and is not written.
//   im2col (N, [D, [H,]] W, C): the pixels form one row-major list of base positions, per axis lower + i * stride for
//   i < count; a load takes `pixels` of them from a start on, all moved by the same offsets (of a tap), 64 channels of each.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace jaxprims {

// ---- device ---------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void tma_load_2d(uint32_t to, const CUtensorMap* map, uint32_t bar, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(bar), "r"(x), "r"(y)
      : "memory");
}
__device__ __forceinline__ void tma_load_3d(uint32_t to, const CUtensorMap* map, uint32_t bar, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void tma_load_4d(uint32_t to, const CUtensorMap* map, uint32_t bar, int x, int y, int z, int u) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(u)
      : "memory");
}
__device__ __forceinline__ void tma_load_im2col_4d(uint32_t to, const CUtensorMap* map, uint32_t bar, int c, int w, int h, int n,
                                                   uint16_t dw, uint16_t dh) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2], "
      "{%7, %8};" ::"r"(to),
      "l"(map), "r"(bar), "r"(c), "r"(w), "r"(h), "r"(n), "h"(dw), "h"(dh)
      : "memory");
}
__device__ __forceinline__ void tma_load_im2col_5d(uint32_t to, const CUtensorMap* map, uint32_t bar, int c, int w, int h, int d,
                                                   int n, uint16_t dw, uint16_t dh, uint16_t dd) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2], {%8, %9, %10};" ::"r"(to),
      "l"(map), "r"(bar), "r"(c), "r"(w), "r"(h), "r"(d), "r"(n), "h"(dw), "h"(dh), "h"(dd)
      : "memory");
}
__device__ __forceinline__ void tma_store_2d(const CUtensorMap* map, uint32_t from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from), "r"(x), "r"(y)
               : "memory");
}
__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, uint32_t from, int x, int y, int z, int u) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(from), "r"(x),
               "r"(y), "r"(z), "r"(u)
               : "memory");
}
// Ends a group of stores / waits until the shared memory of all groups has been read.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// ---- host -----------------------------------------------------------------------------------------------------------------
namespace tma {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                 const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
using EncodeIm2col = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                  const int*, const int*, cuuint32_t, cuuint32_t, const cuuint32_t*, CUtensorMapInterleave,
                                  CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// A function of the driver by name, without linking to it; null where it has none.
inline void* driver_function(const char* name) {
  void* f = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t e = cudaGetDriverEntryPointByVersion(name, &f, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t e = cudaGetDriverEntryPoint(name, &f, cudaEnableDefault, &found);
#endif
  if (e != cudaSuccess) (void)cudaGetLastError();
  return e == cudaSuccess && found == cudaDriverEntryPointSuccess ? f : nullptr;
}

// The same, asked until the driver answers; two threads that ask at once find the same.
template <class F>
F remembered(std::atomic<F>& known, const char* name) {
  F f = known.load(std::memory_order_relaxed);
  if (f == nullptr) {
    f = reinterpret_cast<F>(driver_function(name));
    known.store(f, std::memory_order_relaxed);
  }
  return f;
}

// Array, 128-byte swizzle: extents, strides in bytes of axes 1.., box. False: refused.
inline bool encode_tiled(CUtensorMap* map, CUtensorMapDataType type, int rank, const void* data, const uint64_t* extent,
                         const uint64_t* stride, const uint32_t* box) {
  static std::atomic<EncodeTiled> known{nullptr};
  const EncodeTiled encode = remembered(known, "cuTensorMapEncodeTiled");
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  cuuint64_t dims[5], steps[5];
  cuuint32_t boxes[5];
  for (int i = 0; i < rank; ++i) dims[i] = extent[i], boxes[i] = box[i];
  for (int i = 0; i + 1 < rank; ++i) steps[i] = stride[i];
  return encode != nullptr &&
         encode(map, type, static_cast<cuuint32_t>(rank), const_cast<void*>(data), dims, steps, boxes, ones,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Dense channels-last array with `spatial` axes, elements of so many bytes, 128 bytes of channels at a time; arrays of the spatial
// axes from W outwards.
inline bool encode_im2col(CUtensorMap* map, CUtensorMapDataType type, int spatial, const void* data, uint64_t c,
                          const uint64_t* extent, uint64_t n, const int* lower, const int* upper, const uint32_t* stride,
                          uint32_t pixels, uint32_t bytes = 2) {
  static std::atomic<EncodeIm2col> known{nullptr};
  const EncodeIm2col encode = remembered(known, "cuTensorMapEncodeIm2col");
  cuuint64_t dims[5] = {c}, steps[5] = {bytes * c};
  cuuint32_t strides[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < spatial; ++i) {
    dims[1 + i] = extent[i];
    steps[1 + i] = steps[i] * extent[i];
    strides[1 + i] = stride[i];
  }
  dims[1 + spatial] = n;
  return encode != nullptr &&
         encode(map, type, static_cast<cuuint32_t>(spatial + 2), const_cast<void*>(data), dims, steps, lower, upper, 128 / bytes,
                pixels, strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace tma
}  // namespace jaxprims
