// First layers, weight gradient: dw[r, s, c, k] = sum over n, p, q of x[n, p u + r - ph, q v + s - pw, c] dy[n, p, q, k].
//
// A matrix product: rows are k (from dy, channels last, by ldmatrix.trans), columns are (r, then (s, c) in 8-wide tiles), the reduction
// walks over the pixels of dy, 16 q at a time. In a row of x the elements of a column tile, (s, c) .. + 8, are neighbours, from
// q v C + 8 j on: but ldmatrix wants 16-byte alignment. So a row is kept expanded, as units of 16 bytes that start every
// g = gcd(v C, 8) elements: unit i has the elements [i g, i g + 8). Then q's tile j is unit q v C / g + j 8 / g, its steps from q to q are odd
// and meet no bank twice, and no channel or column is padded but to a multiple of 8 of S C.
// A block walks down the rows p of neighbouring images, one or a few a step (and, of wide images, over parts of the columns), and keeps
// in a ring the expanded rows that this step and the next need, so that each row of x is expanded once: its bytes come by cp.async two
// steps ahead and are expanded one step ahead. dy's rows are double-buffered by cp.async.
// Past the end of a row, q >= Q, dy is zeros and x is read as zeros, too.
// Measured (one H200, bf16): paper1 0.69-0.71 ms, ResNet's stem 0.76-0.77; cuDNN 1.40, 1.13.
// Blocks share the sum over (n, p): their sums go to the workspace in float32, and a second kernel adds them in order.
#pragma once
#include "common/async_copy.cuh"
#include "common/fastdiv.h"
#include "common/pack.cuh"
#include "common/ptx.cuh"
#include "common/warp_mma.cuh"
#include "conv/first.h"

