// Checks cuda/conv/grouped.h without a GPU: the blocks of row_walk.h visit every product of a grouped convolution's definition exactly
// once; prints the kernel of a shape given as arguments. Built and run by test_grouped_plan.py.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <tuple>

#include "conv/grouped.h"

using namespace jaxprims::conv;

struct Shape {
  int64_t n, h, w, c, groups, r, s, lo_h, hi_h, lo_w, hi_w, d, u = 1;
  bool flip = false;
};

static bool problem(const Shape& q, Op op, Problem* p) {
  Geometry geo;
  geo.lhs_spec = {0, 3, 1, 2}, geo.rhs_spec = {3, 2, 0, 1}, geo.out_spec = {0, 3, 1, 2};
  geo.strides = {q.u, q.u}, geo.padding_low = {q.lo_h, q.lo_w}, geo.lhs_dilation = {1, 1}, geo.rhs_dilation = {q.d, q.d};
  geo.flip = q.flip, geo.groups = q.groups;
  const int64_t P = (q.h + q.lo_h + q.hi_h - (q.r - 1) * q.d - 1) / q.u + 1, Q = (q.w + q.lo_w + q.hi_w - (q.s - 1) * q.d - 1) / q.u + 1;
  if (q.h + q.lo_h + q.hi_h < (q.r - 1) * q.d + 1 || q.w + q.lo_w + q.hi_w < (q.s - 1) * q.d + 1) return false;
  *p = Problem();
  if (!make_problem(op, geo, {q.n, q.h, q.w, q.c}, {q.r, q.s, q.c / q.groups, q.c}, {q.n, P, Q, q.c}, p).empty()) return false;
  p->in_type = p->out_type = Type::kBF16;
  return true;
}

// (image, output row, output column) -> times visited; the inputs of each are checked on the way.
static bool walk_is_right(const Problem& p, const RowWalk& d) {
  const bool wgrad = p.op == Op::kWeightGrad;
  const int64_t images = wgrad ? p.chs : p.imgs;
  std::map<std::tuple<int, int, int>, int> seen;
  for (int block = 0; block < d.per_chunk; ++block) {
    const int32_t begin = static_cast<int32_t>(d.rows * block / d.per_chunk), end = static_cast<int32_t>(d.rows * (block + 1) / d.per_chunk);
    if (begin == end) return false;
    for (int32_t row = begin; row < end;) {
      const WalkPart part = walk_part(d, row, end);
      if (part.p1 <= part.p0) return false;
      for (int32_t m = part.h0; m < part.h1; ++m) {
        const int32_t in = m * d.dil_h + part.f + d.base_h;
        if ((m >= part.low && m < part.high) != (in >= 0 && in < d.IH)) return false;
      }
      for (int n = 0; n < d.images; ++n)
        for (int32_t i = part.p0; i < part.p1; ++i)
          for (int j = 0; j < d.cols; ++j) {
            const int32_t out_h = i * d.dil_h + part.f, out_w = (part.column + j) * d.dil_w + part.g;
            if (part.image + n >= images || out_h >= d.OH || out_w >= d.OW) continue;
            ++seen[std::make_tuple(part.image + n, out_h, out_w)];
            for (int r = 0; r < d.R; ++r) {
              const int32_t in = (i + r) * d.dil_h + part.f + d.base_h;
              const Axis& a = p.axis[1];
              const int tap = d.reversed_h ? d.R - 1 - r : r;
              if (in != (wgrad ? tap * a.a + out_h * a.b + a.c : out_h * a.a + tap * a.b + a.c)) return false;
            }
            for (int s = 0; s < d.S; ++s) {
              const int32_t in = (part.column + j + s) * d.dil_w + part.g + d.base_w;
              const Axis& a = p.axis[2];
              const int tap = d.reversed_w ? d.S - 1 - s : s;
              if (in != (wgrad ? tap * a.a + out_w * a.b + a.c : out_w * a.a + tap * a.b + a.c)) return false;
            }
          }
      row += part.p1 - part.p0;
    }
  }
  for (const auto& v : seen)
    if (v.second != 1) return false;
  return static_cast<int64_t>(seen.size()) == images * d.OH * d.OW;
}

constexpr const char* kNames[] = {"none", "band", "wide", "narrow", "wgrad", "depthwise"};

int main(int argc, char** argv) {
  if (argc == 10) {  // op n h c groups r pad dilation stride
    const auto v = [&](int i) { return std::atoll(argv[i]); };
    Problem p;
    const int64_t pad = v(7);
    if (!problem({v(2), v(3), v(3), v(4), v(5), v(6), v(6), pad, pad, pad, pad, v(8), v(9)}, static_cast<Op>(v(1)), &p)) return 1;
    std::printf("%s\n", kNames[static_cast<int>(grouped_plan(p, int64_t{32} << 20).kernel)]);
    return 0;
  }
  std::mt19937 random(3);
  const auto draw = [&](int a, int b) { return a + static_cast<int>(random() % (b - a + 1)); };
  int band = 0, narrow = 0, wgrad = 0;
  for (int i = 0; i < 3000; ++i) {
    Shape q;
    const int per = 1 << draw(0, 4);
    q.n = draw(1, 20), q.h = draw(1, 20), q.w = draw(1, 1) == draw(1, 8) ? draw(100, 300) : draw(1, 40);
    q.c = 16 * draw(1, 3), q.groups = q.c / per;
    q.r = per > 1 ? 3 : draw(3, 7), q.s = per > 1 ? 3 : draw(3, 9);
    q.lo_h = draw(-1, 8), q.hi_h = draw(-1, 8), q.lo_w = draw(-1, 8), q.hi_w = draw(-1, 8), q.d = draw(1, 3), q.flip = draw(0, 1) == 1;
    for (Op op : {Op::kForward, Op::kInputGrad, Op::kWeightGrad}) {
      Problem p;
      if (!problem(q, op, &p)) continue;
      const GroupedPlan plan = grouped_plan(p, int64_t{1} << draw(12, 25));
      const RowWalk* d = plan.kernel == Grouped::kBand ? static_cast<const RowWalk*>(&plan.band)
                         : plan.kernel == Grouped::kNarrow ? static_cast<const RowWalk*>(&plan.narrow)
                         : plan.kernel == Grouped::kRowWgrad ? static_cast<const RowWalk*>(&plan.wgrad) : nullptr;
      if (d == nullptr) continue;
      band += plan.kernel == Grouped::kBand, narrow += plan.kernel == Grouped::kNarrow, wgrad += plan.kernel == Grouped::kRowWgrad;
      const int shared = plan.kernel == Grouped::kBand ? plan.band.shared : plan.kernel == Grouped::kNarrow ? plan.narrow.shared : plan.wgrad.shared;
      if (!walk_is_right(p, *d) || shared > 163 * 1024) {
        std::printf("wrong: op %d %s n %d h %d w %d c %d groups %d r %d s %d pads %d %d %d %d d %d\n", static_cast<int>(op),
                    kNames[static_cast<int>(plan.kernel)], (int)q.n, (int)q.h, (int)q.w, (int)q.c, (int)q.groups, (int)q.r, (int)q.s,
                    (int)q.lo_h, (int)q.hi_h, (int)q.lo_w, (int)q.hi_w, (int)q.d);
        return 2;
      }
    }
  }
  std::printf("%d band, %d narrow, %d weight gradients\n", band, narrow, wgrad);
  return band > 300 && narrow > 300 && wgrad > 300 ? 0 : 3;
}
