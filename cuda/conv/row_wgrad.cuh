// Weight gradient of depthwise convolutions and of groups of few channels on tensor cores, walking down the image row by row.
//
//   dw[r, s, ch, k] = sum over n, p, q of x[n, p + r + base_h, q + s + base_w, ch] * dy[n, p, q, k]
//   band    (one channel a group)  eight columns of dy and the 16 columns of x above them, over 16 spans of 8 columns of one or several
//           images: G_r[16][8] += x[16 columns][16 spans] * dy[16 spans][8 columns]; in the end dw[r][s] = sum over j of G_r[j + s][j]
//   narrow  (2 to 16)  16 rows of the product are the 8 channels of a unit at two neighbouring s (or 16 channels at one s), its 8
//           columns the unit's channels of dy, its 16 steps pixels; what joins different groups is not stored
//
// Layout   channels last, 16-bit elements; chunks, tiles and runs of rows as in band.cuh and narrow.cuh.
// Work     A stage is a row of x and the row of dy that begins to meet it (r = 0); a row of dy stays in registers while R rows of x
//          pass. The sums stay in registers until the block's run ends; then a partial filter is written, and a second kernel adds
//          the partial filters.
// Exact    zeros of padding times infinity make NaN: a NaN in the result is computed again from the definition.
// Order    fixed by the sizes: the same bits in every run.
// Bound    memory.
// Measured on an H200, bf16, us (before): 128x28x28x192 7x7 105 (148), 128x56x56x96 7x7 151 (298), 64x56x56x192 3x3 82 (109);
//          128x56x56x128 of 32 groups 131 (9132), 128x14x14x512 of 32 groups 98 (1158).
#pragma once
#include "conv/row_walk.cuh"
#include "conv/row_wgrad.h"

namespace jaxprims {
namespace conv {

struct RowWgradArgs : WalkArgs {
  int32_t segments_log, pitch_x, pitch_y, y_at, stage;
  float* partials;
};

template <class T, int Threads, int GR, int JX, int JY>
struct PairLoader {
  Granules<Threads, GR, JX> of_x;
  Granules<Threads, GR, JY> of_y;
  int32_t row, end, top, h, stop, last, low, high;  // as in WalkPart; top: the image's row of the piece's row 0; last: the part's last row of dy
  uint32_t mask_x, mask_y;
  const T *x, *y;

  __device__ __forceinline__ void settle(const RowWgradArgs& a, int64_t channel) {
    if (h < stop || row >= end) return;
    const WalkPart part = walk_part(a.d, row, end);
    const int32_t left = part.column * a.d.dil_w + part.g;
    top = part.f, h = part.h0, stop = part.h1, low = part.low, high = part.high, last = part.p1 - 1;
    const int64_t images = a.p.chs - part.image, channels = a.p.groups * a.p.ks - channel;
    mask_x = of_x.inside(a.d.window, left + a.d.base_w, a.d.dil_w, a.d.IW, images, channels);
    mask_y = of_y.inside(a.d.cols, left, a.d.dil_w, a.d.OW, images, channels);
    x = static_cast<const T*>(a.p.in_data) + int64_t{part.image} * a.p.in.channel + (left + a.d.base_w) * a.p.in.s[2] + channel;
    y = static_cast<const T*>(a.p.w_data) + int64_t{part.image} * a.p.w.channel + left * a.p.w.s[2] + channel;
    row += part.p1 - part.p0;
  }
  template <class Place>
  __device__ __forceinline__ void start(const RowWgradArgs& a, int32_t from, int32_t to, int64_t channel, int2* table_x, int2* table_y,
                                        Place place) {
    of_x.build(table_x, a.d.images, a.d.window, a.p.in.channel, a.p.in.s[2] * a.d.dil_w,
               [&](uint32_t n, uint32_t col, uint32_t g) { return n * a.pitch_x + place(col) + g * 16; });
    of_y.build(table_y, a.d.images, a.d.cols, a.p.w.channel, a.p.w.s[2] * a.d.dil_w,
               [&](uint32_t n, uint32_t col, uint32_t g) { return a.y_at + n * a.pitch_y + place(col) + g * 16; });
    row = from, end = to, h = 0, stop = 0;
    settle(a, channel);
  }
  __device__ __forceinline__ void next(const RowWgradArgs& a, int64_t channel, uint32_t stage) {
    if (h < stop) {
      const Problem& p = a.p;
      const int32_t y_row = h * a.d.dil_h + top;
      if (h >= low && h < high) of_x.copy(x + int64_t{y_row + a.d.base_h} * p.in.s[1], p.in_data, stage, mask_x);
      if (h <= last && y_row < a.d.OH) of_y.copy(y + int64_t{y_row} * p.w.s[1], p.w_data, stage, mask_y);
      ++h;
      settle(a, channel);
    }
    copies_commit();
  }
};

__device__ __forceinline__ void load_pair(uint32_t (&d)[2], uint32_t at) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(d[0]), "=r"(d[1]) : "r"(at));
}

