// Convolution as an implicit matrix product: forward, input gradient, weight gradient, any layout, one kernel.
//
//   out[b, g, img, o.., k] = act( sum over ch, r.. of in[b, g, img, (o*a + r*b + c)/e.., ch] * w[b, g, r.., ch, k] + bias[k] + residual )
//   problem.h says which tensor is in, w and out in each of the three; the sum is float32, with one rounding at the end.
//
// Layout   any: addresses are 64-bit sums of index * stride. select.h picks which index neighbouring threads walk along.
// Work     conv_gemm: one block = one tile of  rows (img, o'..) x channels k  of one phase (index.h), group and batch. The
//          tiles of `in` and `w` are gathered from global memory while the block multiplies the previous ones: nothing is
//          unfolded in memory, and no product with a zero of a dilation is formed. Row r of a tile has a start address and
//          input index, step k of the reduction an offset to both, so an element costs three additions, three range checks
//          (the padding) and a load. Groups of a few channels have a kernel without tiles: direct.cuh.
//          Weight gradients have few outputs with long sums: `splits` blocks take one tile's k-tiles by turns of equal length
//          and write their sums to workspace[split][output]; conv_add adds them.
// Order    sums run in a fixed order, the shares of a sum are added in a fixed order: the same bits in every run.
// Cost     2 * outputs * taps * channels flops outside tensor cores; bound: FMA, and the gather's integer work.
#pragma once
#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "common/act.cuh"
#include "common/fastdiv.h"
#include "common/pack.cuh"
#include "conv/select.h"

