// Convolution forward and input gradient on Hopper's tensor cores: an implicit matrix product, float16 and bfloat16.
//
//   out[n, o.., k] = clip( sum over taps j.., channels c of in[n, lower + o' * step + j * offset.., c] * w[tap, c, k]
//                          + bias[k] + residual )
//   rows are the pixels (n, o'..) of one phase as one list, columns are k; sm90.h's walks give lower, step, offset and tap.
//   Forward has one phase (o' = o); the input gradient of a convolution of stride u has u phases per axis, each with its own
//   taps, all in one launch: no product with a zero is formed.
//
// Layout   in, out channels last; w HWIO as it lies: its chunks of 64 c x 64 k are an MN-major operand going forward, and a
//          K-major one in the input gradient (there c is a column and k is summed). No copy of w, no workspace.
// Work     persistent: one block per multiprocessor walks over the tiles, columns first, so that neighbours share pixels in L2.
//          One thread loads: im2col TMA turns (tap, 64 channels) of 64 MB pixels into one box, padding included.
//          Two warpgroups multiply and store in turn. Sums are float32, rounded once. Stores are TMA's; but a list of pixels of
//          one phase of several is no box: there they are 16-byte vectors, each row to its place.
//          The wider side of a tile is the N of the instruction (it reads less shared memory for the same products): where k is at
//          most 64, the product is transposed, channels are its rows and 256 pixels its columns (Swap).
// Padding  where it is much of the work and images are many, a tile's pixels are a box of many images at few places (kBox): the
//          taps that fall outside for all of them are left out, exactly, by every thread alike.
// Order    every output is summed by one warpgroup in one order: the same bits in every run.
// Cost     2 * outputs * taps * C flops; loads from L2 of (MB + NB) chunks for every MB * NB chunks of sums.
// Tried    TFLOP/s on an H200, bfloat16, where an 8192^3 product ran at 745 to 778 (names: 3x3 layers of ResNet-50, batch 256; 9x9:
//          N 128, C 128, 32^2, K 128). v1 bias and residual looked at for every sum: 9x9 729, 3x3 C 64 357, 1x1 C 64 K 256 47.
//          v2 store without branches, result kept twice, transposed tiles for K 64: 453 (3x3 C 64), 175 (1x1).
//          v3 boxes: 9x9 input gradient 303 -> 503, 3x3 C 512 7^2 733 -> 769. v4 a plain store without bias and clip, phases as
//          boxes: 1x1 C 512 K 2048 7^2 513 -> 608, input gradient 3x3 C 128 stride 2 329 -> 373. cuDNN in the last run: 9x9 410 and
//          293 (input gradient), 3x3 C 512 561.
#pragma once
#include "conv/sm90.cuh"