template <class T, int R>
__global__ void __launch_bounds__(256, R <= 3 ? 2 : 1) band_wgrad_kernel(const __grid_constant__ RowWgradArgs a) {
  extern __shared__ __align__(128) unsigned char smem[];
  const Problem& p = a.p;
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const int chunk = blockIdx.x % a.d.chunks, block = blockIdx.x / a.d.chunks;
  const int32_t begin = static_cast<int32_t>(a.d.rows * block / a.d.per_chunk), end = static_cast<int32_t>(a.d.rows * (block + 1) / a.d.per_chunk);
  const int64_t channel0 = int64_t{chunk} * kBandChannels;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const auto place = [](uint32_t col) { return col * kBandColumn + (col >> 3) * 16; };
  __shared__ int2 table_x[1024], table_y[512];
  PairLoader<T, 256, 4, 4, 2> loader;
  loader.start(a, begin, end, channel0, table_x, table_y, place);
  for (int i = 0; i + 1 < kPairStages; ++i) loader.next(a, channel0, ring + i * a.stage);

  const int segments = 1 << a.segments_log, span = 2 * t;  // the thread's spans: 2t, 2t + 1, and eight further
  const uint32_t x_at = (span >> a.segments_log) * a.pitch_x + (span & (segments - 1)) * kBandGroup + g * kBandColumn + warp * 8;
  const uint32_t y_at = a.y_at + (span >> a.segments_log) * a.pitch_y + (span & (segments - 1)) * kBandGroup + g * kBandColumn + warp * 8;
  const uint32_t x_next = a.segments_log == 0 ? a.pitch_x : kBandGroup, y_next = a.segments_log == 0 ? a.pitch_y : kBandGroup;
  const uint32_t x_down = a.segments_log == 4 ? 8 * kBandGroup : (8 >> a.segments_log) * a.pitch_x;
  const uint32_t y_down = a.segments_log == 4 ? 8 * kBandGroup : (8 >> a.segments_log) * a.pitch_y;

  float acc[4][R][4];
#pragma unroll
  for (int c = 0; c < 4; ++c)
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[c][r][i] = 0.f;
  uint32_t dy[4][R][2];  // rows of dy, the row that came with input row u in u modulo R
  const auto products = [&](auto number, uint32_t stage, bool has_x, bool has_y) {
    constexpr int U = decltype(number)::value;
    if (has_y) {
      uint32_t raw[2][2][2];  // [spans 0, 8 further][span][channels]
#pragma unroll
      for (int i = 0; i < 4; ++i) load_pair(raw[i / 2][i % 2], stage + y_at + (i / 2 ? y_down : 0) + (i % 2 ? y_next : 0));
#pragma unroll
      for (int c = 0; c < 4; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i) dy[c][U][i] = __byte_perm(raw[i][0][c / 2], raw[i][1][c / 2], c % 2 ? 0x7632 : 0x5410);
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i) dy[c][U][i] = 0;
    }
    if (!has_x) return;
    uint32_t raw[2][2][2][2];  // [columns 0, 8][spans 0, 8 further][span][channels]
#pragma unroll
    for (int i = 0; i < 8; ++i)
      load_pair(raw[i / 4][i / 2 % 2][i % 2], stage + x_at + (i / 4) * kBandGroup + (i / 2 % 2 ? x_down : 0) + (i % 2 ? x_next : 0));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = __byte_perm(raw[i % 2][i / 2][0][c / 2], raw[i % 2][i / 2][1][c / 2], c % 2 ? 0x7632 : 0x5410);
#pragma unroll
      for (int r = 0; r < R; ++r) mma_k16(acc[c][r], x, dy[c][(U - r + R) % R][0], dy[c][(U - r + R) % R][1], T{});
    }
  };
  int slot = 0;
