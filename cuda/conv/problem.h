// What a convolution kernel is asked to do, in plain C++: extents, element strides, addresses.
//
// All three convolutions are one problem (index.h), because the roles of the tensors only rotate:
//     out[b, g, img, o.., k] = act( sum over ch, r.. of in[b, g, img, (o*a + r*b + c)/e.., ch] * w[b, g, r.., ch, k] + bias + residual )
//                        in   w    out   img        ch         k          o               r
//     forward            x    w    y     image      C / G      K / G      output pixel    tap
//     input gradient     dy   w    dx    image      K / G      C / G      input pixel     tap
//     weight gradient    x    dy   dw    C / G      image      K / G      tap             output pixel
// g = group (of features or of images), b = true batch. Every layout and a flipped filter are element strides.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "conv/index.h"

namespace jaxprims {
namespace conv {

constexpr int kMaxSpatial = 3;
// Extents and per-image products stay this far below 2^31, so that a 32-bit index plus one tile does not overflow.
constexpr int64_t kExtentLimit = (int64_t{1} << 31) - 1024;
// (O-1)*a + (R-1)*|b| + |c| and the spatial extents stay below this, so that sums of input indices fit in 32 bits.
constexpr int64_t kReachLimit = int64_t{1} << 30;

enum class Op : int { kForward = 0, kInputGrad = 1, kWeightGrad = 2 };
enum class Algorithm : int { kAuto = 0, kImplicitGemm = 1, kDirect = 2, kGemm = 3 };  // jaxprims/conv/params.py has the same
enum class Type : int { kF32 = 0, kF16 = 1, kBF16 = 2 };

struct TensorStrides {
  int64_t b = 0, g = 0;            // true batch (0: not batched), group
  int64_t outer = 0, channel = 0;  // in, out: img and ch / k;  w: k and ch
  int64_t s[kMaxSpatial] = {0, 0, 0};
  int64_t offset = 0;              // of the first element: not 0 where a filter is flipped
};

struct Problem {
  Op op = Op::kForward;
  Type in_type = Type::kF32, out_type = Type::kF32, bias_type = Type::kF32, residual_type = Type::kF32;
  int64_t batch = 1, groups = 1, imgs = 1, chs = 1, ks = 1;
  Axis axis[kMaxSpatial];
  TensorStrides in, w, out;        // in.outer = img, in.channel = ch; w.outer = k, w.channel = ch; out.outer = img, out.channel = k
  const void *in_data = nullptr, *w_data = nullptr, *bias = nullptr, *residual = nullptr;
  void* out_data = nullptr;
  int64_t bias_b = 0, residual_b = 0;  // true-batch strides of bias and residual
  int activation = 0;
  Algorithm algorithm = Algorithm::kAuto;
  bool tf32 = false;  // float32 operands may be rounded to TF32's 11 bits

