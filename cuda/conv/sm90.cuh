// What the Hopper convolution kernels share: the ring of tiles in shared memory, the multiplying loop, the loads of pixels.
//
// A block has three warpgroups. One thread of the first fills a ring of stages by TMA; the other two are consumers that take
// whole output tiles in turn: while one multiplies, the other finishes its sums and stores them (ping-pong). Stage: the tile's
// rows as MB chunks, its columns as NB chunks, of 64 x 64 elements each. (The weight gradient, whose tiles are few and long, lets
// both consumers work on one tile instead.)
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <initializer_list>

#include "common/fastdiv.h"
#include "common/mma.cuh"
#include "common/ptx.cuh"
#include "common/tma.cuh"
#include "conv/sm90.h"

namespace jaxprims {
namespace conv {

constexpr int kSm90Threads = 384;
constexpr int kChunkBytes = 64 * 64 * 2;
constexpr int kSm90Shared = 227 * 1024;  // what a block may have

// MB x NB chunks of sums, Results of them kept on their way out (at most one for each consumer), each ResultBytes.
template <int MB_, int NB_, int ResultBytes>
struct Sm90Tile {
  static constexpr int MB = MB_, NB = NB_;
  static constexpr int kStageBytes = (MB + NB) * kChunkBytes, kResultBytes = ResultBytes;
  static constexpr int kRest = 1024 + 256 + 2 * 192 * 4;  // alignment, barriers, bias
  static constexpr int kRoom = kSm90Shared - kRest;
  static constexpr int kResults = ResultBytes > 0 && kRoom - 2 * ResultBytes >= 4 * kStageBytes ? 2 : 1;
  static constexpr int kFit = (kRoom - kResults * ResultBytes) / kStageBytes;
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static constexpr int kBytes = kRest + kStages * kStageBytes + kResults * ResultBytes;
  static_assert(kStages >= 4 && kBytes <= kSm90Shared, "the ring must hide the latency of a load");
  static_assert(MB * NB <= kSm90Chunks, "sums are 32 MB NB registers a thread");
};

// Shared addresses.
template <class Tile>
struct Sm90Memory {
  uint32_t ring, result, full, empty, multiply_turn, store_turn, bias;
  __device__ explicit Sm90Memory(const void* shared) {
    ring = (shared_address(shared) + 1023) & ~1023u;
    result = ring + Tile::kStages * Tile::kStageBytes;
    full = result + Tile::kResults * Tile::kResultBytes;
    empty = full + 8 * Tile::kStages;
    multiply_turn = empty + 8 * Tile::kStages;
    store_turn = multiply_turn + 16;
    bias = full + 256;
  }
  // readers: warpgroups that read a stage.
  __device__ void init(uint32_t readers) const {
    for (int i = 0; i < Tile::kStages; ++i) {
      barrier_init(full + 8 * i, 1);   // the loading thread announces the bytes
      barrier_init(empty + 8 * i, 4 * readers);  // one lane of each of their warps
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(multiply_turn + 8 * i, 128);
      barrier_init(store_turn + 8 * i, 128);
    }
    barrier_init_fence();
  }
};

// A place in the ring: stage, and how often (modulo 2) it has been passed.
template <int Stages>
struct Ring {
  uint32_t stage = 0, lap = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == Stages) stage = 0, lap ^= 1;
  }
  __device__ __forceinline__ void skip(uint32_t n) {
    const uint32_t to = stage + n;
    lap ^= to / Stages & 1;
    stage = to % Stages;
  }
};

// Consumer g waits for its turn-th turn: the other one has had as many (g = 0), or one more (g = 1).
__device__ __forceinline__ void wait_turn(uint32_t turns, uint32_t g, uint32_t turn) {
  barrier_wait(turns + 8 * g, (turn & 1) ^ (g ^ 1));
}
__device__ __forceinline__ void pass_turn(uint32_t turns, uint32_t g) { barrier_arrive(turns + 8 * (g ^ 1)); }

// sums = rows * columns: M chunks of rows, those at `rows_at` in a stage, by all of its columns. Takes every Every-th stage and
// releases each once it has been read. The last is still being read when run() returns: finish() waits for it.
template <class T, class Tile, int M, int TransA, int TransB, int Every = 1>
struct Multiplier {
  float (&sums)[M][32 * Tile::NB];
  const Sm90Memory<Tile>& memory;
  Ring<Tile::kStages>& ring;
  uint32_t rows_at = 0;
  uint32_t last = 0;

