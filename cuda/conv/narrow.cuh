// Grouped convolution with 2 to 16 channels a group, 3 x 3, forward and input gradient, on tensor cores.
//
//   out[n, p, q, k] = sum over r, s, ch of in[n, p + r + base_h, q + s + base_w, group's ch] * w[r, s, ch, k]
//
// Layout   channels last, 16-bit elements. A unit is 8 output channels: they need the 8 input channels of the same place (groups of up
//          to 8; the filter's operand is block-diagonal) or 16 (groups of 16). A block has eight units and up to 128 pixels of
//          an image row of one or several images; a warp one unit and half of the pixels, four sets of 16.
// Work     16 pixels x 8 channels come from shared memory by ldmatrix: 8 channels of a pixel are 16 bytes, so a tap is an address. Two
//          taps s side by side fill the 16 steps of a product, the third one a product of 8 steps. An input row meets three output
//          rows, whose sums rotate through registers: it is read from shared memory once. The filter stays in registers.
//          Rows come through a ring in shared memory (row_walk.cuh); a finished row leaves through shared memory in 16-byte pieces.
// Order    fixed by the sizes.
// Cost     of a product's multiplications channels a group / 8 count. Bound: memory.
//          Measured on an H200, bf16, us (direct.cuh): 128x56x56x128 of 32 groups 177 forward, 169 input gradient (3169, 3190);
//          128x14x14x512 of 32 groups 77, 73 (862, 833).
#pragma once
#include "conv/narrow.h"
#include "conv/row_walk.cuh"

namespace jaxprims {
namespace conv {

struct NarrowArgs : WalkArgs {
  int32_t stage;
};

constexpr int kNarrowThreads = 512;
constexpr int kNarrowSets = 4;  // of 16 pixels, a warp

template <class T, int Depth>
__global__ void __launch_bounds__(kNarrowThreads, 1) narrow_kernel(const __grid_constant__ NarrowArgs a) {
  constexpr int R = 3, S = 3, kWords = Depth == 8 ? 3 : 6;  // words of the filter's operand, a tap row
  extern __shared__ __align__(128) unsigned char smem[];
  const Problem& p = a.p;
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(smem)), outs = ring + kNarrowStages * a.stage;
  const int chunk = blockIdx.x % a.d.chunks, block = blockIdx.x / a.d.chunks;
  const int32_t begin = static_cast<int32_t>(a.d.rows * block / a.d.per_chunk), end = static_cast<int32_t>(a.d.rows * (block + 1) / a.d.per_chunk);
  const int64_t channel0 = int64_t{chunk} * kNarrowChannels;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int unit = warp % 8, set0 = warp / 8 * kNarrowSets;
  const auto place = [&](uint32_t image, uint32_t col, uint32_t granule) {
    return (image * a.d.window + col) * kNarrowPixel + granule * 16;
  };
  __shared__ int2 table[kNarrowGranules];
  WalkLoader<T, kNarrowThreads, 8, (kNarrowGranules + kNarrowThreads - 1) / kNarrowThreads, 2> loader;
  loader.start(a, begin, end, channel0, table, place);
  for (int i = 0; i + 1 < kNarrowStages; ++i) loader.next(a, channel0, ring + i * a.stage);