  int64_t pixels() const { return int64_t{axis[0].O} * axis[1].O * axis[2].O; }
  int64_t taps() const { return int64_t{axis[0].R} * axis[1].R * axis[2].R; }
  int64_t phases() const { return int64_t{live_phases(axis[0])} * live_phases(axis[1]) * live_phases(axis[2]); }
  // Rows of the matrix product of one phase, counted for the longest phase.
  int64_t phase_pixels() const { return int64_t{axis[0].rows} * axis[1].rows * axis[2].rows; }
  bool empty() const { return batch * groups * imgs * ks * pixels() == 0; }
};

// The static options of a convolution, as in the config of the custom call.
struct Geometry {
  std::vector<int64_t> lhs_spec, rhs_spec, out_spec;
  std::vector<int64_t> strides, padding_low, lhs_dilation, rhs_dilation;
  bool flip = false;
  int64_t groups = 1, batch_groups = 1;
  bool x_batched = false, w_batched = false, y_batched = false;
};

inline std::string show(const std::vector<int64_t>& v) {
  std::string s = "(";
  for (size_t i = 0; i < v.size(); ++i) s += (i ? ", " : "") + std::to_string(v[i]);
  return s + ")";
}

// One tensor without its roles: extents and strides by the positions of a spec.
struct Described {
  int64_t batch = 1, d0 = 1, d1 = 1, s[kMaxSpatial] = {1, 1, 1};
  int64_t batch_stride = 0, stride0 = 0, stride1 = 0, stride_s[kMaxSpatial] = {0, 0, 0};
};

inline std::string describe(const char* name, const std::vector<int64_t>& dims, const std::vector<int64_t>& spec, bool batched,
                            Described* t) {
  const size_t lead = batched ? 1 : 0, rank = spec.size();
  if (dims.size() != rank + lead)
    return std::string(name) + " has shape " + show(dims) + ", but its rank must be " + std::to_string(rank + lead);
  std::vector<int64_t> stride(dims.size());
  std::vector<char> seen(rank, 0);
  int64_t step = 1;
  for (size_t i = dims.size(); i-- > 0;) {
    stride[i] = step;
    step *= dims[i];
  }
  for (int64_t at : spec) {
    if (at < 0 || at >= static_cast<int64_t>(rank) || seen[at])
      return std::string(name) + ": dimension numbers " + show(spec) + " are not a permutation";
    seen[at] = 1;
  }
  if (batched) t->batch = dims[0], t->batch_stride = stride[0];
  t->d0 = dims[lead + spec[0]], t->stride0 = stride[lead + spec[0]];
  t->d1 = dims[lead + spec[1]], t->stride1 = stride[lead + spec[1]];
  const size_t pad = kMaxSpatial - (rank - 2);  // missing axes come first, with extent 1
  for (size_t i = 2; i < rank; ++i) {
    t->s[pad + i - 2] = dims[lead + spec[i]];
    t->stride_s[pad + i - 2] = stride[lead + spec[i]];
  }
  if (t->d0 > kExtentLimit || t->d1 > kExtentLimit)
    return std::string(name) + " has shape " + show(dims) + ": an extent is past " + std::to_string(kExtentLimit);
  int64_t product = 1;
  for (int64_t extent : t->s) {
    if (extent >= kReachLimit || (product *= extent) > kExtentLimit)
      return std::string(name) + " has shape " + show(dims) + ": its spatial extents are past " + std::to_string(kExtentLimit);
  }
  return "";
}

// Fills everything of the problem but types, addresses and epilogue. Returns the reason where it cannot, else "".
inline std::string make_problem(Op op, const Geometry& geo, const std::vector<int64_t>& x_dims, const std::vector<int64_t>& w_dims,
                                const std::vector<int64_t>& y_dims, Problem* p) {
  const size_t rank = geo.strides.size();
  if (rank < 1 || rank > kMaxSpatial) return "the spatial rank must be 1, 2 or 3, got " + std::to_string(rank);
  if (geo.lhs_spec.size() != rank + 2 || geo.rhs_spec.size() != rank + 2 || geo.out_spec.size() != rank + 2 ||
      geo.padding_low.size() != rank || geo.lhs_dilation.size() != rank || geo.rhs_dilation.size() != rank)
    return "dimension numbers, strides, padding and dilations must agree in rank";
  const int64_t G = geo.groups, BG = geo.batch_groups, groups = G * BG;
  if (G < 1 || BG < 1 || (G > 1 && BG > 1))
    return "groups " + std::to_string(G) + " and batch_groups " + std::to_string(BG) + " must be positive and at most one of them above 1";
  Described x, w, y;
  std::string e = describe("x", x_dims, geo.lhs_spec, geo.x_batched, &x);
  if (e.empty()) e = describe("w", w_dims, geo.rhs_spec, geo.w_batched, &w);
  if (e.empty()) e = describe("y", y_dims, geo.out_spec, geo.y_batched, &y);
  if (!e.empty()) return e;
  const std::string shapes = ": x " + show(x_dims) + ", w " + show(w_dims) + ", y " + show(y_dims);
  if (x.d1 != w.d1 * G) return "x's channels must be groups * w's input features" + shapes;
  if (x.d0 != y.d0 * BG) return "x's images must be batch_groups * y's images" + shapes;
  if (w.d0 != y.d1) return "w's output features must be y's channels" + shapes;
  if (w.d0 % groups != 0) return "w's output features must be a multiple of the " + std::to_string(groups) + " groups" + shapes;

  // True batch: those who have it agree, and the result has it where an operand has it.
  const bool result_batched = op == Op::kForward ? geo.y_batched : op == Op::kInputGrad ? geo.x_batched : geo.w_batched;
  if ((geo.x_batched || geo.w_batched || geo.y_batched) && !result_batched)
    return "the result of a batched convolution must be batched" + shapes;
  p->batch = 1;
  if (result_batched) {
    p->batch = op == Op::kForward ? y.batch : op == Op::kInputGrad ? x.batch : w.batch;
    if ((geo.x_batched && x.batch != p->batch) || (geo.w_batched && w.batch != p->batch) || (geo.y_batched && y.batch != p->batch))
      return "the leading batch axes differ" + shapes;
  }

  const int64_t k = w.d0 / groups, c = w.d1, n = y.d0;
  const int64_t x_group = G > 1 ? c * x.stride1 : n * x.stride0, w_group = k * w.stride0, y_group = k * y.stride1;
  p->op = op;
  p->groups = groups;
  TensorStrides tx, tw, ty;  // with outer = image / K, channel = C or K / C
  tx.b = x.batch_stride, tx.g = x_group, tx.outer = x.stride0, tx.channel = x.stride1;
  tw.b = w.batch_stride, tw.g = w_group, tw.outer = w.stride0, tw.channel = w.stride1;
  ty.b = y.batch_stride, ty.g = y_group, ty.outer = y.stride0, ty.channel = y.stride1;
  for (int i = 0; i < kMaxSpatial; ++i) {
    const int j = i - (kMaxSpatial - static_cast<int>(rank));
    const int64_t u = j < 0 ? 1 : geo.strides[j], pad = j < 0 ? 0 : geo.padding_low[j];
    const int64_t l = j < 0 ? 1 : geo.lhs_dilation[j], d = j < 0 ? 1 : geo.rhs_dilation[j];
    const int64_t H = x.s[i], R = w.s[i], P = y.s[i];
    if (u < 1 || l < 1 || d < 1 || u >= kReachLimit || l >= kReachLimit || d >= kReachLimit || pad <= -kReachLimit || pad >= kReachLimit)
      return "strides, dilations and padding must be below 2^30, and strides and dilations positive";
    // Products of two numbers below 2^30: no overflow in 64 bits.
    const int64_t reach = (P > 0 ? P - 1 : 0) * u, grown = (H > 0 ? H - 1 : 0) * l, span = (R > 0 ? R - 1 : 0) * d;
    if ((reach > grown ? reach : grown) + span + (pad < 0 ? -pad : pad) >= kReachLimit)
      return "the padded extent of spatial axis " + std::to_string(j) + " is past 2^30" + shapes;
    if (op == Op::kForward) p->axis[i] = make_axis(u, d, -pad, l, P, R, H);
    if (op == Op::kInputGrad) p->axis[i] = make_axis(l, -d, pad, u, H, R, P);
    if (op == Op::kWeightGrad) p->axis[i] = make_axis(d, u, -pad, l, R, P, H);
    tx.s[i] = x.stride_s[i], tw.s[i] = w.stride_s[i], ty.s[i] = y.stride_s[i];
    if (geo.flip && R > 0) {
      tw.offset += (R - 1) * tw.s[i];
      tw.s[i] = -tw.s[i];
    }
  }
  const auto swapped = [](TensorStrides t) {
    const int64_t outer = t.outer;
    t.outer = t.channel;
    t.channel = outer;
    return t;
  };
  switch (op) {
    case Op::kForward: p->in = tx, p->w = tw, p->out = ty, p->imgs = n, p->chs = c, p->ks = k; break;
    case Op::kInputGrad: p->in = ty, p->w = swapped(tw), p->out = tx, p->imgs = n, p->chs = k, p->ks = c; break;
    case Op::kWeightGrad:  // w's place is taken by dy: outer = k, channel = image; out = dw: outer = c, channel = k
      p->in = swapped(tx), p->w = swapped(ty), p->out = swapped(tw), p->imgs = c, p->chs = n, p->ks = k;
      break;
  }
  return "";
}

}  // namespace conv
}  // namespace jaxprims