  __device__ __forceinline__ void release(uint32_t stage) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(memory.empty + 8 * stage);
  }
  __device__ __forceinline__ void stage(int first) {
    barrier_wait(memory.full + 8 * ring.stage, ring.lap);
    const uint32_t at = memory.ring + ring.stage * Tile::kStageBytes;
    const uint64_t a = mma_descriptor(at + rows_at, kChunkBytes, 1024);
    const uint64_t b = mma_descriptor(at + Tile::MB * kChunkBytes, kChunkBytes, 1024);
    constexpr int kStepA = (TransA ? 2048 : 32) / 16, kStepB = (TransB ? 2048 : 32) / 16;
    mma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int m = 0; m < M; ++m)
        mma<T, 64 * Tile::NB, TransA, TransB>(sums[m], a + m * (kChunkBytes / 16) + k * kStepA, b + k * kStepB, k > 0 || !first);
    mma_commit();
  }
  __device__ __forceinline__ void advance() {
    last = ring.stage;
#pragma unroll
    for (int i = 0; i < Every; ++i) ring.advance();
  }
  __device__ __forceinline__ void run(uint32_t stages) {
    stage(1);
    advance();
    for (uint32_t i = 1; i < stages; ++i) {
      stage(0);
      mma_wait<1>();
      release(last);
      advance();
    }
  }
  // Adds any number of stages, none too, to what is in the sums.
  __device__ __forceinline__ void add(uint32_t stages) {
    for (uint32_t i = 0; i < stages; ++i) {
      stage(0);
      if (i > 0) {
        mma_wait<1>();
        release(last);
      }
      advance();
    }
    mma_wait<0>();
#pragma unroll
    for (int m = 0; m < M; ++m) mma_pin(sums[m]);
    if (stages > 0) release(last);
  }
  __device__ __forceinline__ void finish() {
    mma_wait<0>();
#pragma unroll
    for (int m = 0; m < M; ++m) mma_pin(sums[m]);
    release(last);
  }
};

// A column of pixels: where its first pixel's window begins, in input coordinates; flat: d is the pixel's number.
struct Pixel {
  int w, h, d, n;
};
enum PixelMode : int { kFlat = 0, kPlane = 1, kVolume = 2, kBox = 3 };

__device__ __forceinline__ void load_pixels(int mode, uint32_t to, const CUtensorMap* map, uint32_t bar, int c, const Pixel& at,
                                            int dw, int dh, int dd) {
  if (mode == kPlane)
    tma_load_im2col_4d(to, map, bar, c, at.w, at.h, at.n, static_cast<uint16_t>(dw), static_cast<uint16_t>(dh));
  else if (mode == kFlat)
    tma_load_2d(to, map, bar, c, at.d);
  else if (mode == kBox)
    tma_load_4d(to, map, bar, c, at.w + dw, at.h + dh, at.n);
  else
    tma_load_im2col_5d(to, map, bar, c, at.w, at.h, at.d, at.n, static_cast<uint16_t>(dw), static_cast<uint16_t>(dh),
                       static_cast<uint16_t>(dd));
}

template <class T>
__device__ __forceinline__ uint32_t pack_pair(float a, float b) {
  if constexpr (IsHalf<T>::value) {
    const __half2 v = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&v);
  } else {
    const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
}
template <class T>
__device__ __forceinline__ float2 unpack_pair(uint32_t v) {
  if constexpr (IsHalf<T>::value) return __half22float2(*reinterpret_cast<const __half2*>(&v));
  else return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v));
}

// ---- host -----------------------------------------------------------------------------------------------------------------
template <class T>
constexpr CUtensorMapDataType sm90_type() {
  return IsHalf<T>::value ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// The pixels of a channels-last array as a walk takes them: `pixels` at a time.
template <class T>
bool sm90_pixel_map(CUtensorMap* map, int mode, const Problem& p, const Sm90Walk& w, int64_t channels, int64_t images, uint32_t pixels) {
  const uint64_t c = static_cast<uint64_t>(channels), n = static_cast<uint64_t>(images);
  const int32_t I[3] = {p.axis[0].I, p.axis[1].I, p.axis[2].I};
  if (mode == kFlat) {
    const uint64_t extent[2] = {c, n * I[0] * I[1] * I[2]}, stride[1] = {2 * c};
    const uint32_t box[2] = {64, pixels};
    return tma::encode_tiled(map, sm90_type<T>(), 2, p.in_data, extent, stride, box);
  }
  const uint64_t extent[3] = {static_cast<uint64_t>(I[2]), static_cast<uint64_t>(I[1]), static_cast<uint64_t>(I[0])};
  const int lower[3] = {w.lower[2], w.lower[1], w.lower[0]};
  const int upper[3] = {sm90_upper(w, 2, I[2]), sm90_upper(w, 1, I[1]), sm90_upper(w, 0, I[0])};
  const uint32_t step[3] = {static_cast<uint32_t>(w.step[2]), static_cast<uint32_t>(w.step[1]), static_cast<uint32_t>(w.step[0])};
  return tma::encode_im2col(map, sm90_type<T>(), mode == kPlane ? 2 : 3, p.in_data, c, extent, n, lower, upper, step, pixels);
}

inline int sm90_mode(const Problem& p, bool flat) {
  const bool volume = p.axis[0].I > 1 || p.axis[0].R > 1 || p.axis[0].O > 1;
  return flat ? kFlat : volume ? kVolume : kPlane;
}

// Lets a kernel have `bytes` of shared memory on the current device.
inline cudaError_t sm90_allow(const void* kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

inline cudaError_t first_error(std::initializer_list<cudaError_t> errors) {
  for (cudaError_t e : errors)
    if (e != cudaSuccess) return e;
  return cudaSuccess;
}

// Multiprocessors of the current device, asked once for each device. An answer that did not come is asked for again.
inline int sm90_multiprocessors() {
  static std::atomic<int> known[64] = {};
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0) {
    (void)cudaGetLastError();
    return kSm90Workers;
  }
  if (device < 64 && known[device].load(std::memory_order_relaxed) > 0) return known[device].load(std::memory_order_relaxed);
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess || count < 1) {
    (void)cudaGetLastError();
    return kSm90Workers;
  }
  if (device < 64) known[device].store(count, std::memory_order_relaxed);
  return count;
}

}  // namespace conv
}  // namespace jaxprims
