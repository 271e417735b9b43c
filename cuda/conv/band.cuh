// Depthwise convolution, forward and input gradient, on tensor cores: one banded matrix per channel and tap row.
//
//   out[n, p, q, c] = sum over r, s of in[n, p + r + base_h, q + s + base_w, c] * w[r, s, c]
//   eight neighbouring q of one channel and tap row r: out[8] += in[16 columns] * B_r[16][8],  B_r[k][j] = w[r][k - j], else 0
//
// Layout   channels last, 16-bit elements; a block has 32 channels, a warp four of them, whose B_r stay in registers.
// Work     The 16 rows of the matrix product are 16 spans of 8 columns, of one or several images, all in the same image row. An input
//          row h meets R output rows, whose sums (R x 4 registers a channel) rotate: it is read from shared memory once. Two neighbouring
//          columns of two channels become two operands by two byte permutations: no transpose.
//          Rows come through a ring in shared memory (row_walk.cuh); a finished row leaves through shared memory in 16-byte pieces.
// Order    fixed: taps along a row inside of the matrix instruction, rows r one after the other.
// Cost     a product does 16 x 8 x 16 multiplications of which S / 16 count; 7 x 7 needs 1/16 of the FMA kernel's instructions.
//          Measured on an H200, bf16, host's clock, us (depthwise.cuh): 128x28x28x192 7x7 forward 111 (177), input gradient 110 (175);
//          128x56x56x96 7x7 179, 181 (435, 440); 256x28x28x144 5x5 157, 156 (177, 180).
//          Bound: the latency of a row's steps, 8 warps to a multiprocessor.
#pragma once
#include "conv/band.h"
#include "conv/row_walk.cuh"

namespace jaxprims {
namespace conv {

struct BandArgs : WalkArgs {
  int32_t segments_log, pitch, stage;
};

constexpr int kBandThreads = 256;

template <class T, int R>
__global__ void __launch_bounds__(kBandThreads, 1) band_kernel(const __grid_constant__ BandArgs a) {
  extern __shared__ __align__(128) unsigned char smem[];
  const Problem& p = a.p;
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(smem)), outs = ring + kBandStages * a.stage;
  const int chunk = blockIdx.x % a.d.chunks, block = blockIdx.x / a.d.chunks;
  const int32_t begin = static_cast<int32_t>(a.d.rows * block / a.d.per_chunk), end = static_cast<int32_t>(a.d.rows * (block + 1) / a.d.per_chunk);
  const int64_t channel0 = int64_t{chunk} * kBandChannels;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const auto place = [&](uint32_t image, uint32_t col, uint32_t granule) {
    return image * a.pitch + col * kBandColumn + (col >> 3) * 16 + granule * 16;
  };
  __shared__ int2 table[4 * kBandThreads];
  WalkLoader<T, kBandThreads, 4, 4, 4> loader;
  loader.start(a, begin, end, channel0, table, place);
  for (int i = 0; i + 1 < kBandStages; ++i) loader.next(a, channel0, ring + i * a.stage);

