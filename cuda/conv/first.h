// Which first layers (C <= 4 input channels) the kernels of first_*.cuh take, and every number of their launches: plain C++.
//
// Taken: float16 and bfloat16, channels last (x, y) and HWIO (w) dense, one group, no dilation, K a multiple of 8, 1-D and 2-D, any
// strides and padding; a true batch axis of any operand is a factor of the grid. Not taken: what does not fit in shared memory.
#pragma once
#include <cstdint>

#include "conv/problem.h"

namespace jaxprims {
namespace conv {

constexpr int kFirstShared = 227 * 1024;  // bytes of a block, and of a multiprocessor's blocks together
constexpr int kFirstSMs = 132;            // fixed, so that the bits are the same on every GPU
constexpr int kFirstForwardRows = 256;    // output pixels of a forward tile: 32 for each of eight warps

// The convolution in its own names, whichever op is asked for.
struct FirstShape {
  int64_t batch = 1, x_b = 0, w_b = 0, y_b = 0;  // true batch and its strides in elements (0: not batched)
  int32_t N = 1, C = 1, K = 1, H = 1, W = 1, R = 1, S = 1, P = 1, Q = 1, u = 1, v = 1, ph = 0, pw = 0;
};

struct FirstPlan {
  const char* reason = "not looked at";  // null where the kernels take the problem
  FirstShape s;
  int shared = 0;       // bytes
  int64_t blocks = 0;
  int nt = 0;           // forward: 8-wide tiles of K a block has; input gradient: of (s, c); weight gradient: of (r, s, c) a warp has
  int chunks = 1;       // forward, weight gradient: parts of K
  int halo = 0;         // forward: pixels of one window of x
  int buffers = 2;      // forward: windows that a team of warps has
  bool sm90 = false;    // forward: by wgmma
  int th = 0, qt = 0, wt = 0, warps = 8;  // input gradient: rows h' and columns q of a tile, columns w that it finishes
  int mt = 0, wm = 1, wn = 1, wk = 1;     // weight gradient: 16-high tiles of K a warp has; warps along K, (r, s, c), pixels
  int groups = 1, ring = 0;               // weight gradient: parts of (r, s, c); rows of x kept
  int rows = 1, q16 = 16;                 // weight gradient: rows and columns of dy a step
  int64_t splits = 1;                     // weight gradient: blocks that share a sum
};

inline int first_gcd(int a, int b) { return static_cast<int>(gcd(a, b)); }
inline int64_t first_div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Fills the shape, or says why not.
inline const char* first_shape(const Problem& p, FirstShape* s) {
  if (p.groups != 1) return "groups";
  if (p.in_type != Type::kF16 && p.in_type != Type::kBF16) return "float32";
  if (p.op != Op::kWeightGrad && p.out_type != p.in_type) return "the result is of another type";
  const Axis& d = p.axis[0];
  if (d.O != 1 || d.R != 1 || d.I != 1 || d.c != 0) return "three spatial axes";
  const bool fwd = p.op == Op::kForward, dx = p.op == Op::kInputGrad;
  const int64_t C = fwd ? p.chs : dx ? p.ks : p.imgs, K = dx ? p.chs : p.ks, N = p.op == Op::kWeightGrad ? p.chs : p.imgs;
  if (C < 1 || C > 4) return "more than 4 channels";
  if (K < 8 || K % 8 != 0) return "K is not a multiple of 8";
  if (N < 1 || p.taps() < 1 || p.batch < 1) return "empty";
  int32_t in[2], taps[2], out[2], stride[2], pad[2];
  for (int i = 0; i < 2; ++i) {
    const Axis& x = p.axis[i + 1];
    const int32_t dilation = fwd ? x.b : dx ? -x.b : x.a, grown = fwd || !dx ? x.e : x.a;
    if (dilation != 1 || grown != 1) return "dilation";
    stride[i] = fwd ? x.a : dx ? x.e : x.b;
    pad[i] = dx ? x.c : -x.c;
    in[i] = dx ? x.O : x.I, out[i] = fwd ? x.O : dx ? x.I : x.R, taps[i] = p.op == Op::kWeightGrad ? x.O : x.R;
    if (in[i] < 1 || out[i] < 1 || taps[i] < 1) return "empty";
    if (taps[i] > 64 || stride[i] > 64 || in[i] > 16384 || out[i] > 16384 || pad[i] > 16384 || pad[i] < -16384) return "too large";
  }
  const TensorStrides& tx = dx ? p.out : p.in;
  const TensorStrides& tw = p.op == Op::kWeightGrad ? p.out : p.w;
  const TensorStrides& ty = fwd ? p.out : dx ? p.in : p.w;
  const auto is = [](int64_t extent, int64_t stride_, int64_t want) { return extent == 1 || stride_ == want; };
  const bool wg = p.op == Op::kWeightGrad;
  const int64_t x_n = wg ? tx.channel : tx.outer, x_c = wg ? tx.outer : tx.channel;
  const int64_t y_n = wg ? ty.channel : ty.outer, y_k = wg ? ty.outer : ty.channel;
  const int64_t w_c = fwd ? tw.channel : tw.outer, w_k = fwd ? tw.outer : tw.channel;
  if (!is(C, x_c, 1) || !is(in[1], tx.s[2], C) || !is(in[0], tx.s[1], C * in[1]) || !is(N, x_n, C * in[1] * in[0]) ||
      !is(K, y_k, 1) || !is(out[1], ty.s[2], K) || !is(out[0], ty.s[1], K * out[1]) || !is(N, y_n, K * out[1] * out[0]) ||
      !is(K, w_k, 1) || !is(C, w_c, K) || !is(taps[1], tw.s[2], K * C) || !is(taps[0], tw.s[1], K * C * taps[1]))
    return "not channels last and dense";
  if (tx.offset != 0 || tw.offset != 0 || ty.offset != 0) return "flipped";
  s->batch = p.batch, s->x_b = tx.b, s->w_b = tw.b, s->y_b = ty.b;
  if (N > (1 << 24) || K > (1 << 16) || N * out[0] > (1 << 30) || p.batch > (1 << 20)) return "too large";
  s->N = static_cast<int32_t>(N), s->C = static_cast<int32_t>(C), s->K = static_cast<int32_t>(K);
  s->H = in[0], s->W = in[1], s->R = taps[0], s->S = taps[1], s->P = out[0], s->Q = out[1];
  s->u = stride[0], s->v = stride[1], s->ph = pad[0], s->pw = pad[1];
  return nullptr;
}

// ---- forward -----------------------------------------------------------------------------------------------------------

inline int first_groups4(const FirstShape& s) { return (s.S + 3) / 4; }
inline int first_pitch(const FirstShape& s) { return (s.Q - 1) * s.v + 4 * first_groups4(s); }

inline void first_forward_plan(FirstPlan* f, bool sm90) {
  const FirstShape& s = f->s;
  const int64_t pixels = int64_t{s.P} * s.Q;
  if (pixels >= (1 << 28)) return void(f->reason = "too large");
  const int tile = sm90 ? 128 : kFirstForwardRows, teams = sm90 ? 2 : 1;
  const int64_t touched = (tile + s.Q - 2) / s.Q + 1, rows = s.P < touched ? s.P : touched;
  const int64_t halo = ((rows - 1) * s.u + s.R) * first_pitch(s), half = kFirstShared / 2 - 1024;
  // The widest part of K that wastes least: 96, 64 or 32 columns.
  int best = 0;
  int64_t cost = 0;
  for (const int nt : {12, 8, 4}) {
    const int64_t fixed = int64_t{s.R} * first_groups4(s) * nt * 256 + nt * 32 + 8 * 16 * (nt * 8 + 8) * 2, window = 8 * teams * halo;
    const bool two = nt <= 8 && fixed + (sm90 ? 1 : 2) * window <= half;  // blocks on a multiprocessor
    const int buffers = two && fixed + 2 * window > half ? 1 : 2;
    if (fixed + buffers * window > kFirstShared) continue;
    const int64_t c = first_div_up(s.K, nt * 8) * (nt * 8 + 12);  // 12: what loading a window and its fragments costs
    if (best == 0 || c < cost) best = nt, cost = c, f->buffers = buffers, f->shared = static_cast<int>(fixed + buffers * window);
  }
  if (best == 0) return void(f->reason = "the filter and the rows that a tile needs do not fit in shared memory");
  f->nt = best, f->halo = static_cast<int>(halo), f->sm90 = sm90;
  f->chunks = static_cast<int>(first_div_up(s.K, best * 8));
  const int64_t work = s.batch * f->chunks * s.N * first_div_up(pixels, tile), all = first_div_up(work, teams);
  if (work >= kExtentLimit) return void(f->reason = "too large");
  const int64_t most = kFirstSMs * (best <= 8 && f->shared <= half ? 2 : 1);
  f->blocks = all < most ? all : most;
  f->reason = nullptr;
}

// ---- input gradient ----------------------------------------------------------------------------------------------------

inline int first_z_pitch(int nt) { return nt * 8 + (nt % 2 ? 0 : 8); }

inline void first_input_grad_plan(FirstPlan* f) {
  const FirstShape& s = f->s;
  f->nt = static_cast<int>(first_div_up(s.S * s.C, 8));
  if (f->nt > 6) return void(f->reason = "more than 48 pairs of filter column and channel");
  if (f->nt < 2) f->nt = 2;
  const int64_t taps = first_div_up(s.R, s.u), k16 = first_div_up(s.K, 16), rows = first_div_up(s.H, s.u);
  const int64_t filters = s.R * k16 * f->nt * 256;
  for (int m = 512; m >= 64; m /= 2) {
    int qt = s.Q, wt = s.W;
    if (qt > m) qt = m, wt = (m - 2) * s.v - s.S;
    if (wt < 1) continue;
    int th = 1;
    double best = 0;
    for (int t = 1; t <= rows && t * qt <= m; ++t) {
      const double fill = double(t * qt) / double(first_div_up(t * qt, 64) * 64) * t / (t + taps * 0.1);
      if (fill >= best) best = fill, th = t;
    }
    const int warps = static_cast<int>(first_div_up(th * qt, 64));
    const int64_t stages = 2 * ((taps - 1) * qt + 64 * warps) * 32, z = int64_t{64} * warps * first_z_pitch(f->nt) * 4;
    const int64_t shared = filters + (stages > z ? stages : z);
    if (shared > kFirstShared) continue;
    f->th = th, f->qt = qt, f->wt = wt, f->warps = warps, f->shared = static_cast<int>(shared);
    const int64_t work = s.batch * s.N * first_div_up(rows, th) * (s.u < s.H ? s.u : s.H) * first_div_up(s.W, wt);
    const int64_t per = shared > kFirstShared / 2 - 1024 || f->nt > 3 ? 1 : 2;
    f->blocks = work < kFirstSMs * per ? work : kFirstSMs * per;
    f->reason = nullptr;
    return;
  }
  f->reason = "the filter and the rows that a tile needs do not fit in shared memory";
}

// ---- weight gradient ---------------------------------------------------------------------------------------------------

inline int first_unit(const FirstShape& s) { return first_gcd(s.v * s.C, 8); }             // elements from one 16-byte unit to the next
inline int first_columns(const FirstShape& s) { return (s.S * s.C + 7) / 8; }              // 8-wide tiles of one filter row
inline int first_row_units(const FirstShape& s, int q16) {  // of a row of x that q16 columns of dy, or all, meet
  const int g = first_unit(s), q = s.Q < q16 ? s.Q : q16;
  return (q - 1) * (s.v * s.C / g) + (first_columns(s) - 1) * (8 / g) + 1;
}
inline int first_raw_bytes(const FirstShape& s, int q16) {
  const int span = (first_row_units(s, q16) - 1) * first_unit(s) + 8, row = s.W * s.C;
  return ((row < span ? row : span) * 2 + 31) / 16 * 16;
}
inline int first_dy_pitch(int channels) { return channels * 2 + (channels / 8 % 2 ? 0 : 16); }  // an odd number of 16 bytes

inline void first_weight_grad_plan(FirstPlan* f, int64_t workspace) {
  const FirstShape& s = f->s;
  const int tiles = s.R * first_columns(s), fresh = s.u < s.R ? s.u : s.R;
  struct Instance { int mt, nt, wm; };
  const Instance instance = s.K <= 32 ? Instance{2, 8, 1} : s.K % 96 == 0 || (s.K > 64 && s.K < 96) ? Instance{3, 14, 2} : Instance{4, 6, 1};
  f->mt = instance.mt, f->nt = instance.nt, f->wm = instance.wm;
  const int most = 8 / f->wm, want = static_cast<int>(first_div_up(tiles, f->nt));
  f->wn = want >= 4 ? 4 : want >= 3 ? 4 : want;  // 1, 2 or 4
  if (f->wn > most) f->wn = most;
  f->wk = most / f->wn;
  f->groups = static_cast<int>(first_div_up(tiles, f->wn * f->nt));
  const int channels = f->wm * f->mt * 16;
  f->chunks = static_cast<int>(first_div_up(s.K, channels));
  const int64_t sums = f->wk > 1 ? int64_t{f->wm} * f->wn * 32 * f->mt * f->nt * 16 : 0;
  // A step: as many columns as fit, as few rows as keep all warps busy.
  int64_t shared = 0;
  const auto fits = [&](int rows, int q16) {
    const int64_t ring = (2 * rows - 1) * fresh + s.R;
    const int64_t streams = int64_t{2} * rows * q16 * first_dy_pitch(channels) + ring * first_row_units(s, q16) * 16 +
                            int64_t{2} * rows * fresh * first_raw_bytes(s, q16);
    shared = 16 + (streams > sums ? streams : sums);
    return shared <= kFirstShared;
  };
  const int whole = static_cast<int>(first_div_up(s.Q, 16) * 16);
  for (int parts = 1; parts <= whole / 16; ++parts) {
    f->q16 = static_cast<int>(first_div_up(whole / 16, parts) * 16);
    if (fits(1, f->q16)) break;
  }
  if (!fits(1, f->q16)) return void(f->reason = "the rows that a tile needs do not fit in shared memory");
  for (f->rows = 1; f->rows < 16 && f->rows < s.P && fits(f->rows + 1, f->q16); ++f->rows) {
    const int64_t steps = f->rows * f->q16 / 16, turns = first_div_up(steps, f->wk);
    if (turns >= 4 && steps * 10 >= turns * f->wk * 9) break;
  }
  fits(f->rows, f->q16);
  f->ring = (2 * f->rows - 1) * fresh + s.R;
  const int64_t outputs = s.batch * s.R * s.S * s.C * s.K, parts = s.batch * f->chunks * f->groups;
  int64_t splits = kFirstSMs / parts, rows = s.N * first_div_up(s.Q, f->q16) * first_div_up(s.P, f->rows);
  if (splits < 1) splits = 1;
  if (splits > rows) splits = rows;
  if (splits > workspace / 4 / outputs) splits = workspace / 4 / outputs;
  if (splits < 1) return void(f->reason = "no workspace");
  if (rows > (1 << 30) || rows / splits > 1 << 14) return void(f->reason = "the sums are too long for the workspace");
  f->splits = splits, f->shared = static_cast<int>(shared), f->blocks = parts * splits;
  f->reason = nullptr;
}

// sm90: whether a GPU is there that runs wgmma. workspace: bytes that the call was given.
inline FirstPlan first_plan(const Problem& p, bool sm90, int64_t workspace) {
  FirstPlan f;
  f.reason = first_shape(p, &f.s);
  if (f.reason != nullptr) return f;
  switch (p.op) {
    case Op::kForward:
      first_forward_plan(&f, sm90);
      // Narrow tiles give wgmma too little to do for what loading a window costs (AlexNet 0.61 against 0.54 ms, DQN 0.073 against 0.069).
      if (sm90 && (f.reason != nullptr || f.nt < 8)) first_forward_plan(&f, false);
      break;
    case Op::kInputGrad: first_input_grad_plan(&f); break;
    case Op::kWeightGrad: first_weight_grad_plan(&f, workspace); break;
  }
  if (f.reason == nullptr && (f.blocks < 1 || f.blocks > (int64_t{1} << 30))) f.reason = "too many blocks";
  return f;
}

}  // namespace conv
}  // namespace jaxprims
