// The index arithmetic of convolution, in plain C++: which taps meet which pixel, without a multiplication by zero.
//
// Along one spatial axis all three convolutions have the form
//     out[o] = sum over r of in[(o*a + r*b + c) / e] * w[r]      where the division is exact and in [0, I)
//     forward            o = output pixel   r = tap             a = stride        b = rhs_dilation   c = -pad  e = lhs_dilation
//     input gradient     o = input pixel    r = tap             a = lhs_dilation  b = -rhs_dilation  c = +pad  e = stride
//     weight gradient    o = tap            r = output pixel    a = rhs_dilation  b = stride         c = -pad  e = lhs_dilation
// The outputs split into e/gcd(a,e) phases, o = o'*phases + f. In a phase the r for which the division is exact are an
// arithmetic progression, r = first + j*r_stride, j < count (or there are none), and the input index is affine:
//     in index = base + o'*o_step + j*j_step
// so a kernel that works on one phase at a time visits only products that exist.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define CONV_HD __host__ __device__
#else
#define CONV_HD
#endif

namespace jaxprims {
namespace conv {

struct Axis {
  int32_t a = 1, b = 1, c = 0, e = 1;
  int32_t O = 1, R = 1, I = 1;            // extents of out, of the reduction, of in
  int32_t phases = 1, r_stride = 1;       // e / gcd(a, e), e / gcd(b, e)
  int32_t o_step = 1, j_step = 1;         // a / gcd(a, e), b / gcd(b, e)
  int32_t g = 1, inv = 0;                 // gcd(b, e), (b / g)^-1 modulo r_stride
  int32_t rows = 1;                       // ceil(O / phases): outputs of the longest phase
};

struct Phase {
  int32_t base = 0, first = 0, count = 0;
};

inline int64_t gcd(int64_t a, int64_t b) {
  if (a < 0) a = -a;
  while (b != 0) {
    const int64_t t = a % b;
    a = b;
    b = t;
  }
  return a;
}

CONV_HD inline int64_t floor_mod(int64_t a, int64_t n) {
  const int64_t m = a % n;
  return m < 0 ? m + n : m;
}

// x with v*x = 1 modulo n, where gcd(v, n) = 1 (extended Euclid).
inline int64_t inverse(int64_t v, int64_t n) {
  int64_t r0 = n, r1 = floor_mod(v, n), t0 = 0, t1 = 1;
  while (r1 > 1) {
    const int64_t q = r0 / r1, r = r0 - q * r1, t = t0 - q * t1;
    r0 = r1;
    r1 = r;
    t0 = t1;
    t1 = t;
  }
  return n == 1 ? 0 : floor_mod(t1, n);
}

// The arguments fit in 32 bits: problem.h checks that first.
inline Axis make_axis(int64_t a, int64_t b, int64_t c, int64_t e, int64_t O, int64_t R, int64_t I) {
  Axis x;
  const int64_t ga = gcd(a, e), gb = gcd(b, e);
  x.a = static_cast<int32_t>(a), x.b = static_cast<int32_t>(b), x.c = static_cast<int32_t>(c), x.e = static_cast<int32_t>(e);
  x.O = static_cast<int32_t>(O), x.R = static_cast<int32_t>(R), x.I = static_cast<int32_t>(I);
  x.phases = static_cast<int32_t>(e / ga), x.r_stride = static_cast<int32_t>(e / gb);
  x.o_step = static_cast<int32_t>(a / ga), x.j_step = static_cast<int32_t>(b / gb);
  x.g = static_cast<int32_t>(gb), x.inv = static_cast<int32_t>(inverse(b / gb, e / gb));
  x.rows = static_cast<int32_t>((O + x.phases - 1) / x.phases);
  return x;
}

// Number of phases that have an output at all.
CONV_HD inline int32_t live_phases(const Axis& x) { return x.phases < x.O ? x.phases : x.O; }

// Phase f: solve f*a + c + r*b = 0 modulo e for r.
CONV_HD inline Phase phase_of(const Axis& x, int32_t f) {
  Phase p;
  const int64_t t = static_cast<int64_t>(f) * x.a + x.c;
  if (x.e == 1) {
    p.base = static_cast<int32_t>(t);
    p.count = x.R;
    return p;
  }
  if (t % x.g != 0) return p;
  const int64_t first = floor_mod(-(t / x.g), x.r_stride) * x.inv % x.r_stride;
  if (first >= x.R) return p;
  p.first = static_cast<int32_t>(first);
  p.count = static_cast<int32_t>((x.R - first + x.r_stride - 1) / x.r_stride);
  p.base = static_cast<int32_t>((t + first * x.b) / x.e);
  return p;
}

}  // namespace conv
}  // namespace jaxprims
