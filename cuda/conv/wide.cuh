// Depthwise convolution with filters of 8 x 8 to 31 x 31, forward and input gradient, on tensor cores.
//
//   out[n, p, q, c] = sum over r, s of in[n, p + r + base_h, q + s + base_w, c] * w[r, s, c]
//   one channel, one tap row: out[16 images][8 columns] += in[16 images][16 columns] * B[16][8],  B[k][j] = w[r][16 step + k - 8 nt - j]
//
// Layout   channels last, 16-bit elements; a block has 16 channels, 16 images, 4 x 32 outputs, a warp two of the channels.
// Work     B depends on 16 step - 8 nt alone: five registers hold what a thread needs of a tap row, for all steps and columns. An input row
//          meets four output rows with four neighbouring tap rows, which rotate through registers: each is read from shared memory once
//          (a table of neighbouring pairs of taps), and the sums stay in registers. Steps outside of the image are skipped.
//          Input rows come through a ring in shared memory.
// Order    fixed by the sizes.
// Cost     31 x 31: 62 % of the products of a step that is not skipped count. Bound: tensor cores and shared memory.
//          Measured on an H200, bf16: 64x32x32x256 31x31 317 us forward, 318 input gradient (depthwise.cuh: 1814, 1820).
#pragma once
#include "conv/row_walk.cuh"
#include "conv/wide.h"

namespace jaxprims {
namespace conv {

struct WideArgs : WalkArgs {
  int32_t tiles_h;
};

constexpr int kWideThreads = 256;

template <class T>
__global__ void __launch_bounds__(kWideThreads, 1) wide_kernel(const __grid_constant__ WideArgs a) {
  constexpr int P = kWideRows, NT = kWideCols / 8, NE = 5;
  extern __shared__ __align__(128) unsigned char smem[];
  const Problem& p = a.p;
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(smem)), outs = ring + kWideStages * kWideStage;
  uint32_t* table = reinterpret_cast<uint32_t*>(smem + kWideStages * kWideStage + kWideOut);
  uint32_t id = blockIdx.x;
  const int chunk = id % a.d.chunks;
  id /= a.d.chunks;
  const int32_t p0 = static_cast<int32_t>(id % a.tiles_h) * P;
  id /= a.tiles_h;
  const int32_t q0 = static_cast<int32_t>(id % a.d.tiles_w) * kWideCols;
  const int64_t image0 = int64_t{id / a.d.tiles_w} * kWideImages;
  const int64_t channel0 = int64_t{chunk} * kWideChannels;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;

  // Input rows h0 .. h1 - 1; the first step of 16 columns with one inside, and the end of them.
  const int32_t h_from = p0 + a.d.base_h, left = q0 + a.d.base_w;
  const int32_t h0 = h_from > 0 ? h_from : 0;
  int32_t h1 = h_from + P + a.d.R - 1;
  if (h1 > p.axis[1].I) h1 = p.axis[1].I;
  const int step0 = left < 0 ? -left / 16 : 0;
  int step1 = (kWideCols + a.d.S - 1 + 15) / 16;
  while (step1 > step0 && left + 16 * (step1 - 1) >= p.axis[2].I) --step1;

  const auto place = [](uint32_t image, uint32_t col, uint32_t granule) { return image * kWidePitch + col * 32 + granule * 16; };
  const auto load = [&](int32_t h, int slot) {
    if (h < h1) {
      const uint32_t width = (step1 - step0) * 16;
      const T* base = static_cast<const T*>(p.in_data) + image0 * p.in.outer + int64_t{h} * p.in.s[1] + channel0;
      const uint32_t granules = kWideImages * 2 * width;
#pragma unroll 2
      for (uint32_t i = threadIdx.x; i < granules; i += kWideThreads) {
        const uint32_t granule = i & 1, pixel = i >> 1, n = pixel / 16 % kWideImages, col = (pixel / 256 + step0) * 16 + pixel % 16;
        const int32_t w = left + static_cast<int32_t>(col);
        const bool take = static_cast<uint32_t>(w) < static_cast<uint32_t>(p.axis[2].I) && image0 + n < p.imgs &&
                          channel0 + granule * 8 < p.groups;
        const T* from = take ? base + n * p.in.outer + w * p.in.s[2] + granule * 8 : static_cast<const T*>(p.in_data);
        copy_async(ring + slot * kWideStage + place(n, col, granule), from, take ? 16 : 0);
      }
    }
    copies_commit();
  };
  for (int i = 0; i + 1 < kWideStages; ++i) load(h0 + i, i);

  {  // The table: [tap row][channel][pairs (w[d], w[d + 1]), d = -7 ..]
    const T* w = static_cast<const T*>(p.w_data) + p.w.offset;
    for (int i = threadIdx.x; i < a.d.R * kWideChannels * kWideTable; i += kWideThreads) {
      const int c = i % kWideChannels, d = i / kWideChannels % kWideTable - 7, r = i / kWideChannels / kWideTable;
      uint32_t word = 0;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int s = d + e;
        if (s < 0 || s >= a.d.S || channel0 + c >= p.groups) continue;
        const int tr = a.d.reversed_h ? a.d.R - 1 - r : r, ts = a.d.reversed_w ? a.d.S - 1 - s : s;
        word |= uint32_t{*reinterpret_cast<const uint16_t*>(w + (channel0 + c) * p.w.g + tr * p.w.s[1] + ts * p.w.s[2])} << (16 * e);
      }
      table[(r * kWideChannels + c) * kWideTable + d + 7] = word;
    }
  }