namespace jaxprims {
namespace conv {

struct Sm90PhaseArgs {
  uint32_t first_tile = 0, rows = 0;
  int32_t count[kMaxSpatial], offset[kMaxSpatial], lower[kMaxSpatial], step[kMaxSpatial];
  int32_t tap0, tap_step[kMaxSpatial], f[kMaxSpatial];
  FastDiv outs[kMaxSpatial];
  FastDiv boxes1, boxes2;  // kBox: along axes 1 and 2
};

// MB x NB chunks of the product: rows pixels, columns channels, or (Swap) the reverse.
template <int MB_, int NB_, bool Swap_>
struct Sm90ConvTile : Sm90Tile<MB_, NB_, MB_ * NB_ * kChunkBytes> {
  static constexpr bool kSwap = Swap_, kResidual = !Swap_ && MB_ * NB_ <= 4;  // larger tiles leave it no registers
  static constexpr int PB = Swap_ ? NB_ : MB_, CB = Swap_ ? MB_ : NB_;  // chunks of pixels, of channels
  static constexpr int kPixels = 64 * PB, kChannels = 64 * CB;
  static constexpr int kPixelsAt = Swap_ ? MB_ * kChunkBytes : 0, kFilterAt = Swap_ ? 0 : MB_ * kChunkBytes;  // in a stage
};

template <int Phases>
struct Sm90ConvArgs {
  CUtensorMap in[Phases];
  CUtensorMap out[Phases];
  CUtensorMap w;
  Sm90PhaseArgs phase[Phases];
  FastDiv tiles_n, band;  // tiles along k; those of a band: 8 along k by all along the pixels
  uint32_t tiles, chunks;  // chunks of 64 channels in a tap
  int32_t phases, mode, cols;
  int32_t pw, ph, pn;     // kBox: a tile's pixels
  int32_t extent1, extent2;
  const void *bias, *residual;
  Type bias_type;
  int32_t plain;  // no bias, residual or clip
  float lo, hi;
  // strided: the rows' places
  void* out_data;
  int64_t out_image, out_s[kMaxSpatial];
  int32_t out_phases[kMaxSpatial];
};

constexpr uint32_t kSm90Band = 8;

struct Sm90Place {
  int32_t phase;
  uint32_t m, n;  // first row and column
};

template <class Tile, int Phases>
__device__ __forceinline__ Sm90Place sm90_place(const Sm90ConvArgs<Phases>& a, uint32_t tile) {
  Sm90Place at;
  at.phase = 0;
  if constexpr (Phases > 1) {
    while (at.phase + 1 < a.phases && tile >= a.phase[at.phase + 1].first_tile) ++at.phase;
    tile -= a.phase[at.phase].first_tile;
  }
  // Bands of eight tiles along k: blocks that run together share both operands in L2. Phases have one band of all.
  uint32_t m, n;
  if (Phases > 1 || a.tiles_n.d <= kSm90Band) {
    a.tiles_n.divmod(tile, m, n);
  } else {
    uint32_t band, rest;
    a.band.divmod(tile, band, rest);
    const uint32_t left = a.tiles_n.d - band * kSm90Band, width = left < kSm90Band ? left : kSm90Band;
    m = rest / width, n = band * kSm90Band + rest % width;
  }
  at.m = m * Tile::kPixels, at.n = n * Tile::kChannels;
  return at;
}

// kBox: a tile's first output, and the taps that it needs.
struct Sm90Window {
  int32_t w, h, n, j1, count1, j2, count2;
};
template <class Tile, int Phases>
__device__ __forceinline__ Sm90Window sm90_window(const Sm90ConvArgs<Phases>& a, const Sm90Place& at) {
  const Sm90PhaseArgs& ph = a.phase[at.phase];
  uint32_t rest = at.m / Tile::kPixels, w, h;
  ph.boxes2.divmod(rest, rest, w);
  ph.boxes1.divmod(rest, rest, h);
  Sm90Window v;
  v.w = static_cast<int32_t>(w) * a.pw, v.h = static_cast<int32_t>(h) * a.ph, v.n = static_cast<int32_t>(rest) * a.pn;
  v.count1 = sm90_live_taps(ph.lower[1], ph.offset[1], ph.count[1], a.extent1, v.h, a.ph, &v.j1);
  v.count2 = sm90_live_taps(ph.lower[2], ph.offset[2], ph.count[2], a.extent2, v.w, a.pw, &v.j2);
  return v;
}
template <class Tile, int Phases>
__device__ __forceinline__ uint32_t sm90_conv_steps(const Sm90ConvArgs<Phases>& a, const Sm90Place& at) {
  const Sm90PhaseArgs& ph = a.phase[at.phase];
  if (a.mode == kBox && (Phases == 1 || ph.count[1] * ph.count[2] > 0)) {
    const Sm90Window v = sm90_window<Tile>(a, at);
    return static_cast<uint32_t>(v.count1) * v.count2 * a.chunks;
  }
  return static_cast<uint32_t>(ph.count[0]) * ph.count[1] * ph.count[2] * a.chunks;
}

__device__ __forceinline__ float sm90_bias(const void* data, Type type, uint32_t i) {
  if (type == Type::kF32) return static_cast<const float*>(data)[i];
  if (type == Type::kF16) return __half2float(static_cast<const __half*>(data)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
}

// The loading thread.
template <class Tile, bool Forward, int Phases>
__device__ __forceinline__ void sm90_conv_load(const Sm90ConvArgs<Phases>& a, const Sm90Memory<Tile>& memory) {
  Ring<Tile::kStages> ring;
  for (uint32_t tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
    const Sm90Place at = sm90_place<Tile, Phases>(a, tile);
    const Sm90PhaseArgs& ph = a.phase[at.phase];
    const CUtensorMap* map = &a.in[at.phase];
    Pixel pixel;
    int begin1 = 0, end1 = ph.count[1], begin2 = 0, end2 = ph.count[2];
    if (a.mode == kBox && (Phases == 1 || ph.count[1] * ph.count[2] > 0)) {
      const Sm90Window v = sm90_window<Tile>(a, at);
      pixel.w = v.w + ph.lower[2], pixel.h = v.h + ph.lower[1], pixel.n = v.n, pixel.d = 0;
      begin1 = v.j1, end1 = v.j1 + v.count1, begin2 = v.j2, end2 = v.j2 + v.count2;
    } else if (a.mode == kFlat) {
      pixel.d = static_cast<int>(at.m), pixel.w = pixel.h = pixel.n = 0;
    } else {
      uint32_t o[kMaxSpatial], rest = at.m;
#pragma unroll
      for (int i = kMaxSpatial - 1; i >= 0; --i) ph.outs[i].divmod(rest, rest, o[i]);
      pixel.n = static_cast<int>(rest);
      pixel.d = static_cast<int>(o[0]) * ph.step[0] + ph.lower[0];
      pixel.h = static_cast<int>(o[1]) * ph.step[1] + ph.lower[1];
      pixel.w = static_cast<int>(o[2]) * ph.step[2] + ph.lower[2];
    }
    for (int j0 = 0; j0 < ph.count[0]; ++j0)
      for (int j1 = begin1; j1 < end1; ++j1)
        for (int j2 = begin2; j2 < end2; ++j2) {
          const int tap = ph.tap0 + j0 * ph.tap_step[0] + j1 * ph.tap_step[1] + j2 * ph.tap_step[2];
          for (uint32_t chunk = 0; chunk < a.chunks; ++chunk) {
            const int c = static_cast<int>(chunk * 64);
            const uint32_t to = memory.ring + ring.stage * Tile::kStageBytes, full = memory.full + 8 * ring.stage;
            barrier_wait(memory.empty + 8 * ring.stage, ring.lap ^ 1);
            barrier_expect(full, Tile::kStageBytes);
            load_pixels(a.mode, to + Tile::kPixelsAt, map, full, c, pixel, j2 * ph.offset[2], j1 * ph.offset[1], j0 * ph.offset[0]);
#pragma unroll
            for (int j = 0; j < Tile::CB; ++j) {
              const int n = static_cast<int>(at.n) + 64 * j;
              tma_load_3d(to + Tile::kFilterAt + j * kChunkBytes, &a.w, full, Forward ? n : c, Forward ? c : n, tap);
            }
            ring.advance();
          }
        }
  }
}

// What is done to the sums: nothing; bias and clip; residual too.
enum class Finish : int { kPlain, kBias, kResidual };

template <class T, Finish F>
__device__ __forceinline__ uint32_t sm90_finish_pair(float u, float v, float2 add, float lo, float hi) {
  if constexpr (F == Finish::kPlain) return pack_pair<T>(u, v);
  return pack_pair<T>(clip_keep_nan(u + add.x, lo, hi), clip_keep_nan(v + add.y, lo, hi));
}

// The residual of the sums at row r and columns k, k + 1.
template <class T, int Phases>
__device__ __forceinline__ float2 sm90_residual(const Sm90ConvArgs<Phases>& a, uint32_t rows, uint32_t r, uint32_t k) {
  if (r >= rows || k >= static_cast<uint32_t>(a.cols)) return {0.f, 0.f};
  const T* at = static_cast<const T*>(a.residual) + static_cast<int64_t>(r) * a.cols + k;
  return unpack_pair<T>(*reinterpret_cast<const uint32_t*>(at));
}

// Sums become the result's chunks in shared memory, [pixels][64 channels] each: rounded, in the swizzle that TMA reads.
template <class T, class Tile, Finish F, int Phases>
__device__ __forceinline__ void sm90_conv_stage(const Sm90ConvArgs<Phases>& a, const Sm90Place& at, float (&sums)[Tile::MB][32 * Tile::NB], uint32_t result,
                                                uint32_t bias) {
  const uint32_t thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const float lo = a.lo, hi = a.hi;
  if constexpr (Tile::kSwap) {
    const uint32_t piece = 2 * warp + (lane >> 3 & 1);  // of the 8 channels of this lane's matrix
    float2 b0 = {0.f, 0.f}, b1 = {0.f, 0.f};
    if constexpr (F != Finish::kPlain) {
      b0.x = b0.y = load_shared(bias + (warp * 16 + lane / 4) * 4);
      b1.x = b1.y = load_shared(bias + (warp * 16 + lane / 4 + 8) * 4);
    }
#pragma unroll
    for (int j = 0; j < 8 * Tile::NB; j += 2) {
      __syncwarp();
      const float* s = sums[0] + 4 * j;
      const uint32_t r = 8 * j + (lane & 7) + (lane >> 4) * 8;
      store_matrices_transposed(result + r * 128 + ((piece ^ r % 8) * 16), sm90_finish_pair<T, F>(s[0], s[1], b0, lo, hi),
                                sm90_finish_pair<T, F>(s[2], s[3], b1, lo, hi), sm90_finish_pair<T, F>(s[4], s[5], b0, lo, hi),
                                sm90_finish_pair<T, F>(s[6], s[7], b1, lo, hi));
    }
  } else {
    const uint32_t row = warp * 16 + (lane & 15), half = lane >> 4;  // where this lane's matrix row goes
#pragma unroll
    for (int j = 0; j < 8 * Tile::NB; j += 2) {
      __syncwarp();  // keeps the compiler from overlapping the steps: there are no registers for it
      float2 b0 = {0.f, 0.f}, b1 = {0.f, 0.f};
      if constexpr (F != Finish::kPlain)
        b0 = load_shared_pair(bias + (8 * j + lane % 4 * 2) * 4), b1 = load_shared_pair(bias + (8 * j + 8 + lane % 4 * 2) * 4);
#pragma unroll
      for (int m = 0; m < Tile::MB; ++m) {
        const float* s = sums[m] + 4 * j;
        const uint32_t to = 64 * m + row, p = j + half;  // 16-byte piece p % 8 of chunk p / 8
        float2 add[4];
        if (F == Finish::kResidual) __syncwarp();
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          add[q] = q < 2 ? b0 : b1;
          if constexpr (F == Finish::kResidual) {
            uint32_t me = lane;
            asm volatile("" : "+r"(me));  // keeps the compiler from finding all addresses first
            const uint32_t r = at.m + 64 * m + warp * 16 + me / 4 + 8 * (q % 2), k = at.n + 8 * (j + q / 2) + me % 4 * 2;
            const float2 more = sm90_residual<T>(a, a.phase[at.phase].rows, r, k);
            add[q].x += more.x, add[q].y += more.y;
          }
        }
        store_matrices(result + j / 8 * (Tile::MB * kChunkBytes) + to * 128 + ((p % 8 ^ to % 8) * 16),
                       sm90_finish_pair<T, F>(s[0], s[1], add[0], lo, hi), sm90_finish_pair<T, F>(s[2], s[3], add[1], lo, hi),
                       sm90_finish_pair<T, F>(s[4], s[5], add[2], lo, hi), sm90_finish_pair<T, F>(s[6], s[7], add[3], lo, hi));
      }
    }
  }
}

// Writes a strided phase's rows, each to its place; Zero: zeros, and nothing is read.
template <class T, class Tile, bool Zero, int Phases>
__device__ __forceinline__ void sm90_conv_scatter(const Sm90ConvArgs<Phases>& a, const Sm90Place& at, uint32_t result) {
  const Sm90PhaseArgs& ph = a.phase[at.phase];
  const uint32_t piece = threadIdx.x % 8;
#pragma unroll 4
  for (uint32_t r = threadIdx.x % 128 / 8; r < Tile::kPixels; r += 16) {
    if (at.m + r >= ph.rows) break;
    uint32_t o[kMaxSpatial], rest = at.m + r;
    int64_t to = 0;
#pragma unroll
    for (int d = kMaxSpatial - 1; d >= 0; --d) {
      ph.outs[d].divmod(rest, rest, o[d]);
      to += (static_cast<int64_t>(o[d]) * a.out_phases[d] + ph.f[d]) * a.out_s[d];
    }
    to += static_cast<int64_t>(rest) * a.out_image;
#pragma unroll
    for (int j = 0; j < Tile::CB; ++j) {
      const uint32_t k = at.n + 64 * j + 8 * piece;
      if (k >= static_cast<uint32_t>(a.cols)) break;
      float4 v = {0.f, 0.f, 0.f, 0.f};
      if (!Zero) v = load_shared_quad(result + j * (Tile::PB * kChunkBytes) + r * 128 + ((piece ^ r % 8) * 16));
      *reinterpret_cast<float4*>(static_cast<T*>(a.out_data) + to + k) = v;
    }
  }
}

template <class T, class Tile, bool Forward, int Phases>
__global__ void __launch_bounds__(kSm90Threads, 1) sm90_conv(const __grid_constant__ Sm90ConvArgs<Phases> a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char shared[];
  const Sm90Memory<Tile> memory(shared);
  if (threadIdx.x == 0) memory.init(1);
  __syncthreads();
  const uint32_t group = threadIdx.x / 128;
  if (group == 0) {
    registers_down<40>();
    if (threadIdx.x == 0) sm90_conv_load<Tile, Forward, Phases>(a, memory);
  } else {
    registers_up<232>();
    const uint32_t g = group - 1;
    Ring<Tile::kStages> ring;
    uint32_t i = 0;
    for (uint32_t tile = blockIdx.x; tile < a.tiles; tile += gridDim.x, ++i) {
      Sm90Place at = sm90_place<Tile, Phases>(a, tile);
      const uint32_t steps = sm90_conv_steps<Tile>(a, at);
      if (i % 2 != g) {
        ring.skip(steps);
        continue;
      }
      if (Phases > 1 && steps == 0) {  // a phase that no tap reaches
        sm90_conv_scatter<T, Tile, true>(a, at, 0);
        wait_turn(memory.multiply_turn, g, i / 2);
        pass_turn(memory.multiply_turn, g);
        if (Tile::kResults == 1) {
          wait_turn(memory.store_turn, g, i / 2);
          pass_turn(memory.store_turn, g);
        }
        continue;
      }
      float sums[Tile::MB][32 * Tile::NB];
      wait_turn(memory.multiply_turn, g, i / 2);
      {
        Multiplier<T, Tile, Tile::MB, Tile::kSwap && Forward, !Tile::kSwap && Forward> multiplier{sums, memory, ring};
        multiplier.run(steps);
        pass_turn(memory.multiply_turn, g);
        multiplier.finish();
      }
      uint32_t same = tile;  // found again rather than kept: the sums leave no registers
      asm volatile("" : "+r"(same));
      at = sm90_place<Tile, Phases>(a, same);
      const uint32_t result = memory.result + (Tile::kResults > 1 ? g : 0) * Tile::kResultBytes;
      const uint32_t bias = memory.bias + g * (192 * 4), thread = threadIdx.x % 128;
      if (Tile::kResults == 1) wait_turn(memory.store_turn, g, i / 2);
      else if (thread == 0) tma_store_wait_read();  // its own last result
      if (!Forward || a.plain) {
        if (Tile::kResults > 1) named_sync(1 + g, 128);
        sm90_conv_stage<T, Tile, Finish::kPlain>(a, at, sums, result, bias);
      } else {
        for (uint32_t k = thread; k < Tile::kChannels; k += 128) {
          const bool live = a.bias != nullptr && at.n + k < static_cast<uint32_t>(a.cols);
          store_shared(bias + k * 4, live ? sm90_bias(a.bias, a.bias_type, at.n + k) : 0.f);
        }
        named_sync(1 + g, 128);
        if (Tile::kResidual && a.residual != nullptr)
          sm90_conv_stage<T, Tile, Tile::kResidual ? Finish::kResidual : Finish::kBias>(a, at, sums, result, bias);
        else sm90_conv_stage<T, Tile, Finish::kBias>(a, at, sums, result, bias);
      }
      if (Phases > 1 && a.mode != kBox) {
        named_sync(1 + g, 128);
        sm90_conv_scatter<T, Tile, false>(a, at, result);
        if (Tile::kResults > 1) named_sync(1 + g, 128);
      } else {
        proxy_fence();
        named_sync(1 + g, 128);
        if (thread == 0) {
          const bool box = a.mode == kBox;
          Sm90Window v = {};
          if (box) v = sm90_window<Tile>(a, at);
#pragma unroll
          for (int j = 0; j < Tile::CB; ++j) {
            const int k = static_cast<int>(at.n) + 64 * j;
            if (k >= a.cols) break;
            if (box) tma_store_4d(&a.out[at.phase], result + j * (Tile::PB * kChunkBytes), k, v.w, v.h, v.n);
            else tma_store_2d(&a.out[0], result + j * (Tile::PB * kChunkBytes), k, static_cast<int>(at.m));
          }
          tma_store_commit();
          if (Tile::kResults == 1) tma_store_wait_read();
        }
      }
      if (Tile::kResults == 1) pass_turn(memory.store_turn, g);
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_read();  // shared memory must outlive the copies
  }
#endif
}

// ---- launch -----------------------------------------------------------------------------------------------------------------
template <class T, int MB, int NB, bool Swap, bool Forward, int Phases>
cudaError_t sm90_conv_prepare() {
  using Tile = Sm90ConvTile<MB, NB, Swap>;
  return sm90_allow(reinterpret_cast<const void*>(sm90_conv<T, Tile, Forward, Phases>), Tile::kBytes);
}

// sm90_conv_prepare has run on this device. cudaErrorInvalidValue: nothing was launched, see sm90_launch.h.
template <class T, int MB, int NB, bool Swap, bool Forward, int Phases>
cudaError_t sm90_conv_launch(const Problem& p, const Sm90Plan& plan, cudaStream_t stream) {
  using Tile = Sm90ConvTile<MB, NB, Swap>;
  Sm90ConvArgs<Phases> a;
  const bool box = plan.pw > 0;
  a.mode = box ? kBox : sm90_mode(p, plan.flat);
  a.pw = plan.pw, a.ph = plan.ph, a.pn = plan.pn, a.extent1 = p.axis[1].I, a.extent2 = p.axis[2].I;
  a.cols = static_cast<int32_t>(p.ks);
  a.chunks = static_cast<uint32_t>(sm90_ceil(p.chs, 64));
  const uint32_t tiles_n = static_cast<uint32_t>(sm90_ceil(p.ks, Tile::kChannels));
  a.tiles_n = FastDiv(tiles_n);
  a.bias = p.bias, a.residual = p.residual, a.bias_type = p.bias_type;
  sm90_clip(p.activation, &a.lo, &a.hi);
  a.plain = p.bias == nullptr && p.residual == nullptr && p.activation == 0;
  a.out_data = p.out_data, a.out_image = p.out.outer;
  for (int i = 0; i < kMaxSpatial; ++i) a.out_s[i] = p.out.s[i], a.out_phases[i] = p.axis[i].phases;

  // The phases, those with the most taps first: the last tiles are the small ones.
  Sm90Walk walks[kSm90Phases];
  int phases = 0;
  int32_t f[kMaxSpatial];
  for (f[0] = 0; f[0] < p.axis[0].phases; ++f[0])
    for (f[1] = 0; f[1] < p.axis[1].phases; ++f[1])
      for (f[2] = 0; f[2] < p.axis[2].phases; ++f[2]) {
        int at = phases++;
        if (at >= Phases) return cudaErrorInvalidValue;
        const Sm90Walk w = sm90_walk(p, plan.flip, f);
        for (; at > 0 && walks[at - 1].taps() < w.taps(); --at) walks[at] = walks[at - 1];
        walks[at] = w;
      }
  a.phases = phases;
  int64_t tiles = 0;
  for (int i = 0; i < phases; ++i) {
    const Sm90Walk& w = walks[i];
    Sm90PhaseArgs& ph = a.phase[i];
    ph.first_tile = static_cast<uint32_t>(tiles);
    ph.rows = static_cast<uint32_t>(w.rows(p.imgs));
    ph.tap0 = w.tap0;
    for (int d = 0; d < kMaxSpatial; ++d) {
      ph.count[d] = w.count[d], ph.offset[d] = w.offset[d], ph.lower[d] = w.lower[d], ph.step[d] = w.step[d];
      ph.tap_step[d] = w.tap_step[d], ph.f[d] = w.f[d];
      ph.outs[d] = FastDiv(static_cast<uint32_t>(w.outs[d]));
    }
    int64_t tiles_m = sm90_ceil(ph.rows, Tile::kPixels);
    if (box && w.taps() > 0) {
      if (plan.pw * plan.ph * plan.pn != Tile::kPixels) return cudaErrorInvalidValue;
      const int64_t boxes2 = sm90_ceil(w.outs[2], plan.pw), boxes1 = sm90_ceil(w.outs[1], plan.ph);
      ph.boxes2 = FastDiv(static_cast<uint32_t>(boxes2)), ph.boxes1 = FastDiv(static_cast<uint32_t>(boxes1));
      tiles_m = boxes2 * boxes1 * sm90_ceil(p.imgs, plan.pn);
      if (tiles_m * Tile::kPixels >= kExtentLimit) return cudaErrorInvalidValue;
    }
    tiles += tiles_m * tiles_n;
    if (tiles >= kExtentLimit) return cudaErrorInvalidValue;
    if (!box && w.taps() > 0 && !sm90_pixel_map<T>(&a.in[i], a.mode, p, w, p.chs, p.imgs, Tile::kPixels)) return cudaErrorInvalidValue;
  }
  a.tiles = static_cast<uint32_t>(tiles);
  a.band = FastDiv(static_cast<uint32_t>(tiles / tiles_n < kExtentLimit / kSm90Band ? tiles / tiles_n * kSm90Band : 1));

  const uint64_t inner = Forward ? p.ks : p.chs, outer = Forward ? p.chs : p.ks;  // of w as it lies
  const uint64_t w_extent[3] = {inner, outer, static_cast<uint64_t>(p.taps())}, w_stride[2] = {2 * inner, 2 * inner * outer};
  const uint32_t w_box[3] = {64, 64, 1};
  if (!tma::encode_tiled(&a.w, sm90_type<T>(), 3, p.w_data, w_extent, w_stride, w_box)) return cudaErrorInvalidValue;
  const uint64_t k = static_cast<uint64_t>(p.ks), in_c = static_cast<uint64_t>(p.chs), n = static_cast<uint64_t>(p.imgs);
  bool encoded = true;
  if (box) {
    const uint64_t I2 = p.axis[2].I, I1 = p.axis[1].I, O2 = p.axis[2].O, O1 = p.axis[1].O;
    const uint64_t u2 = p.axis[2].phases, u1 = p.axis[1].phases;
    const uint32_t tile[4] = {64, static_cast<uint32_t>(plan.pw), static_cast<uint32_t>(plan.ph), static_cast<uint32_t>(plan.pn)};
    const uint64_t in_extent[4] = {in_c, I2, I1, n}, in_stride[3] = {2 * in_c, 2 * in_c * I2, 2 * in_c * I2 * I1};
    const uint64_t out_stride[3] = {2 * k * u2, 2 * k * O2 * u1, 2 * k * O2 * O1};
    for (int i = 0; i < phases; ++i) {  // a phase's outputs: every u-th
      const Sm90Walk& w = walks[i];
      if (w.taps() == 0) continue;
      const uint64_t out_extent[4] = {k, static_cast<uint64_t>(w.outs[2]), static_cast<uint64_t>(w.outs[1]), n};
      const T* first = static_cast<const T*>(p.out_data) + (static_cast<uint64_t>(w.f[1]) * O2 + w.f[2]) * k;
      encoded = encoded && tma::encode_tiled(&a.in[i], sm90_type<T>(), 4, p.in_data, in_extent, in_stride, tile) &&
                tma::encode_tiled(&a.out[i], sm90_type<T>(), 4, first, out_extent, out_stride, tile);
    }
  } else {
    const uint64_t extent[2] = {k, n * static_cast<uint64_t>(p.pixels())}, stride[1] = {2 * k};
    const uint32_t tile[2] = {64, Tile::kPixels};
    encoded = tma::encode_tiled(&a.out[0], sm90_type<T>(), 2, p.out_data, extent, stride, tile);
  }
  if (!encoded) return cudaErrorInvalidValue;

  const auto kernel = sm90_conv<T, Tile, Forward, Phases>;
  const int sms = sm90_multiprocessors();
  const unsigned blocks = tiles < sms ? static_cast<unsigned>(tiles) : static_cast<unsigned>(sms);
  kernel<<<blocks, kSm90Threads, Tile::kBytes, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace conv
}  // namespace jaxprims
