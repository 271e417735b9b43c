// First layers, weight gradient on Hopper: first_weight_grad.cuh's product by wgmma, turned: rows are (r, s, c) out of registers.
//
// Rows are 64 MT of (r, s, c) for each of two warpgroups (teams), which share the rows or, where one has them all, the pixels;
// columns are 8 NT of K. The rows of x are kept expanded in the ring as there, and come by ldmatrix.trans, 16 pixels at a time: two tiles
// of 8 (s, c) are a warp's 16 rows. dy's pixels lie in pieces of 8 channels (16 bytes), pixels one after the other, which is how
// tensor cores take a matrix whose columns are contiguous, without a swizzle. Loads, ring, split and sums as in first_weight_grad.cuh.
// Measured against mma.sync (one H200, bf16): paper1 0.637 (0.705) ms, ResNet's stem 0.758 (0.771). That the tensor cores' time hardly
// counts says what is next: all warps load and expand before all multiply; warps of their own should do the first.
#pragma once
#ifdef JAXPRIMS_SM90A
#include "conv/first_weight_grad.cuh"
#include "conv/first_wgmma.cuh"

namespace jaxprims {
namespace conv {
namespace first {

template <class T, int MT, int NT>
__global__ void __launch_bounds__(256, 1) first_weight_grad_sm90(const __grid_constant__ WeightGradArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kChannels = NT * 8, kPart = MT == 4 ? 2 : MT;  // kPart: tiles whose rows are in registers at once
  extern __shared__ __align__(16) unsigned char shared[];
  const FirstShape& s = a.s;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
  const int team = warp / 4, wn = team % a.wn, wk = team / a.wn;  // a team's tiles of 64 (r, s, c), its share of the pixels
  const int piece = a.rows * a.q16 * 16 + 16, row_bytes = a.row_units * 16, dy_bytes = NT * piece;  // piece: 8 channels of all pixels
  const uint32_t zero = shared_address(shared), dy0 = zero + 16, ring0 = dy0 + 2 * dy_bytes;
  const uint32_t raw0 = ring0 + a.ring * row_bytes;

  int64_t at = blockIdx.x;
  const int split = static_cast<int>(at % a.splits);
  at /= a.splits;
  const int group = static_cast<int>(at % a.groups);
  at /= a.groups;
  const int k0 = static_cast<int>(at % a.chunks) * kChannels;
  const int64_t b = at / a.chunks;
  const int tiles = s.R * a.columns, tile0 = (group * a.wn + wn) * MT * 8;
  const uint16_t* dy = static_cast<const uint16_t*>(a.dy) + b * s.y_b;
  const int64_t all = static_cast<int64_t>(s.N) * a.parts * a.steps;
  const int first = static_cast<int>(all * split / a.splits), last = static_cast<int>(all * (split + 1) / a.splits);

  if (tid < 4) reinterpret_cast<uint32_t*>(shared)[tid] = 0;

  // A step: rows p .. p + rows of image n, columns q0 .. q0 + q16 of a part of them.
  struct Step {
    int n, q0, p, columns;
  };
  const auto step_of = [&](int i) {
    Step o;
    const int image = i / a.steps;
    o.p = (i - image * a.steps) * a.rows;
    o.n = image / a.parts;
    o.q0 = (image - o.n * a.parts) * a.q16;
    o.columns = s.Q - o.q0 < a.q16 ? s.Q - o.q0 : a.q16;
    return o;
  };
  const auto load_dy = [&](const Step& o, int buffer) {
    const uint16_t* from = dy + ((static_cast<int64_t>(o.n) * s.P + o.p) * s.Q + o.q0) * s.K + k0;
#pragma unroll 1
    for (int e = tid; e < a.rows * a.q16 * (kChannels / 8); e += 256) {
      const int px = e / (kChannels / 8), k = e % (kChannels / 8) * 8, i = a.rows == 1 ? 0 : px / a.q16, q = px - i * a.q16;
      const bool inside = q < o.columns && o.p + i < s.P && k0 + k < s.K;
      copy16(dy0 + buffer * dy_bytes + k / 8 * piece + px * 16, inside ? from + (static_cast<int64_t>(i) * s.Q + q) * s.K + k : dy,
             inside ? 16 : 0);
    }
  };
  // The elements of row h of x that the part at column q0 of dy meets, [low, high), and the byte where low is.
  const auto low_of = [&](int q0) {
    const int e = (q0 * s.v - s.pw) * s.C;
    return e > 0 ? e : 0;
  };
  const auto start = [&](int n, int h, int low) { return (b * s.x_b + (static_cast<int64_t>(n) * s.H + h) * s.W * s.C + low) * 2; };
  const auto load_raw = [&](const Step& o, int h, int slot) {  // the aligned 16 bytes that have the elements
    const int low = low_of(o.q0);
    int high = (o.q0 * s.v - s.pw) * s.C + (a.row_units - 1) * a.unit + 8;
    high = high < s.W * s.C ? high : s.W * s.C;
    if (h < 0 || h >= s.H || high <= low) return;
    const int64_t begin = start(o.n, h, low), aligned = begin & ~int64_t{15};
    const int chunks = static_cast<int>((begin + (high - low) * 2 - aligned + 15) / 16);
#pragma unroll 1
    for (int e = tid; e < chunks; e += 256) {
      const int64_t from = aligned + e * 16, left = a.x_bytes - from;
      copy16(raw0 + slot * a.raw_bytes + e * 16, static_cast<const unsigned char*>(a.x) + from, left < 16 ? static_cast<int>(left) : 16);
    }
  };
  // Expands a row; row[0] is its element `low`.
  const auto expand = [&](const Step& o, int slot, bool valid, int low, const uint16_t* row) {
    unsigned char* to = shared + (ring0 - zero) + slot * row_bytes;
#pragma unroll 1
    for (int i = tid; i < a.row_units; i += 256) {
      const int e = i * a.unit + (o.q0 * s.v - s.pw) * s.C;
      uint32_t v[8];
#pragma unroll
      for (int l = 0; l < 8; ++l) v[l] = valid && e + l >= 0 && e + l < s.W * s.C ? row[e + l - low] : 0;
      *reinterpret_cast<uint4*>(to + i * 16) =
          make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
    }
  };
  // In the ring, row i of the window of the rows from p on (tap r of p + j is i = j fresh + r) is in place (p fresh + i) mod ring.
  const int window = (a.rows - 1) * a.fresh + s.R, fresh = a.rows * a.fresh;  // fresh: that a step has and the one before had not
  const auto x_row = [&](int p, int i) {                                      // i = j fresh + r -> row of x, for the least r
    const int j = i < s.R ? 0 : (i - s.R) / a.fresh + 1;
    return (p + j) * s.u + i - j * a.fresh - s.ph;
  };
  const auto load_fresh = [&](int i) {
    if (i >= last || i % a.steps == 0) return;
    const Step o = step_of(i);
#pragma unroll 1
    for (int j = 0; j < fresh; ++j) load_raw(o, x_row(o.p, window - fresh + j), (i & 1) * fresh + j);
  };

  float acc[MT][NT][4];
#pragma unroll
  for (int i = 0; i < MT * NT * 4; ++i) acc[i / (NT * 4)][i / 4 % NT][i % 4] = 0.f;
  // Lanes of ldmatrix.x4.trans: x's matrices (tile, pixels 0-7), (next tile, 0-7), (tile, 8-15), (next tile, 8-15): a warp's 16 rows.
  const int lane_q = (lane >> 4) * 8 + (lane & 7), q_bytes = s.v * s.C / a.unit * 16;
  uint32_t tap[MT];  // a tile's row r in the window, 2^16 times, and its place in a row
#pragma unroll
  for (int j = 0; j < MT; ++j) {
    int tile = tile0 + j * 8 + warp % 4 * 2 + (lane >> 3 & 1);
    tile = tile < tiles ? tile : tiles - 1;
    const int r = tile / a.columns;
    tap[j] = (r << 16) + (tile - r * a.columns) * (8 / a.unit) * 16;
  }
  // dy's descriptor: its lead offset is from 8 pixels to the next, its stride offset from 8 channels to the next.
  const uint64_t strides = static_cast<uint64_t>(128 >> 4) << 16 | static_cast<uint64_t>(piece >> 4) << 32;

  if (first < last) {
    load_dy(step_of(first), first & 1);
    load_fresh(first + 1);
    copies_commit();
  }
  for (int i = first; i < last; ++i) {
    const Step o = step_of(i);
    const int buffer = i & 1, base = static_cast<int>(static_cast<int64_t>(o.p) * a.fresh % a.ring);
    if (i == first || o.p == 0) {  // all rows of the window
      __syncthreads();
#pragma unroll 1
      for (int j = 0; j < window; ++j) {
        const int h = x_row(o.p, j);
        expand(o, base + j < a.ring ? base + j : base + j - a.ring, h >= 0 && h < s.H, 0, static_cast<const uint16_t*>(a.x) + start(o.n, h, 0) / 2);
      }
    }
    copies_wait();
    proxy_fence();  // dy is read by the tensor cores
    __syncthreads();
    if (i + 1 < last) load_dy(step_of(i + 1), buffer ^ 1);
    load_fresh(i + 2);
    copies_commit();
    if (i + 1 < last && o.p + a.rows < s.P) {  // its fresh rows are here
      const int low = low_of(o.q0);
#pragma unroll 1
      for (int j = 0; j < fresh; ++j) {
        const int h = x_row(o.p + a.rows, window - fresh + j);
        const bool valid = h >= 0 && h < s.H;
        const int shift = valid ? static_cast<int>(start(o.n, h, low) & 15) / 2 : 0, slot = base + window + j;
        expand(o, slot < a.ring ? slot : slot - a.ring, valid, low, reinterpret_cast<const uint16_t*>(shared + (raw0 - zero) + (((i + 1) & 1) * fresh + j) * a.raw_bytes) + shift);
      }
    }

    const uint32_t from_dy = dy0 + buffer * dy_bytes;
    const int steps = (s.P - o.p < a.rows ? s.P - o.p : a.rows) * (a.q16 / 16);
    uint32_t ma[kPart][4] = {}, mb[kPart][4] = {};
    int row = 0, q0 = wk * 16;  // of the next fetch
    const auto fetch = [&](int j0, uint32_t(&m)[kPart][4]) {
      while (q0 >= a.q16) q0 -= a.q16, ++row;
      const int q = q0 + lane_q;
      const bool inside = q < o.columns;
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        const int slot = base + row * a.fresh + static_cast<int>(tap[j0 + j] >> 16);
        matrices_transposed(m[j], inside ? ring0 + (slot < a.ring ? slot : slot - a.ring) * row_bytes + (tap[j0 + j] & 0xFFFF) + q * q_bytes : zero);
      }
      if (j0 + kPart == MT) q0 += 16 * a.wk;
    };
    const auto multiply = [&](int step, int j0, uint32_t(&m)[kPart][4]) {
      pin(acc);
      pin(m);
      mma_fence();
      const uint64_t b = static_cast<uint64_t>(((from_dy + step * 256) & 0x3FFFF) >> 4) | strides;
#pragma unroll
      for (int j = 0; j < kPart; ++j) wgmma<T, NT, 1>(acc[j0 + j], m[j][0], m[j][1], m[j][2], m[j][3], b);
      mma_commit();
    };
    // While the tensor cores have one part's rows, the next are loaded: of the same step, or of the next.
    constexpr int kSecond = kPart < MT ? kPart : 0;
    const int ahead = kPart < MT ? 0 : a.wk, turn = kPart < MT ? a.wk : 2 * a.wk;
    if (wk < steps) fetch(0, ma);
    for (int step = wk; step < steps; step += turn) {
      multiply(step, 0, ma);
      if (step + ahead < steps) {
        mma_wait<1>();  // what had mb
        pin(mb);
        fetch(kSecond, mb);
        multiply(step + ahead, kSecond, mb);
        mma_wait<1>();
        pin(ma);
        if (step + turn < steps) fetch(0, ma);
      }
    }
    mma_wait<0>();
    pin(acc);
    pin(ma);
    pin(mb);
  }

