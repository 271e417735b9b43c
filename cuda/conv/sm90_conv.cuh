// Convolution forward and input gradient on Hopper's tensor cores: an implicit matrix product, float16 and bfloat16.
//
//   out[n, o.., k] = clip( sum over taps j.., channels c of in[n, lower + o' * step + j * offset.., c] * w[tap, c, k] + bias[k] + residual )
//   rows are the pixels (n, o'..) of one phase as one list, columns are k; sm90.h's walks give lower, step, offset and tap.
//   Forward has one phase (o' = o); the input gradient of a convolution of stride u has u phases per axis, each with its own
//   taps, all in one launch: no product with a zero is formed.
//
// Layout   in, out channels last; w HWIO as it lies: its chunks of 64 c x 64 k are an MN-major operand going forward, and a
//          K-major one in the input gradient (there c is a column and k is summed). No copy of w, no workspace.
// Work     persistent: one block per multiprocessor walks over the tiles, columns first, so that neighbours share pixels in L2.
//          One thread loads: im2col TMA turns (tap, 64 channels) of 64 MB pixels into one box, padding included.
//          Two warpgroups multiply and store in turn. Sums are float32, rounded once. Phases of stride > 1 are scattered rows:
//          their stores are 16-byte vectors of ordinary writes; else TMA stores.
// Order    every output is summed by one warpgroup in one order: the same bits in every run.
// Cost     2 * outputs * taps * C flops; loads from L2 of (MB + NB) chunks for every MB * NB chunks of sums.
#pragma once
#include "conv/sm90.cuh"

