// Weight gradient of convolution on Hopper's tensor cores, float16 and bfloat16 in, the same or float32 out.
//
//   dw[tap, c, k] = sum over pixels (n, p..) of x[n, lower + p * step + tap * offset.., c] * dy[n, p.., k]
//
// Layout   x, dy channels last, dw HWIO. One side of the product is chunks of 64 channels of a tap, numbered over (tap, chunk),
//          each its own im2col load of 64 pixels: short channels fill a tile with several taps. The other is chunks of 64 k.
//          Either may be the rows (XRows). Both operands are MN-major (the reduction, pixels, is the outer axis of both):
//          nothing is transposed. Wide columns (NB = 3, 4) pay more here than going forward (see Tried).
// Work     all tiles' reductions, in steps of 64 pixels, are one list, cut into kSm90Workers equal shares: every
//          multiprocessor has the same work, however few the tiles are; or each tile's is cut into as many shares. The two consumers share a tile: a chunk of rows each
//          (MB = 2), or every other step each (MB = 1). A share that holds a tile's whole reduction writes it; others leave
//          their sums in the workspace (at most two for each worker), and sm90_wgrad_add adds those of a tile.
// Order    shares depend on the shape alone and are added in order: the same bits in every run, on every GPU.
// Cost     2 * taps * C * K * pixels flops; workspace kSm90Workspace bytes.
// Tried    TFLOP/s on an H200, bfloat16, with the addition (9x9: N 128, C 64, 64^2, K 128; 3x3: C 512, 7^2, batch 256; 1x1: C 256,
//          K 1024, 14^2). v1 rows (tap, c), 192 x 128, consumers in turn: 521, 509, 298. v2 128 x 256, both consumers on one
//          tile: 691, 624, 385. v3 tiles cut alike, addition by several rows of threads: 752, 629, 494. cuDNN: 284, 567, 625.
#pragma once
#include "conv/sm90.cuh"

