// Depthwise convolution with contiguous channels: forward, input gradient, weight gradient, without a matrix product.
//
//   gather   out[img, o.., c] = act( sum over taps of in[img, (o*a + r*b + c0)/e, c] * w[r.., c] + bias[c] + residual )
//   wgrad    dw[r.., c] = sum over img, pixels of x[img, o*a + r*b + c0, c] * dy[img, o.., c]
//
// Layout   channels last in the pixel tensors, C a multiple of 4, any strides for the rest; the filter in any layout.
// Work     depthwise.h cuts every axis into dense pieces, so stride phases and dilations cost no products with zero.
//          A block of 128 threads owns `lanes` x 4 channels; a thread one vector of 4 channels (8 or 16 bytes) and strips of
//          OH x OW outputs. It loads a row of inputs once (registers), and each value meets all its outputs of the strip; the
//          filter is float32 in shared memory, one 16-byte read per tap and OW * 4 products. While a row is multiplied the next
//          one is on its way. Rows shared by neighbouring strips come from L1 and L2.
//          wgrad: a thread keeps the sums of its taps (rows x columns x 4) over its strips; the threads of a block are added
//          through shared memory, a block writes one partial filter, and a second kernel adds the partial filters.
// Order    all sums run in an order fixed by the sizes: the same bits in every run.
// Bound    memory (one read, one write) up to 5 x 5; the FMA units for 7 x 7 (49 of the 31 instructions per element that
//          4.3 TB/s leave for 4 bytes).
// Ladder   H200, microseconds by the host's clock over 24 calls (which adds up to 150 us of dispatch to the short ones), in
//          brackets the kernel without tiles (implicit_gemm.cuh):           forward       input grad.   weight grad.
//            bf16 N256 56^2 C144 3x3                                      447 (5750)    438 (5625)    488 (23597)
//            bf16 N256 56^2 C144 3x3 stride 2                             211 (1529)    297 (6034)    224
//            bf16 N128 28^2 C192 7x7                                      222 (2996)    222 (2986)    234 (6200)
//            bf16 N128 56^2 C96 7x7                                       458 (6184)    464 (6173)    460 (13611)
//            f32  N256 56^2 C144 3x3                                      397           393           474
//            f32  N8 2048 C4096 K4                                        169           167           156
//          Since these figures: 16-bit vectors are kept in whole registers (before, every element had its own); not yet measured.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "common/act.cuh"
#include "common/fastdiv.h"
#include "common/pack.cuh"
#include "conv/depthwise.h"

namespace jaxprims {
namespace conv {

struct DwArgs {
  Problem p;
  DwPlan d;
  float* partials;
};

__device__ __forceinline__ float dw_load_as(Type type, const void* data, int64_t i) {
  if (type == Type::kF32) return static_cast<const float*>(data)[i];
  if (type == Type::kF16) return to_float(static_cast<const __half*>(data)[i]);
  return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
}

// a becomes a / n, the rest is returned; both below 2^31.
__device__ __forceinline__ int32_t dw_take(uint32_t& a, uint32_t n) {
  const uint32_t q = a / n, r = a - q * n;
  a = q;
  return static_cast<int32_t>(r);
}

struct DwStrip {
  int32_t w, h, d;
  int64_t img;
};
__device__ __forceinline__ DwStrip dw_strip(const DwPlan& d, uint32_t strip) {
  uint32_t q, r, w, h, t;
  d.d_cols.divmod(strip, q, w);
  d.d_rows.divmod(q, r, h);
  d.d_t0.divmod(r, q, t);
  return {static_cast<int32_t>(w), static_cast<int32_t>(h), static_cast<int32_t>(t), q};
}

// A vector as it is in memory, in whole registers: the compiler would give each 16-bit element one of its own.
template <class T>
struct VecOf {
  using Type = uint2;
};
template <>
struct VecOf<float> {
  using Type = float4;
};
template <class T>
using Vec = typename VecOf<T>::Type;
template <class T>
__device__ __forceinline__ Vec<T> zero_vec() {
  if constexpr (sizeof(T) == 2) return make_uint2(0u, 0u);
  else return make_float4(0.f, 0.f, 0.f, 0.f);
}
template <class T>
__device__ __forceinline__ float4 widen(const Vec<T>& v);
template <>
__device__ __forceinline__ float4 widen<float>(const float4& v) { return v; }
template <>
__device__ __forceinline__ float4 widen<__nv_bfloat16>(const uint2& v) {  // bfloat16 is the upper half of a float
  return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16),
                     __uint_as_float(v.y & 0xffff0000u));
}
template <>
__device__ __forceinline__ float4 widen<__half>(const uint2& v) {
  const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&v.x)), b = __half22float2(*reinterpret_cast<const __half2*>(&v.y));
  return make_float4(a.x, a.y, b.x, b.y);
}
__device__ __forceinline__ void fma4(float4& acc, const float4& x, const float4& w) {
  acc.x = fmaf(x.x, w.x, acc.x), acc.y = fmaf(x.y, w.y, acc.y), acc.z = fmaf(x.z, w.z, acc.z), acc.w = fmaf(x.w, w.w, acc.w);
}