#pragma unroll 1
  for (int32_t row = begin; row < end;) {
    const WalkPart part = walk_part(a.d, row, end);
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int r = 0; r < R; ++r) dy[c][r][0] = dy[c][r][1] = 0;
    int number = 0;
#pragma unroll 1
    for (int32_t h = part.h0; h < part.h1; ++h) {
      const bool has_x = h >= part.low && h < part.high, has_y = h < part.p1 && h * a.d.dil_h + part.f < a.d.OH;
      const uint32_t stage = ring + slot * a.stage;
      copies_wait<kPairStages - 2>();
      __syncthreads();
      switch (number) {
        case 0: products(std::integral_constant<int, 0>{}, stage, has_x, has_y); break;
        case 1: products(std::integral_constant<int, 1>{}, stage, has_x, has_y); break;
        case 2: products(std::integral_constant<int, 2>{}, stage, has_x, has_y); break;
        case 3: if constexpr (R > 3) products(std::integral_constant<int, 3 % R>{}, stage, has_x, has_y); break;
        case 4: if constexpr (R > 4) products(std::integral_constant<int, 4 % R>{}, stage, has_x, has_y); break;
        case 5: if constexpr (R > 5) products(std::integral_constant<int, 5 % R>{}, stage, has_x, has_y); break;
        case 6: if constexpr (R > 6) products(std::integral_constant<int, 6 % R>{}, stage, has_x, has_y); break;
      }
      loader.next(a, channel0, ring + (slot == 0 ? kPairStages - 1 : slot - 1) * a.stage);
      slot = slot + 1 == kPairStages ? 0 : slot + 1;
      number = number + 1 == R ? 0 : number + 1;
    }
    row += part.p1 - part.p0;
  }

  // Sums along the diagonals: a warp's 16 x 8 products pass through its own shared memory.
  copies_wait<0>();
  __syncthreads();
  float* tile = reinterpret_cast<float*>(smem) + warp * 16 * 8;
  const int lane = threadIdx.x % 32;
  float* part = a.partials + int64_t{block} * a.d.R * a.d.S * p.groups;
#pragma unroll
  for (int c = 0; c < 4; ++c)
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) tile[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = acc[c][r][i];
      __syncwarp();
      const int64_t channel = channel0 + warp * 4 + c;
      if (r < a.d.R && lane < a.d.S && channel < p.groups) {
        float sum = 0.f;
        for (int j = 0; j < 8; ++j) sum += (j + lane < 16) ? tile[(j + lane) * 8 + j] : 0.f;
        part[(int64_t{r} * a.d.S + lane) * p.groups + channel] = sum;
      }
      __syncwarp();
    }
}

