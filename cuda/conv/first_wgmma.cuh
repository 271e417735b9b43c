// wgmma with its rows in registers, for the first-layer kernels: d[64][8 NT] += a[64][16] * b[16][8 NT], without a swizzle.
#pragma once
#include <cstdint>

#include "common/mma.cuh"

namespace jaxprims {
namespace conv {
namespace first {

// a as mma.sync has it, by warps of 16 rows. TransB: the columns of b are contiguous, else its steps.
#define JAXPRIMS_FIRST_WGMMA_32(TYPE) \
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  "}, {%16, %17, %18, %19}, %20, 1, 1, 1, %21;" \
  : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), \
    "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), \
    "+f"(d[3][2]), "+f"(d[3][3]) \
  : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(TransB))
#define JAXPRIMS_FIRST_WGMMA_64(TYPE) \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
  "}, {%32, %33, %34, %35}, %36, 1, 1, 1, %37;" \
  : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), \
    "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), \
    "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), \
    "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), \
    "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]) \
  : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(TransB))
#define JAXPRIMS_FIRST_WGMMA_96(TYPE) \
  asm volatile("wgmma.mma_async.sync.aligned.m64n96k16.f32." TYPE "." TYPE " {" \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47" \
  "}, {%48, %49, %50, %51}, %52, 1, 1, 1, %53;" \
  : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), \
    "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), \
    "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), \
    "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), \
    "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), \
    "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), \
    "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]) \
  : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(TransB))
template <class T, int NT, int TransB>
__device__ __forceinline__ void wgmma(float (&d)[NT][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
  if constexpr (IsHalf<T>::value) {
    if constexpr (NT == 4) JAXPRIMS_FIRST_WGMMA_32("f16");
    if constexpr (NT == 8) JAXPRIMS_FIRST_WGMMA_64("f16");
    if constexpr (NT == 12) JAXPRIMS_FIRST_WGMMA_96("f16");
  } else {
    if constexpr (NT == 4) JAXPRIMS_FIRST_WGMMA_32("bf16");
    if constexpr (NT == 8) JAXPRIMS_FIRST_WGMMA_64("bf16");
    if constexpr (NT == 12) JAXPRIMS_FIRST_WGMMA_96("bf16");
  }
}
#undef JAXPRIMS_FIRST_WGMMA_32
#undef JAXPRIMS_FIRST_WGMMA_64
#undef JAXPRIMS_FIRST_WGMMA_96

template <int M, int NT>
__device__ __forceinline__ void pin(float (&d)[M][NT][4]) {
#pragma unroll
  for (int i = 0; i < M * NT * 4; ++i) asm volatile("" : "+f"(d[i / (4 * NT)][i / 4 % NT][i % 4])::"memory");
}
template <int M>
__device__ __forceinline__ void pin(uint32_t (&v)[M][4]) {
#pragma unroll
  for (int i = 0; i < M * 4; ++i) asm volatile("" : "+r"(v[i / 4][i % 4])::"memory");
}
__device__ __forceinline__ void pin(uint2 (&v)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(v[i].x), "+r"(v[i].y)::"memory");
}

}  // namespace first
}  // namespace conv
}  // namespace jaxprims
