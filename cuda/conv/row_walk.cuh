// What the kernels that walk down an image row by row share: the input rows in a ring of shared memory, the output rows out of it.
//
// Layout   A stage is one input row of a tile: pixels (image, column of the window) x GR granules of 16 bytes; `place` says where
//          pixel and granule lie, so that each kernel chooses its own padding against bank conflicts. cp.async writes zeros for
//          what lies outside of the array.
// Exact    The matrix instructions multiply by zeros: beside the band, beside the diagonal, in the padding. Finite inputs do not
//          notice; an infinite or NaN one makes NaN. So a NaN among the results is computed again, tap by tap (walk_exact).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "common/act.cuh"
#include "common/async_copy.cuh"
#include "common/pack.cuh"
#include "common/warp_mma.cuh"
#include "conv/row_walk.h"

namespace jaxprims {
namespace conv {

struct WalkArgs {
  Problem p;
  RowWalk d;
};

template <class T>
constexpr uint32_t kNanStep = 0;  // a 15-bit magnitude plus this reaches bit 15 exactly where it is NaN
template <>
constexpr uint32_t kNanStep<__nv_bfloat16> = 0x007f007fu;
template <>
constexpr uint32_t kNanStep<__half> = 0x03ff03ffu;

template <class T>
__device__ __forceinline__ bool any_nan(uint32_t w) {
  return (((w & 0x7fff7fffu) + kNanStep<T>)&0x80008000u) != 0;
}

template <class T>
__device__ __forceinline__ uint32_t pack_pair(float lo, float hi);
template <>
__device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
template <>
__device__ __forceinline__ uint32_t pack_pair<__half>(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// The bits of a 16-bit element, or 0; loaded in any case, so that loads do not wait for each other.
template <class T>
__device__ __forceinline__ uint32_t bits_or_zero(const T* at, const T* any, bool take) {
  const uint32_t v = __ldg(reinterpret_cast<const uint16_t*>(take ? at : any));
  return take ? v : 0u;
}

// The granules of a row that a thread copies: number threadIdx.x, + Threads, .. of images x window x GR. Where each lies, counted from the
// window's first pixel in the array and from the stage in shared memory, is written down once; which are inside, once for each tile.
template <int Threads, int GR, int J, int Unroll = J>
struct Granules {
  int2* table;
  int32_t count;

  template <class Place>
  __device__ __forceinline__ void build(int2* shared, int32_t images, int32_t window, int64_t outer, int64_t step, Place place) {
    table = shared, count = images * window * GR;
    for (int32_t i = threadIdx.x; i < count; i += Threads) {
      const int32_t pixel = i / GR, g = i % GR, n = pixel / window, col = pixel - n * window;
      table[i] = make_int2(static_cast<int32_t>(n * outer + col * step + g * 8), static_cast<int32_t>(place(n, col, g)));
    }
  }
  __device__ __forceinline__ uint32_t inside(int32_t window, int32_t left, int32_t dilation, int32_t width, int64_t images, int64_t channels) {
    uint32_t mask = 0;
#pragma unroll 1
    for (int j = 0; j < J; ++j) {
      const int32_t i = threadIdx.x + j * Threads, pixel = i / GR, g = i % GR, n = pixel / window, w = left + (pixel - n * window) * dilation;
      if (static_cast<uint32_t>(w) < static_cast<uint32_t>(width) && n < images && g * 8 < channels) mask |= 1u << j;
    }
    return mask;
  }
  template <class T>
  __device__ __forceinline__ void copy(const T* base, const void* any, uint32_t stage, uint32_t mask) const {
#pragma unroll Unroll
    for (int j = 0; j < J; ++j) {
      const int32_t i = threadIdx.x + j * Threads;
      if (i >= count) break;
      const int2 at = table[i];
      const bool take = mask >> j & 1;
      copy_async(stage + at.y, take ? static_cast<const void*>(base + at.x) : any, take ? 16 : 0);
    }
  }
};

// The loads run ahead of the products through the same run of rows; rows outside of the image are not loaded.
template <class T, int Threads, int GR, int J, int Unroll>
struct WalkLoader {
  Granules<Threads, GR, J, Unroll> granules;
  int32_t row, end, first, h, stop;  // row: where the next part starts; first: the image's row of the piece's row 0
  uint32_t mask;
  const T* base;                     // the window's first pixel in row `first`

  __device__ __forceinline__ void settle(const WalkArgs& a, int64_t channel) {
    while (h >= stop && row < end) {
      const WalkPart part = walk_part(a.d, row, end);
      const int32_t left = part.column * a.d.dil_w + part.g + a.d.base_w;
      first = part.f + a.d.base_h, h = part.low, stop = part.high;
      mask = granules.inside(a.d.window, left, a.d.dil_w, a.d.IW, a.p.imgs - part.image, a.p.groups * a.p.chs - channel);
      base = static_cast<const T*>(a.p.in_data) + int64_t{part.image} * a.p.in.outer + left * a.p.in.s[2] + channel;
      row += part.p1 - part.p0;
    }
  }
  template <class Place>
  __device__ __forceinline__ void start(const WalkArgs& a, int32_t from, int32_t to, int64_t channel, int2* table, Place place) {
    granules.build(table, a.d.images, a.d.window, a.p.in.outer, a.p.in.s[2] * a.d.dil_w, place);
    row = from, end = to, h = 0, stop = 0;
    settle(a, channel);
  }
  // One row into the stage, and a commit in any case.
  __device__ __forceinline__ void next(const WalkArgs& a, int64_t channel, uint32_t stage) {
    if (h < stop) {
      granules.copy(base + int64_t{h * a.d.dil_h + first} * a.p.in.s[1], a.p.in_data, stage, mask);
      ++h;
      settle(a, channel);
    }
    copies_commit();
  }
};

__device__ __forceinline__ float walk_bias(const Problem& p, int64_t c) {
  if (p.bias == nullptr || c >= p.groups * p.ks) return 0.f;
  if (p.bias_type == Type::kF32) return static_cast<const float*>(p.bias)[c];
  if (p.bias_type == Type::kF16) return to_float(static_cast<const __half*>(p.bias)[c]);
  return to_float(static_cast<const __nv_bfloat16*>(p.bias)[c]);
}

// Every NaN in an output row of a tile again, from the definition: where one was seen, after all are written.
template <class T>
__device__ __forceinline__ void walk_exact_row(const WalkArgs& a, int32_t image0, int32_t row, int32_t col0, int64_t channel0,
                                               int channels) {
  const Problem& p = a.p;
  const int64_t C = p.groups * p.ks, count = int64_t{a.d.images} * a.d.cols * channels;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    const int32_t pixel = static_cast<int32_t>(i / channels), n = pixel / a.d.cols, col = col0 + (pixel - n * a.d.cols) * a.d.dil_w;
    const int64_t c = channel0 + i % channels, image = int64_t{image0} + n;
    if (image >= p.imgs || col >= a.d.OW || c >= C) continue;
    T* out = static_cast<T*>(p.out_data) + image * p.out.outer + row * p.out.s[1] + col * p.out.s[2] + c;
    if (!any_nan<T>(*reinterpret_cast<const uint16_t*>(out))) continue;
    const int64_t g = c / p.ks, k = c - g * p.ks;
    const T* in = static_cast<const T*>(p.in_data) + image * p.in.outer + g * p.in.g;
    const T* w = static_cast<const T*>(p.w_data) + p.w.offset + g * p.w.g + k * p.w.outer;
    float sum = 0.f;
#pragma unroll 1
    for (int r = 0; r < a.d.R; ++r) {
      const int32_t h = row + r * a.d.dil_h + a.d.base_h;
      if (static_cast<uint32_t>(h) >= static_cast<uint32_t>(a.d.IH)) continue;
#pragma unroll 1
      for (int s = 0; s < a.d.S; ++s) {
        const int32_t x = col + s * a.d.dil_w + a.d.base_w;
        if (static_cast<uint32_t>(x) >= static_cast<uint32_t>(a.d.IW)) continue;
        const int32_t tr = a.d.reversed_h ? a.d.R - 1 - r : r, ts = a.d.reversed_w ? a.d.S - 1 - s : s;
#pragma unroll 1
        for (int64_t ch = 0; ch < p.chs; ++ch)
          sum = fmaf(to_float(in[h * p.in.s[1] + x * p.in.s[2] + ch * p.in.channel]),
                     to_float(w[ch * p.w.channel + tr * p.w.s[1] + ts * p.w.s[2]]), sum);
      }
    }
    sum += walk_bias(p, c);
    if (p.activation == static_cast<int>(Act::kRelu)) sum = act_apply(Act::kRelu, sum);
    *out = from_float<T>(sum);
  }
}
template <class T>
__device__ __forceinline__ void walk_exact(const WalkArgs& a, int32_t row, int32_t end, int64_t channel0, int channels) {
#pragma unroll 1
  for (; row < end; ++row) {
    const WalkPart part = walk_part(a.d, row, row + 1);
    const int32_t out = part.p0 * a.d.dil_h + part.f;
    if (out < a.d.OH) walk_exact_row<T>(a, part.image, out, part.column * a.d.dil_w + part.g, channel0, channels);
  }
}

}  // namespace conv
}  // namespace jaxprims
