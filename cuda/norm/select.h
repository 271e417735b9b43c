// Which norm calls the vector kernels take (rows.cu, columns.cu), and how they cut the work: pure functions of sizes and of
// index forms, no CUDA, tested on any machine. Everything they refuse runs in the general kernels (kernels.cuh).
#pragma once
#include "common/act.cuh"
#include "norm/index.h"

namespace jaxprims {
namespace norm {

// The activations that the vector kernels inline, eight elements at a time; the others would be eight copies of a long switch.
inline bool act_inlined(Act a) { return a == Act::kNone || a == Act::kRelu || a == Act::kRelu6 || a == Act::kSilu; }

// place(i0 + j) = place(i0) + j / step for 0 <= j < row, where i0 is a multiple of `row`; step 0: the place stays.
struct Along {
  bool ok = false;
  int64_t step = 0;
};
inline Along along_row(const Runs& r, int64_t row) {
  if (r.mode == Runs::kSame) return {true, 1};
  if (r.mode == Runs::kZero) return {true, 0};
  if (r.mode == Runs::kTwo && r.outer_post.d % row != 0) return {};
  const int64_t post = r.inner_post.d, size = r.inner.d;
  if (post % row == 0) return {true, 0};
  if (row % post != 0) return {};
  if (r.inner_mod && size % (row / post) != 0) return {};  // would wrap inside a row
  return {true, post};
}

// In an index space [outer, rows, width]: the place does not depend on the row.
inline bool same_in_rows(const Runs& r, int64_t rows, int64_t width) {
  if (r.mode == Runs::kZero) return true;
  if (r.mode == Runs::kSame) return rows == 1;
  auto term = [&](const Div& post, const Div& size, bool mod) {
    return post.d % (rows * width) == 0 || (mod && width % (post.d * size.d) == 0) || (rows == 1);
  };
  return term(r.inner_post, r.inner, r.inner_mod) && (r.mode != Runs::kTwo || term(r.outer_post, r.outer, r.outer_mod));
}

inline bool same_runs(const Runs& a, const Runs& b) {
  return a.mode == b.mode && a.inner_post.d == b.inner_post.d && a.inner.d == b.inner.d && a.outer_post.d == b.outer_post.d &&
         a.outer.d == b.outer.d;
}

// ---- rows: a statistic is `length` consecutive elements. `group` threads hold it as `k` vectors each.
struct RowTerm {
  int kind = 0;  // 0: absent, 1: one value per element, 2: one per `by` elements, 3: one per row
  FastDiv by;
};
struct RowPlan {
  bool ok = false;
  int k = 1, group = 32, block = 256, length = 0;  // k = 0: too long to hold, read twice
  int64_t rows = 0, blocks = 0;
  RowTerm scale, bias;
};

constexpr int kProcessors = 132;  // of an H200; a constant, so that the order of a sum depends on the shape alone

inline int power_of_two(int64_t n) {  // the least that is not below n
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

inline RowPlan row_forward_plan(int64_t rows, int64_t length, int vec) {
  RowPlan p;
  if (length % vec != 0 || length >= (int64_t{1} << 30) || rows < 1) return p;
  const int64_t n = length / vec;
  p.rows = rows, p.length = static_cast<int>(length);
  if (n <= 128) {  // a warp or a part of it; neighbours fill the block
    p.group = n < 32 ? power_of_two(n) : 32;
    p.k = n <= 32 ? 1 : n <= 64 ? 2 : 4;
    p.block = rows * p.group < int64_t{kProcessors} * 512 ? 128 : 256;
  } else if (n <= 4096) {  // 64 or 128 bytes in flight for each thread that an SM holds (768 or 512)
    p.k = n <= 1024 ? 4 : 8;
    p.group = p.block = static_cast<int>((n + 32 * p.k - 1) / (32 * p.k) * 32);
  } else {
    if (rows < kProcessors) return p;  // few long rows: the general kernel cuts them into chunks
    p.k = 0;
    p.group = p.block = 512;
  }
  const int64_t per = p.block / p.group, blocks = (rows + per - 1) / per;
  p.blocks = blocks < 16 * kProcessors ? blocks : 16 * kProcessors;
  p.ok = true;
  return p;
}

// Backward holds the sums of dscale and dbias: 16 floats a thread and vector, so few vectors and many threads. `room`: floats for
// the blocks' sums. `plain`: without an activation, whose code needs registers.
inline RowPlan row_backward_plan(int64_t rows, int64_t length, int vec, bool plain, bool sums, int64_t room) {
  RowPlan p;
  if (length % vec != 0 || rows < 1) return p;
  const int64_t n = length / vec;
  if (n > (plain ? 2048 : 1024)) return p;  // would spill
  p.rows = rows, p.length = static_cast<int>(length);
  int64_t resident;
  if (n <= 64) {
    p.group = n < 32 ? power_of_two(n) : 32;
    p.k = n <= 32 ? 1 : 2;
    p.block = 256;
    resident = p.k == 1 && plain ? 3 : 2;
  } else {
    p.k = n <= 256 ? 1 : n <= (plain ? 512 : 1024) ? 2 : 4;
    p.group = p.block = static_cast<int>((n + 32 * p.k - 1) / (32 * p.k) * 32);
    resident = (p.k == 1 && plain ? 768 : 512) / p.block;
    if (resident > 8) resident = 8;
  }
  const int64_t per = p.block / p.group;
  int64_t blocks = (rows + per - 1) / per;
  const int64_t fill = kProcessors * resident;
  if (blocks > fill) blocks = fill;
  if (sums) {
    const int64_t most = room / (2 * length);
    if (most < blocks && most < 16) return p;  // too few blocks to be worth it
    if (blocks > most) blocks = most;
  }
  p.blocks = blocks;
  p.ok = blocks > 0;
  return p;
}

// ---- columns: the index space is [outer, rows, width]; a statistic is all rows of `share` neighbouring columns. A block of 256
// threads has `cols` vectors of `vec` columns side by side and `lanes` rows at a time. The `chunks` blocks of an outer and strip take tiles of
// neighbouring rows in turn, so that all of them together sweep the rows in order.
struct ColumnPlan {
  bool ok = false;
  int vec = 1, cols = 1, lanes = 256, strips = 1, share = 1;
  int64_t outer = 1, rows = 1, width = 1, chunks = 1;
  int64_t blocks() const { return outer * strips * chunks; }
};

// `target`: blocks that fill the GPU; `room`: columns' values that the workspace holds (chunks * outer * width).
inline ColumnPlan column_plan(const View& v, int vec, int64_t target, int64_t room) {
  ColumnPlan p;
  p.outer = v.s0, p.rows = v.r0, p.width = v.s1 * v.r1, p.share = static_cast<int>(v.r1);
  if (p.width % vec != 0 || v.r1 > 256 || p.rows < 16 || p.rows >= (int64_t{1} << 29)) return p;
  const int64_t n = p.width / vec, wide = vec == 1 ? 128 : 64;
  p.vec = vec;
  p.strips = static_cast<int>((n + wide - 1) / wide);
  p.cols = static_cast<int>((n + p.strips - 1) / p.strips);
  p.lanes = 256 / p.cols;
  int64_t k = target / (p.outer * p.strips);
  const int64_t most = p.rows / (p.lanes * 8);  // at least two steps of four rows a thread
  if (k > most) k = most;
  if (k > room / (p.outer * p.width)) k = room / (p.outer * p.width);
  else if (k < 1) k = 1;
  if (k < 1) return p;  // no room for a single chunk
  p.chunks = k;
  p.ok = p.blocks() < 0x7fffffff;
  return p;
}

}  // namespace norm
}  // namespace jaxprims