namespace jaxprims {
namespace conv {

struct Args {
  Problem p;
  Config c;
  int64_t tiles_m, tiles_n;
  int32_t phases[kMaxSpatial];  // live phases per axis
  FastDiv m_inner;              // extent of the faster index of a row (img, or the pixels of a phase)
  uint32_t m_outer;
  FastDiv rows1, rows2;         // outputs of a phase along axes 1 and 2
  FastDiv per_image, all_k, pixels, o1, o2, group_k;  // direct: how a block's outputs are numbered
  int64_t outputs;              // of one split
  float* workspace;             // splits x outputs sums; null where there is one split
};

// a becomes a / n, the rest is returned. 32-bit where that is enough: 64-bit division is a long subroutine.
__device__ __forceinline__ int64_t take(int64_t& a, int64_t n) {
  int64_t q;
  if (((a | n) >> 32) == 0) q = static_cast<uint32_t>(a) / static_cast<uint32_t>(n);
  else q = a / n;
  const int64_t r = a - q * n;
  a = q;
  return r;
}

__device__ __forceinline__ float load_as(Type type, const void* data, int64_t i) {
  if (type == Type::kF32) return static_cast<const float*>(data)[i];
  if (type == Type::kF16) return to_float(static_cast<const __half*>(data)[i]);
  return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
}

// The epilogue: one output from its sum. `at` is its place without the true batch.
__device__ __forceinline__ void finish(const Problem& p, int64_t batch, int64_t k, int64_t at, float v) {
  if (p.bias != nullptr) v += load_as(p.bias_type, p.bias, batch * p.bias_b + k);
  if (p.residual != nullptr) v += load_as(p.residual_type, p.residual, batch * p.residual_b + at);
  if (p.activation != 0) v = act_apply(static_cast<Act>(p.activation), v);
  at += batch * p.out.b;
  if (p.out_type == Type::kF32) static_cast<float*>(p.out_data)[at] = v;
  else if (p.out_type == Type::kF16) static_cast<__half*>(p.out_data)[at] = from_float<__half>(v);
  else static_cast<__nv_bfloat16*>(p.out_data)[at] = from_float<__nv_bfloat16>(v);
}

// One output, or one split's part of it.
__device__ __forceinline__ void finish_or_part(const Args& a, int64_t split, int64_t batch, int64_t k, int64_t at, float v) {
  if (a.workspace != nullptr) a.workspace[split * a.outputs + batch * a.p.out.b + at] = v;
  else finish(a.p, batch, k, at, v);
}

// ---- tiles -----------------------------------------------------------------------------------------------------------

// A block's tile is M x N with K steps at a time; a thread owns TM x TN outputs; Split groups of threads own the whole tile
// each and take K / Split steps of every K.
template <int M_, int N_, int K_, int TM_, int TN_, int Split_>
struct Shape {
  static constexpr int M = M_, N = N_, K = K_, TM = TM_, TN = TN_, Split = Split_;
  static constexpr int kGroup = M / TM * (N / TN), kThreads = kGroup * Split;
  static constexpr int kA = M * K / kThreads, kB = (N * K + kThreads - 1) / kThreads;  // loads per thread
  static constexpr int kPitchA = M + 4, kPitchB = N + 4, kPitchC = N + 1;               // padding: fewer bank conflicts
  static constexpr int kStage = K * (kPitchA + kPitchB);                                // floats of one stage
  static constexpr int kMinBlocks = Split == 8 ? 1 : 2;  // the split tile is for few blocks: it may use more registers
  static constexpr bool kTwoLevels = TM * TN <= 16 || kMinBlocks == 1;  // see kFlush; Wide has no registers for it
  static constexpr int kFloats = 2 * kStage > M * kPitchC ? 2 * kStage : M * kPitchC;
  static_assert(kThreads == 256, "the launch and the loaders count on 256 threads");
  static_assert(kThreads % K == 0 && kThreads % M == 0 && M * K % kThreads == 0, "a loader pass covers whole rows of the tile");
  static_assert(kThreads % N == 0 && K % Split == 0 && TM % 4 == 0, "thread tiles divide the tile");
};
// A long sum is two levels of sums: every so many k-tiles a thread adds what it has to a second set of registers.
constexpr int kFlush = 64;

using Wide = Shape<128, 64, 16, 8, 4, 1>;
using Medium = Shape<64, 64, 16, 4, 4, 1>;
using Split = Shape<32, 32, 64, 8, 4, 8>;
using Tiny = Shape<16, 16, 64, 4, 4, 16>;
using Narrow = Shape<128, 8, 16, 4, 4, 4>;

// What all threads of a block share: its place and its phase.
struct BlockInfo {
  int64_t batch, split, group, n0;  // n0: first output channel of the tile
  uint32_t m_outer0, m_inner0;    // the tile's first row
  int32_t f[kMaxSpatial];
  Phase phase[kMaxSpatial];
  FastDiv k_inner, taps1, taps2;  // extent of the faster reduction index; taps of the phase along axes 1 and 2
  uint32_t k_outer;               // extent of the slower one
  uint32_t k_outer0, k_inner0;    // the split's first step
  int64_t k_tiles;                // of the split
};

template <int M, int K>
struct Offsets {
  int4 row_index[M];              // input index (three axes) of a row at the phase's first tap; y = INT_MIN: no such row
  int64_t row_in[M], row_out[M];  // offsets; row_out = INT64_MIN: no such row
  int4 k_index[2][K];             // what a step of the reduction adds to it; x = INT_MIN: no such step
  int64_t k_in[2][K], k_w[2][K];
};

template <int K>
__device__ inline void place_block(const Args& a, int64_t id, int tile_m, int tile_n, BlockInfo& s) {
  const Problem& p = a.p;
  s.n0 = take(id, a.tiles_n) * tile_n;
  s.group = take(id, p.groups);
  for (int i = kMaxSpatial - 1; i >= 0; --i) s.f[i] = static_cast<int32_t>(take(id, a.phases[i]));
  int64_t m0 = take(id, a.tiles_m) * tile_m;
  s.split = take(id, a.c.splits);
  s.batch = id;
  s.m_inner0 = static_cast<uint32_t>(take(m0, a.m_inner.d));
  s.m_outer0 = static_cast<uint32_t>(m0);
  for (int i = 0; i < kMaxSpatial; ++i) s.phase[i] = phase_of(p.axis[i], s.f[i]);
  const int64_t taps = int64_t{s.phase[0].count} * s.phase[1].count * s.phase[2].count;
  s.taps1 = FastDiv(s.phase[1].count > 0 ? s.phase[1].count : 1);
  s.taps2 = FastDiv(s.phase[2].count > 0 ? s.phase[2].count : 1);
  const int64_t inner = a.c.k_ch_fast ? p.chs : taps, total = p.chs * taps;
  s.k_inner = FastDiv(inner > 0 ? static_cast<uint32_t>(inner) : 1u);
  s.k_outer = static_cast<uint32_t>(total == 0 ? 0 : a.c.k_ch_fast ? taps : p.chs);
  s.k_tiles = (total + K - 1) / K;
  s.k_outer0 = s.k_inner0 = 0;
  if (a.c.splits > 1) {
    const int64_t per = (s.k_tiles + a.c.splits - 1) / a.c.splits, from = s.split * per;
    s.k_tiles = from >= s.k_tiles ? 0 : from + per <= s.k_tiles ? per : s.k_tiles - from;
    int64_t step = from * K;
    s.k_inner0 = static_cast<uint32_t>(take(step, s.k_inner.d));
    s.k_outer0 = static_cast<uint32_t>(step);
  }
}

// Row m of the tile: its image and output pixel, where it starts in `in` and where it is written.
template <int M, int K>
__device__ inline void place_row(const Args& a, const BlockInfo& s, int m, Offsets<M, K>& t) {
  const Problem& p = a.p;
  uint32_t outer, inner, o[kMaxSpatial], rest;
  a.m_inner.divmod(s.m_inner0 + m, outer, inner);
  outer += s.m_outer0;
  bool valid = outer < a.m_outer;
  const int64_t img = a.c.m_img_fast ? inner : outer;
  a.rows2.divmod(a.c.m_img_fast ? outer : inner, rest, o[2]);
  a.rows1.divmod(rest, o[0], o[1]);
  int32_t index[kMaxSpatial] = {0, 0, 0};
  int64_t in = img * p.in.outer, out = img * p.out.outer + p.out.offset;
  for (int i = 0; i < kMaxSpatial; ++i) {
    const int64_t at = int64_t{o[i]} * p.axis[i].phases + s.f[i];
    valid = valid && at < p.axis[i].O;  // a shorter phase
    if (!valid) break;
    index[i] = static_cast<int32_t>(o[i]) * p.axis[i].o_step + s.phase[i].base;
    in += index[i] * p.in.s[i];
    out += at * p.out.s[i];
  }
  t.row_index[m] = valid ? make_int4(index[0], index[1], index[2], 0) : make_int4(0, INT_MIN, 0, 0);
  t.row_in[m] = valid ? in : 0;
  t.row_out[m] = valid ? out : INT64_MIN;
}

// Step (outer, inner + lane) of the reduction: its channel and tap.
struct Step {
  bool valid;
  int64_t ch;
  int32_t j[kMaxSpatial];
};
__device__ __forceinline__ Step step_at(const FastDiv& k_inner, const FastDiv& taps1, const FastDiv& taps2, uint32_t k_outer,
                                        bool ch_fast, uint32_t outer0, uint32_t inner0) {
  Step r;
  uint32_t outer, inner, rest, j0, j1, j2;
  k_inner.divmod(inner0, outer, inner);
  outer += outer0;
  r.valid = outer < k_outer;
  r.ch = ch_fast ? inner : outer;
  taps2.divmod(ch_fast ? outer : inner, rest, j2);
  taps1.divmod(rest, j0, j1);
  r.j[0] = static_cast<int32_t>(j0), r.j[1] = static_cast<int32_t>(j1), r.j[2] = static_cast<int32_t>(j2);
  return r;
}

template <int M, int K>
__device__ inline void place_step(const Args& a, const BlockInfo& s, uint32_t outer0, uint32_t inner0, int lane, int stage,
                                  Offsets<M, K>& t) {
  const Problem& p = a.p;
  const Step k = step_at(s.k_inner, s.taps1, s.taps2, s.k_outer, a.c.k_ch_fast, outer0, inner0 + lane);
  int32_t index[kMaxSpatial] = {INT_MIN, 0, 0};
  int64_t in = 0, w = 0;
  if (k.valid) {
    in = k.ch * p.in.channel, w = k.ch * p.w.channel;
    for (int i = 0; i < kMaxSpatial; ++i) {
      index[i] = k.j[i] * p.axis[i].j_step;
      in += index[i] * p.in.s[i];
      w += (s.phase[i].first + int64_t{k.j[i]} * p.axis[i].r_stride) * p.w.s[i];
    }
  }
  t.k_index[stage][lane] = make_int4(index[0], index[1], index[2], 0);
  t.k_in[stage][lane] = in;
  t.k_w[stage][lane] = w;
}

__device__ __forceinline__ bool inside(const Problem& p, const int4& row, const int4& k) {
  // Unsigned: a negative index is past every extent. INT_MIN plus any index of the other side is past them, too.
  return static_cast<uint32_t>(row.x) + static_cast<uint32_t>(k.x) < static_cast<uint32_t>(p.axis[0].I) &&
         static_cast<uint32_t>(row.y) + static_cast<uint32_t>(k.y) < static_cast<uint32_t>(p.axis[1].I) &&
         static_cast<uint32_t>(row.z) + static_cast<uint32_t>(k.z) < static_cast<uint32_t>(p.axis[2].I);
}

// Where a thread's i-th element of a tile of `Across` rows x K steps is: neighbours along the steps or along the rows.
template <int Across, int K>
__device__ __forceinline__ int row_of(bool k_fast, int i) {
  return k_fast ? static_cast<int>(threadIdx.x) / K + i * (256 / K) : static_cast<int>(threadIdx.x) % Across;
}
template <int Across, int K>
__device__ __forceinline__ int step_of(bool k_fast, int i) {
  return k_fast ? static_cast<int>(threadIdx.x) % K : static_cast<int>(threadIdx.x) / Across + i * (256 / Across);
}

template <class T, class S>
__device__ __forceinline__ void load_tiles(const Args& a, const Offsets<S::M, S::K>& t, const T* in, const T* w, int64_t n0, int stage,
                                           T (&ra)[S::kA], T (&rb)[S::kB]) {
  const Problem& p = a.p;
  const T zero = from_float<T>(0.f);
  if (a.c.a_k_fast) {
    const int k = step_of<S::M, S::K>(true, 0);
    const int4 dk = t.k_index[stage][k];
    const T* base = in + t.k_in[stage][k];
#pragma unroll
    for (int i = 0; i < S::kA; ++i) {
      const int m = row_of<S::M, S::K>(true, i);
      ra[i] = inside(p, t.row_index[m], dk) ? base[t.row_in[m]] : zero;
    }
  } else {
    const int m = row_of<S::M, S::K>(false, 0);
    const int4 dm = t.row_index[m];
    const T* base = in + t.row_in[m];
#pragma unroll
    for (int i = 0; i < S::kA; ++i) {
      const int k = step_of<S::M, S::K>(false, i);
      ra[i] = inside(p, dm, t.k_index[stage][k]) ? base[t.k_in[stage][k]] : zero;
    }
  }
#pragma unroll
  for (int i = 0; i < S::kB; ++i) {
    const int n = row_of<S::N, S::K>(a.c.b_k_fast, i), k = step_of<S::N, S::K>(a.c.b_k_fast, i);
    const bool valid = (S::N * S::K % 256 == 0 || (n < S::N && k < S::K)) && n0 + n < p.ks;
    rb[i] = valid && t.k_index[stage][k].x != INT_MIN ? w[t.k_w[stage][k] + (n0 + n) * p.w.outer] : zero;
  }
}

template <class T, class S>
__device__ __forceinline__ void store_tiles(const Config& c, float* sa, float* sb, const T (&ra)[S::kA], const T (&rb)[S::kB]) {
#pragma unroll
  for (int i = 0; i < S::kA; ++i)
    sa[step_of<S::M, S::K>(c.a_k_fast, i) * S::kPitchA + row_of<S::M, S::K>(c.a_k_fast, i)] = to_float(ra[i]);
#pragma unroll
  for (int i = 0; i < S::kB; ++i) {
    const int n = row_of<S::N, S::K>(c.b_k_fast, i), k = step_of<S::N, S::K>(c.b_k_fast, i);
    if (S::N * S::K % 256 == 0 || (n < S::N && k < S::K)) sb[k * S::kPitchB + n] = to_float(rb[i]);
  }
}

template <class S>
__device__ __forceinline__ void multiply(const float* sa, const float* sb, int k0, int m, int n, float (&acc)[S::TM][S::TN]) {
#pragma unroll
  for (int k = k0; k < k0 + S::K / S::Split; ++k) {
    float av[S::TM], bv[S::TN];
#pragma unroll
    for (int i = 0; i < S::TM; i += 4) *reinterpret_cast<float4*>(av + i) = *reinterpret_cast<const float4*>(sa + k * S::kPitchA + m + i);
#pragma unroll
    for (int j = 0; j < S::TN; j += 4) *reinterpret_cast<float4*>(bv + j) = *reinterpret_cast<const float4*>(sb + k * S::kPitchB + n + j);
#pragma unroll
    for (int i = 0; i < S::TM; ++i)
#pragma unroll
      for (int j = 0; j < S::TN; ++j) acc[i][j] = fmaf(av[i], bv[j], acc[i][j]);
  }
}

template <class T, class S>
__global__ void __launch_bounds__(256, S::kMinBlocks) conv_gemm(const __grid_constant__ Args a, int64_t first_block) {
  __shared__ __align__(16) float tile[S::kFloats];
  __shared__ Offsets<S::M, S::K> offsets;
  __shared__ __align__(16) unsigned char info_bytes[sizeof(BlockInfo)];  // shared memory runs no constructors
  BlockInfo& info = *reinterpret_cast<BlockInfo*>(info_bytes);
  const Problem& p = a.p;
  const int tid = threadIdx.x;

  if (tid == 0) place_block<S::K>(a, first_block + blockIdx.x, S::M, S::N, info);
  __syncthreads();
  for (int m = tid; m < S::M; m += 256) place_row<S::M, S::K>(a, info, m, offsets);
  // The steps of the reduction are placed one stage ahead of the loads, by the first K threads.
  uint32_t k_outer0 = info.k_outer0, k_inner0 = info.k_inner0;
  const auto place_steps = [&](int stage) {
    if (tid < S::K) {
      place_step<S::M, S::K>(a, info, k_outer0, k_inner0, tid, stage, offsets);
      uint32_t q, r;
      info.k_inner.divmod(k_inner0 + S::K, q, r);
      k_outer0 += q;
      k_inner0 = r;
    }
  };
  const int64_t k_tiles = info.k_tiles, n0 = info.n0;
  const T* in = static_cast<const T*>(p.in_data) + p.in.offset + info.batch * p.in.b + info.group * p.in.g;
  const T* w = static_cast<const T*>(p.w_data) + p.w.offset + info.batch * p.w.b + info.group * p.w.g;

  const int part = tid / S::kGroup, slot = tid % S::kGroup;
  const int m = slot / (S::N / S::TN) * S::TM, n = slot % (S::N / S::TN) * S::TN;
  float acc[S::TM][S::TN] = {}, high[S::kTwoLevels ? S::TM : 1][S::kTwoLevels ? S::TN : 1] = {};
  if (k_tiles > 0) {  // a phase without taps, and a split past the end, have nothing to add
    T ra[S::kA], rb[S::kB];
    place_steps(0);
    __syncthreads();
    load_tiles<T, S>(a, offsets, in, w, n0, 0, ra, rb);
    store_tiles<T, S>(a.c, tile, tile + S::K * S::kPitchA, ra, rb);
    if (k_tiles > 1) place_steps(1);
    __syncthreads();
    for (int64_t t = 0; t < k_tiles; ++t) {
      const int now = t & 1, next = now ^ 1;
      if (t + 1 < k_tiles) load_tiles<T, S>(a, offsets, in, w, n0, next, ra, rb);
      if (t + 2 < k_tiles) place_steps(now);
      const float* sa = tile + now * S::kStage;
      multiply<S>(sa, sa + S::K * S::kPitchA, part * (S::K / S::Split), m, n, acc);
      float* da = tile + next * S::kStage;
      if (t + 1 < k_tiles) store_tiles<T, S>(a.c, da, da + S::K * S::kPitchA, ra, rb);
      __syncthreads();
      if constexpr (S::kTwoLevels) {
        if (t % kFlush == kFlush - 1) {
#pragma unroll
          for (int i = 0; i < S::TM; ++i)
#pragma unroll
            for (int j = 0; j < S::TN; ++j) high[i][j] += acc[i][j], acc[i][j] = 0.f;
        }
      }
    }
  } else {
    __syncthreads();  // the rows
  }

  if constexpr (S::kTwoLevels) {
#pragma unroll
    for (int i = 0; i < S::TM; ++i)
#pragma unroll
      for (int j = 0; j < S::TN; ++j) acc[i][j] += high[i][j];
  }
  // The sums go through shared memory, so that the stores are neighbours in memory; the parts are added in order.
  for (int s = 0; s < S::Split; ++s) {
    if (part == s) {
#pragma unroll
      for (int i = 0; i < S::TM; ++i)
#pragma unroll
        for (int j = 0; j < S::TN; ++j) {
          float& c = tile[(m + i) * S::kPitchC + n + j];
          c = s == 0 ? acc[i][j] : c + acc[i][j];
        }
    }
    __syncthreads();
  }
  const int64_t batch = info.batch, group = info.group, split = info.split;
#pragma unroll 1
  for (int i = tid; i < S::M * S::N; i += 256) {
    const int row = a.c.out_k_fast ? i / S::N : i % S::M, col = a.c.out_k_fast ? i % S::N : i / S::M;
    const int64_t at = offsets.row_out[row], k = n0 + col;
    if (at != INT64_MIN && k < p.ks)
      finish_or_part(a, split, batch, group * p.ks + k, at + group * p.out.g + k * p.out.channel, tile[row * S::kPitchC + col]);
  }
}

// ---- the splits' sum ---------------------------------------------------------------------------------------------------

// out[i] = sum over s of workspace[s][i]. A block has 32 neighbouring outputs; eight threads per output take every eighth split,
// and theirs are added in order.
constexpr int kAddOutputs = 32, kAddThreads = 8;
template <class T>
__global__ void __launch_bounds__(256) conv_add(const float* workspace, T* out, int64_t outputs, int splits) {
  __shared__ float sums[kAddThreads][kAddOutputs];
  const int lane = threadIdx.x % kAddOutputs, row = threadIdx.x / kAddOutputs;
  const int64_t at = int64_t{blockIdx.x} * kAddOutputs + lane;
  float sum = 0.f;
  if (at < outputs) {
#pragma unroll 4
    for (int s = row; s < splits; s += kAddThreads) sum += workspace[s * outputs + at];
  }
  sums[row][lane] = sum;
  __syncthreads();
  if (row > 0 || at >= outputs) return;
#pragma unroll
  for (int r = 1; r < kAddThreads; ++r) sum += sums[r][lane];
  out[at] = from_float<T>(sum);
}

// ---- host ------------------------------------------------------------------------------------------------------------

// Everything of a launch but the launch; *blocks is the number of blocks in all.
inline Args make_args(const Problem& p, const Config& c, void* workspace, int64_t* blocks) {
  Args a;
  a.p = p;
  a.c = c;
  a.workspace = c.splits > 1 ? static_cast<float*>(workspace) : nullptr;
  a.outputs = p.batch * p.groups * p.imgs * p.ks * p.pixels();
  const auto div = [](int64_t d) { return FastDiv(static_cast<uint32_t>(d > 0 ? d : 1)); };
  for (int i = 0; i < kMaxSpatial; ++i) a.phases[i] = live_phases(p.axis[i]);
  if (c.kernel == Kernel::kDirect) {
    const int64_t per_image = p.pixels() * p.ks * p.groups;
    a.per_image = div(per_image), a.all_k = div(p.ks * p.groups), a.pixels = div(p.pixels()), a.group_k = div(p.ks);
    a.o1 = div(p.axis[1].O), a.o2 = div(p.axis[2].O);
    a.tiles_n = 1;
    a.tiles_m = ceil_div(p.imgs * per_image, c.lanes);
    *blocks = a.tiles_m * c.splits * p.batch;
    return a;
  }
  const Tile t = tile_of(c.kernel);
  a.tiles_m = ceil_div(p.imgs * p.phase_pixels(), t.m);
  a.tiles_n = ceil_div(p.ks, t.n);
  a.m_inner = div(c.m_img_fast ? p.imgs : p.phase_pixels());
  a.m_outer = static_cast<uint32_t>(c.m_img_fast ? p.phase_pixels() : p.imgs);
  a.rows1 = div(p.axis[1].rows), a.rows2 = div(p.axis[2].rows);
  *blocks = tile_blocks(p, c.kernel) * c.splits;
  return a;
}

}  // namespace conv
}  // namespace jaxprims