namespace jaxprims {
namespace conv {

template <int MB_, int NB_, bool XRows_>
struct Sm90WgradTile : Sm90Tile<MB_, NB_, (MB_ == 1 ? NB_ * 64 * 64 * 4 : 0)> {  // MB 1: where the consumers add their sums
  static constexpr bool kXRows = XRows_;
  static constexpr int XB = XRows_ ? MB_ : NB_, KB = XRows_ ? NB_ : MB_;  // chunks of (tap, 64 channels), of 64 k
  static constexpr int kXAt = XRows_ ? 0 : MB_ * kChunkBytes, kKAt = XRows_ ? MB_ * kChunkBytes : 0;  // in a stage
  static constexpr int kParts = MB_ * NB_ * 8;  // of 512 sums, four for each thread of a warpgroup
};

struct Sm90WgradArgs {
  CUtensorMap x, dy;
  FastDiv outs[kMaxSpatial];            // extents of dy
  int32_t lower[kMaxSpatial], step[kMaxSpatial], offset[kMaxSpatial];
  FastDiv taps1, taps2, chunks, tiles_k;  // filter extents of axes 1, 2; chunks of 64 channels; tiles along k
  uint32_t x_chunks, k_chunks, tiles, steps, workers;  // x_chunks: those of all taps
  uint32_t splits;  // workers for each tile, where the tiles' reductions are cut alike; 0: where all is one list
  int32_t mode, flip, taps, C, K;
  void* out;
  int32_t out_f32;
  float* partial;
};

// Where a worker's share begins in the list of all tiles' steps.
__device__ __forceinline__ uint64_t sm90_share(const Sm90WgradArgs& a, uint32_t worker) {
  if (a.splits == 0) return static_cast<uint64_t>(a.tiles) * a.steps * worker / a.workers;
  const uint32_t tile = worker / a.splits, part = worker - tile * a.splits;
  return static_cast<uint64_t>(tile) * a.steps + static_cast<uint64_t>(a.steps) * part / a.splits;
}
__device__ __forceinline__ uint32_t sm90_owner(const Sm90WgradArgs& a, uint64_t position) {
  return static_cast<uint32_t>(((position + 1) * a.workers - 1) / (static_cast<uint64_t>(a.tiles) * a.steps));
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
    uint32_t tx, tk;
    a.tiles_k.divmod(s.tile, tx, tk);
    const uint32_t x0 = tx * Tile::XB, k0 = tk * Tile::KB;  // chunks past the last are not loaded: their sums are not written
    const uint32_t live_x = a.x_chunks - x0 < Tile::XB ? a.x_chunks - x0 : Tile::XB;
    const uint32_t live_k = a.k_chunks - k0 < Tile::KB ? a.k_chunks - k0 : Tile::KB;
    const uint32_t bytes = (live_x + live_k) * kChunkBytes;
    int c[Tile::XB], dw[Tile::XB], dh[Tile::XB], dd[Tile::XB];
#pragma unroll
    for (int i = 0; i < Tile::XB; ++i) {
      uint32_t tap, chunk, t0, t1, t2;
      a.chunks.divmod(x0 + i, tap, chunk);
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
      for (int i = 0; i < Tile::XB; ++i)
        if (static_cast<uint32_t>(i) < live_x)
          load_pixels(a.mode, to + Tile::kXAt + i * kChunkBytes, &a.x, full, c[i], pixel, dw[i], dh[i], dd[i]);
#pragma unroll
      for (int j = 0; j < Tile::KB; ++j)
        if (static_cast<uint32_t>(j) < live_k)
          tma_load_2d(to + Tile::kKAt + j * kChunkBytes, &a.dy, full, static_cast<int>((k0 + j) * 64), static_cast<int>(first));
      ring.advance();
    }
    position += s.end - s.begin;
  }
}

// Where a thread's sums of chunk (m, n) of a tile go: the first of them, and what is left of c and k there.
struct Sm90WgradPlace {
  int64_t at;
  int32_t c, k;
};
template <class Tile>
__device__ __forceinline__ Sm90WgradPlace sm90_wgrad_place(const Sm90WgradArgs& a, uint32_t tile, uint32_t m, uint32_t n) {
  const uint32_t thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  uint32_t tx, tk, tap, chunk;
  a.tiles_k.divmod(tile, tx, tk);
  const uint32_t x = tx * Tile::XB + (Tile::kXRows ? m : n);
  const uint32_t k = (tk * Tile::KB + (Tile::kXRows ? n : m)) * 64 + (Tile::kXRows ? column : row);
  a.chunks.divmod(x, tap, chunk);
  if (a.flip) tap = static_cast<uint32_t>(a.taps) - 1 - tap;
  const uint32_t c = chunk * 64 + (Tile::kXRows ? row : column);
  Sm90WgradPlace to;
  to.at = (static_cast<int64_t>(tap) * a.C + c) * a.K + k;
  to.c = x < a.x_chunks ? a.C - static_cast<int32_t>(c) : 0, to.k = a.K - static_cast<int32_t>(k);
  return to;
}
// Part j of a chunk: columns 8 j.. of the product. Four sums (mma.cuh): rows r and r + 8, columns c and c + 1.
template <class T, class Tile>
__device__ __forceinline__ void sm90_wgrad_write(const Sm90WgradArgs& a, const Sm90WgradPlace& to, int j, float4 v) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float p = h ? v.z : v.x, q = h ? v.w : v.y;
    if constexpr (Tile::kXRows) {  // K is a multiple of 8: a pair is in or out
      if (8 * h >= to.c || 8 * j >= to.k) return;
      const int64_t at = to.at + static_cast<int64_t>(8 * h) * a.K + 8 * j;
      if (a.out_f32) *reinterpret_cast<float2*>(static_cast<float*>(a.out) + at) = {p, q};
      else *reinterpret_cast<uint32_t*>(static_cast<T*>(a.out) + at) = pack_pair<T>(p, q);
    } else {  // and so is C
      if (8 * j >= to.c || 8 * h >= to.k) return;
      const int64_t at = to.at + static_cast<int64_t>(8 * j) * a.K + 8 * h;
      if (a.out_f32) {
        float* out = static_cast<float*>(a.out) + at;
        out[0] = p, out[a.K] = q;
      } else {
        unsigned short* out = static_cast<unsigned short*>(a.out) + at;
        const uint32_t both = pack_pair<T>(p, q);
        out[0] = static_cast<unsigned short>(both), out[a.K] = static_cast<unsigned short>(both >> 16);
      }
    }
  }
}

// A stretch's place in the workspace: a worker has at most one tile begun by another, and one that another ends.
template <class Tile>
__device__ __forceinline__ float4* sm90_wgrad_slot(const Sm90WgradArgs& a, uint32_t worker, bool first) {
  return reinterpret_cast<float4*>(a.partial) + static_cast<int64_t>(2 * worker + (first ? 0 : 1)) * Tile::kParts * 128;
}

