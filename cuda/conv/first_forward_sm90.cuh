// First layers forward on Hopper: first_forward.cuh's product by wgmma, its rows out of registers.
//
// The same rows, columns and steps; a k16 step of 64 pixels by 8 NT columns is one wgmma, whose pixels come as registers: the same 8-byte
// loads of the padded window as for mma.sync, so that the few channels never have to lie in a layout that the tensor cores read, while
// the filters do (K-major core matrices of 8 columns x 16 bytes, no swizzle). The four k of a thread are again the channels of one pixel.
// Each of a block's two warpgroups has tiles of 128 pixels, windows and barriers of its own: one multiplies while the other stores.
// Measured against mma.sync (one H200, bf16): paper1 0.563 (0.718) ms, ResNet's stem 0.525 (0.590), ten CIFAR filters 0.200 (0.212).
// Tried: 32-wide tiles, slower (AlexNet's first layer 0.608 against 0.537, DQN 0.073 against 0.069): left to mma.sync.
#pragma once
#ifdef JAXPRIMS_SM90A
#include "conv/first_forward.cuh"
#include "conv/first_wgmma.cuh"

namespace jaxprims {
namespace conv {
namespace first {

template <class T, int NT>
__global__ void __launch_bounds__(256, NT <= 8 ? 2 : 1) first_forward_sm90(const __grid_constant__ ForwardArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kColumns = NT * 8, kPitch = kColumns + 8, kStep = NT * 256;  // kStep: bytes of a step's filters
  constexpr int kAhead = NT <= 8 ? 1 : 2;  // pixels of the next window that a thread asks for in two steps
  extern __shared__ __align__(16) unsigned char shared[];
  const FirstShape& s = a.s;
  const int steps = s.R * a.groups4;
  unsigned char* filters = shared;
  float* bias = reinterpret_cast<float*>(filters + steps * kStep);
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4, team = warp / 4, member = tid % 128;
  unsigned char* out = reinterpret_cast<unsigned char*>(bias + kColumns) + warp * (16 * kPitch * 2);
  uint2* halo = reinterpret_cast<uint2*>(reinterpret_cast<unsigned char*>(bias + kColumns) + 8 * 16 * kPitch * 2) + team * a.buffers * a.halo;
  const int pixels = s.P * s.Q;

  const auto load_filters = [&](int part) {
    const int64_t b = part / a.chunks;
    const int k0 = part % a.chunks * kColumns;
    const uint16_t* w = static_cast<const uint16_t*>(a.w) + b * s.w_b + k0;
    for (int e = tid; e < steps * kColumns * 2; e += 256) {  // two channels of four filter columns, for one k
      const int k = e % kColumns, rest = e / kColumns, half = rest % 2, step = rest / 2, r = step / a.groups4;
      const int col = (step - r * a.groups4) * 4;
      const uint16_t* at = w + static_cast<int64_t>(r * s.S + col) * s.C * s.K + k;
      uint32_t v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int c = half * 2 + i % 2, q = i / 2;
        v[i] = col + q < s.S && c < s.C && k0 + k < s.K ? at[(q * s.C + c) * s.K] : 0;
      }
      *reinterpret_cast<uint4*>(filters + step * kStep + half * (NT * 128) + k * 16) =
          make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
    }
    for (int k = tid; k < kColumns; k += 256)
      bias[k] = a.bias != nullptr && k0 + k < s.K ? load_typed(a.bias_type, a.bias, b * a.bias_b + k0 + k) : 0.f;
    proxy_fence();
  };
  const uint64_t descriptor0 = static_cast<uint64_t>((shared_address(filters) & 0x3FFFF) >> 4) |
                               static_cast<uint64_t>(NT * 128 >> 4) << 16 | static_cast<uint64_t>(128 >> 4) << 32;

