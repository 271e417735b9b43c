// Convolution forward and input gradient on Hopper's tensor cores, float32: an implicit matrix product in TF32, or in float32 as
// three products of TF32.
//
//   out[n, o.., k] = clip( sum over taps j.., channels c of in[n, lower + o' * step + j * offset.., c] * w[tap, c, k]
//                          + bias[k] + residual )
//   with the walks and phases of sm90_conv.cuh. For TF32 wgmma takes an operand from shared memory K-major alone: pixels are, the
//   filter of a forward convolution is not. So the product is transposed: rows are channels k, columns are pixels, and the filter
//   is the operand that comes from registers, where any thread may read any element of the chunk.
//
// Layout   in, out channels last; w HWIO as it lies, by chunks of 32 x 32 (forward: rows c, columns k) or rows of 32 k (input
//          gradient); no copy of w, no workspace. The rows of a forward tile are permuted so that the threads of a warp read the
//          chunk's 128-byte swizzle without bank conflicts: sm90_f32_row.
// Work     persistent, one block per multiprocessor. One thread loads by (im2col) TMA; two warpgroups multiply the same tile,
//          64 channels each (kCB 2) or half of the pixels each (kCB 1). Sums go from registers to memory, float32, full sectors.
// TF32     the hardware truncates the pixels; so the filter is rounded away from zero: what one operand loses the other gains, on
//          average, and no product is off by more than if both were rounded to nearest.
// Exact    x = hi + lo, a b = hi hi + hi lo + lo hi, each part TF32. Filter: split in registers, hi rounded. Pixels: hi is what the
//          hardware reads of x; three warps write the chunk of lo beside it. The tensor core truncates when it adds: small terms go
//          first, and every 32 channels the sum is added to one in registers, rounded.
//          Not finite: such a filter has lo = 0, and +-1 in the place of hi against lo of the pixels; such a pixel has lo = itself,
//          and +-1 in its own place. So infinity times a number is infinity, and what is NaN stays NaN. Numbers within a factor of
//          1 - 2^-12 of the largest count as infinite.
// Order    every output is summed by one warpgroup in one order: the same bits in every run.
// Cost     2 * outputs * taps * C flops, times three where exact. Shared memory moves 128 bytes a cycle: its tiles, of 64 x kN sums
//          for each warpgroup, read 64 for the multiplication, the rest brings chunks in: wide tiles are near the tensor cores' rate.
// Tried    TFLOP/s on an H200, forward (3x3: layers of ResNet-50, batch 256; 9x9: N 128, C 64, 64^2, K 128; paper5: N 128, C 384,
//          13^2, K 384, 3x3). TF32: v1 tiles of 256 or 128 pixels, filter to nearest: 9x9 413, paper5 313, 3x3 C 512 295, error 1.6
//          times XLA's. v2 192 pixels, filter away from zero: 9x9 419, paper5 332, 3x3 C 512 354, 9x9 C 128 312 -> 399; error 1.06
//          times. XLA: paper5 272 to 283, 3x3 C 256 314 to 341 (here 349). Exact: v1 the splitting warps took a quad at a time: 9x9
//          82, paper5 90, 3x3 C 64 69. v2 four at a time, more registers for them: 105, 111, 87. The two warpgroups made to
//          multiply in turn: 99, 99, 88, so they do not. XLA: paper5 53, 3x3 C 256 88 (Winograd; here 114), C 64 35.
#pragma once
#include "common/mma_tf32.cuh"
#include "conv/sm90.cuh"
#include "conv/sm90_f32.h"