template <class T, class Tile>
__global__ void __launch_bounds__(kSm90Threads, 1) sm90_wgrad(const __grid_constant__ Sm90WgradArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char shared[];
  const Sm90Memory<Tile> memory(shared);
  if (threadIdx.x == 0) memory.init(Tile::MB);
  __syncthreads();
  const uint64_t begin = sm90_share(a, blockIdx.x), end = sm90_share(a, blockIdx.x + 1);
  const uint32_t group = threadIdx.x / 128;
  if (group == 0) {
    registers_down<40>();
    if (threadIdx.x == 0) sm90_wgrad_load<Tile>(a, memory, begin, end);
  } else {
    registers_up<232>();
    const uint32_t g = group - 1;
    Ring<Tile::kStages> ring;
    for (uint64_t position = begin; position < end;) {
      const Sm90Stretch s = sm90_stretch(position, end, a.steps);
      const bool first = position == begin;
      const uint32_t steps = s.end - s.begin;
      position += steps;
      float sums[1][32 * Tile::NB];
      if constexpr (Tile::MB == 2) {
        Multiplier<T, Tile, 1, 1, 1> multiplier{sums, memory, ring, g * kChunkBytes};
        multiplier.run(steps);
        multiplier.finish();
      } else {
        Ring<Tile::kStages> next = ring;
        next.skip(steps);
        ring.skip(g);
#pragma unroll
        for (int i = 0; i < 32 * Tile::NB; ++i) sums[0][i] = 0.f;
        Multiplier<T, Tile, 1, 1, 1, 2> multiplier{sums, memory, ring};
        multiplier.add((steps + 1 - g) / 2);
        ring = next;
        const uint32_t mine = memory.result + threadIdx.x % 128 * 16;
        if (g == 1) {
#pragma unroll
          for (int j = 0; j < 8 * Tile::NB; ++j)
            store_shared(mine + j * 2048, make_float4(sums[0][4 * j], sums[0][4 * j + 1], sums[0][4 * j + 2], sums[0][4 * j + 3]));
        }
        named_sync(1, 256);
        if (g == 0) {
#pragma unroll
          for (int j = 0; j < 8 * Tile::NB; ++j) {
            const float4 v = load_shared_quad(mine + j * 2048);
            sums[0][4 * j] += v.x, sums[0][4 * j + 1] += v.y, sums[0][4 * j + 2] += v.z, sums[0][4 * j + 3] += v.w;
          }
        }
        named_sync(1, 256);
        if (g == 1) continue;
      }
      if (steps == a.steps) {
#pragma unroll
        for (int n = 0; n < Tile::NB; ++n) {
          const Sm90WgradPlace to = sm90_wgrad_place<Tile>(a, s.tile, g, n);
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            __syncwarp();  // keeps the compiler from overlapping the steps: there are no registers for it
            const float* v = sums[0] + 32 * n + 4 * j;
            sm90_wgrad_write<T, Tile>(a, to, j, make_float4(v[0], v[1], v[2], v[3]));
          }
        }
      } else {
        float4* slot = sm90_wgrad_slot<Tile>(a, blockIdx.x, first) + g * 8 * Tile::NB * 128 + threadIdx.x % 128;
        uint32_t tx, tk;
        a.tiles_k.divmod(s.tile, tx, tk);
        const uint32_t live = Tile::kXRows ? a.k_chunks - tk * Tile::KB : a.x_chunks - tx * Tile::XB;
#pragma unroll
        for (int j = 0; j < 8 * Tile::NB; ++j)
          if (static_cast<uint32_t>(j / 8) < live)
            slot[j * 128] = make_float4(sums[0][4 * j], sums[0][4 * j + 1], sums[0][4 * j + 2], sums[0][4 * j + 3]);
      }
    }
  }
#endif
}