namespace jaxprims {
namespace conv {

struct Sm90PhaseArgs {
  uint32_t first_tile = 0, rows = 0;
  int32_t count[kMaxSpatial], offset[kMaxSpatial], lower[kMaxSpatial], step[kMaxSpatial];
  int32_t tap0, tap_step[kMaxSpatial], f[kMaxSpatial];
  FastDiv outs[kMaxSpatial];
};

template <int Phases>
struct Sm90ConvArgs {
  CUtensorMap in[Phases];
  CUtensorMap w, out;
  Sm90PhaseArgs phase[Phases];
  FastDiv tiles_n;
  uint32_t tiles, chunks;  // chunks of 64 channels in a tap
  int32_t phases, mode, cols;
  const void *bias, *residual;
  Type bias_type;
  float lo, hi;
  // strided: the rows' places
  void* out_data;
  int64_t out_image, out_s[kMaxSpatial];
  int32_t out_phases[kMaxSpatial];
};

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
  uint32_t m, n;
  a.tiles_n.divmod(tile, m, n);
  at.m = m * Tile::kRows, at.n = n * Tile::kCols;
  return at;
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
    if (a.mode == kFlat) {
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
      for (int j1 = 0; j1 < ph.count[1]; ++j1)
        for (int j2 = 0; j2 < ph.count[2]; ++j2) {
          const int tap = ph.tap0 + j0 * ph.tap_step[0] + j1 * ph.tap_step[1] + j2 * ph.tap_step[2];
          for (uint32_t chunk = 0; chunk < a.chunks; ++chunk) {
            const int c = static_cast<int>(chunk * 64);
            const uint32_t to = memory.ring + ring.stage * Tile::kStageBytes, full = memory.full + 8 * ring.stage;
            barrier_wait(memory.empty + 8 * ring.stage, ring.lap ^ 1);
            barrier_expect(full, Tile::kStageBytes);
            load_pixels(a.mode, to, map, full, c, pixel, j2 * ph.offset[2], j1 * ph.offset[1], j0 * ph.offset[0]);
#pragma unroll
            for (int j = 0; j < Tile::NB; ++j) {
              const int n = static_cast<int>(at.n) + 64 * j;
              tma_load_3d(to + (Tile::MB + j) * kChunkBytes, &a.w, full, Forward ? n : c, Forward ? c : n, tap);
            }
            ring.advance();
          }
        }
  }
}

// Sums become the result's chunks in shared memory: rounded, in the swizzle that TMA reads.
template <class T, class Tile, int Phases>
__device__ __forceinline__ void sm90_conv_stage(const Sm90ConvArgs<Phases>& a, const Sm90Place& at, float (&sums)[Tile::MB][32 * Tile::NB],
                                                uint32_t store) {
  const uint32_t thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const uint32_t rows = a.phase[at.phase].rows;
  const uint32_t row = warp * 16 + (lane & 15), piece = lane >> 4;  // where this lane's matrix row goes
#pragma unroll
  for (int j = 0; j < 8 * Tile::NB; j += 2) {
    float2 bias[2] = {{0.f, 0.f}, {0.f, 0.f}};
    if (a.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t k = at.n + 8 * (j + i) + lane % 4 * 2;
        if (k < static_cast<uint32_t>(a.cols)) bias[i] = {sm90_bias(a.bias, a.bias_type, k), sm90_bias(a.bias, a.bias_type, k + 1)};
      }
    }
#pragma unroll
    for (int m = 0; m < Tile::MB; ++m) {
      uint32_t packed[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {  // column pair j + q / 2, row half q % 2
        float u = sums[m][4 * (j + q / 2) + 2 * (q % 2)] + bias[q / 2].x, v = sums[m][4 * (j + q / 2) + 2 * (q % 2) + 1] + bias[q / 2].y;
        if (a.residual != nullptr) {
          const uint32_t r = at.m + 64 * m + warp * 16 + lane / 4 + 8 * (q % 2), k = at.n + 8 * (j + q / 2) + lane % 4 * 2;
          if (r < rows && k < static_cast<uint32_t>(a.cols)) {
            const float2 add = unpack_pair<T>(*reinterpret_cast<const uint32_t*>(static_cast<const T*>(a.residual) + int64_t{r} * a.cols + k));
            u += add.x, v += add.y;
          }
        }
        u = u < a.lo ? a.lo : u > a.hi ? a.hi : u;
        v = v < a.lo ? a.lo : v > a.hi ? a.hi : v;
        packed[q] = pack_pair<T>(u, v);
      }
      const uint32_t r = 64 * m + row, p = j + piece;  // 16-byte piece p % 8 of chunk p / 8
      store_matrices(store + p / 8 * (Tile::MB * kChunkBytes) + r * 128 + ((p % 8 ^ r % 8) * 16), packed[0], packed[1], packed[2], packed[3]);
    }
  }
}

// Writes a strided phase's rows, each to its place.
template <class T, class Tile, int Phases>
__device__ __forceinline__ void sm90_conv_scatter(const Sm90ConvArgs<Phases>& a, const Sm90Place& at, uint32_t store) {
  const Sm90PhaseArgs& ph = a.phase[at.phase];
  for (uint32_t i = threadIdx.x % 128; i < Tile::kRows * 8; i += 128) {
    const uint32_t r = i / 8, piece = i % 8;
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
    for (int j = 0; j < Tile::NB; ++j) {
      const uint32_t k = at.n + 64 * j + 8 * piece;
      if (k >= static_cast<uint32_t>(a.cols)) break;
      uint4 v;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "r"(store + j * (Tile::MB * kChunkBytes) + r * 128 + ((piece ^ r % 8) * 16)));
      *reinterpret_cast<uint4*>(static_cast<T*>(a.out_data) + to + k) = v;
    }
  }
}

