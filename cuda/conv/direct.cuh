// Convolution of groups of a few channels (depthwise): forward, input gradient, weight gradient, any layout, without tiles.
//
//   the formula of implicit_gemm.cuh, whose arguments, workspace and rounding these are.
//
// Work     a thread sums one output, or a fixed share of its sum; `lanes` outputs per block, neighbours in memory.
//          Of a weight gradient that is split, each of `splits` blocks has an equal stretch of the reduction.
// Order    the shares of a sum are added pairwise, always the same pairs.
// Cost     2 * outputs * taps * channels flops; bound: loads from L2, every input is read once for each tap.
#pragma once
#include "conv/implicit_gemm.cuh"

namespace jaxprims {
namespace conv {

// One output, or one of `parts` interleaved shares of a split of it, straight from global memory.
template <class T>
__device__ inline float sum_direct(const Args& a, const T* in, const T* w, const int32_t (&start)[kMaxSpatial],
                                   const Phase (&phase)[kMaxSpatial], int part, int parts, int64_t split) {
  const Problem& p = a.p;
  float acc = 0.f;
  if (parts == 1 && a.c.splits == 1) {
    for (int j0 = 0; j0 < phase[0].count; ++j0) {
      const int32_t i0 = start[0] + j0 * p.axis[0].j_step;
      if (static_cast<uint32_t>(i0) >= static_cast<uint32_t>(p.axis[0].I)) continue;
      const int64_t in0 = i0 * p.in.s[0], w0 = (phase[0].first + int64_t{j0} * p.axis[0].r_stride) * p.w.s[0];
      for (int j1 = 0; j1 < phase[1].count; ++j1) {
        const int32_t i1 = start[1] + j1 * p.axis[1].j_step;
        if (static_cast<uint32_t>(i1) >= static_cast<uint32_t>(p.axis[1].I)) continue;
        const int64_t in1 = in0 + i1 * p.in.s[1], w1 = w0 + (phase[1].first + int64_t{j1} * p.axis[1].r_stride) * p.w.s[1];
        for (int j2 = 0; j2 < phase[2].count; ++j2) {
          const int32_t i2 = start[2] + j2 * p.axis[2].j_step;
          if (static_cast<uint32_t>(i2) >= static_cast<uint32_t>(p.axis[2].I)) continue;
          const T* pi = in + in1 + i2 * p.in.s[2];
          const T* pw = w + w1 + (phase[2].first + int64_t{j2} * p.axis[2].r_stride) * p.w.s[2];
          for (int64_t ch = 0; ch < p.chs; ++ch) acc = fmaf(to_float(pi[ch * p.in.channel]), to_float(pw[ch * p.w.channel]), acc);
        }
      }
    }
    return acc;
  }
  const int64_t taps = int64_t{phase[0].count} * phase[1].count * phase[2].count, total = taps * p.chs;
  if (total == 0) return acc;
  const FastDiv taps1(phase[1].count), taps2(phase[2].count);
  const FastDiv k_inner(static_cast<uint32_t>(a.c.k_ch_fast ? p.chs : taps));
  const uint32_t k_outer = static_cast<uint32_t>(a.c.k_ch_fast ? taps : p.chs);
  const int64_t per = (total + a.c.splits - 1) / a.c.splits, begin = split * per, end = begin + per < total ? begin + per : total;
  int64_t first = begin;
  uint32_t inner = static_cast<uint32_t>(take(first, k_inner.d)) + part, outer = static_cast<uint32_t>(first);
  for (int64_t t = begin + part; t < end; t += parts) {
    const Step k = step_at(k_inner, taps1, taps2, k_outer, a.c.k_ch_fast, outer, inner);
    const int32_t i0 = start[0] + k.j[0] * p.axis[0].j_step, i1 = start[1] + k.j[1] * p.axis[1].j_step,
                  i2 = start[2] + k.j[2] * p.axis[2].j_step;
    if (inside(p, make_int4(i0, i1, i2, 0), make_int4(0, 0, 0, 0))) {
      const float x = to_float(in[k.ch * p.in.channel + i0 * p.in.s[0] + i1 * p.in.s[1] + i2 * p.in.s[2]]);
      int64_t at = k.ch * p.w.channel;
      for (int i = 0; i < kMaxSpatial; ++i) at += (phase[i].first + int64_t{k.j[i]} * p.axis[i].r_stride) * p.w.s[i];
      acc = fmaf(x, to_float(w[at]), acc);
    }
    uint32_t q, r;
    k_inner.divmod(inner + parts, q, r);
    outer += q;
    inner = r;
  }
  return acc;
}

template <class T>
__global__ void __launch_bounds__(256, 2) conv_direct(const __grid_constant__ Args a, int64_t first_block) {
  __shared__ float shares[256];
  const Problem& p = a.p;
  const int lanes = a.c.lanes, parts = 256 / lanes;
  const int lane = threadIdx.x % lanes, part = threadIdx.x / lanes;
  int64_t batch = first_block + blockIdx.x;
  int64_t img0 = take(batch, a.tiles_m) * lanes;
  const int64_t split = take(batch, a.c.splits);
  const uint32_t in_image = static_cast<uint32_t>(take(img0, a.per_image.d)) + lane;
  uint32_t img, y, pixel, kk, group, k, o[kMaxSpatial], rest;
  a.per_image.divmod(in_image, img, y);
  if (a.c.out_k_fast) a.all_k.divmod(y, pixel, kk);
  else a.pixels.divmod(y, kk, pixel);
  a.group_k.divmod(kk, group, k);
  a.o2.divmod(pixel, rest, o[2]);
  a.o1.divmod(rest, o[0], o[1]);
  const int64_t image = img0 + img;
  const bool valid = image < p.imgs;

  float acc = 0.f;
  int64_t at = p.out.offset + group * p.out.g + image * p.out.outer + k * p.out.channel;
  if (valid) {
    int32_t start[kMaxSpatial];
    Phase phase[kMaxSpatial];
    for (int i = 0; i < kMaxSpatial; ++i) {
      const Axis& x = p.axis[i];
      const int32_t f = x.phases == 1 ? 0 : static_cast<int32_t>(o[i]) % x.phases;
      phase[i] = phase_of(x, f);
      start[i] = (static_cast<int32_t>(o[i]) - f) / x.phases * x.o_step + phase[i].base;
      at += o[i] * p.out.s[i];
    }
    const T* in = static_cast<const T*>(p.in_data) + p.in.offset + batch * p.in.b + group * p.in.g + image * p.in.outer;
    const T* w = static_cast<const T*>(p.w_data) + p.w.offset + batch * p.w.b + group * p.w.g + k * p.w.outer;
    acc = sum_direct(a, in, w, start, phase, part, parts, split);
  }
  if (parts > 1) {  // the shares are added pairwise, always the same pairs
    shares[threadIdx.x] = acc;
    for (int half = parts / 2; half > 0; half /= 2) {
      __syncthreads();
      if (part < half) shares[threadIdx.x] += shares[threadIdx.x + half * lanes];
    }
    if (part == 0) acc = shares[threadIdx.x];
  }
  if (valid && part == 0) finish_or_part(a, split, batch, int64_t{group} * p.ks + k, at, acc);
}

}  // namespace conv
}  // namespace jaxprims