// Adds the parts of the tiles that were shared. grid.x = tiles * parts, block (128, 1 or kAdders): each row of threads adds every
// blockDim.y-th worker's, the first adds the rows.
constexpr uint32_t kAdders = 8;
template <class T, class Tile>
__global__ void sm90_wgrad_add(const __grid_constant__ Sm90WgradArgs a) {
  __shared__ float4 rows[kAdders - 1][128];
  const uint32_t tile = blockIdx.x / Tile::kParts, part = blockIdx.x % Tile::kParts, m = part / 8 / Tile::NB, n = part / 8 % Tile::NB;
  uint32_t tx, tk;
  a.tiles_k.divmod(tile, tx, tk);
  if (tx * Tile::XB + (Tile::kXRows ? m : n) >= a.x_chunks || tk * Tile::KB + (Tile::kXRows ? n : m) >= a.k_chunks) return;
  const uint64_t begin = static_cast<uint64_t>(tile) * a.steps;
  const uint32_t from = a.splits > 0 ? tile * a.splits : sm90_owner(a, begin);
  const uint32_t to = a.splits > 0 ? from + a.splits - 1 : sm90_owner(a, begin + a.steps - 1);
  if (from == to) return;  // one worker had all of it, and wrote it
  float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
  for (uint32_t worker = from + threadIdx.y; worker <= to; worker += blockDim.y) {
    // Only the first can have begun before this tile: then this was its last stretch, else its first.
    const bool first = worker > from || sm90_share(a, worker) >= begin;
    const float4 v = sm90_wgrad_slot<Tile>(a, worker, first)[part * 128 + threadIdx.x];
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  if (blockDim.y > 1) {
    if (threadIdx.y > 0) rows[threadIdx.y - 1][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0) return;
#pragma unroll
    for (uint32_t y = 0; y + 1 < kAdders; ++y) {
      const float4 v = rows[y][threadIdx.x];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
  }
  sm90_wgrad_write<T, Tile>(a, sm90_wgrad_place<Tile>(a, tile, m, n), part % 8, sum);
}

// ---- launch -----------------------------------------------------------------------------------------------------------------
template <class T, int MB, int NB, bool XRows>
cudaError_t sm90_wgrad_prepare() {
  using Tile = Sm90WgradTile<MB, NB, XRows>;
  return sm90_allow(reinterpret_cast<const void*>(sm90_wgrad<T, Tile>), Tile::kBytes);
}

// sm90_wgrad_prepare has run on this device. cudaErrorInvalidValue: nothing was launched, see sm90_launch.h.
template <class T, int MB, int NB, bool XRows>
cudaError_t sm90_wgrad_launch(const Problem& p, const Sm90Plan& plan, void* workspace, cudaStream_t stream) {
  using Tile = Sm90WgradTile<MB, NB, XRows>;
  Sm90WgradArgs a;
  const Sm90Walk w = sm90_wgrad_walk(p);
  const int64_t pixels = p.chs * w.rows(1);
  a.mode = sm90_mode(p, plan.flat);
  for (int i = 0; i < kMaxSpatial; ++i) {
    a.outs[i] = FastDiv(static_cast<uint32_t>(w.outs[i]));
    a.lower[i] = w.lower[i], a.step[i] = w.step[i], a.offset[i] = w.offset[i];
  }
  const uint32_t chunks = static_cast<uint32_t>(sm90_ceil(p.imgs, 64));
  a.taps1 = FastDiv(static_cast<uint32_t>(w.count[1])), a.taps2 = FastDiv(static_cast<uint32_t>(w.count[2]));
  a.taps = w.taps();
  const int64_t x_chunks = int64_t{a.taps} * chunks, k_chunks = sm90_ceil(p.ks, 64), tiles_k = sm90_ceil(k_chunks, Tile::KB);
  const int64_t tiles = sm90_ceil(x_chunks, Tile::XB) * tiles_k;
  if (x_chunks >= kExtentLimit || tiles * Tile::kParts >= kExtentLimit) return cudaErrorInvalidValue;
  a.chunks = FastDiv(chunks), a.tiles_k = FastDiv(static_cast<uint32_t>(tiles_k));
  a.x_chunks = static_cast<uint32_t>(x_chunks), a.k_chunks = static_cast<uint32_t>(k_chunks), a.tiles = static_cast<uint32_t>(tiles);
  a.steps = static_cast<uint32_t>(sm90_ceil(pixels, 64));
  // Cut alike, tiles walk over the same pixels at the same time, and a worker leaves one part, not two; where that leaves
  // over a sixteenth of the workers idle, or they are fewer than the tiles, all is one list. A share has at least four steps.
  const int64_t alike = kSm90Workers / tiles, longest = sm90_ceil(a.steps, 4);
  const int64_t splits = alike < longest ? alike : longest;
  if (splits > 0 && (splits < alike || splits * tiles * 16 >= kSm90Workers * 15)) {
    a.splits = static_cast<uint32_t>(splits), a.workers = static_cast<uint32_t>(splits * tiles);
  } else {
    const int64_t shares = sm90_ceil(tiles * a.steps, 4);
    a.splits = 0, a.workers = static_cast<uint32_t>(shares < kSm90Workers ? shares : kSm90Workers);
  }
  a.flip = plan.flip, a.C = static_cast<int32_t>(p.imgs), a.K = static_cast<int32_t>(p.ks);
  a.out = p.out_data, a.out_f32 = p.out_type == Type::kF32, a.partial = static_cast<float*>(workspace);

  if (!sm90_pixel_map<T>(&a.x, a.mode, p, w, p.imgs, p.chs, 64)) return cudaErrorInvalidValue;
  const uint64_t extent[2] = {static_cast<uint64_t>(p.ks), static_cast<uint64_t>(pixels)}, stride[1] = {2 * extent[0]};
  const uint32_t box[2] = {64, 64};
  if (!tma::encode_tiled(&a.dy, sm90_type<T>(), 2, p.w_data, extent, stride, box)) return cudaErrorInvalidValue;

  const auto kernel = sm90_wgrad<T, Tile>;
  kernel<<<a.workers, kSm90Threads, Tile::kBytes, stream>>>(a);
  if (a.splits != 1) sm90_wgrad_add<T, Tile><<<a.tiles * Tile::kParts, dim3(128, a.workers >= 6 * a.tiles ? kAdders : 1), 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace conv
}  // namespace jaxprims