// N vectors `step` elements apart; those outside of the mask are zero.
template <class T, int N>
__device__ __forceinline__ void load_columns(Vec<T> (&raw)[N], const T* at, int32_t step, uint32_t mask) {
#pragma unroll
  for (int c = 0; c < N; ++c) {
    raw[c] = zero_vec<T>();
    if (mask >> c & 1) raw[c] = *reinterpret_cast<const Vec<T>*>(at + int64_t{c * step});
  }
}

// Which of N columns, `step` apart from `first` on, lie in [0, extent).
template <int N>
__device__ __forceinline__ uint32_t columns_inside(int32_t first, int32_t step, int32_t extent) {
  uint32_t mask = 0;
#pragma unroll
  for (int c = 0; c < N; ++c)
    if (static_cast<uint32_t>(first + c * step) < static_cast<uint32_t>(extent)) mask |= 1u << c;
  return mask;
}

// Blocks of 128 threads that a multiprocessor's registers hold, for a count of registers per thread.
constexpr int dw_resident(int registers) { return registers <= 96 ? 5 : registers <= 128 ? 4 : registers <= 168 ? 3 : 2; }
// Whether the next row is on its way while one is multiplied: float32's wide rows have no registers for two.
template <class T, int Columns>
constexpr bool kDwAhead = sizeof(T) == 2 || Columns < 8;
template <class T, int S, int A, int OW, int OH>
constexpr int kDwGatherRegisters =
    4 * OW * OH + (4 + (kDwAhead<T, A * (OW - 1) + S> ? sizeof(T) : 0)) * (A * (OW - 1) + S) +
    (sizeof(T) == 4 ? (A == 1 ? 44 : 60) : (A == 1 ? 36 : 48));
template <class T, int S, int RB, int A, int OW>
constexpr int kDwWgradRegisters = 4 * RB * S + (4 + sizeof(T)) * (A * (OW - 1) + S) + 4 * OW + 40;

