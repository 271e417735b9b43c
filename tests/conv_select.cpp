// Checks cuda/conv/sm90.h and sm90_f32.h without a GPU: what the Hopper kernels would visit against the definition of a convolution, and prints
// the tile, or the kernel and its splits, of the shapes given as arguments. Built and run by test_conv_select.py.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <tuple>

#include "conv/select.h"
#include "conv/sm90_f32.h"

using namespace jaxprims::conv;

struct Shape {
  int64_t n, c, h, w, k, r, s, u, lo, hi, d, l;
  bool flip;
  int64_t groups = 1;
};

static bool problem(const Shape& q, Op op, Problem* p) {
  Geometry geo;
  geo.lhs_spec = {0, 3, 1, 2}, geo.rhs_spec = {3, 2, 0, 1}, geo.out_spec = {0, 3, 1, 2};
  geo.strides = {q.u, q.u}, geo.padding_low = {q.lo, q.lo}, geo.lhs_dilation = {q.l, q.l}, geo.rhs_dilation = {q.d, q.d};
  geo.flip = q.flip, geo.groups = q.groups;
  const auto out = [&](int64_t i, int64_t taps) { return ((i - 1) * q.l + 1 + q.lo + q.hi - (taps - 1) * q.d - 1) / q.u + 1; };
  const int64_t P = out(q.h, q.r), Q = out(q.w, q.s);
  if ((q.h - 1) * q.l + 1 + q.lo + q.hi < (q.r - 1) * q.d + 1 || (q.w - 1) * q.l + 1 + q.lo + q.hi < (q.s - 1) * q.d + 1) return false;
  *p = Problem();
  if (!make_problem(op, geo, {q.n, q.h, q.w, q.c}, {q.r, q.s, q.c / q.groups, q.k}, {q.n, P, Q, q.k}, p).empty()) return false;
  p->in_type = p->out_type = Type::kBF16;
  return true;
}

// Products (output, input, tap) of the two spatial axes, by the definition of problem.h. Taps are numbered as they lie.
using Products = std::set<std::tuple<int, int, int, int, int>>;
static Products defined(const Problem& p, bool flip) {
  Products set;
  const Axis &y = p.axis[1], &x = p.axis[2];
  for (int o1 = 0; o1 < y.O; ++o1)
    for (int o2 = 0; o2 < x.O; ++o2)
      for (int r1 = 0; r1 < y.R; ++r1)
        for (int r2 = 0; r2 < x.R; ++r2) {
          const int i1 = o1 * y.a + r1 * y.b + y.c, i2 = o2 * x.a + r2 * x.b + x.c;
          if (i1 < 0 || i2 < 0 || i1 % y.e != 0 || i2 % x.e != 0 || i1 / y.e >= y.I || i2 / x.e >= x.I) continue;
          const int tap = flip ? (y.R - 1 - r1) * x.R + x.R - 1 - r2 : r1 * x.R + r2;
          set.insert({o1, o2, i1 / y.e, i2 / x.e, tap});
        }
  return set;
}

template <class Plan>
static Products visited(const Problem& p, const Plan& plan, long* extra) {
  Products set;
  int32_t f[3] = {0, 0, 0};
  for (f[1] = 0; f[1] < p.axis[1].phases; ++f[1])
    for (f[2] = 0; f[2] < p.axis[2].phases; ++f[2]) {
      const Sm90Walk w = sm90_walk(p, plan.flip, f);
      const int ph = plan.pw > 0 ? plan.ph : 1, pw = plan.pw > 0 ? plan.pw : 1;
      if (w.taps() == 0) continue;
      for (int b1 = 0; b1 < w.outs[1]; b1 += ph)
        for (int b2 = 0; b2 < w.outs[2]; b2 += pw) {
          int32_t j1 = 0, j2 = 0, n1 = w.count[1], n2 = w.count[2];
          if (plan.pw > 0) {
            n1 = sm90_live_taps(w.lower[1], w.offset[1], w.count[1], p.axis[1].I, b1, ph, &j1);
            n2 = sm90_live_taps(w.lower[2], w.offset[2], w.count[2], p.axis[2].I, b2, pw, &j2);
            if (j1 < 0 || j2 < 0 || j1 + n1 > w.count[1] || j2 + n2 > w.count[2]) std::exit(3);
          }
          for (int o1 = b1; o1 < b1 + ph && o1 < w.outs[1]; ++o1)
            for (int o2 = b2; o2 < b2 + pw && o2 < w.outs[2]; ++o2)
              for (int a = j1; a < j1 + n1; ++a)
                for (int b = j2; b < j2 + n2; ++b) {
                  const int i1 = w.lower[1] + o1 * w.step[1] + a * w.offset[1], i2 = w.lower[2] + o2 * w.step[2] + b * w.offset[2];
                  if (i1 < 0 || i2 < 0 || i1 >= p.axis[1].I || i2 >= p.axis[2].I) {  // padding reads zero
                    ++*extra;
                    continue;
                  }
                  const int out1 = o1 * p.axis[1].phases + w.f[1], out2 = o2 * p.axis[2].phases + w.f[2];
                  if (!set.insert({out1, out2, i1, i2, w.tap0 + a * w.tap_step[1] + b * w.tap_step[2]}).second) std::exit(4);
                }
        }
    }
  return set;
}

