// Index arithmetic of the norms: no CUDA in here, tested on any machine.
//
// All arrays of a call lie in one index space (the normalised array's, row-major, n elements). `Runs` gives the place of
// its element i in an array that has only some of the axes (a scale, a mean); `View` sees the space as [S0, R0, S1, R1],
// where S0 and S1 hold the axes of a statistic and R0 and R1 those it is taken over.
#pragma once
#include <cstdint>
#include <vector>

#include "common/fastdiv.h"

#ifdef __CUDACC__
#define NORM_HD __host__ __device__ __forceinline__
#else
#define NORM_HD inline
#endif

namespace jaxprims {
namespace norm {

// Division by a fixed number: multiply and shift where the index space has fewer than 2^31 elements.
struct Div {
  FastDiv fast;
  int64_t d = 1;
  Div() = default;
  explicit Div(int64_t divisor) : fast(divisor > 0 && divisor < (int64_t{1} << 31) ? static_cast<uint32_t>(divisor) : 1u), d(divisor) {}
  NORM_HD int64_t quotient(int64_t n, bool wide) const {
    if (d == 1) return n;
#ifdef __CUDA_ARCH__
    if (!wide) return fast.div(static_cast<uint32_t>(n));
#else
    (void)wide;
#endif
    return n / d;
  }
  NORM_HD int64_t rest(int64_t n, bool wide) const { return n - quotient(n, wide) * d; }
};

struct Runs {
  enum Mode : int { kSame, kZero, kOne, kTwo } mode = kZero;
  bool inner_mod = true, outer_mod = true;  // false where the run holds the outermost axes: nothing to wrap
  Div inner_post, inner, outer_post, outer;
  NORM_HD int64_t at(int64_t i, bool wide) const {
    if (mode == kSame) return i;
    if (mode == kZero) return 0;
    int64_t a = inner_post.quotient(i, wide);
    if (inner_mod) a = inner.rest(a, wide);
    if (mode == kTwo) {
      int64_t b = outer_post.quotient(i, wide);
      if (outer_mod) b = outer.rest(b, wide);
      a += b * inner.d;
    }
    return a;
  }
};

// The array that has the axes with has[a]; false where they do not form two runs.
inline bool make_runs(const std::vector<int64_t>& dims, const std::vector<char>& has, Runs& out) {
  int64_t post[2] = {1, 1}, size[2] = {1, 1}, after = 1;
  int count = 0;
  bool open = false;
  bool missing_outside[2] = {false, false};
  bool any_missing = false;
  for (int a = static_cast<int>(dims.size()) - 1; a >= 0; --a) {
    if (dims[a] == 1) continue;
    if (has[a]) {
      if (!open) {
        if (count == 2) return false;
        post[count++] = after;
        open = true;
      }
      size[count - 1] *= dims[a];
    } else {
      open = false;
      any_missing = true;
      for (int r = 0; r < count; ++r) missing_outside[r] = true;
    }
    after *= dims[a];
  }
  if (count == 2) missing_outside[0] = true;  // the other run lies outside as well
  out.inner_post = Div(post[0]);
  out.inner = Div(size[0]);
  out.inner_mod = missing_outside[0];
  out.outer_post = Div(post[1]);
  out.outer = Div(size[1]);
  out.outer_mod = missing_outside[1];
  out.mode = !any_missing ? Runs::kSame : count == 0 ? Runs::kZero : count == 1 ? Runs::kOne : Runs::kTwo;
  return true;
}

struct View {
  int64_t s0 = 1, r0 = 1, s1 = 1, r1 = 1;
  Div by_s1, by_r1;
  NORM_HD int64_t statistics() const { return s0 * s1; }
  NORM_HD int64_t reduced() const { return r0 * r1; }
  // First element of statistic s, and the element r of it as an offset from there.
  NORM_HD int64_t first(int64_t s, bool wide) const {
    const int64_t a = by_s1.quotient(s, wide), b = s - a * s1;
    return (a * r0 * s1 + b) * r1;
  }
  NORM_HD int64_t offset(int64_t r, bool wide) const {
    const int64_t a = by_r1.quotient(r, wide), b = r - a * r1;
    return a * s1 * r1 + b;
  }
};

inline bool make_view(const std::vector<int64_t>& dims, const std::vector<char>& kept, View& v) {
  int64_t slot[4] = {1, 1, 1, 1};  // r1, s1, r0, s0
  int at = 0;
  for (int a = static_cast<int>(dims.size()) - 1; a >= 0; --a) {
    if (dims[a] == 1) continue;
    const int parity = kept[a] ? 1 : 0;
    while (at < 4 && (at & 1) != parity) ++at;
    if (at == 4) return false;
    slot[at] *= dims[a];
  }
  v.r1 = slot[0], v.s1 = slot[1], v.r0 = slot[2], v.s0 = slot[3];
  if (v.s1 == 1) {  // nothing between: one contiguous row
    v.r1 *= v.r0;
    v.r0 = 1;
  }
  v.by_s1 = Div(v.s1);
  v.by_r1 = Div(v.r1);
  return true;
}

// Who reduces what: blocks of 256 threads. A group of `group` threads has one statistic; `column` blocks hold 32 neighbours
// along S1 (coalesced where R1 = 1), row blocks 256 / group whole statistics. R is cut into `chunks` of `length`; more than
// one chunk needs room for one Value per statistic and chunk.
struct Plan {
  bool column = false;
  int group = 256;
  int64_t tiles = 0;  // blocks beside one another
  int64_t chunks = 1, length = 0;
};
constexpr int kThreads = 256;

inline Plan make_plan(const View& v, int64_t room) {  // room: Values that the workspace holds
  Plan p;
  const int64_t s = v.statistics(), r = v.reduced();
  p.column = v.r1 == 1 && v.s1 >= 8;
  if (p.column) {
    p.group = 8;
    p.tiles = v.s0 * ((v.s1 + 31) / 32);
  } else {
    p.group = r <= 512 ? 32 : r <= 1024 ? 64 : r <= 2048 ? 128 : 256;
    const int64_t per = kThreads / p.group;
    p.tiles = (s + per - 1) / per;
  }
  const int64_t least = p.column ? 128 : 4096;  // below this a chunk is not worth a second kernel
  if (p.tiles < 264 && r >= 2 * least) {
    int64_t k = (r + least - 1) / least;
    const int64_t fill = (1056 + p.tiles - 1) / p.tiles;
    if (k > fill) k = fill;
    if (k > room / (s + 1) - 1) k = room / (s + 1) - 1;  // one more for the totals
    if (k > 1) p.chunks = k;
  }
  p.length = (r + p.chunks - 1) / p.chunks;
  return p;
}

}  // namespace norm
}  // namespace jaxprims