template <class T, int S, int A, int OW, int OH, bool Exact>
__global__ void __launch_bounds__(kDwThreads, dw_resident(kDwGatherRegisters<T, S, A, OW, OH>))
    dw_gather(const __grid_constant__ DwArgs args) {
  constexpr int kColumns = A * (OW - 1) + S;
  extern __shared__ __align__(16) float4 shared[];
  const Problem& p = args.p;
  const DwPlan& d = args.d;
  uint32_t id = blockIdx.x;
  const int32_t chunk = dw_take(id, d.chunks);
  // What all threads share is kept in shared memory, so that it costs registers only where it is used.
  __shared__ __align__(16) unsigned char piece_bytes[kMaxSpatial * sizeof(DwPiece)];
  volatile DwPiece* pieces = reinterpret_cast<volatile DwPiece*>(piece_bytes);
  for (int i = kMaxSpatial - 1; i >= 0; --i) {
    const int32_t f = dw_take(id, d.x[i].subs);
    if (threadIdx.x != 0) continue;
    const DwPiece piece = dw_piece(d.x[i], f);
    pieces[i].f = piece.f, pieces[i].base = piece.base, pieces[i].count = piece.count;
    pieces[i].first = piece.first, pieces[i].step = piece.step, pieces[i].T = piece.T;
  }
  __syncthreads();
  const int64_t group = dw_take(id, static_cast<uint32_t>(d.groups)), batch = id;
  const int slot = threadIdx.x / d.lanes, lane = threadIdx.x - slot * d.lanes;
  const int64_t channel = (int64_t{chunk} * d.lanes + lane) * kDwVector;

  // The filter: [tap of the piece][lane], float32.
  {
    const T* w = static_cast<const T*>(p.w_data) + p.w.offset + batch * p.w.b;
    const int32_t c0 = pieces[0].count, c1 = pieces[1].count, c2 = pieces[2].count;
    // A thread stays on one channel; its loads are independent of each other.
    const int32_t width = d.lanes * kDwVector, step = kDwThreads / width, own = static_cast<int32_t>(threadIdx.x) / width;
    const int32_t lane_c = static_cast<int32_t>(threadIdx.x) - own * width, c12 = c1 * c2, taps = c0 * c12;
    const int64_t c = int64_t{chunk} * width + lane_c;
    const int64_t s0 = pieces[0].step * p.w.s[0], s1 = pieces[1].step * p.w.s[1], s2 = pieces[2].step * p.w.s[2];
    w += c * p.w.g + pieces[0].first * p.w.s[0] + pieces[1].first * p.w.s[1] + pieces[2].first * p.w.s[2];
    if (own < step) {
#pragma unroll 8
      for (int32_t tap = own; tap < taps; tap += step) {
        const int32_t j0 = tap / c12, rest = tap - j0 * c12, j1 = rest / c2, j2 = rest - j1 * c2;
        float v = 0.f;
        if (c < p.groups) v = to_float(w[j0 * s0 + j1 * s1 + j2 * s2]);
        reinterpret_cast<float*>(shared)[tap * width + lane_c] = v;
      }
    }
  }
  __syncthreads();
  if (slot >= d.slots || channel >= p.groups) return;
  float4* stage = shared + d.filter + threadIdx.x;  // the epilogue's part of shared memory

  const T* in_c = static_cast<const T*>(p.in_data) + batch * p.in.b + channel;
  const bool staged = p.residual != nullptr || p.activation > static_cast<int>(Act::kRelu);

  for (int round = 0; round < d.rounds; ++round) {
    const int64_t strip64 = (group * d.rounds + round) * d.slots + slot;
    if (strip64 >= d.strips) return;
    const DwStrip at_in = dw_strip(d, static_cast<uint32_t>(strip64));
    if (at_in.w * OW >= pieces[2].T || at_in.h * OH >= pieces[1].T || at_in.d >= pieces[0].T) continue;  // of a longer piece

    float4 acc[OH][OW];
#pragma unroll
    for (int i = 0; i < OH; ++i)
#pragma unroll
      for (int k = 0; k < OW; ++k) acc[i][k] = make_float4(0.f, 0.f, 0.f, 0.f);

    const T* in_img = in_c + at_in.img * p.in.outer;
    const int32_t taps0 = pieces[0].count, taps1 = pieces[1].count, taps2 = pieces[2].count;
    const int32_t rows = d.x[1].A * (OH - 1) + taps1, row0 = d.x[1].IS * (d.x[1].A * at_in.h * OH) + pieces[1].base;
    for (int32_t j0 = 0; j0 < taps0; ++j0) {
      const int32_t depth = d.x[0].IS * (d.x[0].A * at_in.d + j0) + pieces[0].base;
      if (static_cast<uint32_t>(depth) >= static_cast<uint32_t>(p.axis[0].I)) continue;
      for (int32_t s0 = 0; s0 < taps2; s0 += S) {  // once, but for the chunked kinds
        const int32_t col0 = d.x[2].IS * (A * at_in.w * OW + s0) + pieces[2].base;
        const uint32_t mask = columns_inside<kColumns>(col0, d.x[2].IS, p.axis[2].I);
        const T* at = in_img + depth * p.in.s[0] + col0 * p.in.s[2];
        const auto fetch = [&](Vec<T>(&raw)[kColumns], int32_t m) {
          const int32_t row = row0 + m * d.x[1].IS;
          const bool inside = m < rows && static_cast<uint32_t>(row) < static_cast<uint32_t>(p.axis[1].I);
          load_columns<T, kColumns>(raw, at + row * p.in.s[1], d.in_step, inside ? mask : 0u);
        };
        Vec<T> raw[kColumns];
        fetch(raw, 0);
#pragma unroll 1
        for (int32_t m = 0; m < rows; ++m) {
          float4 x[kColumns];
#pragma unroll
          for (int c = 0; c < kColumns; ++c) x[c] = widen<T>(raw[c]);
          if (kDwAhead<T, kColumns>) fetch(raw, m + 1);
#pragma unroll
          for (int i = 0; i < OH; ++i) {
            const int32_t r = m - d.x[1].A * i;
            if (r < 0 || r >= taps1) continue;
            const float4* taps = shared + ((j0 * taps1 + r) * taps2 + s0) * d.lanes + lane;
#pragma unroll
            for (int s = 0; s < S; ++s) {
              if (!Exact && s0 + s >= taps2) break;
              const float4 f = taps[s * d.lanes];
#pragma unroll
              for (int k = 0; k < OW; ++k) fma4(acc[i][k], x[A * k + s], f);
            }
          }
          if (!kDwAhead<T, kColumns>) fetch(raw, m + 1);
        }
      }
    }

    uint32_t strip = static_cast<uint32_t>(strip64);
    asm volatile("" : "+r"(strip));  // decoded again: its parts need not stay in registers
    const DwStrip to = dw_strip(d, strip);
    const int32_t h0 = to.h * OH, w0 = to.w * OW, out_h = pieces[1].T - h0, out_w = pieces[2].T - w0, row_f = pieces[1].f;
    const int64_t out0 = to.img * p.out.outer + (int64_t{to.d} * d.x[0].OS + pieces[0].f) * p.out.s[0] +
                         (int64_t{w0} * d.x[2].OS + pieces[2].f) * p.out.s[2] + channel;
    T* out = static_cast<T*>(p.out_data) + batch * p.out.b;
    float4 bias = make_float4(0.f, 0.f, 0.f, 0.f);
    if (p.bias != nullptr) {
      const int64_t at = batch * p.bias_b + channel;
      bias = make_float4(dw_load_as(p.bias_type, p.bias, at), dw_load_as(p.bias_type, p.bias, at + 1),
                         dw_load_as(p.bias_type, p.bias, at + 2), dw_load_as(p.bias_type, p.bias, at + 3));
    }
    if (!staged) {
      const bool relu = p.activation == static_cast<int>(Act::kRelu);
#pragma unroll
      for (int i = 0; i < OH; ++i) {
        if (i >= out_h) break;
        T* row = out + out0 + (int64_t{h0 + i} * d.x[1].OS + row_f) * p.out.s[1];
#pragma unroll
        for (int k = 0; k < OW; ++k) {
          if (k >= out_w) break;
          float v[kDwVector] = {acc[i][k].x + bias.x, acc[i][k].y + bias.y, acc[i][k].z + bias.z, acc[i][k].w + bias.w};
          if (relu) {
#pragma unroll
            for (int n = 0; n < kDwVector; ++n) v[n] = act_apply(Act::kRelu, v[n]);
          }
          store<T, kDwVector>(row + int64_t{k * d.out_step}, v);
        }
      }
    } else {
      // One copy of the activations' code serves all outputs: the sums pass through the thread's own shared memory.
#pragma unroll 1
      for (int i = 0; i < OH; ++i) {
        if (i >= out_h) break;
#pragma unroll
        for (int n = 0; n < OH; ++n) {
          if (n != i) continue;
#pragma unroll
          for (int k = 0; k < OW; ++k) stage[k * kDwThreads] = acc[n][k];
        }
        const int64_t row = out0 + (int64_t{h0 + i} * d.x[1].OS + row_f) * p.out.s[1];
#pragma unroll 1
        for (int k = 0; k < OW; ++k) {
          if (k >= out_w) break;
          const int64_t place = row + int64_t{k * d.out_step};
          float* value = reinterpret_cast<float*>(stage + k * kDwThreads);
          const float b[kDwVector] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
          for (int n = 0; n < kDwVector; ++n) value[n] += b[n];
#pragma unroll 1
          for (int n = 0; n < kDwVector; ++n) {
            float v = value[n];
            if (p.residual != nullptr) v += dw_load_as(p.residual_type, p.residual, batch * p.residual_b + place + n);
            value[n] = act_apply(static_cast<Act>(p.activation), v);
          }
          const float v[kDwVector] = {value[0], value[1], value[2], value[3]};
          store<T, kDwVector>(out + place, v);
        }
      }
    }
  }
}