// sm90_sum_taps jumps over the boxes inside; here they are all visited.
static bool sums_agree() {
  std::mt19937 random(11);
  const auto draw = [&](int a, int b) { return a + static_cast<int>(random() % (b - a + 1)); };
  for (int i = 0; i < 100000; ++i) {
    Sm90Walk w = {};
    w.lower[1] = draw(-20, 10), w.offset[1] = draw(1, 5), w.count[1] = draw(0, 8), w.outs[1] = draw(0, 200);
    const int extent = draw(1, 80), width = draw(0, 1) ? draw(1, 9) : 1 << draw(0, 8);
    int64_t sum = 0;
    int32_t first;
    for (int32_t o = 0; o < w.outs[1]; o += width) sum += sm90_live_taps(w.lower[1], w.offset[1], w.count[1], extent, o, width, &first);
    if (sum != sm90_sum_taps(w, 1, extent, width)) return false;
  }
  return true;
}

// generic op n c h k r u pad groups workspace: the kernel without tensor cores, and its splits.
static int generic(char** argv) {
  const auto v = [&](int i) { return std::atoll(argv[i]); };
  Problem p;
  if (!problem({v(2), v(3), v(4), v(4), v(5), v(6), v(6), v(7), v(8), v(8), 1, 1, false, v(9)}, static_cast<Op>(v(1)), &p)) return 1;
  p.in_type = p.out_type = Type::kF32;
  const Config c = select(p, true, v(10));
  constexpr const char* kNames[] = {"wide", "medium", "split", "tiny", "narrow", "direct", "sm90"};
  std::printf("%s x %d\n", kNames[static_cast<int>(c.kernel)], c.splits);
  const int64_t outputs = p.batch * p.groups * p.imgs * p.ks * p.pixels();
  return c.splits > 1 && c.splits * outputs * 4 > v(10) ? 6 : 0;
}

// f32 tf32 op n c h k r u pad: the tile of float32 operands.
static int float32(char** argv) {
  const auto v = [&](int i) { return std::atoll(argv[i]); };
  Problem p;
  if (!problem({v(3), v(4), v(5), v(5), v(6), v(7), v(7), v(8), v(9), v(9), 1, 1, false}, static_cast<Op>(v(2)), &p)) return 1;
  p.in_type = p.out_type = Type::kF32, p.tf32 = v(1) != 0;
  const Sm90F32Plan plan = sm90_f32_plan(p);
  if (plan.reason != nullptr) std::printf("%s\n", plan.reason);
  else std::printf("%dx%d%s%s%s\n", plan.cb, plan.n, plan.exact ? " exact" : "", plan.pw ? " boxes" : "", plan.flat ? " flat" : "");
  return 0;
}

int main(int argc, char** argv) {
  if (argc == 12) return generic(argv + 1);
  if (argc == 11) return float32(argv + 1);
  if (argc > 1) {  // one row of a table: op n c h k r u pad
    const auto v = [&](int i) { return std::atoll(argv[i]); };
    Problem p;
    if (!problem({v(2), v(3), v(4), v(4), v(5), v(6), v(6), v(7), v(8), v(8), 1, 1, false}, static_cast<Op>(v(1)), &p)) return 1;
    const Config c = select(p, true, kSm90Workspace);
    if (c.kernel != Kernel::kSm90) std::printf("%s\n", c.sm90.reason ? c.sm90.reason : "no workspace");
    else std::printf("%dx%d%s%s%s\n", c.sm90.mb, c.sm90.nb, c.sm90.swap ? " swapped" : "", c.sm90.pw ? " boxes" : "", c.sm90.flat ? " flat" : "");
    return 0;
  }
  if (!sums_agree()) {
    std::printf("sm90_sum_taps is wrong\n");
    return 7;
  }
  std::mt19937 random(7);
  const auto draw = [&](int a, int b) { return a + static_cast<int>(random() % (b - a + 1)); };
  int taken = 0, boxes = 0, strided = 0, wide_all = 0, wide_boxes = 0, wide_strided = 0;
  long extra = 0;
  for (int i = 0; i < 4000; ++i) {
    const Shape q = {draw(1, 40), 8 * draw(1, 9), draw(1, 17), draw(1, 17), 8 * draw(1, 9), draw(1, 5), draw(1, 5), draw(1, 3),
                     draw(-1, 4), draw(-1, 4), draw(1, 3), draw(1, 4) == 1 ? 2 : 1, draw(0, 1) == 1};
    for (Op op : {Op::kForward, Op::kInputGrad}) {
      Problem p;
      if (!problem(q, op, &p)) continue;
      const Sm90Plan plan = sm90_plan(p);
      p.in_type = p.out_type = Type::kF32, p.tf32 = i % 2 == 0;
      const Sm90F32Plan wide = sm90_f32_plan(p);
      const bool half_taken = plan.reason == nullptr, wide_taken = wide.reason == nullptr;
      taken += half_taken, boxes += half_taken && plan.pw > 0, strided += half_taken && plan.strided;
      wide_all += wide_taken, wide_boxes += wide_taken && wide.pw > 0, wide_strided += wide_taken && wide.strided;
      if ((half_taken && visited(p, plan, &extra) != defined(p, plan.flip)) ||
          (wide_taken && visited(p, wide, &extra) != defined(p, wide.flip))) {
        std::printf("wrong: op %d n %d h %d w %d r %d s %d u %d lo %d hi %d d %d l %d\n", static_cast<int>(op), (int)q.n, (int)q.h, (int)q.w,
                    (int)q.r, (int)q.s, (int)q.u, (int)q.lo, (int)q.hi, (int)q.d, (int)q.l);
        return 2;
      }
    }
  }
  std::printf("%d taken, %d boxes, %d strided; float32 %d, %d, %d\n", taken, boxes, strided, wide_all, wide_boxes, wide_strided);
  return taken > 500 && boxes > 100 && strided > 50 && wide_all > 500 && wide_boxes > 100 && wide_strided > 50 ? 0 : 5;
}