// 16 warps: eight units x two halves of the pixels, each half four sets of 16.
template <class T, int Depth>
__global__ void __launch_bounds__(512, 1) narrow_wgrad_kernel(const __grid_constant__ RowWgradArgs a) {
  constexpr int R = 3, kSets = 4, kSteps = Depth == 8 ? 2 : 3;  // pairs of s, or s
  extern __shared__ __align__(128) unsigned char smem[];
  const Problem& p = a.p;
  const uint32_t zeros = static_cast<uint32_t>(__cvta_generic_to_shared(smem)), ring = zeros + 256;
  if (threadIdx.x < 64) reinterpret_cast<uint32_t*>(smem)[threadIdx.x] = 0;
  const int chunk = blockIdx.x % a.d.chunks, block = blockIdx.x / a.d.chunks;
  const int32_t begin = static_cast<int32_t>(a.d.rows * block / a.d.per_chunk), end = static_cast<int32_t>(a.d.rows * (block + 1) / a.d.per_chunk);
  const int64_t channel0 = int64_t{chunk} * kNarrowChannels;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int unit = warp % 8, set0 = warp / 8 * kSets;
  const auto place = [](uint32_t col) { return col * kNarrowPixel; };
  __shared__ int2 table_x[kPairGranulesX], table_y[kPairGranulesY];
  PairLoader<T, 512, 8, kPairGranulesX / 512, kPairGranulesY / 512> loader;
  loader.start(a, begin, end, channel0, table_x, table_y, place);
  for (int i = 0; i + 1 < kPairStages; ++i) loader.next(a, channel0, ring + i * a.stage);

  // A transposed load of four 8 x 8 matrices: x has (pixels 0-7, 8-15) x (s, s + 1) or (channels 0-7, 8-15); dy has two sets.
  const int pixels = a.d.images * a.d.cols;
  uint32_t x_at[kSets], y_at[kSets / 2];
#pragma unroll
  for (int i = 0; i < kSets; ++i) {
    int pixel = (set0 + i) * 16 + lane / 16 * 8 + lane % 8;
    if (pixel >= pixels) pixel = 0;
    const int n = pixel / a.d.cols, col = pixel - n * a.d.cols, second = lane / 8 % 2;
    x_at[i] = n * a.pitch_x + (col + (Depth == 8 ? second : 0)) * kNarrowPixel + (Depth == 8 ? unit * 16 : unit / 2 * 32 + second * 16);
  }
#pragma unroll
  for (int i = 0; i < kSets / 2; ++i) {
    const int pixel = (set0 + 2 * i) * 16 + lane, n = pixel / a.d.cols, col = pixel - n * a.d.cols;
    y_at[i] = pixel < pixels ? a.y_at + n * a.pitch_y + col * kNarrowPixel + unit * 16 : ~0u;
  }
  float acc[R][kSteps][4];
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[r][s][i] = 0.f;
  uint32_t dy[R][kSets / 2][4];
  const auto products = [&](auto number, uint32_t stage, bool has_x, bool has_y) {
    constexpr int U = decltype(number)::value;
#pragma unroll
    for (int i = 0; i < kSets / 2; ++i) load_matrices_transposed(dy[U][i], has_y && y_at[i] != ~0u ? stage + y_at[i] : zeros);
    if (!has_x) return;
#pragma unroll
    for (int i = 0; i < kSets; ++i)
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        uint32_t x[4];
        load_matrices_transposed(x, stage + x_at[i] + s * (Depth == 8 ? 2 : 1) * kNarrowPixel);
#pragma unroll
        for (int r = 0; r < R; ++r)
          mma_k16(acc[r][s], x, dy[(U - r + R) % R][i / 2][i % 2 * 2], dy[(U - r + R) % R][i / 2][i % 2 * 2 + 1], T{});
      }
  };
  int slot = 0;
#pragma unroll 1
  for (int32_t row = begin; row < end;) {
    const WalkPart part = walk_part(a.d, row, end);
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int i = 0; i < kSets / 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) dy[r][i][j] = 0;
    int number = 0;
#pragma unroll 1
    for (int32_t h = part.h0; h < part.h1; ++h) {
      const bool has_x = h >= part.low && h < part.high, has_y = h < part.p1 && h * a.d.dil_h + part.f < a.d.OH;
      const uint32_t stage = ring + slot * a.stage;
      copies_wait<kPairStages - 2>();
      __syncthreads();
      switch (number) {
        case 0: products(std::integral_constant<int, 0>{}, stage, has_x, has_y); break;
        case 1: products(std::integral_constant<int, 1>{}, stage, has_x, has_y); break;
        default: products(std::integral_constant<int, 2>{}, stage, has_x, has_y); break;
      }
      loader.next(a, channel0, ring + (slot == 0 ? kPairStages - 1 : slot - 1) * a.stage);
      slot = slot + 1 == kPairStages ? 0 : slot + 1;
      number = number + 1 == R ? 0 : number + 1;
    }
    row += part.p1 - part.p0;
  }

  // The second half of the pixels is added to the first; the partial filter is [tap][channel of the group][k].
  copies_wait<0>();
  __syncthreads();
  constexpr int kSums = R * kSteps * 4;
  float* sums = reinterpret_cast<float*>(smem) + (unit * 32 + lane) * (kSums + 1);
  if (warp >= 8) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = acc[i / 4 / kSteps][i / 4 % kSteps][i % 4];
  }
  __syncthreads();
  if (warp >= 8) return;
  const int64_t per = p.ks, K = p.groups * per;
  float* part = a.partials + int64_t{block} * 9 * per * K;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const int r = i / 4 / kSteps, step = i / 4 % kSteps, high = i % 4 / 2;
    const int s = Depth == 8 ? 2 * step + high : step;
    const int64_t in = channel0 + (Depth == 8 ? unit * 8 : unit / 2 * 16 + high * 8) + g, k = channel0 + unit * 8 + 2 * t + i % 2;
    if (s < 3 && k < K && in / per == k / per)
      part[((r * 3 + s) * per + in % per) * K + k] = acc[r][step][i % 4] + sums[i];
  }
}