namespace jaxprims {
namespace conv {

struct Sm90F32Phase {
  uint32_t first_tile = 0, rows = 0;
  int32_t count[kMaxSpatial], offset[kMaxSpatial], lower[kMaxSpatial], step[kMaxSpatial];
  int32_t tap0, tap_step[kMaxSpatial], f[kMaxSpatial];
  FastDiv outs[kMaxSpatial];
  FastDiv boxes1, boxes2;  // kBox: along axes 1 and 2
};

template <int Phases>
struct Sm90F32Args {
  CUtensorMap in[Phases];
  CUtensorMap w;
  Sm90F32Phase phase[Phases];
  FastDiv tiles_n;         // tiles along k
  uint32_t tiles, chunks;  // chunks of 32 channels in a tap
  int32_t phases, mode, cols;
  int32_t pw, ph, pn;      // kBox: a tile's pixels
  int32_t imgs, extent1, extent2;
  const void* bias;
  const float* residual;
  Type bias_type;
  float lo, hi;
  float* out;
  int64_t out_image, out_s[kMaxSpatial];
  int32_t out_phases[kMaxSpatial];
};

template <bool Exact, bool Forward, int CB, int N>
struct Sm90F32Tile {
  static constexpr bool kExact = Exact, kForward = Forward;
  static constexpr int kCB = CB, kN = N, kPixels = CB == 2 ? N : 2 * N, kChannels = 64 * CB;
  static constexpr int kPixelsAt = kChannels * 128, kLowAt = kPixelsAt + kPixels * 128;  // in a stage
  static constexpr int kLoaded = kLowAt, kStageBytes = kLowAt + (Exact ? kPixels * 128 : 0);
  static constexpr int kRest = 1024 + 256 + 2 * N * 8;  // alignment, barriers, where the pixels go
  static constexpr int kFit = (kSm90Shared - kRest) / kStageBytes;
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static constexpr int kBytes = kRest + kStages * kStageBytes;
  static_assert(kStages >= 3, "the ring must hide the latency of a load");
};

template <class Tile>
struct Sm90F32Memory {
  uint32_t ring, full, ready, empty, places;
  __device__ explicit Sm90F32Memory(const void* shared) {
    ring = (shared_address(shared) + 1023) & ~1023u;
    full = ring + Tile::kStages * Tile::kStageBytes;
    ready = full + 64, empty = full + 128, places = full + 256;
  }
  __device__ void init() const {
    for (int i = 0; i < Tile::kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(ready + 8 * i, 3);  // the splitting warps
      barrier_init(empty + 8 * i, 8);  // the multiplying warps
    }
    barrier_init_fence();
  }
};

struct Sm90F32Place {
  int32_t phase;
  uint32_t m, n;                           // tile along the pixels; first channel
  int32_t w, h, img;                       // kBox: first output
  int32_t begin1, end1, begin2, end2;      // taps
  uint32_t steps;
};

template <class Tile, int Phases>
__device__ __forceinline__ Sm90F32Place sm90_f32_place(const Sm90F32Args<Phases>& a, uint32_t tile) {
  Sm90F32Place at;
  at.phase = 0;
  if constexpr (Phases > 1) {
    while (at.phase + 1 < a.phases && tile >= a.phase[at.phase + 1].first_tile) ++at.phase;
    tile -= a.phase[at.phase].first_tile;
  }
  const Sm90F32Phase& ph = a.phase[at.phase];
  uint32_t n;
  a.tiles_n.divmod(tile, at.m, n);
  at.n = n * Tile::kChannels;
  at.w = at.h = at.img = 0;
  at.begin1 = at.begin2 = 0, at.end1 = ph.count[1], at.end2 = ph.count[2];
  if (a.mode == kBox && ph.count[1] * ph.count[2] > 0) {
    uint32_t rest, w, h;
    ph.boxes2.divmod(at.m, rest, w);
    ph.boxes1.divmod(rest, rest, h);
    at.w = static_cast<int32_t>(w) * a.pw, at.h = static_cast<int32_t>(h) * a.ph, at.img = static_cast<int32_t>(rest) * a.pn;
    at.end1 = sm90_live_taps(ph.lower[1], ph.offset[1], ph.count[1], a.extent1, at.h, a.ph, &at.begin1);
    at.end2 = sm90_live_taps(ph.lower[2], ph.offset[2], ph.count[2], a.extent2, at.w, a.pw, &at.begin2);
    at.end1 += at.begin1, at.end2 += at.begin2;
  }
  at.steps = static_cast<uint32_t>(ph.count[0]) * (at.end1 - at.begin1) * (at.end2 - at.begin2) * a.chunks;
  return at;
}

// The loading thread.
template <class Tile, int Phases>
__device__ __forceinline__ void sm90_f32_load(const Sm90F32Args<Phases>& a, const Sm90F32Memory<Tile>& memory) {
  Ring<Tile::kStages> ring;
  for (uint32_t tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
    const Sm90F32Place at = sm90_f32_place<Tile, Phases>(a, tile);
    if (at.steps == 0) continue;
    const Sm90F32Phase& ph = a.phase[at.phase];
    const CUtensorMap* map = &a.in[at.phase];
    Pixel pixel = {0, 0, 0, 0};
    if (a.mode == kBox) {
      pixel.w = at.w + ph.lower[2], pixel.h = at.h + ph.lower[1], pixel.n = at.img;
    } else if (a.mode == kFlat) {
      pixel.d = static_cast<int>(at.m * Tile::kPixels);
    } else {
      uint32_t o[kMaxSpatial], rest = at.m * Tile::kPixels;
#pragma unroll
      for (int i = kMaxSpatial - 1; i >= 0; --i) ph.outs[i].divmod(rest, rest, o[i]);
      pixel.n = static_cast<int>(rest);
      pixel.d = static_cast<int>(o[0]) * ph.step[0] + ph.lower[0];
      pixel.h = static_cast<int>(o[1]) * ph.step[1] + ph.lower[1];
      pixel.w = static_cast<int>(o[2]) * ph.step[2] + ph.lower[2];
    }
    for (int j0 = 0; j0 < ph.count[0]; ++j0)
      for (int j1 = at.begin1; j1 < at.end1; ++j1)
        for (int j2 = at.begin2; j2 < at.end2; ++j2) {
          const int tap = ph.tap0 + j0 * ph.tap_step[0] + j1 * ph.tap_step[1] + j2 * ph.tap_step[2];
          for (uint32_t chunk = 0; chunk < a.chunks; ++chunk) {
            const int c = static_cast<int>(chunk * 32);
            const uint32_t to = memory.ring + ring.stage * Tile::kStageBytes, full = memory.full + 8 * ring.stage;
            barrier_wait(memory.empty + 8 * ring.stage, ring.lap ^ 1);
            barrier_expect(full, Tile::kLoaded);
            load_pixels(a.mode, to + Tile::kPixelsAt, map, full, c, pixel, j2 * ph.offset[2], j1 * ph.offset[1], j0 * ph.offset[0]);
            if constexpr (Tile::kForward) {
#pragma unroll
              for (int j = 0; j < Tile::kChannels / 32; ++j)
                tma_load_3d(to + j * 4096, &a.w, full, static_cast<int>(at.n) + 32 * j, c, tap);
            } else {
              tma_load_3d(to, &a.w, full, c, static_cast<int>(at.n), tap);
            }
            ring.advance();
          }
        }
  }
}

// Exact: lo of Batch groups of four pixels' elements, the first `live` of them.
constexpr uint32_t kSm90F32Splitters = 96;
template <class Tile, int Batch>
__device__ __forceinline__ void sm90_f32_lows(uint32_t at, uint32_t live, float& odd) {
  float4 v[Batch];
#pragma unroll
  for (int b = 0; b < Batch; ++b)
    if (b + 1 < Batch || b < live) v[b] = load_shared_quad(at + b * (kSm90F32Splitters * 16));
#pragma unroll
  for (int b = 0; b < Batch; ++b)
    if (b + 1 < Batch || b < live) {
      float* x = reinterpret_cast<float*>(&v[b]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float low = x[e] - __uint_as_float(__float_as_uint(x[e]) & 0xFFFFE000);
        odd = fmaf(low, 0.f, odd);
        x[e] = __uint_as_float(__float_as_uint(low) + 0x1000);  // rounded once truncated
      }
      store_shared(at + Tile::kPixels * 128 + b * (kSm90F32Splitters * 16), v[b]);
    }
}
// Four elements of which one may be infinite or NaN.
template <class Tile>
__device__ __forceinline__ void sm90_f32_odd(uint32_t at) {
  const float4 v = load_shared_quad(at), l = load_shared_quad(at + Tile::kPixels * 128);
  float x[4] = {v.x, v.y, v.z, v.w}, y[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if ((__float_as_uint(x[e]) & 0x7F800000) != 0x7F800000) continue;
    y[e] = x[e] != x[e] ? __uint_as_float(0x7FFFFFFF) : x[e];
    x[e] = copysignf(1.f, x[e]);
  }
  store_shared(at, make_float4(x[0], x[1], x[2], x[3]));
  store_shared(at + Tile::kPixels * 128, make_float4(y[0], y[1], y[2], y[3]));
}

// Exact: three warps write lo of every chunk of pixels, places for places as the pixels lie.
template <class Tile, int Phases>
__device__ __forceinline__ void sm90_f32_split(const Sm90F32Args<Phases>& a, const Sm90F32Memory<Tile>& memory, uint32_t thread) {
  constexpr uint32_t kQuads = Tile::kPixels * 8, kThreads = kSm90F32Splitters;
  Ring<Tile::kStages> ring;
  for (uint32_t tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
    const uint32_t steps = sm90_f32_place<Tile, Phases>(a, tile).steps;
    for (uint32_t i = 0; i < steps; ++i) {
      const uint32_t pixels = memory.ring + ring.stage * Tile::kStageBytes + Tile::kPixelsAt;
      barrier_wait(memory.full + 8 * ring.stage, ring.lap);
      float odd = 0.f;  // NaN once something was not finite
      uint32_t q = thread;
#pragma unroll 1
      for (uint32_t n = 0; n < kQuads / (4 * kThreads); ++n, q += 4 * kThreads) sm90_f32_lows<Tile, 4>(pixels + q * 16, 4, odd);
      constexpr uint32_t kRest = kQuads % (4 * kThreads), kBatch = (kRest + kThreads - 1) / kThreads;
      if (kRest > 0) sm90_f32_lows<Tile, kBatch>(pixels + q * 16, (kQuads - q + kThreads - 1) / kThreads, odd);
      if (odd != odd) {
        for (q = thread; q < kQuads; q += kThreads) sm90_f32_odd<Tile>(pixels + q * 16);
      }
      proxy_fence();
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(memory.ready + 8 * ring.stage);
      ring.advance();
    }
  }
}

// Row 16 warp + group + 8 h of a warpgroup's 64: its channel. Forward: the eight groups of four threads read the eight 16-byte
// pieces of a row of the chunk, pieces p and p + 4 by one half of the warp, so that rows c .. c + 3 (swizzled) fill all banks.
template <bool Forward>
__device__ __forceinline__ uint32_t sm90_f32_row(uint32_t warp, uint32_t group, uint32_t h) {
  if (!Forward) return 16 * warp + group + 8 * h;
  const uint32_t piece = 2 * (warp & 1) + (group >> 1 & 1) * 4 + (group >> 2);
  return 32 * (warp >> 1) + 4 * piece + 2 * (group & 1) + h;
}

// A warpgroup's share of a tile.
template <class Tile>
struct Sm90F32Multiplier {
  const Sm90F32Memory<Tile>& memory;
  Ring<Tile::kStages>& ring;
  uint32_t lane_at, pixels_at;  // in a stage: what this thread reads of the filter, this warpgroup's pixels
  uint32_t last;

