// Convolution of float32 as an implicit matrix product on tensor cores (mma.sync, m16n8k8), any layout, sm_80 and later.
//
//   the formula, the tables of offsets, the split and the epilogue of implicit_gemm.cuh.
//
// Layout   a stage holds 128 rows and 64 channels of 32 steps each. An operand whose steps are neighbours in memory lies as
//          [row][step], else as [step][row]; pitches of 36, 136 and 72 floats keep fragments free of bank conflicts.
// Work     one block = one tile of 128 x 64, eight warps of 32 x 32. cp.async fills two stages ahead: 16 bytes where four
//          neighbours exist together and are aligned, else 4; what lies in the padding is filled with zeros.
// Numbers  Problem::tf32: operands rounded to TF32, sums leave the tensor cores every 256 terms. Else three products of
//          TF32 parts; tensor cores cut off what they add, so each stage's sum is added in float32.
//          Sums with an infinity, whose low part is no number, are formed of the high parts again.
// Order    fixed: the same bits in every run.
// Cost     one or three tensor-core products a term; the 16-byte copies take a fourth of the integer work of single elements.
// Tried    the FMA kernel's loader, through registers, two stages of 16 steps (paper rows, N = 128, H200): weight gradient of paper2
//          32 TFLOP/s in TF32 and 12 in float32, this 58 and 32; paper5 forward 30, this 51; its input gradient 22, this 37.
// Next     the table of steps is written by one warp in front of each barrier; wider warp tiles; 16-bit types.
#include "conv/mma_gemm.h"

#include <atomic>

#include "common/async_copy.cuh"
#include "common/warp_mma.cuh"
#include "conv/implicit_gemm.cuh"