  // A block has whole parts (b, chunk of K) or a share of one, so that both teams change filters together.
  const int block_first = static_cast<int>(static_cast<int64_t>(a.work) * blockIdx.x / gridDim.x);
  const int block_last = static_cast<int>(static_cast<int64_t>(a.work) * (blockIdx.x + 1) / gridDim.x);
  const int of_part = s.N * a.per_image;
  const uint32_t mask = s.S % 4 == 0 || t < s.S % 4 ? 0xFFFFFFFFu : 0u;
  for (int begin = block_first; begin < block_last;) {
    const int part_end = (begin / of_part + 1) * of_part, end = part_end < block_last ? part_end : block_last;
    __syncthreads();
    load_filters(begin / of_part);
    __syncthreads();
    int part, n, buffer = 0;
    Window now, next;
    if (begin + team < end) {
      now = window<128>(a, begin + team, &part, &n);
      for (int i = member; i < now.pixels; i += 128) halo[i] = pixel(a, now, i);
    }
    for (int work = begin + team; work < end; work += 2) {
      named_sync(1 + team, 128);
      const uint2* from = halo + buffer * a.halo;
      uint2* to = halo + (a.buffers == 2 ? buffer ^ 1 : 0) * a.halo;
      int next_n = n;
      next = now;
      next.pixels = 0;
      if (work + 2 < end) next = window<128>(a, work + 2, &part, &next_n);

      const uint2* row[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int i = now.i0 + j / 2 * 64 + warp % 4 * 16 + j % 2 * 8 + g;
        i = i < pixels ? i : pixels - 1;
        const int p = a.by_q.div(i), q = i - p * s.Q;
        row[j] = from + (p - now.p0) * s.u * a.pitch + q * s.v + t;
      }
      float acc[2][NT][4];
#pragma unroll
      for (int i = 0; i < 2 * NT * 4; ++i) acc[i / (4 * NT)][i / 4 % NT][i % 4] = 0.f;
      uint2 va[4], vb[4] = {};
      int at = 0, sg = 0, ahead = member;
      uint64_t descriptor = descriptor0;
      const auto fetch = [&](uint2(&v)[4]) {  // of the next step
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = row[j][at + sg * 4];
        if (++sg == a.groups4) {
          sg = 0, at += a.pitch;
#pragma unroll
          for (int j = 0; j < 4; ++j) v[j].x &= mask, v[j].y &= mask;
        }
      };
      const auto multiply = [&](uint2(&v)[4]) {
        pin(acc);
        pin(v);
        mma_fence();
        wgmma<T, NT, 0>(acc[0], v[0].x, v[1].x, v[0].y, v[1].y, descriptor);
        wgmma<T, NT, 0>(acc[1], v[2].x, v[3].x, v[2].y, v[3].y, descriptor);
        mma_commit();
        descriptor += kStep >> 4;
      };
      const int early = a.buffers == 2 ? next.pixels : 0;  // pixels of the next window that may be put beside this one
      uint2 fresh[kAhead];
      const auto ask = [&] {
#pragma unroll
        for (int j = 0; j < kAhead; ++j)
          if (ahead + j * 128 < early) fresh[j] = pixel(a, next, ahead + j * 128);
      };
      const auto keep = [&] {
#pragma unroll
        for (int j = 0; j < kAhead; ++j)
          if (ahead + j * 128 < early) to[ahead + j * 128] = fresh[j];
        ahead += kAhead * 128;
      };
      fetch(va);
      for (int step = 0; step < steps; step += 2) {
        multiply(va);
        ask();
        if (step + 1 < steps) {
          mma_wait<1>();  // what had vb
          pin(vb);
          fetch(vb);
          multiply(vb);
          mma_wait<1>();
          pin(va);
          if (step + 2 < steps) fetch(va);
        }
        keep();
      }
      mma_wait<0>();
      pin(acc);
      pin(va);
      pin(vb);
      if (a.buffers == 1) ahead = member, named_sync(1 + team, 128);  // all have read this window
#pragma unroll 4
      for (int i = ahead; i < next.pixels; i += 128) to[i] = pixel(a, next, i);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        finish_rows<T, NT>(a, acc[half], out, bias, part, n, now.i0 + half * 64 + warp % 4 * 16);
      now = next, n = next_n;
      buffer ^= a.buffers - 1;
    }
    begin = end;
  }
#endif
}

template <class T>
cudaError_t forward_sm90(const Problem& p, const FirstPlan& f, cudaStream_t stream) {
  const ForwardArgs a = forward_args(p, f, 128);
  const unsigned blocks = static_cast<unsigned>(f.blocks);
  switch (f.nt) {
    case 12: first_forward_sm90<T, 12><<<blocks, 256, f.shared, stream>>>(a); break;
    case 8: first_forward_sm90<T, 8><<<blocks, 256, f.shared, stream>>>(a); break;
    default: return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace first
}  // namespace conv
}  // namespace jaxprims
#endif
