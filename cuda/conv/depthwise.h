// Which depthwise convolutions the kernels of depthwise.cuh take, and how they are cut up: a pure function, no CUDA.
//
// One channel per group (multiplier 1), channels contiguous in x, y and dx; forward, input gradient and weight gradient.
// index.h writes an axis as  in = (o*a + r*b + c)/e. Two kinds of steps break it into dense pieces: the e/gcd(a,e) phases
// (an input gradient of a stride), and the |j_step| residues of o' (a dilation). In each of the `subs` pieces
//     out = OS*t + f          in = IS*(A*t + j) + base          t < T, j < taps of the piece
// so that neighbouring t with neighbouring j meet the same inputs, whatever the stride and the dilation: a window slides.
#pragma once
#include <cstdint>

#include "common/fastdiv.h"
#include "conv/problem.h"

namespace jaxprims {
namespace conv {

constexpr int kDwThreads = 128;
constexpr int kDwVector = 4;            // channels per thread: 8 or 16 bytes
constexpr int kDwFilter = 32 * 1024;    // bytes of shared memory for the filter

// Partial sums of the weight gradient: this many bytes hold as many filters as blocks share a channel when the GPU is full
// (four blocks of 128 threads and 64 channels on each of 132 multiprocessors). jaxprims/conv/workspace.py has the same formula.
inline int64_t dw_workspace(int64_t channels, int64_t taps) {
  return channels < 1 ? 0 : 4 * taps * channels * ((528 * 64 + channels - 1) / channels);
}

// One axis of the gather. `axis` has the phases, see index.h.
struct DwAxis {
  Axis axis;
  int32_t A = 1, OS = 1, IS = 1;
  int32_t subs = 1, T = 1;  // pieces with an output; outputs of the longest
  bool reversed = false;    // j_step was negative: the taps are walked from the last to the first
};

// A kernel of depthwise.cuh: which template.
enum class DwKind : int {
  kTaps2, kTaps3, kTaps4, kTaps5, kTaps7, kChunks,  // stride 1, window over two axes: taps along the last axis
  kStride2Taps3, kStride2Chunks,
  kLine4, kLineChunks,                              // one output row per thread: 1-D
  kWgrad3, kWgrad5, kWgrad7, kWgradLine4, kWgradStride2Taps3, kWgradStride2Taps7,
};

struct DwPlan {
  const char* reason = "";  // null: the kernels take it; else why not
  DwKind kind = DwKind::kTaps3;
  DwAxis x[kMaxSpatial];
  int32_t lanes = 1, slots = 1, chunks = 1;  // of a block's 128 threads, lanes x 4 channels times slots strips
  int32_t rows = 1, cols = 1;                // strips per piece along axes 1 and 2
  int32_t rounds = 1;                        // strips per thread (gather)
  int32_t in_step = 0, out_step = 0;         // elements between neighbouring columns of a strip, in `in` (x) and out (dy)
  int32_t filter = 0;                        // 16-byte words of shared memory for it
  int64_t strips = 0, groups = 0;            // strips of a piece; blocks that share them
  int64_t blocks = 0;
  // weight gradient
  int32_t tap_rows = 1, tap_cols = 1;        // taps along axes 1 and 2 that a thread sums
  int32_t row_parts = 1, col_parts = 1;      // parts of the taps
  int32_t partials = 1;                      // filters in the workspace
  FastDiv d_cols, d_rows, d_t0, d_img;       // strip -> cols, rows, depth, image
};

struct DwShape {
  int S, A, OW, OH;  // taps along the last axis, input steps per output, outputs of a strip
};
// half: a 16-bit element type. Strips of 7 divide images of 7, 14, 28, 56 pixels; larger strips read each input less often
// and cost registers: 7 x 4 outputs of 4 channels leave two blocks of 128 threads on a multiprocessor. float32 moves twice
// the bytes, so it can afford to read twice as often, and its loads need twice the registers.
constexpr DwShape dw_shape(DwKind k, bool half) {
  switch (k) {
    case DwKind::kTaps2: return {2, 1, 4, 4};
    case DwKind::kTaps3: return {3, 1, 4, 4};
    case DwKind::kTaps4: return {4, 1, 4, 4};
    case DwKind::kTaps5: return {5, 1, 7, half ? 4 : 2};
    case DwKind::kTaps7: case DwKind::kChunks: return {7, 1, 7, half ? 3 : 2};
    case DwKind::kStride2Taps3: return {3, 2, 4, 2};
    case DwKind::kStride2Chunks: return {7, 2, 4, 2};
    case DwKind::kLine4: return {4, 1, 8, 1};
    case DwKind::kLineChunks: return {7, 1, 8, 1};
    case DwKind::kWgrad3: return {3, 1, half ? 7 : 4, 1};
    case DwKind::kWgrad5: return {5, 1, 7, 1};
    case DwKind::kWgrad7: return {7, 1, 7, 1};
    case DwKind::kWgradLine4: return {4, 1, 8, 1};
    case DwKind::kWgradStride2Taps3: return {3, 2, 4, 1};
    case DwKind::kWgradStride2Taps7: return {7, 2, 4, 1};
  }
  return {1, 1, 1, 1};
}
constexpr int dw_tap_rows(DwKind k) {
  switch (k) {
    case DwKind::kWgrad3: case DwKind::kWgradStride2Taps3: return 3;
    case DwKind::kWgrad5: return 5;
    case DwKind::kWgrad7: case DwKind::kWgradStride2Taps7: return 4;  // 4 x 7 x 4 sums; 7 x 7 x 4 would spill
    default: return 1;
  }
}

inline DwAxis dw_axis(const Axis& a) {
  DwAxis d;
  d.axis = a;
  d.A = a.o_step;
  d.reversed = a.j_step < 0;
  d.IS = d.reversed ? -a.j_step : a.j_step;
  const int64_t os = int64_t{a.phases} * d.IS;
  d.OS = static_cast<int32_t>(os < kReachLimit ? os : kReachLimit);
  d.subs = d.OS < a.O ? d.OS : a.O;
  d.T = (a.O + d.OS - 1) / d.OS;
  return d;
}

// Piece f of an axis: where it starts in `in`, and its taps: j of the piece is tap first + j*step of the filter.
struct DwPiece {
  int32_t f = 0, base = 0, count = 0, first = 0, step = 1, T = 0;
};
CONV_HD inline DwPiece dw_piece(const DwAxis& d, int32_t f) {
  DwPiece r;
  const int32_t residue = f / d.axis.phases;
  const Phase p = phase_of(d.axis, f - residue * d.axis.phases);
  r.f = f, r.count = p.count, r.first = p.first, r.step = d.axis.r_stride;
  r.base = p.base + residue * d.axis.o_step;
  r.T = (d.axis.O - f + d.OS - 1) / d.OS;
  if (d.reversed && p.count > 0) {
    r.base += (p.count - 1) * d.axis.j_step;
    r.first += (p.count - 1) * d.axis.r_stride;
    r.step = -d.axis.r_stride;
  }
  return r;
}

// Lanes (vectors of 4 channels) of a block: few idle threads, and rows of 64 bytes or more where channels suffice.
inline void dw_lanes(DwPlan* d, int64_t vectors, int64_t most) {
  double best = 1e30;
  for (int lanes = 1; lanes <= 32; ++lanes) {
    if (lanes > vectors || lanes > most) break;
    const int64_t chunks = (vectors + lanes - 1) / lanes;
    const int slots = kDwThreads / lanes;
    double cost = static_cast<double>(chunks * lanes) / static_cast<double>(vectors) * kDwThreads / (slots * lanes);
    cost *= 1.0 + 1.0 / lanes + (chunks > 1 && lanes % 4 != 0 ? 0.15 : 0.0);  // short rows; rows that split a sector
    if (cost < best) best = cost, d->lanes = lanes, d->slots = slots, d->chunks = static_cast<int32_t>(chunks);
  }
}

inline bool dw_aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// workspace: bytes that the call was given.
inline DwPlan depthwise_plan(const Problem& p, int64_t workspace = 0) {
  DwPlan d;
  const bool wgrad = p.op == Op::kWeightGrad, half = p.in_type != Type::kF32;
  const int64_t bytes = half ? 8 : 16;
  if (p.groups % kDwVector != 0) { d.reason = "channels are not a multiple of 4"; return d; }
  if (p.ks != 1 || (wgrad ? p.imgs : p.chs) != 1) { d.reason = "more than one channel per group"; return d; }
  if (p.empty() || p.taps() == 0 || (wgrad && p.chs == 0)) { d.reason = "empty"; return d; }
  // The pixel tensors: x and y, of which the weight gradient has the second in w's place.
  const TensorStrides& a = p.in;
  const TensorStrides& b = wgrad ? p.w : p.out;
  const int64_t a_img = wgrad ? a.channel : a.outer, b_img = wgrad ? b.channel : b.outer;
  if (a.g != 1 || b.g != 1 || a.offset != 0 || b.offset != 0) { d.reason = "channels are not contiguous"; return d; }
  bool whole = a_img % kDwVector == 0 && b_img % kDwVector == 0 && a.b % kDwVector == 0 && b.b % kDwVector == 0;
  for (int i = 0; i < kMaxSpatial; ++i) whole = whole && a.s[i] % kDwVector == 0 && b.s[i] % kDwVector == 0;
  whole = whole && dw_aligned(p.in_data, bytes) && dw_aligned(wgrad ? p.w_data : p.out_data, bytes);
  if (!whole) { d.reason = "a pixel's channels do not start on a vector"; return d; }
  if (!wgrad && p.in_type != p.out_type) { d.reason = "operand and result differ in type"; return d; }

  for (int i = 0; i < kMaxSpatial; ++i) {
    const Axis& x = p.axis[i];
    if (wgrad) {
      if (x.e != 1) { d.reason = "weight gradient of a dilated input"; return d; }
      d.x[i] = dw_axis(make_axis(x.b, x.a, x.c, 1, x.R, x.O, x.I));  // the forward convolution's axis
    } else {
      d.x[i] = dw_axis(x);
    }
    if (d.x[i].OS >= kReachLimit) { d.reason = "phases times dilation past 2^30"; return d; }
  }
  const DwAxis& h = d.x[1];
  const DwAxis& w = d.x[2];
  if (w.A > 2) { d.reason = "stride above 2"; return d; }
  const auto taps = [](const DwAxis& x) { return (x.axis.R + x.axis.r_stride - 1) / x.axis.r_stride; };  // of the longest phase
  const int S = taps(w), R = taps(h);
  const bool exact = w.axis.r_stride == 1;  // every piece has all taps
  if (wgrad) {
    if (w.A == 2) d.kind = S <= 3 && R <= 3 ? DwKind::kWgradStride2Taps3 : DwKind::kWgradStride2Taps7;
    else if (R == 1 && S <= 4) d.kind = DwKind::kWgradLine4;
    else if (S <= 3) d.kind = DwKind::kWgrad3;
    else if (S <= 5) d.kind = DwKind::kWgrad5;
    else d.kind = DwKind::kWgrad7;
  } else if (w.A == 2) {
    d.kind = exact && S == 3 ? DwKind::kStride2Taps3 : DwKind::kStride2Chunks;
  } else if (h.axis.O == 1) {
    d.kind = S <= 4 ? DwKind::kLine4 : DwKind::kLineChunks;
  } else if (exact) {
    d.kind = S == 3 ? DwKind::kTaps3 : S == 5 ? DwKind::kTaps5 : S == 7 ? DwKind::kTaps7 : S <= 2 ? DwKind::kTaps2
             : S == 4 ? DwKind::kTaps4 : DwKind::kChunks;
  } else {
    d.kind = S <= 2 ? DwKind::kTaps2 : S <= 4 ? DwKind::kTaps4 : DwKind::kChunks;
  }
  const DwShape s = dw_shape(d.kind, half);
  const int64_t in_step = w.IS * a.s[2], out_step = w.OS * b.s[2];
  if (in_step < 0 || out_step < 0 || in_step > kReachLimit / 32 || out_step > kReachLimit / 32) {
    d.reason = "a strip past 2^30 elements";
    return d;
  }
  d.in_step = static_cast<int32_t>(in_step), d.out_step = static_cast<int32_t>(out_step);

  const int64_t vectors = p.groups / kDwVector;
  // The filter of one piece and one chunk of channels stays in shared memory (32 KB of it, 16 bytes per tap and lane).
  const int64_t filter = int64_t{taps(d.x[0])} * R * S;
  if (!wgrad && filter > kDwFilter / 16) { d.reason = "the filter is larger than shared memory"; return d; }
  dw_lanes(&d, vectors, wgrad ? 32 : kDwFilter / 16 / filter);
  d.filter = static_cast<int32_t>(wgrad ? 0 : filter * d.lanes);
  const int64_t imgs = wgrad ? p.chs : p.imgs;
  // The weight gradient walks rows one by one, so axes 0 and 1 need no pieces there.
  const int64_t t0 = wgrad ? d.x[0].axis.O : d.x[0].T;
  d.rows = wgrad ? h.axis.O : (h.T + s.OH - 1) / s.OH;
  d.cols = (w.T + s.OW - 1) / s.OW;
  if (wgrad) {
    d.strips = imgs * t0 * d.rows * w.subs * d.cols;
  } else {
    d.strips = imgs * t0 * d.rows * d.cols;
  }
  constexpr int64_t kLimit = (int64_t{1} << 31) - (1 << 20);  // strips, and blocks of a grid
  if (d.strips >= kLimit || imgs >= kLimit) { d.reason = "more than 2^31 strips"; return d; }
  d.d_cols = FastDiv(static_cast<uint32_t>(d.cols)), d.d_rows = FastDiv(static_cast<uint32_t>(d.rows));
  d.d_t0 = FastDiv(static_cast<uint32_t>(t0)), d.d_img = FastDiv(static_cast<uint32_t>(w.subs));
  const auto up = [](int64_t x, int64_t y) { return (x + y - 1) / y; };
  if (wgrad) {
    d.tap_rows = dw_tap_rows(d.kind), d.tap_cols = s.S;
    d.row_parts = static_cast<int32_t>(up(h.axis.R, d.tap_rows)), d.col_parts = static_cast<int32_t>(up(w.axis.R, d.tap_cols));
    const int64_t depth = d.x[0].axis.R, parts = int64_t{d.row_parts} * d.col_parts * depth;
    const int64_t each = 4 * p.pixels() * p.groups * p.batch;  // bytes of one partial filter
    const int64_t room = workspace / each;
    if (room < 1) { d.reason = "no workspace"; return d; }
    int64_t want = up(528, d.chunks * parts * p.batch);         // fill the GPU once
    if (want > up(d.strips, d.slots)) want = up(d.strips, d.slots);  // no block without work
    d.partials = static_cast<int32_t>(want < room ? want : room);
    d.blocks = d.chunks * parts * d.partials * p.batch;
  } else {
    // Four strips per thread spread the loading of the filter, as long as enough blocks remain (four per multiprocessor,
    // four times over).
    const int64_t pieces = int64_t{d.x[0].subs} * h.subs * w.subs;
    const int64_t once = up(d.strips, d.slots) * d.chunks * pieces * p.batch;
    d.rounds = once >= 4 * 4 * 528 ? 4 : once >= 2 * 4 * 528 ? 2 : 1;
    d.groups = up(d.strips, int64_t{d.slots} * d.rounds);
    d.blocks = d.groups * d.chunks * pieces * p.batch;
  }
  if (d.blocks >= kLimit) { d.reason = "more than 2^31 blocks"; return d; }
  d.reason = nullptr;
  return d;
}

}  // namespace conv
}  // namespace jaxprims