namespace jaxprims {
namespace conv {
namespace {

constexpr int kM = 128, kN = 64, kK = 32, kStages = 3, kPitchK = kK + 4, kPitchM = kM + 8, kPitchN = kN + 8;
constexpr int kFloatsA = kM * kPitchK, kFloatsB = kN * kPitchK, kStageFloats = kFloatsA + kFloatsB;
static_assert(kFloatsA >= kK * kPitchM && kFloatsB >= kK * kPitchN && kStages * kStageFloats >= kM * (kN + 1), "");
constexpr int kBytes = kStages * kStageFloats * 4;

template <int Bytes>
__device__ __forceinline__ void copy(float* to, const float* from, bool valid) {
  copy_async<Bytes>(static_cast<uint32_t>(__cvta_generic_to_shared(to)), from, valid ? Bytes : 0);
}

// W neighbours at a time.
template <bool AK, int W>
__device__ __forceinline__ void copy_rows(const Problem& p, const Offsets<kM, kK>& t, const float* in, int slot, float* sa) {
  const int tid = threadIdx.x;
  if constexpr (AK) {
    constexpr int kAcross = kK / W, kRows = 256 / kAcross;
    const int k = tid % kAcross * W;
    const int4 dk = t.k_index[slot][k];
    const float* base = in + t.k_in[slot][k];
#pragma unroll 4
    for (int m = tid / kAcross; m < kM; m += kRows) {
      const bool ok = inside(p, t.row_index[m], dk);
      copy<4 * W>(sa + m * kPitchK + k, ok ? base + t.row_in[m] : in, ok);
    }
  } else {
    constexpr int kAcross = kM / W, kSteps = 256 / kAcross;
    const int m = tid % kAcross * W;
    const int4 dm = t.row_index[m];
    const float* base = in + t.row_in[m];
#pragma unroll 4
    for (int k = tid / kAcross; k < kK; k += kSteps) {
      const bool ok = inside(p, dm, t.k_index[slot][k]);
      copy<4 * W>(sa + k * kPitchM + m, ok ? base + t.k_in[slot][k] : in, ok);
    }
  }
}
template <bool BK, int W>
__device__ __forceinline__ void copy_channels(const Problem& p, const Offsets<kM, kK>& t, const float* w, int64_t n0, int slot,
                                              float* sb) {
  const int tid = threadIdx.x;
  constexpr int kAcross = (BK ? kK : kN) / W;
#pragma unroll 2
  for (int i = tid / kAcross; i < (BK ? kN : kK); i += 256 / kAcross) {
    const int n = BK ? i : tid % kAcross * W, k = BK ? tid % kAcross * W : i;
    const bool ok = n0 + n < p.ks && t.k_index[slot][k].x != INT_MIN;
    copy<4 * W>(sb + (BK ? n * kPitchK + k : k * kPitchN + n), ok ? w + t.k_w[slot][k] + (n0 + n) * p.w.outer : w, ok);
  }
}

template <bool K>
__device__ __forceinline__ float at(const float* s, int row, int step, int pitch_m) {
  return K ? s[row * kPitchK + step] : s[step * pitch_m + row];
}

// x as high + low, both TF32, where x is finite and not next to the largest numbers: low is no number then.
__device__ __forceinline__ void parts(float x, uint32_t& high, uint32_t& low) {
  high = round_tf32(x);
  low = round_tf32(x - __uint_as_float(high));
}
__device__ __forceinline__ uint32_t finite_high(float x) {
  const uint32_t high = round_tf32(x);
  return (high << 1) == 0xff000000u ? __float_as_uint(x) & 0xffffe000u : high;
}

// acc[4 i + j]: the 16 x 8 at (16 i, 8 j) of the warp's 32 x 32.
template <int Products, bool AK, bool BK>
__device__ __forceinline__ void multiply_stage(const float* sa, const float* sb, int m, int n,
                                               float (&acc)[8][4], float (&high)[8][4], bool flush) {
  const int lane = threadIdx.x % 32, row = lane / 4, step = lane % 4;
#pragma unroll(Products == 3 ? 1 : 4)
  for (int k = 0; k < kK; k += 8) {
    float va[2][4], vb[4][2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) va[i][e] = at<AK>(sa, m + 16 * i + row + e % 2 * 8, k + step + e / 2 * 4, kPitchM);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) vb[j][e] = at<BK>(sb, n + 8 * j + row, k + step + e * 4, kPitchN);
    if constexpr (Products == 1) {
      uint32_t a[2][4], b[4][2];
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = round_tf32(va[i / 4][i % 4]), b[i / 2][i % 2] = round_tf32(vb[i / 2][i % 2]);
#pragma unroll
      for (int i = 0; i < 8; ++i) mma_tf32(acc[i], a[i / 4], b[i % 4]);
    } else {
      uint32_t b[4][2], lb[4][2];
#pragma unroll
      for (int i = 0; i < 8; ++i) parts(vb[i / 2][i % 2], b[i / 2][i % 2], lb[i / 2][i % 2]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t a[4], la[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) parts(va[i][e], a[e], la[e]);
#pragma unroll
        for (int j = 0; j < 4; ++j) mma_tf32(acc[4 * i + j], la, b[j]);
#pragma unroll
        for (int j = 0; j < 4; ++j) mma_tf32(acc[4 * i + j], a, lb[j]);
#pragma unroll
        for (int j = 0; j < 4; ++j) mma_tf32(acc[4 * i + j], a, b[j]);
      }
    }
  }
  if constexpr (Products == 3) {  // sums with an infinity, or next to one: of the high parts alone
    float zero = 0.f;
#pragma unroll
    for (int i = 0; i < 32; ++i) zero = fmaf(acc[i / 4][i % 4], 0.f, zero);
    if (__any_sync(0xffffffffu, zero != 0.f)) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float sum[4] = {};
#pragma unroll 1
        for (int k = 0; k < kK; k += 8) {
          uint32_t ha[4], hb[2];
#pragma unroll
          for (int e = 0; e < 4; ++e) ha[e] = finite_high(at<AK>(sa, m + i / 4 * 16 + row + e % 2 * 8, k + step + e / 2 * 4, kPitchM));
#pragma unroll
          for (int e = 0; e < 2; ++e) hb[e] = finite_high(at<BK>(sb, n + i % 4 * 8 + row, k + step + e * 4, kPitchN));
          mma_tf32(sum, ha, hb);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][e] = fmaf(acc[i][e], 0.f, 0.f) == 0.f ? acc[i][e] : sum[e];
      }
    }
  }
  if (Products == 3 || flush) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) high[i][e] += acc[i][e], acc[i][e] = 0.f;
  }
}