  float acc[2][P][NT][4];
#pragma unroll
  for (int c = 0; c < 2; ++c)
#pragma unroll
    for (int i = 0; i < P; ++i)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[c][i][n][j] = 0.f;
  uint32_t band[2][P][NE];
#pragma unroll
  for (int c = 0; c < 2; ++c)
#pragma unroll
    for (int i = 0; i < P; ++i)
#pragma unroll
      for (int e = 0; e < NE; ++e) band[c][i][e] = 0;
  const uint32_t* mine = table + warp * 2 * kWideTable + 7 + 2 * t - g;
  const auto taps = [&](auto number, int32_t r) {  // of tap row r, or zeros
    constexpr int U = decltype(number)::value;
    const bool inside = static_cast<uint32_t>(r) < static_cast<uint32_t>(a.d.R);
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int e = 0; e < NE; ++e) band[c][U][e] = inside ? mine[(r * kWideChannels + c) * kWideTable + 8 * e] : 0u;
  };
  // Input row number u modulo 4: its newest tap row is for output row p0, the one before for p0 + 1, ...
  const auto products = [&](auto number, int32_t r, uint32_t stage) {
    constexpr int U = decltype(number)::value;
    taps(number, r);
#pragma unroll
    for (int step = 0; step < kWideSteps; ++step) {
      if (step < step0 || step >= step1) continue;
      uint32_t raw[2][2][2];  // [half of the images][half of the columns][column]
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int image = g + i / 4 * 8, col = 16 * step + 8 * (i / 2 % 2) + 2 * t + i % 2;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(raw[i / 4][i / 2 % 2][i % 2]) : "r"(stage + place(image, col, warp / 4) + warp % 4 * 4));
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = __byte_perm(raw[i % 2][i / 2][0], raw[i % 2][i / 2][1], c ? 0x7632 : 0x5410);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const int e = 2 * step - n;
          if (e + 1 < 0 || e >= NE) continue;
#pragma unroll
          for (int i = 0; i < P; ++i) {
            const int from = (U - i + P) % P;
            mma_k16(acc[c][i][n], x, e >= 0 ? band[c][from][e < 0 ? 0 : e] : 0u, e + 1 < NE ? band[c][from][e + 1 < NE ? e + 1 : 0] : 0u, T{});
          }
        }
      }
    }
  };
  __syncthreads();
  // The tap rows that output rows p0 + 1 .. p0 + 3 have in the first input row came with rows before it.
  int number = h0 - h_from;  // tap row of output row p0
  taps(std::integral_constant<int, 3>{}, number - 1);
  taps(std::integral_constant<int, 2>{}, number - 2);
  taps(std::integral_constant<int, 1>{}, number - 3);
  int slot = 0, u = 0;
#pragma unroll 1
  for (int32_t h = h0; h < h1; ++h, ++number) {
    copies_wait<kWideStages - 2>();
    __syncthreads();
    load(h + kWideStages - 1, slot == 0 ? kWideStages - 1 : slot - 1);
    const uint32_t stage = ring + slot * kWideStage;
    slot = slot + 1 == kWideStages ? 0 : slot + 1;
    switch (u) {
      case 0: products(std::integral_constant<int, 0>{}, number, stage); break;
      case 1: products(std::integral_constant<int, 1>{}, number, stage); break;
      case 2: products(std::integral_constant<int, 2>{}, number, stage); break;
      default: products(std::integral_constant<int, 3>{}, number, stage); break;
    }
    u = (u + 1) % P;
  }

  const bool relu = p.activation == static_cast<int>(Act::kRelu);
  float bias[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) bias[c] = walk_bias(p, channel0 + warp * 2 + c);
  bool nan = false;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float v[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          v[c] = acc[c][i][n][j] + bias[c];
          if (relu) v[c] = act_apply(Act::kRelu, v[c]);
        }
        const int image = g + j / 2 * 8, col = 8 * n + 2 * t + j % 2;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(outs + (image * kWideCols + col) * 48 + warp * 4), "r"(pack_pair<T>(v[0], v[1]))
                     : "memory");
      }
    __syncthreads();
    if (p0 + i >= p.axis[1].O) continue;
    for (int k = threadIdx.x; k < kWideImages * kWideCols * 2; k += kWideThreads) {
      const int granule = k % 2, pixel = k / 2, n = pixel / kWideCols;
      const int32_t col = q0 + pixel % kWideCols;
      const int64_t channel = channel0 + granule * 8;
      if (image0 + n >= p.imgs || col >= p.axis[2].O || channel >= p.groups) continue;
      uint4 v;
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "r"(outs + pixel * 48 + granule * 16));
      nan = nan || any_nan<T>(v.x) || any_nan<T>(v.y) || any_nan<T>(v.z) || any_nan<T>(v.w);
      *reinterpret_cast<uint4*>(static_cast<T*>(p.out_data) + (image0 + n) * p.out.outer + (p0 + i) * p.out.s[1] + col * p.out.s[2] + channel) = v;
    }
  }
  if (__syncthreads_or(nan)) {
#pragma unroll 1
    for (int32_t row = p0; row < p0 + P && row < p.axis[1].O; ++row)
      walk_exact_row<T>(a, static_cast<int32_t>(image0), row, q0, channel0, kWideChannels);
  }
}

}  // namespace conv
}  // namespace jaxprims