// Partial filters: partials[partial][batch][tap][channel].
template <class T, int S, int RB, int A, int OW>
__global__ void __launch_bounds__(kDwThreads, dw_resident(kDwWgradRegisters<T, S, RB, A, OW>))
    dw_wgrad(const __grid_constant__ DwArgs args) {
  constexpr int kColumns = A * (OW - 1) + S;
  __shared__ __align__(16) float4 sums[S * kDwThreads];
  const Problem& p = args.p;
  const DwPlan& d = args.d;
  uint32_t id = blockIdx.x;
  const int32_t chunk = dw_take(id, d.chunks);
  const int32_t s0 = dw_take(id, d.col_parts) * S, r0 = dw_take(id, d.row_parts) * RB;
  const int32_t j0 = dw_take(id, d.x[0].axis.R);
  const int64_t partial = dw_take(id, d.partials), batch = id;
  const int slot = threadIdx.x / d.lanes, lane = threadIdx.x - slot * d.lanes;
  const int64_t channel = (int64_t{chunk} * d.lanes + lane) * kDwVector;
  const Axis &a0 = d.x[0].axis, &a1 = d.x[1].axis, &a2 = d.x[2].axis;  // of the forward convolution

  float4 acc[RB][S];
#pragma unroll
  for (int r = 0; r < RB; ++r)
#pragma unroll
    for (int s = 0; s < S; ++s) acc[r][s] = make_float4(0.f, 0.f, 0.f, 0.f);

  if (slot < d.slots && channel < p.groups) {
    const T* x_c = static_cast<const T*>(p.in_data) + batch * p.in.b + channel;
    const T* y_c = static_cast<const T*>(p.w_data) + batch * p.w.b + channel;
    const int32_t x_step = d.in_step, y_step = d.out_step;
#pragma unroll 1
    for (int64_t strip64 = partial * d.slots + slot; strip64 < d.strips; strip64 += int64_t{d.partials} * d.slots) {
      uint32_t q, strip = static_cast<uint32_t>(strip64), tw, f, th, td;
      d.d_cols.divmod(strip, q, tw), strip = q;
      d.d_img.divmod(strip, q, f), strip = q;
      d.d_rows.divmod(strip, q, th), strip = q;
      d.d_t0.divmod(strip, q, td);
      const int64_t img = q;
      const int32_t w0 = static_cast<int32_t>(tw) * OW;
      const int32_t T2 = (a2.O - static_cast<int32_t>(f) + d.x[2].OS - 1) / d.x[2].OS;
      const int32_t valid = T2 - w0;  // outputs of the strip
      const int32_t depth = static_cast<int32_t>(td) * a0.a + j0 * a0.b + a0.c;
      if (valid <= 0 || static_cast<uint32_t>(depth) >= static_cast<uint32_t>(a0.I)) continue;
      const int32_t row0 = static_cast<int32_t>(th) * a1.a + r0 * a1.b + a1.c;
      const int32_t col0 = d.x[2].IS * (A * w0 + s0) + static_cast<int32_t>(f) * a2.a + a2.c;
      const uint32_t mask = columns_inside<kColumns>(col0, d.x[2].IS, a2.I);
      const T* at = x_c + img * p.in.channel + depth * p.in.s[0] + col0 * p.in.s[2];
      const T* dy = y_c + img * p.w.channel + int64_t{td} * p.w.s[0] + int64_t{th} * p.w.s[1] +
                    (int64_t{w0} * d.x[2].OS + f) * p.w.s[2];
      const auto fetch = [&](Vec<T>(&raw)[kColumns], int r) {
        const int32_t row = row0 + r * a1.b;
        const bool inside = r0 + r < a1.R && static_cast<uint32_t>(row) < static_cast<uint32_t>(a1.I);
        load_columns<T, kColumns>(raw, at + row * p.in.s[1], x_step, inside ? mask : 0u);
      };
      Vec<T> raw_y[OW], raw[kColumns];
      load_columns<T, OW>(raw_y, dy, y_step, valid >= OW ? (1u << OW) - 1 : (1u << valid) - 1);
      fetch(raw, 0);
      float4 y[OW];
#pragma unroll
      for (int k = 0; k < OW; ++k) y[k] = widen<T>(raw_y[k]);
#pragma unroll
      for (int r = 0; r < RB; ++r) {
        float4 x[kColumns];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) x[c] = widen<T>(raw[c]);
        if (S < 7 && r + 1 < RB) fetch(raw, r + 1);
#pragma unroll
        for (int k = 0; k < OW; ++k) {
          if (k >= valid) break;  // a zero for dy would not do: x may be infinite
#pragma unroll
          for (int s = 0; s < S; ++s) fma4(acc[r][s], x[A * k + s], y[k]);
        }
        if (S >= 7 && r + 1 < RB) fetch(raw, r + 1);  // no registers for two rows
      }
    }
  }

  // The threads of one channel vector, in order; one row of taps at a time.
  const int64_t taps = int64_t{a0.R} * a1.R * a2.R;
  float* part = args.partials + (partial * p.batch + batch) * taps * p.groups;