template <int Products, bool AK, bool BK>
__global__ void __launch_bounds__(256, 2) conv_mma(const __grid_constant__ Args a, int64_t first_block, bool va, bool vb) {
  extern __shared__ __align__(16) float tile[];
  __shared__ Offsets<kM, kK> offsets;
  __shared__ __align__(16) unsigned char info_bytes[sizeof(BlockInfo)];  // shared memory runs no constructors
  BlockInfo& info = *reinterpret_cast<BlockInfo*>(info_bytes);
  const Problem& p = a.p;
  const int tid = threadIdx.x;
  if (tid == 0) place_block<kK>(a, first_block + blockIdx.x, kM, kN, info);
  __syncthreads();
  if (tid < kM) place_row<kM, kK>(a, info, tid, offsets);
  const int64_t k_tiles = info.k_tiles, n0 = info.n0;
  uint32_t outer = info.k_outer0, inner = info.k_inner0;
  const auto place_steps = [&](int slot) {
    if (tid < kK) place_step<kM, kK>(a, info, outer, inner, tid, slot, offsets);
    uint32_t q, r;
    info.k_inner.divmod(inner + kK, q, r);
    outer += q, inner = r;
  };
  const float* in = static_cast<const float*>(p.in_data) + p.in.offset + info.batch * p.in.b + info.group * p.in.g;
  const float* w = static_cast<const float*>(p.w_data) + p.w.offset + info.batch * p.w.b + info.group * p.w.g;
  const auto fill = [&](int slot, int stage) {
    float* sa = tile + stage * kStageFloats;
    if (va) copy_rows<AK, 4>(p, offsets, in, slot, sa);
    else copy_rows<AK, 1>(p, offsets, in, slot, sa);
    if (vb) copy_channels<BK, 4>(p, offsets, w, n0, slot, sa + kFloatsA);
    else copy_channels<BK, 1>(p, offsets, w, n0, slot, sa + kFloatsA);
  };
  const int m = tid / 32 % 4 * 32, n = tid / 128 * 32;
  float acc[8][4] = {}, high[8][4] = {};
  if (k_tiles > 0) {
    place_steps(0);
    if (k_tiles > 1) place_steps(1);
    __syncthreads();
    fill(0, 0);
    copies_commit();
    if (k_tiles > 1) fill(1, 1);
    copies_commit();
    __syncthreads();
    if (k_tiles > 2) place_steps(0);
    int now = 0, next = 2;  // stages
    for (int64_t t = 0; t < k_tiles; ++t) {
      copies_wait<kStages - 2>();
      __syncthreads();  // stage `now` is full, stage `next` is read by none, the steps of tile t + 2 are there
      if (t + 2 < k_tiles) fill(t & 1, next);
      copies_commit();
      if (t + 3 < k_tiles) place_steps((t + 1) & 1);
      const float* sa = tile + now * kStageFloats;
      multiply_stage<Products, AK, BK>(sa, sa + kFloatsA, m, n, acc, high, t % 8 == 7);
      now = now == kStages - 1 ? 0 : now + 1;
      next = next == kStages - 1 ? 0 : next + 1;
    }
    copies_wait<0>();
  }
  __syncthreads();
  constexpr int kPitchC = kN + 1;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      tile[(m + i / 4 * 16 + tid % 32 / 4 + e / 2 * 8) * kPitchC + n + i % 4 * 8 + tid % 4 * 2 + e % 2] = high[i][e] + acc[i][e];
  __syncthreads();
  const int64_t batch = info.batch, group = info.group, split = info.split;
#pragma unroll 1
  for (int i = tid; i < kM * kN; i += 256) {
    const int row = a.c.out_k_fast ? i / kN : i % kM, col = a.c.out_k_fast ? i % kN : i / kM;
    const int64_t to = offsets.row_out[row], k = n0 + col;
    if (to != INT64_MIN && k < p.ks)
      finish_or_part(a, split, batch, group * p.ks + k, to + group * p.out.g + k * p.out.channel, tile[row * kPitchC + col]);
  }
}

using Function = void (*)(Args, int64_t, bool, bool);
constexpr Function kFunctions[2][2][2] = {  // [products 1, 3][rows' steps are neighbours][channels' steps are]
    {{conv_mma<1, false, false>, conv_mma<1, false, true>}, {conv_mma<1, true, false>, conv_mma<1, true, true>}},
    {{conv_mma<3, false, false>, conv_mma<3, false, true>}, {conv_mma<3, true, false>, conv_mma<3, true, true>}}};

// Lets the kernels take their shared memory: once for each device.
cudaError_t prepare() {
  static std::atomic<bool> done[64] = {};
  int device = 0;
  cudaError_t e = cudaGetDevice(&device);
  const bool known = device >= 0 && device < 64;
  if (e != cudaSuccess || (known && done[device].load(std::memory_order_acquire))) return e;
  for (const auto& products : kFunctions)
    for (const auto& rows : products)
      for (const Function f : rows)
        if ((e = cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)) != cudaSuccess) return e;
  if (known) done[device].store(true, std::memory_order_release);
  return e;
}

bool fours(const TensorStrides& t, const void* data) {  // apart from outer and channel
  int64_t all = t.b | t.g | t.offset | static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) / 4);
  for (int64_t s : t.s) all |= s;
  return all % 4 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

}  // namespace

cudaError_t mma_gemm_launch(const Args& a, int64_t first, unsigned blocks, cudaStream_t stream) {
  const Problem& p = a.p;
  bool va = fours(p.in, p.in_data), vb = fours(p.w, p.w_data);
  if (a.c.a_k_fast) va = va && a.c.k_ch_fast && p.in.channel == 1 && p.chs % 4 == 0 && p.in.outer % 4 == 0;
  else va = va && a.c.m_img_fast && p.in.outer == 1 && p.imgs % 4 == 0 && p.in.channel % 4 == 0;
  if (a.c.b_k_fast) vb = vb && a.c.k_ch_fast && p.w.channel == 1 && p.chs % 4 == 0 && p.w.outer % 4 == 0;
  else vb = vb && p.w.outer == 1 && p.ks % 4 == 0 && p.w.channel % 4 == 0;
  const cudaError_t e = prepare();
  if (e != cudaSuccess) return e;
  kFunctions[p.tf32 ? 0 : 1][a.c.a_k_fast][a.c.b_k_fast]<<<blocks, 256, kBytes, stream>>>(a, first, va, vb);
  return cudaGetLastError();
}

}  // namespace conv
}  // namespace jaxprims