template <class T, class Tile, bool Forward, int Phases>
__global__ void __launch_bounds__(kSm90Threads, 1) sm90_conv(const __grid_constant__ Sm90ConvArgs<Phases> a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char shared[];
  const Sm90Memory<Tile> memory(shared);
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  const uint32_t group = threadIdx.x / 128;
  if (group == 0) {
    registers_down<40>();
    if (threadIdx.x == 0) sm90_conv_load<Tile, Forward, Phases>(a, memory);
  } else {
    registers_up<232>();
    const uint32_t g = group - 1;
    Ring<Tile::kStages> ring;
    uint32_t turn = 0, i = 0;
    for (uint32_t tile = blockIdx.x; tile < a.tiles; tile += gridDim.x, ++i) {
      const Sm90Place at = sm90_place<Tile, Phases>(a, tile);
      const Sm90PhaseArgs& ph = a.phase[at.phase];
      const uint32_t steps = static_cast<uint32_t>(ph.count[0]) * ph.count[1] * ph.count[2] * a.chunks;
      if (i % 2 != g) {
        ring.skip(steps);
        continue;
      }
      float sums[Tile::MB][32 * Tile::NB];
      wait_turn(memory.multiply_turn, g, turn);
      if (Phases > 1 && steps == 0) {  // a phase that no tap reaches
#pragma unroll
        for (int m = 0; m < Tile::MB; ++m)
#pragma unroll
          for (int s = 0; s < 32 * Tile::NB; ++s) sums[m][s] = 0.f;
        pass_turn(memory.multiply_turn, g);
      } else {
        Multiplier<T, Tile, 0, Forward> multiplier{sums, memory, ring};
        multiplier.run(steps);
        pass_turn(memory.multiply_turn, g);
        multiplier.finish();
      }
      wait_turn(memory.store_turn, g, turn);
      sm90_conv_stage<T, Tile, Phases>(a, at, sums, memory.store);
      if constexpr (Phases > 1) {
        named_sync(1 + g, 128);
        sm90_conv_scatter<T, Tile, Phases>(a, at, memory.store);
      } else {
        proxy_fence();
        named_sync(1 + g, 128);
        if (threadIdx.x % 128 == 0) {
#pragma unroll
          for (int j = 0; j < Tile::NB; ++j)
            if (at.n + 64 * j < static_cast<uint32_t>(a.cols))
              tma_store_2d(&a.out, memory.store + j * (Tile::MB * kChunkBytes), static_cast<int>(at.n) + 64 * j, static_cast<int>(at.m));
          tma_store_commit();
          tma_store_wait_read();
        }
      }
      pass_turn(memory.store_turn, g);
      ++turn;
    }
  }
#endif
}

// ---- launch -----------------------------------------------------------------------------------------------------------------
template <class T, int MB, int NB, bool Forward, int Phases>
cudaError_t sm90_conv_launch(const Problem& p, const Sm90Plan& plan, bool flip, cudaStream_t stream) {
  using Tile = Sm90Tile<MB, NB, true>;
  Sm90ConvArgs<Phases> a;
  a.mode = sm90_mode(p, plan.flat);
  a.cols = static_cast<int32_t>(p.ks);
  a.chunks = static_cast<uint32_t>(sm90_ceil(p.chs, 64));
  const uint32_t tiles_n = static_cast<uint32_t>(sm90_ceil(p.ks, Tile::kCols));
  a.tiles_n = FastDiv(tiles_n);
  a.bias = p.bias, a.residual = p.residual, a.bias_type = p.bias_type;
  sm90_clip(p.activation, &a.lo, &a.hi);
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
        const Sm90Walk w = sm90_walk(p, flip, f);
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
    tiles += sm90_ceil(ph.rows, Tile::kRows) * tiles_n;
    if (tiles >= kExtentLimit) return cudaErrorInvalidValue;
    if (w.taps() > 0 && !sm90_pixel_map<T>(&a.in[i], a.mode, p, w, p.chs, p.imgs, Tile::kRows)) return cudaErrorInvalidValue;
  }
  a.tiles = static_cast<uint32_t>(tiles);

  const uint64_t inner = Forward ? p.ks : p.chs, outer = Forward ? p.chs : p.ks;  // of w as it lies
  const uint64_t w_extent[3] = {inner, outer, static_cast<uint64_t>(p.taps())}, w_stride[2] = {2 * inner, 2 * inner * outer};
  const uint32_t w_box[3] = {64, 64, 1};
  if (!tma::encode_tiled(&a.w, sm90_type<T>(), 3, p.w_data, w_extent, w_stride, w_box)) return cudaErrorInvalidValue;
  const uint64_t out_extent[2] = {static_cast<uint64_t>(p.ks), static_cast<uint64_t>(p.imgs * p.pixels())};
  const uint64_t out_stride[1] = {2 * out_extent[0]};
  const uint32_t out_box[2] = {64, Tile::kRows};
  if (!tma::encode_tiled(&a.out, sm90_type<T>(), 2, p.out_data, out_extent, out_stride, out_box)) return cudaErrorInvalidValue;

  const auto kernel = sm90_conv<T, Tile, Forward, Phases>;
  static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kBytes);
  if (allowed != cudaSuccess) return allowed;
  const int sms = sm90_multiprocessors();
  const unsigned blocks = tiles < sms ? static_cast<unsigned>(tiles) : static_cast<unsigned>(sms);
  kernel<<<blocks, kSm90Threads, Tile::kBytes, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace conv
}  // namespace jaxprims