#pragma unroll
  for (int r = 0; r < RB; ++r) {
    __syncthreads();
#pragma unroll
    for (int s = 0; s < S; ++s) sums[s * kDwThreads + threadIdx.x] = acc[r][s];
    __syncthreads();
    if (r0 + r < a1.R) {
      for (int i = threadIdx.x; i < S * d.lanes; i += kDwThreads) {
        const int s = i / d.lanes, n = i - s * d.lanes;
        const int64_t c = (int64_t{chunk} * d.lanes + n) * kDwVector;
        if (s0 + s >= a2.R || c >= p.groups) continue;
        float4 total = sums[s * kDwThreads + n];
        for (int k = 1; k < d.slots; ++k) {
          const float4 v = sums[s * kDwThreads + k * d.lanes + n];
          total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
        }
        const int64_t tap = (int64_t{j0} * a1.R + r0 + r) * a2.R + s0 + s;
        *reinterpret_cast<float4*>(part + tap * p.groups + c) = total;
      }
    }
  }
}

// dw = sum of the partial filters: a block of 32 channels x 32 shares of one tap; shares in order, then pairwise.
template <class T>
__global__ void __launch_bounds__(1024) dw_wgrad_sum(const __grid_constant__ DwArgs args) {
  __shared__ float shares[32][33];
  const Problem& p = args.p;
  const int64_t taps = int64_t{p.axis[0].O} * p.axis[1].O * p.axis[2].O, chunks = (p.groups + 31) / 32;
  uint32_t id = blockIdx.x;
  const int64_t c = int64_t{dw_take(id, static_cast<uint32_t>(chunks))} * 32 + threadIdx.x;
  uint32_t tap = static_cast<uint32_t>(dw_take(id, static_cast<uint32_t>(taps)));
  const int64_t batch = id;
  float v = 0.f;
  if (c < p.groups) {
    const int64_t step = p.batch * taps * p.groups;
    const float* at = args.partials + (batch * taps + tap) * p.groups + c;
    for (int64_t i = threadIdx.y; i < args.d.partials; i += 32) v += at[i * step];
  }
  shares[threadIdx.y][threadIdx.x] = v;
  for (int half = 16; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) shares[threadIdx.y][threadIdx.x] += shares[threadIdx.y + half][threadIdx.x];
  }
  if (threadIdx.y == 0 && c < p.groups) {
    const int32_t i2 = dw_take(tap, p.axis[2].O), i1 = dw_take(tap, p.axis[1].O), i0 = static_cast<int32_t>(tap);
    const int64_t at = p.out.offset + batch * p.out.b + c * p.out.g + i0 * p.out.s[0] + i1 * p.out.s[1] + i2 * p.out.s[2];
    static_cast<T*>(p.out_data)[at] = from_float<T>(shares[0][threadIdx.x]);
  }
}

