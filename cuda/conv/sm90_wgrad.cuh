// Weight gradient of convolution on Hopper's tensor cores, float16 and bfloat16 in, the same or float32 out.
//
//   dw[tap, c, k] = sum over pixels (n, p..) of x[n, lower + p * step + tap * offset.., c] * dy[n, p.., k]
//
// Layout   x, dy channels last, dw HWIO. Rows of the product are chunks of 64 channels of a tap, numbered over (tap, chunk); a
//          tile takes MB of them, each its own im2col load of 64 pixels: short channels fill the tile with several taps.
//          Both operands are MN-major (the reduction, pixels, is the outer axis of both): nothing is transposed.
// Work     all tiles' reductions, in steps of 64 pixels, are one list, cut into kSm90Workers equal shares: every
//          multiprocessor has the same work, however few the tiles are. A share that holds a tile's whole reduction writes it;
//          others leave their sums in the workspace (at most two for each worker), and sm90_wgrad_add adds those of a tile.
// Order    shares depend on the shape alone and are added in order: the same bits in every run, on every GPU.
// Cost     2 * taps * C * K * pixels flops; workspace kSm90Workspace bytes.
#pragma once
#include "conv/sm90.cuh"

namespace jaxprims {
namespace conv {

struct Sm90WgradArgs {
  CUtensorMap x, dy;
  FastDiv outs[kMaxSpatial];            // extents of dy
  int32_t lower[kMaxSpatial], step[kMaxSpatial], offset[kMaxSpatial];
  FastDiv taps1, taps2, chunks, tiles_n;  // filter extents of axes 1, 2; chunks of 64 channels; tiles along k
  uint32_t rows, tiles, steps, workers;  // rows: chunks of all taps
  int32_t mode, flip, taps, C, K;
  void* out;
  int32_t out_f32;
  float* partial;
};

__host__ __device__ inline uint64_t sm90_share(uint64_t total, uint32_t workers, uint32_t worker) { return total * worker / workers; }
__device__ __forceinline__ uint32_t sm90_owner(uint64_t total, uint32_t workers, uint64_t position) {
  return static_cast<uint32_t>(((position + 1) * workers - 1) / total);
}

// A stretch of one tile's reduction.
struct Sm90Stretch {
  uint32_t tile, begin, end;
};
__device__ __forceinline__ Sm90Stretch sm90_stretch(uint64_t position, uint64_t end, uint32_t steps) {
  Sm90Stretch s;
  s.tile = static_cast<uint32_t>(position / steps);
  const uint64_t first = static_cast<uint64_t>(s.tile) * steps;
  s.begin = static_cast<uint32_t>(position - first);
  s.end = end - first < steps ? static_cast<uint32_t>(end - first) : steps;
  return s;
}

template <class Tile>
__device__ __forceinline__ void sm90_wgrad_load(const Sm90WgradArgs& a, const Sm90Memory<Tile>& memory, uint64_t position, uint64_t end) {
  Ring<Tile::kStages> ring;
  while (position < end) {
    const Sm90Stretch s = sm90_stretch(position, end, a.steps);
    uint32_t m, n;
    a.tiles_n.divmod(s.tile, m, n);
    const int k0 = static_cast<int>(n * Tile::kCols);
    const uint32_t live = a.rows - m * Tile::MB < Tile::MB ? a.rows - m * Tile::MB : Tile::MB;
    const uint32_t bytes = (live + Tile::NB) * kChunkBytes;
    int c[Tile::MB], dw[Tile::MB], dh[Tile::MB], dd[Tile::MB];
#pragma unroll
    for (int i = 0; i < Tile::MB; ++i) {
      uint32_t tap, chunk, t0, t1, t2;
      a.chunks.divmod(m * Tile::MB + i, tap, chunk);
      a.taps2.divmod(tap, t1, t2);
      a.taps1.divmod(t1, t0, t1);
      c[i] = static_cast<int>(chunk * 64);
      dw[i] = static_cast<int>(t2) * a.offset[2], dh[i] = static_cast<int>(t1) * a.offset[1], dd[i] = static_cast<int>(t0) * a.offset[0];
    }
    for (uint32_t step = s.begin; step < s.end; ++step) {
      Pixel pixel;
      const uint32_t first = step * 64;
      if (a.mode == kFlat) {
        pixel.d = static_cast<int>(first), pixel.w = pixel.h = pixel.n = 0;
      } else {
        uint32_t o[kMaxSpatial], rest = first;
#pragma unroll
        for (int i = kMaxSpatial - 1; i >= 0; --i) a.outs[i].divmod(rest, rest, o[i]);
        pixel.n = static_cast<int>(rest);
        pixel.d = static_cast<int>(o[0]) * a.step[0] + a.lower[0];
        pixel.h = static_cast<int>(o[1]) * a.step[1] + a.lower[1];
        pixel.w = static_cast<int>(o[2]) * a.step[2] + a.lower[2];
      }
      const uint32_t to = memory.ring + ring.stage * Tile::kStageBytes, full = memory.full + 8 * ring.stage;
      barrier_wait(memory.empty + 8 * ring.stage, ring.lap ^ 1);
      barrier_expect(full, bytes);
#pragma unroll
      for (int i = 0; i < Tile::MB; ++i)
        if (static_cast<uint32_t>(i) < live) load_pixels(a.mode, to + i * kChunkBytes, &a.x, full, c[i], pixel, dw[i], dh[i], dd[i]);
#pragma unroll
      for (int j = 0; j < Tile::NB; ++j)
        tma_load_2d(to + (Tile::MB + j) * kChunkBytes, &a.dy, full, k0 + 64 * j, static_cast<int>(first));
      ring.advance();
    }
    position += s.end - s.begin;
  }
}

// Four sums of a thread (mma.cuh: rows r and r + 8, columns 8 j + 2 (lane % 4) and the next) to their places in dw.
template <class T>
__device__ __forceinline__ void sm90_wgrad_write(const Sm90WgradArgs& a, uint32_t row_chunk, uint32_t k0, float4 v) {
  const uint32_t thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const uint32_t k = k0 + lane % 4 * 2;
  if (row_chunk >= a.rows || k >= static_cast<uint32_t>(a.K)) return;
  uint32_t tap, chunk;
  a.chunks.divmod(row_chunk, tap, chunk);
  if (a.flip) tap = static_cast<uint32_t>(a.taps) - 1 - tap;
  const uint32_t c = chunk * 64 + warp * 16 + lane / 4;
  const int64_t at = (static_cast<int64_t>(tap) * a.C + c) * a.K + k;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (c + 8 * h >= static_cast<uint32_t>(a.C)) return;
    const int64_t to = at + int64_t{8} * h * a.K;
    const float x = h ? v.z : v.x, y = h ? v.w : v.y;
    if (a.out_f32) *reinterpret_cast<float2*>(static_cast<float*>(a.out) + to) = {x, y};
    else *reinterpret_cast<uint32_t*>(static_cast<T*>(a.out) + to) = pack_pair<T>(x, y);
  }
}

// A stretch's place in the workspace: a worker has at most one tile begun by another, and one that another ends.
template <class Tile>
__device__ __forceinline__ float4* sm90_wgrad_slot(const Sm90WgradArgs& a, uint32_t worker, bool first) {
  return reinterpret_cast<float4*>(a.partial) + (static_cast<int64_t>(2 * worker + (first ? 0 : 1)) * Tile::kRows * Tile::kCols) / 4;
}

template <class T, class Tile>
__global__ void __launch_bounds__(kSm90Threads, 1) sm90_wgrad(const __grid_constant__ Sm90WgradArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char shared[];
  const Sm90Memory<Tile> memory(shared);
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  const uint64_t total = static_cast<uint64_t>(a.tiles) * a.steps;
  const uint64_t begin = sm90_share(total, a.workers, blockIdx.x), end = sm90_share(total, a.workers, blockIdx.x + 1);
  const uint32_t group = threadIdx.x / 128;
  if (group == 0) {
    registers_down<40>();
    if (threadIdx.x == 0) sm90_wgrad_load<Tile>(a, memory, begin, end);
  } else {
    registers_up<232>();
    const uint32_t g = group - 1;
    Ring<Tile::kStages> ring;
    uint32_t turn = 0, i = 0;
    for (uint64_t position = begin; position < end; ++i) {
      const Sm90Stretch s = sm90_stretch(position, end, a.steps);
      const bool first = position == begin;
      const uint32_t steps = s.end - s.begin;
      position += steps;
      if (i % 2 != g) {
        ring.skip(steps);
        continue;
      }
      float sums[Tile::MB][32 * Tile::NB];
      wait_turn(memory.multiply_turn, g, turn);
      Multiplier<T, Tile, 1, 1> multiplier{sums, memory, ring};
      multiplier.run(steps);
      pass_turn(memory.multiply_turn, g);
      multiplier.finish();
      ++turn;
      if (steps == a.steps) {
        uint32_t m, n;
        a.tiles_n.divmod(s.tile, m, n);
#pragma unroll
        for (int r = 0; r < Tile::MB; ++r)
#pragma unroll
          for (int j = 0; j < 8 * Tile::NB; ++j)
            sm90_wgrad_write<T>(a, m * Tile::MB + r, n * Tile::kCols + 8 * j,
                                {sums[r][4 * j], sums[r][4 * j + 1], sums[r][4 * j + 2], sums[r][4 * j + 3]});
      } else {
        float4* slot = sm90_wgrad_slot<Tile>(a, blockIdx.x, first) + threadIdx.x % 128;
#pragma unroll
        for (int r = 0; r < Tile::MB; ++r)
#pragma unroll
          for (int j = 0; j < 8 * Tile::NB; ++j)
            slot[(r * 8 * Tile::NB + j) * 128] = {sums[r][4 * j], sums[r][4 * j + 1], sums[r][4 * j + 2], sums[r][4 * j + 3]};
      }
    }
  }
#endif
}

// Adds the parts of the tiles that were shared. grid.x = tiles * MB * 8 NB, 128 threads.
template <class T, class Tile>
__global__ void sm90_wgrad_add(const __grid_constant__ Sm90WgradArgs a) {
  constexpr uint32_t kParts = Tile::MB * 8 * Tile::NB;
  const uint32_t tile = blockIdx.x / kParts, part = blockIdx.x % kParts;
  const uint64_t total = static_cast<uint64_t>(a.tiles) * a.steps, begin = static_cast<uint64_t>(tile) * a.steps;
  const uint32_t from = sm90_owner(total, a.workers, begin), to = sm90_owner(total, a.workers, begin + a.steps - 1);
  if (from == to) return;  // one worker had all of it, and wrote it
  float4 sum = {0.f, 0.f, 0.f, 0.f};
  for (uint32_t worker = from; worker <= to; ++worker) {
    // A worker that begins in this tile, or at its begin, left its first stretch; one that began before, its last.
    const bool first = sm90_share(total, a.workers, worker) >= begin;
    const float4 v = sm90_wgrad_slot<Tile>(a, worker, first)[part * 128 + threadIdx.x];
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  uint32_t m, n;
  a.tiles_n.divmod(tile, m, n);
  sm90_wgrad_write<T>(a, m * Tile::MB + part / (8 * Tile::NB), n * Tile::kCols + 8 * (part % (8 * Tile::NB)), sum);
}

// ---- launch -----------------------------------------------------------------------------------------------------------------
template <class T, int MB, int NB>
cudaError_t sm90_wgrad_launch(const Problem& p, const Sm90Plan& plan, bool flip, void* workspace, cudaStream_t stream) {
  using Tile = Sm90Tile<MB, NB, false>;
  Sm90WgradArgs a;
  const Sm90Walk w = sm90_wgrad_walk(p);
  const int64_t pixels = p.chs * w.rows(1);
  a.mode = sm90_mode(p, plan.flat);
  for (int i = 0; i < kMaxSpatial; ++i) {
    a.outs[i] = FastDiv(static_cast<uint32_t>(w.outs[i]));
    a.lower[i] = w.lower[i], a.step[i] = w.step[i], a.offset[i] = w.offset[i];
  }
  const uint32_t chunks = static_cast<uint32_t>(sm90_ceil(p.imgs, 64)), tiles_n = static_cast<uint32_t>(sm90_ceil(p.ks, Tile::kCols));
  a.taps1 = FastDiv(static_cast<uint32_t>(w.count[1])), a.taps2 = FastDiv(static_cast<uint32_t>(w.count[2]));
  a.chunks = FastDiv(chunks), a.tiles_n = FastDiv(tiles_n);
  a.taps = w.taps();
  const int64_t rows = int64_t{a.taps} * chunks, tiles = sm90_ceil(rows, MB) * tiles_n;
  if (rows >= kExtentLimit || tiles * Tile::MB * 8 * Tile::NB >= kExtentLimit) return cudaErrorInvalidValue;
  a.rows = static_cast<uint32_t>(rows), a.tiles = static_cast<uint32_t>(tiles);
  a.steps = static_cast<uint32_t>(sm90_ceil(pixels, 64));
  // A share of fewer than four steps would cost more than it saves.
  const int64_t shares = sm90_ceil(tiles * a.steps, 4);
  a.workers = static_cast<uint32_t>(shares < kSm90Workers ? shares : kSm90Workers);
  a.flip = flip, a.C = static_cast<int32_t>(p.imgs), a.K = static_cast<int32_t>(p.ks);
  a.out = p.out_data, a.out_f32 = p.out_type == Type::kF32, a.partial = static_cast<float*>(workspace);

  if (!sm90_pixel_map<T>(&a.x, a.mode, p, w, p.imgs, p.chs, 64)) return cudaErrorInvalidValue;
  const uint64_t extent[2] = {static_cast<uint64_t>(p.ks), static_cast<uint64_t>(pixels)}, stride[1] = {2 * extent[0]};
  const uint32_t box[2] = {64, 64};
  if (!tma::encode_tiled(&a.dy, sm90_type<T>(), 2, p.w_data, extent, stride, box)) return cudaErrorInvalidValue;

  const auto kernel = sm90_wgrad<T, Tile>;
  static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kBytes);
  if (allowed != cudaSuccess) return allowed;
  kernel<<<a.workers, kSm90Threads, Tile::kBytes, stream>>>(a);
  if (a.workers > 1) sm90_wgrad_add<T, Tile><<<a.tiles * (Tile::MB * 8 * Tile::NB), 128, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace conv
}  // namespace jaxprims
