// The plan of a first-layer convolution, printed: op, B, n, c, h, k, r, u, pad, bytes of workspace, Hopper or not -> one line. test_conv_first.py runs it.
#include "conv/first.h"

#include <cstdio>
#include <cstdlib>

using namespace jaxprims::conv;

int main(int argc, char** argv) {
  if (argc != 12) return 2;
  int64_t v[11];
  for (int i = 0; i < 11; ++i) v[i] = std::atoll(argv[i + 1]);
  const int64_t B = v[1], n = v[2], c = v[3], h = v[4], k = v[5], r = v[6], u = v[7], pad = v[8], out = (h + 2 * pad - r) / u + 1;
  Geometry g;
  g.lhs_spec = {0, 3, 1, 2}, g.rhs_spec = {3, 2, 0, 1}, g.out_spec = {0, 3, 1, 2};
  g.strides = {u, u}, g.padding_low = {pad, pad}, g.lhs_dilation = {1, 1}, g.rhs_dilation = {1, 1};
  g.x_batched = g.w_batched = g.y_batched = B > 1;
  std::vector<int64_t> x = {n, h, h, c}, w = {r, r, c, k}, y = {n, out, out, k};
  if (B > 1)
    for (auto* t : {&x, &w, &y}) t->insert(t->begin(), B);
  Problem p;
  const std::string bad = make_problem(static_cast<Op>(v[0]), g, x, w, y, &p);
  if (!bad.empty()) return std::printf("%s\n", bad.c_str()), 1;
  p.in_type = p.out_type = Type::kBF16;
  const FirstPlan f = first_plan(p, v[10] != 0, v[9]);
  if (f.reason != nullptr) return std::printf("%s\n", f.reason), 0;
  if (f.shared > kFirstShared || f.blocks < 1) return std::printf("impossible launch\n"), 1;
  switch (p.op) {
    case Op::kForward:
      std::printf("%d columns x %d, %lld blocks, %d windows\n", 8 * f.nt, f.chunks, static_cast<long long>(f.blocks), f.buffers);
      break;
    case Op::kInputGrad: std::printf("%d columns, %d x %d pixels, %d warps\n", 8 * f.nt, f.th, f.qt, f.warps); break;
    case Op::kWeightGrad:
      std::printf("%d x %d tiles, warps %d x %d x %d, steps of %d x %d, %lld splits\n", f.mt, f.nt, f.wm, f.wn, f.wk, f.rows, f.q16,
                  static_cast<long long>(f.splits));
      if (f.splits * f.s.batch * f.s.R * f.s.S * f.s.C * f.s.K * 4 > v[9]) return 1;
  }
}