namespace jaxprims {
namespace conv {
namespace first {

struct WeightGradArgs {
  FirstShape s;
  const void *x, *dy;
  float* workspace;
  int64_t outputs, x_bytes;  // x_bytes: of the whole x
  int splits, groups, chunks;
  int wn, wk;
  int rows, q16, parts, steps;  // a step is `rows` rows by q16 columns; `parts` of columns, `steps` down an image
  int ring, fresh, unit, columns, row_units, raw_bytes;
};

template <class T, int MT, int NT, int WM>
__global__ void __launch_bounds__(256, 1) first_weight_grad(const __grid_constant__ WeightGradArgs a) {
  constexpr int kChannels = WM * MT * 16, kPitch = kChannels * 2 + 16;  // kChannels is a multiple of 16: an odd number of 16 bytes
  extern __shared__ __align__(16) unsigned char shared[];
  const FirstShape& s = a.s;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
  const int wm = warp % WM, wn = warp / WM % a.wn, wk = warp / (WM * a.wn);
  const int row_bytes = a.row_units * 16, dy_bytes = a.rows * a.q16 * kPitch;
  const uint32_t zero = shared_address(shared), dy0 = zero + 16, ring0 = dy0 + 2 * dy_bytes;
  unsigned char* ring = shared + 16 + 2 * dy_bytes;
  unsigned char* raw = ring + a.ring * row_bytes;
  const uint32_t raw0 = shared_address(raw);

  int64_t at = blockIdx.x;
  const int split = static_cast<int>(at % a.splits);
  at /= a.splits;
  const int group = static_cast<int>(at % a.groups);
  at /= a.groups;
  const int k0 = static_cast<int>(at % a.chunks) * kChannels;
  const int64_t b = at / a.chunks;
  const int tiles = s.R * a.columns, tile0 = (group * a.wn + wn) * NT;
  const uint16_t* x = static_cast<const uint16_t*>(a.x) + b * s.x_b;
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
    for (int e = tid; e < a.rows * a.q16 * (kChannels / 8); e += 256) {
      const int px = e / (kChannels / 8), k = e % (kChannels / 8) * 8, i = a.rows == 1 ? 0 : px / a.q16, q = px - i * a.q16;
      const bool inside = q < o.columns && o.p + i < s.P && k0 + k < s.K;
      copy_async(dy0 + buffer * dy_bytes + px * kPitch + k * 2, inside ? from + (static_cast<int64_t>(i) * s.Q + q) * s.K + k : dy,
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
    for (int e = tid; e < chunks; e += 256) {
      const int64_t from = aligned + e * 16, left = a.x_bytes - from;
      copy_async(raw0 + slot * a.raw_bytes + e * 16, static_cast<const unsigned char*>(a.x) + from, left < 16 ? static_cast<int>(left) : 16);
    }
  };
  // Expands a row; row[0] is its element `low`.
  const auto expand = [&](const Step& o, int slot, bool valid, int low, const uint16_t* row) {
    unsigned char* to = ring + slot * row_bytes;
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
    for (int j = 0; j < fresh; ++j) load_raw(o, x_row(o.p, window - fresh + j), (i & 1) * fresh + j);
  };

  float acc[MT][NT][4] = {};
  // Lanes of ldmatrix.x4.trans. dy: matrices (k 0-7, pixels 0-7), (k 8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
  const uint32_t lane_dy = ((lane >> 4) * 8 + (lane & 7)) * kPitch + (wm * MT * 16 + (lane >> 3 & 1) * 8) * 2;
  // x: (pixels 0-7, tile), (8-15, tile), (0-7, next tile), (8-15, next tile)
  const int lane_q = (lane >> 3 & 1) * 8 + (lane & 7), q_bytes = s.v * s.C / a.unit * 16;
  // A tile's row r in the window, and its place in a row.
  int tap[NT / 2];
  uint32_t place[NT / 2];
#pragma unroll
  for (int j = 0; j < NT / 2; ++j) {
    int tile = tile0 + 2 * j + (lane >> 4);
    tile = tile < tiles ? tile : tiles - 1;
    tap[j] = tile / a.columns;
    place[j] = (tile - tap[j] * a.columns) * (8 / a.unit) * 16;
  }

  if (first < last) {
    load_dy(step_of(first), 0);
    load_fresh(first + 1);
    copies_commit();
  }
  for (int i = first; i < last; ++i) {
    const Step o = step_of(i);
    const int buffer = (i - first) & 1, base = static_cast<int>(static_cast<int64_t>(o.p) * a.fresh % a.ring);
    if (i == first || o.p == 0) {  // all rows of the window
      __syncthreads();
      for (int j = 0; j < window; ++j) {
        const int h = x_row(o.p, j);
        expand(o, base + j < a.ring ? base + j : base + j - a.ring, h >= 0 && h < s.H, 0, x + (static_cast<int64_t>(o.n) * s.H + h) * s.W * s.C);
      }
    }
    copies_wait<0>();
    __syncthreads();
    if (i + 1 < last) load_dy(step_of(i + 1), buffer ^ 1);
    load_fresh(i + 2);
    copies_commit();
    if (i + 1 < last && o.p + a.rows < s.P) {  // its fresh rows are here
      const int low = low_of(o.q0);
      for (int j = 0; j < fresh; ++j) {
        const int h = x_row(o.p + a.rows, window - fresh + j);
        const bool valid = h >= 0 && h < s.H;
        const int shift = valid ? static_cast<int>(start(o.n, h, low) & 15) / 2 : 0, slot = base + window + j;
        expand(o, slot < a.ring ? slot : slot - a.ring, valid, low, reinterpret_cast<const uint16_t*>(raw + (((i + 1) & 1) * fresh + j) * a.raw_bytes) + shift);
      }
    }

    const uint32_t from_dy = dy0 + buffer * dy_bytes + lane_dy;
    int q0 = wk * 16, row = 0;
#pragma unroll 1
    while (true) {
      while (q0 >= a.q16) q0 -= a.q16, ++row;
      if (row >= a.rows || o.p + row >= s.P) break;
      uint32_t offset[NT / 2];
#pragma unroll
      for (int j = 0; j < NT / 2; ++j) {
        const int slot = base + row * a.fresh + tap[j];
        offset[j] = (slot < a.ring ? slot : slot - a.ring) * row_bytes + place[j];
      }
#pragma unroll 1
      for (; q0 < a.q16; q0 += 16 * a.wk) {
        uint32_t m[MT][4];
#pragma unroll
        for (int c = 0; c < MT; ++c) load_matrices_transposed(m[c], from_dy + (row * a.q16 + q0) * kPitch + c * 32);
        const int q = q0 + lane_q;
        const bool inside = q < o.columns;
        const uint32_t from_x = ring0 + q * q_bytes;
#pragma unroll
        for (int j = 0; j < NT / 2; ++j) {
          uint32_t v[4];
          load_matrices_transposed(v, inside ? from_x + offset[j] : zero);
#pragma unroll
          for (int c = 0; c < MT; ++c) {
            mma_k16(acc[c][2 * j], m[c], v[0], v[1], T{});
            mma_k16(acc[c][2 * j + 1], m[c], v[2], v[3], T{});
          }
        }
      }
    }
  }

  // Warps that share sums: into the first of them, in order.
  if (a.wk > 1) {
    float* sums = reinterpret_cast<float*>(shared + 16) + (warp % (WM * a.wn)) * 32 * MT * NT * 4 + lane;
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
  for (int j = 0; j < NT; ++j) {
    const int tile = tile0 + j;
    if (tile >= tiles) continue;
    const int r = tile / a.columns, sc = (tile - r * a.columns) * 8 + 2 * t;
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int k = k0 + (wm * MT + i) * 16 + g + e / 2 * 8, column = sc + e % 2;
        if (k < s.K && column < s.S * s.C) out[static_cast<int64_t>(r * s.S * s.C + column) * s.K + k] = acc[i][j][e];
      }
  }
}

// out[i] = sum over s of workspace[s][i]. A block has 32 neighbouring outputs; eight threads per output take every eighth split,
// and theirs are added in order.
template <class T>
__global__ void __launch_bounds__(256) first_add(const float* workspace, T* out, int64_t outputs, int splits) {
  __shared__ float sums[8][32];
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32;
  const int64_t at = int64_t{blockIdx.x} * 32 + lane;
  float sum = 0.f;
  if (at < outputs) {
#pragma unroll 8
    for (int i = row; i < splits; i += 8) sum += workspace[i * outputs + at];
  }
  sums[row][lane] = sum;
  __syncthreads();
  if (row > 0 || at >= outputs) return;
#pragma unroll
  for (int r = 1; r < 8; ++r) sum += sums[r][lane];
  out[at] = from_float<T>(sum);
}

inline WeightGradArgs weight_grad_args(const Problem& p, const FirstPlan& f, void* workspace) {
  WeightGradArgs a;
  a.s = f.s;
  a.x = p.in_data, a.dy = p.w_data, a.workspace = static_cast<float*>(workspace);
  a.outputs = f.s.batch * f.s.R * f.s.S * f.s.C * f.s.K;
  const int64_t one = int64_t{f.s.N} * f.s.H * f.s.W * f.s.C;
  a.x_bytes = 2 * ((f.s.batch - 1) * f.s.x_b + one);
  a.splits = static_cast<int>(f.splits), a.groups = f.groups, a.chunks = f.chunks, a.ring = f.ring;
  a.fresh = f.s.u < f.s.R ? f.s.u : f.s.R;
  a.wn = f.wn, a.wk = f.wk;
  a.rows = f.rows, a.q16 = f.q16, a.parts = static_cast<int>(first_div_up(f.s.Q, f.q16));
  a.steps = static_cast<int>(first_div_up(f.s.P, f.rows));
  a.unit = first_unit(f.s), a.columns = first_columns(f.s), a.row_units = first_row_units(f.s, f.q16);
  a.raw_bytes = first_raw_bytes(f.s, f.q16);
  return a;
}

inline cudaError_t add_splits(const Problem& p, const WeightGradArgs& a, cudaStream_t stream) {
  const unsigned adders = static_cast<unsigned>(first_div_up(a.outputs, 32));
  switch (p.out_type) {
    case Type::kF32: first_add<<<adders, 256, 0, stream>>>(a.workspace, static_cast<float*>(p.out_data), a.outputs, a.splits); break;
    case Type::kF16: first_add<<<adders, 256, 0, stream>>>(a.workspace, static_cast<__half*>(p.out_data), a.outputs, a.splits); break;
    case Type::kBF16: first_add<<<adders, 256, 0, stream>>>(a.workspace, static_cast<__nv_bfloat16*>(p.out_data), a.outputs, a.splits); break;
  }
  return cudaGetLastError();
}

template <class T>
cudaError_t weight_grad(const Problem& p, const FirstPlan& f, void* workspace, cudaStream_t stream) {
  const WeightGradArgs a = weight_grad_args(p, f, workspace);
  const unsigned blocks = static_cast<unsigned>(f.blocks);
  switch (f.nt) {
    case 14: first_weight_grad<T, 3, 14, 2><<<blocks, 256, f.shared, stream>>>(a); break;
    case 6: first_weight_grad<T, 4, 6, 1><<<blocks, 256, f.shared, stream>>>(a); break;
    case 8: first_weight_grad<T, 2, 8, 1><<<blocks, 256, f.shared, stream>>>(a); break;
    default: return cudaErrorInvalidValue;
  }
  const cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? add_splits(p, a, stream) : e;
}

}  // namespace first
}  // namespace conv
}  // namespace jaxprims