  __device__ __forceinline__ Sm90F32Multiplier(const Sm90F32Memory<Tile>& memory, Ring<Tile::kStages>& ring, uint32_t g)
      : memory(memory), ring(ring), last(0) {
    const uint32_t warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, group = lane / 4, t = lane % 4;
    const uint32_t row = sm90_f32_row<Tile::kForward>(warp, group, 0), part = Tile::kCB == 2 ? g * 8192 : 0;
    if (Tile::kForward) lane_at = part + row / 32 * 4096 + t * 128 + ((row % 32 / 4 ^ t) * 16) + row % 4 * 4;
    else lane_at = part + row * 128 + group * 16 + t * 4;
    pixels_at = Tile::kPixelsAt + (Tile::kCB == 2 ? 0 : g * (Tile::kN * 128));
  }
  // The filter's elements, a[4 s + ..] for the s-th 8 channels.
  __device__ __forceinline__ void filter(uint32_t (&a)[16]) const {
    const uint32_t at = memory.ring + ring.stage * Tile::kStageBytes + lane_at;
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if constexpr (Tile::kForward) {
          const float2 v = load_shared_pair((e == 0 ? at : (at ^ 64) + 512) + s * 1024);
          a[4 * s + 2 * e] = __float_as_uint(v.x), a[4 * s + 2 * e + 1] = __float_as_uint(v.y);
        } else {
          const uint32_t from = at ^ ((2 * s + e) * 16);
          a[4 * s + 2 * e] = __float_as_uint(load_shared(from));
          a[4 * s + 2 * e + 1] = __float_as_uint(load_shared(from + 1024));
        }
      }
  }
  __device__ __forceinline__ uint64_t pixels(uint32_t more = 0) const {
    return mma_descriptor(memory.ring + ring.stage * Tile::kStageBytes + pixels_at + more, 0, 1024);
  }
  __device__ __forceinline__ void release(uint32_t stage) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(memory.empty + 8 * stage);
  }
  static __device__ __forceinline__ void pin(uint32_t (&a)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i])::"memory");
  }

  // TF32: a stage's products are queued behind those of the stage before, whose filter `before` is then free.
  __device__ __forceinline__ void queue(float (&sums)[Tile::kN / 2], uint32_t (&a)[16], uint32_t (&before)[16], int first) {
    barrier_wait(memory.full + 8 * ring.stage, ring.lap);
    filter(a);
#pragma unroll
    for (int i = 0; i < 16; ++i) a[i] = round_tf32_away(a[i]);
    const uint64_t b = pixels();
    mma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) mma_tf32<Tile::kN>(sums, a + 4 * s, b + 2 * s, s > 0 || !first);
    mma_commit();
    if (!first) {
      mma_wait<1>();
      pin(before);
      release(last);
    }
    last = ring.stage;
    ring.advance();
  }
  __device__ __forceinline__ void run_tf32(float (&sums)[Tile::kN / 2], uint32_t steps) {
    uint32_t a[16], b[16];
    queue(sums, a, b, 1);
    uint32_t i = 1;
    for (; i + 1 < steps; i += 2) {
      queue(sums, b, a, 0);
      queue(sums, a, b, 0);
    }
    if (i < steps) queue(sums, b, a, 0);
    mma_wait<0>();
    pin(a);
    pin(b);
    mma_pin(sums);
    release(last);
  }

  __device__ __forceinline__ void run_exact(float (&sums)[Tile::kN / 2], uint32_t steps) {
    uint32_t x[16];
    barrier_wait(memory.full + 8 * ring.stage, ring.lap);
    filter(x);
    for (uint32_t i = 0; i < steps; ++i) {
      uint32_t high[16], low[16], other[16];  // other: high where the pixels' lo is taken
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float v = __uint_as_float(x[j]);
        const bool finite = (x[j] & 0x7FFFFFFF) < 0x7F7FF000;  // and so is what it is rounded to
        const uint32_t r = round_tf32(v);
        high[j] = finite ? r : x[j];
        low[j] = finite ? __float_as_uint(v - __uint_as_float(r)) : 0;
        other[j] = finite ? r : (x[j] & 0x80000000) | 0x3F800000;
      }
      barrier_wait(memory.ready + 8 * ring.stage, ring.lap);
      const uint64_t b = pixels(), b_low = pixels(Tile::kPixels * 128);
      float part[Tile::kN / 2];
      mma_fence();
#pragma unroll
      for (int s = 0; s < 4; ++s) mma_tf32<Tile::kN>(part, low + 4 * s, b + 2 * s, s > 0);
#pragma unroll
      for (int s = 0; s < 4; ++s) mma_tf32<Tile::kN>(part, other + 4 * s, b_low + 2 * s, 1);
#pragma unroll
      for (int s = 0; s < 4; ++s) mma_tf32<Tile::kN>(part, high + 4 * s, b + 2 * s, 1);
      mma_commit();
      last = ring.stage;
      ring.advance();
      if (i + 1 < steps) {
        barrier_wait(memory.full + 8 * ring.stage, ring.lap);
        filter(x);
      }
      mma_wait<0>();
      pin(high);
      pin(low);
      pin(other);
      mma_pin(part);
      release(last);
#pragma unroll
      for (int j = 0; j < Tile::kN / 2; ++j) sums[j] += part[j];
    }
  }
};