  float bias[4];
  uint32_t band[4][R][2];
  {
    const T* w = static_cast<const T*>(p.w_data) + p.w.offset;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int64_t channel = channel0 + warp * 4 + c;
      const bool inside = channel < p.groups;
      bias[c] = walk_bias(p, channel);
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t word = 0;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int s = 2 * t + 8 * half + e - g;
            const int tr = a.d.reversed_h ? a.d.R - 1 - r : r, ts = a.d.reversed_w ? a.d.S - 1 - s : s;
            const bool take = inside && s >= 0 && s < a.d.S && r < a.d.R;
            word |= bits_or_zero(w + channel * p.w.g + tr * p.w.s[1] + ts * p.w.s[2], w, take) << (16 * e);
          }
          band[c][r][half] = word;
        }
    }
  }

  const int segments = 1 << a.segments_log;
  const uint32_t span = (g >> a.segments_log) * a.pitch + (g & (segments - 1)) * kBandGroup + t * 2 * kBandColumn + warp * 8;
  const uint32_t down = a.segments_log == 4 ? 8 * kBandGroup : (8 >> a.segments_log) * a.pitch;  // eight spans further
  int slot = 0;             // of the ring
  int parity = 0;           // of the output rows
  bool pending = false;     // an output row waits in shared memory
  __shared__ int32_t waiting[2][3];  // its image, row and column
  bool nan = false;
  const auto flush = [&]() {
    if (!pending) return;
    pending = false;
    const uint32_t from = outs + (parity ^ 1) * kBandOut;
    const int32_t* where = waiting[parity ^ 1];
    if (where[1] >= a.d.OH) return;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int i = threadIdx.x + k * kBandThreads;
      const int granule = i % 4, m = i / 32, j = i / 4 % 8;
      const int64_t image = int64_t{where[0]} + (m >> a.segments_log), channel = channel0 + granule * 8;
      const int32_t col = where[2] + ((m & (segments - 1)) * 8 + j) * a.d.dil_w;
      if (image >= p.imgs || col >= a.d.OW || channel >= p.groups) continue;
      uint4 v;
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "r"(from + m * kBandGroup + j * kBandColumn + granule * 16));
      nan = nan || any_nan<T>(v.x) || any_nan<T>(v.y) || any_nan<T>(v.z) || any_nan<T>(v.w);
      *reinterpret_cast<uint4*>(static_cast<T*>(p.out_data) + image * p.out.outer + where[1] * p.out.s[1] + col * p.out.s[2] +
                                channel) = v;
    }
  };

  float acc[4][R][4];
  // Input row number u modulo R: it gives tap r to the output row whose sums are in (u - r) modulo R, and ends that of tap R - 1.
  const auto products = [&](auto number, uint32_t stage, bool valid, bool ends, bool relu) {
    constexpr int U = decltype(number)::value, Last = (U + 1) % R;
    if (valid) {
      uint32_t raw[2][2][2][2];  // [half of the rows][half of the columns][column][channels]
#pragma unroll
      for (int i = 0; i < 8; ++i)
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];"
                     : "=r"(raw[i / 4][i / 2 % 2][i % 2][0]), "=r"(raw[i / 4][i / 2 % 2][i % 2][1])
                     : "r"(stage + span + (i / 4 ? down : 0) + i / 2 % 2 * kBandGroup + i % 2 * kBandColumn));
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = __byte_perm(raw[i % 2][i / 2][0][c / 2], raw[i % 2][i / 2][1][c / 2], c % 2 ? 0x7632 : 0x5410);
#pragma unroll
        for (int r = 0; r < R; ++r) mma_k16(acc[c][(U - r + R) % R], x, band[c][r][0], band[c][r][1], T{});
      }
    }
    if (ends) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float v[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          v[c] = acc[c][Last][i] + bias[c];
          if (relu) v[c] = act_apply(Act::kRelu, v[c]);
        }
        asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(outs + parity * kBandOut + (g + i / 2 * 8) * kBandGroup +
                                                             (2 * t + i % 2) * kBandColumn + warp * 8),
                     "r"(pack_pair<T>(v[0], v[1])), "r"(pack_pair<T>(v[2], v[3]))
                     : "memory");
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[c][Last][i] = 0.f;
  };

  const bool relu = p.activation == static_cast<int>(Act::kRelu);
#pragma unroll 1
  for (int32_t row = begin; row < end;) {
    const WalkPart part = walk_part(a.d, row, end);
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[c][r][i] = 0.f;
    int number = 0;
    // The template's R may pass the filter's: the rows of zeros lie below it, and their input rows count as outside.
    const int32_t h1 = part.h1 + R - a.d.R;
#pragma unroll 1
    for (int32_t h = part.h0; h < h1; ++h) {
      const bool valid = h >= part.low && h < part.high;
      const uint32_t stage = ring + slot * a.stage;
      if (valid) copies_wait<kBandStages - 2>();
      __syncthreads();
      const int32_t out = h - (R - 1);
      const bool ends = out >= part.p0;
      switch (number) {
        case 0: products(std::integral_constant<int, 0>{}, stage, valid, ends, relu); break;
        case 1: products(std::integral_constant<int, 1>{}, stage, valid, ends, relu); break;
        case 2: products(std::integral_constant<int, 2>{}, stage, valid, ends, relu); break;
        case 3: products(std::integral_constant<int, 3>{}, stage, valid, ends, relu); break;
        case 4: products(std::integral_constant<int, 4>{}, stage, valid, ends, relu); break;
        case 5: if constexpr (R > 5) products(std::integral_constant<int, 5 % R>{}, stage, valid, ends, relu); break;
        case 6: if constexpr (R > 6) products(std::integral_constant<int, 6 % R>{}, stage, valid, ends, relu); break;
      }
      if (valid) {
        const int to = slot == 0 ? kBandStages - 1 : slot - 1;
        loader.next(a, channel0, ring + to * a.stage);
        slot = slot + 1 == kBandStages ? 0 : slot + 1;
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
  if (__syncthreads_or(nan)) walk_exact<T>(a, begin, end, channel0, kBandChannels);
}

}  // namespace conv
}  // namespace jaxprims