  uint32_t filter[R][kWords];
  {
    const T* w = static_cast<const T*>(p.w_data) + p.w.offset;
    const int64_t out = channel0 + unit * 8 + g, in0 = channel0 + (Depth == 8 ? unit * 8 : unit / 2 * 16) + 2 * t;
    const int64_t group = out / p.ks, k = out - group * p.ks;
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const int s = Depth == 8 ? i : i / 2;
        const int tr = a.d.reversed_h ? R - 1 - r : r, ts = a.d.reversed_w ? S - 1 - s : s;
        uint32_t word = 0;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int64_t in = in0 + e + (Depth == 16 && i % 2 ? 8 : 0);
          const bool take = out < p.groups * p.ks && in / p.chs == group;
          word |= bits_or_zero(w + group * p.w.g + k * p.w.outer + (in - group * p.chs) * p.w.channel + tr * p.w.s[1] + ts * p.w.s[2], w, take)
                  << (16 * e);
        }
        filter[r][i] = word;
      }
  }
  __shared__ float biases[kNarrowChannels];
  if (threadIdx.x < kNarrowChannels) biases[threadIdx.x] = walk_bias(p, channel0 + threadIdx.x);

  const int pixels = a.d.images * a.d.cols;
  // Where the window of pixel i starts in a stage (any pixel's where there is none).
  __shared__ uint16_t starts[kNarrowPixels];
  if (threadIdx.x < kNarrowPixels) {
    const int pixel = threadIdx.x < pixels ? threadIdx.x : 0, image = pixel / a.d.cols, col = pixel - image * a.d.cols;
    starts[threadIdx.x] = static_cast<uint16_t>(image * a.d.window + col);
  }
  const uint32_t second = Depth == 8 ? lane / 16 * kNarrowPixel + unit * 16 : unit / 2 * 32 + lane / 16 * 16;
  int slot = 0, parity = 0;
  bool pending = false;
  __shared__ int32_t waiting[2][3];  // its image, row and column
  bool nan = false;
  const auto flush = [&]() {
    if (!pending) return;
    pending = false;
    const uint32_t from = outs + (parity ^ 1) * kNarrowOut;
    const int32_t* where = waiting[parity ^ 1];
    if (where[1] >= a.d.OH) return;
#pragma unroll(Depth == 16 ? 1 : 2)
    for (int part = 0; part < kNarrowPixels * 8 / kNarrowThreads; ++part) {
      const int i = threadIdx.x + part * kNarrowThreads;
      if (i >= pixels * 8) break;
      const int granule = i % 8, pixel = i / 8, n = pixel / a.d.cols;
      const int64_t image = int64_t{where[0]} + n, channel = channel0 + granule * 8;
      const int32_t col = where[2] + (pixel - n * a.d.cols) * a.d.dil_w;
      if (image >= p.imgs || col >= a.d.OW || channel >= p.groups * p.ks) continue;
      uint4 v;
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "r"(from + pixel * kNarrowPixel + granule * 16));
      nan = nan || any_nan<T>(v.x) || any_nan<T>(v.y) || any_nan<T>(v.z) || any_nan<T>(v.w);
      *reinterpret_cast<uint4*>(static_cast<T*>(p.out_data) + image * p.out.outer + where[1] * p.out.s[1] + col * p.out.s[2] +
                                channel) = v;
    }
  };

  float acc[kNarrowSets][R][4];
  // Input row number u modulo 3, as in band.cuh.
  const auto products = [&](auto number, uint32_t stage, bool valid, bool ends, bool relu) {
    constexpr int U = decltype(number)::value, Last = (U + 1) % R;
    if (valid) {
#pragma unroll
      for (int i = 0; i < kNarrowSets; ++i) {
        const uint32_t from = stage + second + starts[(set0 + i) * 16 + lane % 16] * kNarrowPixel;
        if constexpr (Depth == 8) {
          uint32_t x[4], y[2];
          load_matrices(x, from);
          load_matrices(y, from + 2 * kNarrowPixel);
#pragma unroll
          for (int r = 0; r < R; ++r) mma_k16(acc[i][(U - r + R) % R], x, filter[r][0], filter[r][1], T{});
#pragma unroll
          for (int r = 0; r < R; ++r) mma_k8(acc[i][(U - r + R) % R], y[0], y[1], filter[r][2], T{});
        } else {
#pragma unroll
          for (int s = 0; s < S; ++s) {
            uint32_t x[4];
            load_matrices(x, from + s * kNarrowPixel);
#pragma unroll
            for (int r = 0; r < R; ++r) mma_k16(acc[i][(U - r + R) % R], x, filter[r][2 * s], filter[r][2 * s + 1], T{});
          }
        }
      }
    }
    if (ends) {
#pragma unroll
      for (int i = 0; i < kNarrowSets; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float v0 = acc[i][Last][2 * h] + biases[unit * 8 + 2 * t], v1 = acc[i][Last][2 * h + 1] + biases[unit * 8 + 2 * t + 1];
          if (relu) v0 = act_apply(Act::kRelu, v0), v1 = act_apply(Act::kRelu, v1);
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(outs + parity * kNarrowOut + ((set0 + i) * 16 + g + 8 * h) * kNarrowPixel +
                                                       unit * 16 + t * 4),
                       "r"(pack_pair<T>(v0, v1))
                       : "memory");
        }
    }
#pragma unroll
    for (int i = 0; i < kNarrowSets; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[i][Last][j] = 0.f;
  };

  const bool relu = p.activation == static_cast<int>(Act::kRelu);
#pragma unroll 1
  for (int32_t row = begin; row < end;) {
    const WalkPart part = walk_part(a.d, row, end);
#pragma unroll
    for (int i = 0; i < kNarrowSets; ++i)
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][r][j] = 0.f;
    int number = 0;
#pragma unroll 1
    for (int32_t h = part.h0; h < part.h1; ++h) {
      const bool valid = h >= part.low && h < part.high;
      const uint32_t stage = ring + slot * a.stage;
      if (valid) copies_wait<kNarrowStages - 2>();
      __syncthreads();
      const int32_t out = h - (R - 1);
      const bool ends = out >= part.p0;
      switch (number) {
        case 0: products(std::integral_constant<int, 0>{}, stage, valid, ends, relu); break;
        case 1: products(std::integral_constant<int, 1>{}, stage, valid, ends, relu); break;
        default: products(std::integral_constant<int, 2>{}, stage, valid, ends, relu); break;
      }
      if (valid) {
        const int to = slot == 0 ? kNarrowStages - 1 : slot - 1;
        loader.next(a, channel0, ring + to * a.stage);
        slot = slot + 1 == kNarrowStages ? 0 : slot + 1;
      }
      flush();
      number = number + 1 == R ? 0 : number + 1;
      if (ends) {
        if (threadIdx.x == 0)
          waiting[parity][0] = part.image, waiting[parity][1] = out * a.d.dil_h + part.f, waiting[parity][2] = part.column * a.d.dil_w + part.g;
        pending = true, parity ^= 1;
      }
    }
    row += part.p1 - part.p0;
  }
  __syncthreads();
  flush();
  if (__syncthreads_or(nan)) walk_exact<T>(a, begin, end, channel0, kNarrowChannels);
}

}  // namespace conv
}  // namespace jaxprims