// Element of the result where a tile's pixel starts; -1: outside.
template <class Tile, int Phases>
__device__ __forceinline__ int64_t sm90_f32_pixel(const Sm90F32Args<Phases>& a, const Sm90F32Place& at, uint32_t pixel) {
  const Sm90F32Phase& ph = a.phase[at.phase];
  uint32_t o[kMaxSpatial], img;
  if (a.mode == kBox && at.steps > 0) {
    const uint32_t pw = static_cast<uint32_t>(a.pw), row = pixel / pw, n = row / static_cast<uint32_t>(a.ph);
    o[0] = 0, o[1] = at.h + row % static_cast<uint32_t>(a.ph), o[2] = at.w + pixel % pw, img = at.img + n;
    if (o[1] >= ph.outs[1].d || o[2] >= ph.outs[2].d || img >= static_cast<uint32_t>(a.imgs)) return -1;
  } else {
    const uint32_t r = at.m * Tile::kPixels + pixel;
    if (r >= ph.rows) return -1;
    if (Phases == 1) return static_cast<int64_t>(r) * a.cols;
    img = r;
#pragma unroll
    for (int d = kMaxSpatial - 1; d >= 0; --d) ph.outs[d].divmod(img, img, o[d]);
  }
  int64_t to = static_cast<int64_t>(img) * a.out_image;
#pragma unroll
  for (int d = 0; d < kMaxSpatial; ++d) to += (static_cast<int64_t>(o[d]) * a.out_phases[d] + ph.f[d]) * a.out_s[d];
  return to;
}