  // Warps that share sums: into the first of them, in order.
  if (a.wk > 1) {
    float* sums = reinterpret_cast<float*>(shared + 16) + (warp % (4 * a.wn)) * 32 * MT * NT * 4 + lane;
    for (int other = 1; other < a.wk; ++other) {
      __syncthreads();
      if (wk == other) {
#pragma unroll
        for (int i = 0; i < MT * NT * 4; ++i) sums[i * 32] = acc[i / (NT * 4)][i / 4 % NT][i % 4];
      }
      __syncthreads();
      if (wk == 0) {
#pragma unroll
        for (int i = 0; i < MT * NT * 4; ++i) acc[i / (NT * 4)][i / 4 % NT][i % 4] += sums[i * 32];
      }
    }
    if (wk > 0) return;
  }
  float* out = a.workspace + split * a.outputs + b * s.R * s.S * s.C * s.K;
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile = tile0 + i * 8 + warp % 4 * 2 + half, r = tile / a.columns, column = (tile - r * a.columns) * 8 + g;
      if (tile >= tiles || column >= s.S * s.C) continue;
      float* at = out + static_cast<int64_t>(r * s.S * s.C + column) * s.K + k0 + 2 * t;
#pragma unroll
      for (int j = 0; j < NT; ++j)
        if (k0 + j * 8 < s.K) *reinterpret_cast<float2*>(at + j * 8) = make_float2(acc[i][j][2 * half], acc[i][j][2 * half + 1]);
    }
#endif
}

template <class T>
cudaError_t weight_grad_sm90(const Problem& p, const FirstPlan& f, void* workspace, cudaStream_t stream) {
  const WeightGradArgs a = weight_grad_args(p, f, workspace);
  const unsigned blocks = static_cast<unsigned>(f.blocks);
  switch (f.nt * 10 + f.mt) {
    case 121: first_weight_grad_sm90<T, 1, 12><<<blocks, 256, f.shared, stream>>>(a); break;
    case 123: first_weight_grad_sm90<T, 3, 12><<<blocks, 256, f.shared, stream>>>(a); break;
    case 124: first_weight_grad_sm90<T, 4, 12><<<blocks, 256, f.shared, stream>>>(a); break;
    case 81: first_weight_grad_sm90<T, 1, 8><<<blocks, 256, f.shared, stream>>>(a); break;
    case 83: first_weight_grad_sm90<T, 3, 8><<<blocks, 256, f.shared, stream>>>(a); break;
    case 84: first_weight_grad_sm90<T, 4, 8><<<blocks, 256, f.shared, stream>>>(a); break;
    case 41: first_weight_grad_sm90<T, 1, 4><<<blocks, 256, f.shared, stream>>>(a); break;
    case 43: first_weight_grad_sm90<T, 3, 4><<<blocks, 256, f.shared, stream>>>(a); break;
    case 44: first_weight_grad_sm90<T, 4, 4><<<blocks, 256, f.shared, stream>>>(a); break;
    default: return cudaErrorInvalidValue;
  }
  const cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? add_splits(p, a, stream) : e;
}

}  // namespace first
}  // namespace conv
}  // namespace jaxprims
#endif
