// Checks the plans of rows (cuda/norm/select.h, cuda/act/select.h) without a GPU: whatever a plan takes, its threads cover.
// Built and run by test_rows_select.py; with arguments, prints the plan of a length.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __device__  // of common/act.cuh, for its names
#define __forceinline__ inline
#include "act/select.h"
#include "norm/select.h"

using namespace jaxprims;
using namespace jaxprims::norm;

static int bad = 0;
static void expect(bool ok, const char* what, int64_t rows, int64_t n, int vec) {
  if (!ok) std::printf("%s: %lld x %lld by %d\n", what, static_cast<long long>(rows), static_cast<long long>(n), vec), ++bad;
}

static void covers(const RowPlan& p, const char* what, int64_t rows, int64_t n, int vec, int most_threads, int most_elements) {
  const int64_t threads = p.group ? p.group : static_cast<int64_t>(p.block) * p.cluster;
  const int64_t room = threads * p.k * vec;
  expect(room >= n, what, rows, n, vec);
  expect(p.block % 32 == 0 && p.block >= 32 && p.block <= most_threads && p.k * vec <= most_elements, what, rows, n, vec);
  expect(p.group == 0 || (p.block % p.group == 0 && p.cluster == 1), what, rows, n, vec);
  expect(p.group != 0 || room - n < 32 * static_cast<int64_t>(p.cluster) * p.k * vec + n, what, rows, n, vec);  // no idle warps
  expect(p.cluster <= 8 && p.blocks > 0 && p.blocks % p.cluster == 0 && p.blocks < (int64_t{1} << 31), what, rows, n, vec);
  expect(p.cluster == 1 || p.cluster * p.block / 32 <= 128, what, rows, n, vec);  // team.cuh's Scratch
  const int64_t per = p.group ? p.block / p.group : 1;
  expect((p.blocks / p.cluster - 1) * per < rows, what, rows, n, vec);  // none without a row
}

static void check(int64_t rows, int64_t n) {
  for (const int vec : {4, 8}) {
    for (const bool clusters : {false, true}) {
      const RowPlan f = row_forward_plan(rows, n, vec, clusters);
      if (f.ok && f.k) covers(f, "forward", rows, n, vec, 1024, 32);
      expect(f.ok == (n % vec == 0 && (n <= 16384 || (clusters && n <= 65536) || rows >= kProcessors)), "forward taken", rows, n, vec);
      for (const bool plain : {false, true})
        for (const bool sums : {false, true}) {
          const int64_t room = int64_t{1} << 22;
          const RowPlan b = row_backward_plan(rows, n, vec, plain, sums, room, clusters);
          if (!b.ok) continue;
          covers(b, "backward", rows, n, vec, 512, 32);
          expect(b.k * vec <= 16 || (plain && vec == 8), "backward's registers", rows, n, vec);
          const int64_t per_sm = b.group ? 2 : b.k * vec > 8 ? 512 / b.block : 4;
          expect(int64_t{3} * 2 * b.k * b.block * 16 * per_sm <= 220 * 1024, "backward's shared memory", rows, n, vec);
          expect(!sums || b.blocks / b.cluster * 2 * n <= room, "backward's workspace", rows, n, vec);
        }
      const RowPlan l = row_plain_plan(rows, n, vec, clusters);
      if (l.ok) covers(l, "plain", rows, n, vec, 512, 32);
      for (const bool pair : {false, true}) {
        if (const RowShape w = whole_shape(n, vec, pair, clusters); w.threads) {
          const int64_t threads = w.group ? w.group : static_cast<int64_t>(w.threads) * w.cluster;
          expect(threads * w.vectors * vec >= n && n % vec == 0 && w.threads % 32 == 0 && w.threads <= 512 && (w.cluster == 1 || clusters),
                 "whole softmax", rows, n, vec);
        }
        const RowShape s = row_shape(n, vec, pair);
        if (s.threads == 0) continue;
        const int64_t threads = s.group ? s.group : static_cast<int64_t>(s.threads) * s.cluster;
        const int64_t vectors = n % vec == 0 ? n / vec : (n + vec - 1) / vec + 1;
        expect(threads * s.vectors >= vectors && s.threads % 32 == 0 && s.threads <= (s.cluster > 1 ? 512 : 1024), "softmax", rows, n, vec);
        expect(s.vectors * vec <= (pair ? 16 : 32), "softmax's registers", rows, n, vec);
      }
    }
    for (const bool backward : {false, true}) {
      const RowPlan o = row_odd_plan(rows, n, vec, backward, backward, int64_t{1} << 22);
      if (!o.ok) continue;
      covers(o, "odd", rows, n + vec - 1, vec, 512, 32);
      const int64_t per = o.group ? o.block / o.group : 1;
      expect(!backward || o.blocks * per >= rows || o.blocks * per % vec == 0, "odd: the shift stays", rows, n, vec);
      expect(!backward || o.blocks * 2 * n <= int64_t{1} << 22, "odd: workspace", rows, n, vec);
    }
  }
}

int main(int argc, char** argv) {
  if (argc == 5) {
    const int64_t rows = std::atoll(argv[2]), n = std::atoll(argv[3]);
    const int vec = std::atoi(argv[4]);
    if (std::strcmp(argv[1], "softmax") == 0 || std::strcmp(argv[1], "pair") == 0) {
      const RowShape s = row_shape(n, vec, argv[1][0] == 'p');
      std::printf("%d %d %d %d\n", s.group, s.vectors * vec, s.threads, s.cluster);
      return 0;
    }
    const RowPlan p = std::strcmp(argv[1], "forward") == 0    ? row_forward_plan(rows, n, vec, true)
                      : std::strcmp(argv[1], "backward") == 0 ? row_backward_plan(rows, n, vec, true, true, int64_t{1} << 22, true)
                                                              : row_odd_plan(rows, n, vec, true, true, int64_t{1} << 22);
    if (p.ok) std::printf("%d %d %d %d\n", p.group, p.k * vec, p.block, p.cluster);
    else std::printf("no\n");
    return 0;
  }
  for (const int64_t rows : {1, 7, 131, 132, 1000, 1 << 20})
    for (int64_t n = 1; n < 140000; n += n < 2100 ? 1 : 37 + n % 5) check(rows, n);
  for (const int64_t n : {4096, 8192, 8200, 12288, 16384, 16392, 32768, 32776, 65536, 65544, 1 << 20})
    for (const int64_t rows : {int64_t{1}, int64_t{512}, int64_t{1} << 33}) check(rows, n);
  if (bad) std::printf("%d failures\n", bad);
  return bad != 0;
}