__device__ __forceinline__ float sm90_f32_bias(const void* data, Type type, uint32_t i) {
  if (type == Type::kF32) return static_cast<const float*>(data)[i];
  if (type == Type::kF16) return __half2float(static_cast<const __half*>(data)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
}

template <class Tile, bool Residual, int Phases>
__device__ __forceinline__ void sm90_f32_store(const Sm90F32Args<Phases>& a, const float (&sums)[Tile::kN / 2], uint32_t places, uint32_t channel) {
  const uint32_t t = threadIdx.x % 4, cols = static_cast<uint32_t>(a.cols);
  constexpr uint32_t kNext = Tile::kForward ? 1 : 8;  // the other row's channel
  const bool live0 = channel < cols, live1 = channel + kNext < cols;
  const float b0 = live0 && a.bias != nullptr ? sm90_f32_bias(a.bias, a.bias_type, channel) : 0.f;
  const float b1 = live1 && a.bias != nullptr ? sm90_f32_bias(a.bias, a.bias_type, channel + kNext) : 0.f;
  const float lo = a.lo, hi = a.hi;
#pragma unroll
  for (int j = 0; j < Tile::kN / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int64_t to;
      asm volatile("ld.shared.b64 %0, [%1];" : "=l"(to) : "r"(places + (8 * j + 2 * t + e) * 8) : "memory");
      if (to < 0) continue;
      to += channel;
      float u = sums[4 * j + e] + b0, v = sums[4 * j + 2 + e] + b1;
      if constexpr (Tile::kForward) {
        if (!live0) continue;
        if (Residual) {
          const float2 more = *reinterpret_cast<const float2*>(a.residual + to);
          u += more.x, v += more.y;
        }
        *reinterpret_cast<float2*>(a.out + to) = make_float2(clip_keep_nan(u, lo, hi), clip_keep_nan(v, lo, hi));
      } else {
        if (live0) a.out[to] = u;
        if (live1) a.out[to + 8] = v;
      }
    }
  }
}