// ---- host ------------------------------------------------------------------------------------------------------------

template <class T, DwKind Kind, bool Exact>
void launch_gather(const DwArgs& a, cudaStream_t stream) {
  constexpr DwShape s = dw_shape(Kind, sizeof(T) == 2);
  const bool staged = a.p.residual != nullptr || a.p.activation > static_cast<int>(Act::kRelu);
  const size_t bytes = (size_t{static_cast<uint32_t>(a.d.filter)} + (staged ? s.OW * kDwThreads : 0)) * 16;  // below 48 KB
  dw_gather<T, s.S, s.A, s.OW, s.OH, Exact><<<static_cast<unsigned>(a.d.blocks), kDwThreads, bytes, stream>>>(a);
}
template <class T, DwKind Kind>
void launch_wgrad(const DwArgs& a, cudaStream_t stream) {
  constexpr DwShape s = dw_shape(Kind, sizeof(T) == 2);
  dw_wgrad<T, s.S, dw_tap_rows(Kind), s.A, s.OW><<<static_cast<unsigned>(a.d.blocks), kDwThreads, 0, stream>>>(a);
}

template <class T>
cudaError_t dw_launch(const Problem& p, const DwPlan& d, float* workspace, cudaStream_t stream) {
  const DwArgs a{p, d, workspace};
  switch (d.kind) {
    case DwKind::kTaps2: launch_gather<T, DwKind::kTaps2, false>(a, stream); break;
    case DwKind::kTaps3: launch_gather<T, DwKind::kTaps3, true>(a, stream); break;
    case DwKind::kTaps4: launch_gather<T, DwKind::kTaps4, false>(a, stream); break;
    case DwKind::kTaps5: launch_gather<T, DwKind::kTaps5, true>(a, stream); break;
    case DwKind::kTaps7: launch_gather<T, DwKind::kTaps7, true>(a, stream); break;
    case DwKind::kChunks: launch_gather<T, DwKind::kChunks, false>(a, stream); break;
    case DwKind::kStride2Taps3: launch_gather<T, DwKind::kStride2Taps3, true>(a, stream); break;
    case DwKind::kStride2Chunks: launch_gather<T, DwKind::kStride2Chunks, false>(a, stream); break;
    case DwKind::kLine4: launch_gather<T, DwKind::kLine4, false>(a, stream); break;
    case DwKind::kLineChunks: launch_gather<T, DwKind::kLineChunks, false>(a, stream); break;
    case DwKind::kWgrad3: launch_wgrad<T, DwKind::kWgrad3>(a, stream); break;
    case DwKind::kWgrad5: launch_wgrad<T, DwKind::kWgrad5>(a, stream); break;
    case DwKind::kWgrad7: launch_wgrad<T, DwKind::kWgrad7>(a, stream); break;
    case DwKind::kWgradLine4: launch_wgrad<T, DwKind::kWgradLine4>(a, stream); break;
    case DwKind::kWgradStride2Taps3: launch_wgrad<T, DwKind::kWgradStride2Taps3>(a, stream); break;
    case DwKind::kWgradStride2Taps7: launch_wgrad<T, DwKind::kWgradStride2Taps7>(a, stream); break;
  }
  cudaError_t e = cudaGetLastError();
  if (e != cudaSuccess || p.op != Op::kWeightGrad) return e;
  const unsigned blocks = static_cast<unsigned>((p.groups + 31) / 32 * p.pixels() * p.batch);
  switch (p.out_type) {
    case Type::kF32: dw_wgrad_sum<float><<<blocks, dim3(32, 32), 0, stream>>>(a); break;
    case Type::kF16: dw_wgrad_sum<__half><<<blocks, dim3(32, 32), 0, stream>>>(a); break;
    case Type::kBF16: dw_wgrad_sum<__nv_bfloat16><<<blocks, dim3(32, 32), 0, stream>>>(a); break;
  }
  return cudaGetLastError();
}

}  // namespace conv
}  // namespace jaxprims