// dw = sum of the partial filters: a block of 32 channels k x 32 shares of one tap and channel of the group; shares in order, then
// pairwise. A NaN is computed again from x and dy.
template <class T, class Out>
__global__ void __launch_bounds__(1024) row_wgrad_sum(const __grid_constant__ RowWgradArgs a) {
  __shared__ float shares[32][33];
  const Problem& p = a.p;
  const int64_t per = p.ks, K = p.groups * per, chunks = (K + 31) / 32;
  int64_t id = blockIdx.x;
  const int64_t k = id % chunks * 32 + threadIdx.x;
  id /= chunks;  // tap * per + channel
  float v = 0.f;
  if (k < K) {
    const float* at = a.partials + id * K + k;
    const int64_t step = int64_t{a.d.R} * a.d.S * per * K;
    for (int i = threadIdx.y; i < a.d.per_chunk; i += 32) v += at[i * step];
  }
  const auto total = [&]() {
    __syncthreads();
    shares[threadIdx.y][threadIdx.x] = v;
    for (int half = 16; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.y < half) shares[threadIdx.y][threadIdx.x] += shares[threadIdx.y + half][threadIdx.x];
    }
    __syncthreads();
    return shares[0][threadIdx.x];
  };
  float sum = total();
  const int64_t ch = id % per, tap = id / per;
  const int r = static_cast<int>(tap / a.d.S), s = static_cast<int>(tap % a.d.S);
  const int64_t group = k / per, kk = k - group * per;
  if (__syncthreads_or(sum != sum)) {
    v = 0.f;
    if (k < K) {
      const T* x = static_cast<const T*>(p.in_data) + group * p.in.g + ch * p.in.outer;
      const T* dy = static_cast<const T*>(p.w_data) + group * p.w.g + kk * p.w.outer;
      const int32_t OH = a.d.OH, OW = a.d.OW;
      for (int64_t i = threadIdx.y; i < p.chs * OH; i += 32) {
        const int64_t n = i / OH;
        const int32_t q = static_cast<int32_t>(i - n * OH), h = q + r * a.d.dil_h + a.d.base_h;
        if (static_cast<uint32_t>(h) >= static_cast<uint32_t>(a.d.IH)) continue;
        for (int32_t j = 0; j < OW; ++j) {
          const int32_t w = j + s * a.d.dil_w + a.d.base_w;
          if (static_cast<uint32_t>(w) >= static_cast<uint32_t>(a.d.IW)) continue;
          v = fmaf(to_float(x[n * p.in.channel + h * p.in.s[1] + w * p.in.s[2]]), to_float(dy[n * p.w.channel + q * p.w.s[1] + j * p.w.s[2]]), v);
        }
      }
    }
    const float again = total();
    if (sum != sum) sum = again;
  }
  if (threadIdx.y == 0 && k < K)
    static_cast<Out*>(p.out_data)[p.out.offset + group * p.out.g + ch * p.out.outer + kk * p.out.channel + r * p.out.s[1] + s * p.out.s[2]] =
        from_float<Out>(sum);
}

}  // namespace conv
}  // namespace jaxprims