template <class Tile, int Phases>
__global__ void __launch_bounds__(kSm90Threads, 1) sm90_f32(const __grid_constant__ Sm90F32Args<Phases> a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char shared[];
  const Sm90F32Memory<Tile> memory(shared);
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  const uint32_t group = threadIdx.x / 128;
  if (group == 0) {
    registers_down<Tile::kExact ? 72 : 40>();
    if (threadIdx.x == 0) sm90_f32_load<Tile, Phases>(a, memory);
    if constexpr (Tile::kExact) {
      if (threadIdx.x >= 32) sm90_f32_split<Tile, Phases>(a, memory, threadIdx.x - 32);
    }
  } else {
    registers_up<Tile::kExact ? 216 : 232>();
    const uint32_t g = group - 1, thread = threadIdx.x % 128;
    const uint32_t places = memory.places + g * (Tile::kN * 8), first = Tile::kCB == 2 ? 0 : g * Tile::kN;
    Ring<Tile::kStages> ring;
    for (uint32_t tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
      const uint32_t steps = sm90_f32_place<Tile, Phases>(a, tile).steps;
      float sums[Tile::kN / 2];
      {
        Sm90F32Multiplier<Tile> multiplier(memory, ring, g);
        if (Tile::kExact || (Phases > 1 && steps == 0)) {
#pragma unroll
          for (int j = 0; j < Tile::kN / 2; ++j) sums[j] = 0.f;
        }
        if constexpr (Tile::kExact) {
          if (steps > 0) multiplier.run_exact(sums, steps);
        } else {
          if (Phases == 1 || steps > 0) multiplier.run_tf32(sums, steps);
        }
      }
      uint32_t same = tile;  // found again rather than kept: the sums leave few registers
      asm volatile("" : "+r"(same));
      const Sm90F32Place at = sm90_f32_place<Tile, Phases>(a, same);
      named_sync(1 + g, 128);  // the last tile's places have been read
      for (uint32_t i = thread; i < Tile::kN; i += 128) {
        const int64_t to = sm90_f32_pixel<Tile, Phases>(a, at, first + i);
        asm volatile("st.shared.b64 [%0], %1;" ::"r"(places + i * 8), "l"(to) : "memory");
      }
      named_sync(1 + g, 128);
      const uint32_t channel = at.n + (Tile::kCB == 2 ? 64 * g : 0) + sm90_f32_row<Tile::kForward>(thread / 32, thread % 32 / 4, 0);
      if (Tile::kForward && a.residual != nullptr) sm90_f32_store<Tile, Tile::kForward, Phases>(a, sums, places, channel);
      else sm90_f32_store<Tile, false, Phases>(a, sums, places, channel);
    }
  }
#endif
}

}  // namespace conv
}  // namespace jaxprims
