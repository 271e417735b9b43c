// Which norm calls the vector kernels take (rows_*.cu, columns.cu), and how they cut the work: pure functions of sizes and of
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

// place(r * row) = r for all rows; place(r * row + j) = j for all rows.
inline bool one_a_row(const Runs& r, int64_t rows, int64_t row) {
  return rows == 1 || (r.mode == Runs::kOne && r.inner_post.d == row && !r.inner_mod) || (r.mode == Runs::kSame && row == 1);
}
inline bool same_for_rows(const Runs& r, int64_t rows, int64_t row) {
  return (r.mode == Runs::kSame && rows == 1) || (r.mode == Runs::kOne && r.inner_post.d == 1 && r.inner.d == row);
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
  // group: 8 or 32 lanes of a warp, 0: the block, or `cluster` neighbouring blocks; k = 0: too long to hold, read twice
  int k = 1, group = 32, block = 256, cluster = 1, length = 0;
  int64_t rows = 0, blocks = 0;
  RowTerm scale, bias;
  bool plain = false;   // y = xhat scale + bias with one value per element, the same for all rows, or none
  bool direct = false;  // what has one element for a row has that of row r at r
};

constexpr int kProcessors = 132;  // of an H200; a constant, so that the order of a sum depends on the shape alone

inline int power_of_two(int64_t n) {  // the least that is not below n
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

inline int whole_warps(int64_t threads) { return static_cast<int>((threads + 31) / 32 * 32); }

// Blocks of at most 512 threads with 16 elements each that hold a row together; 0: more than the 8 of a cluster.
inline int cluster_of(int64_t length) {
  const int64_t c = power_of_two((length + 8191) / 8192);
  return c <= 8 ? static_cast<int>(c) : 0;
}

// Plain rows forward: 32 elements a thread from 1024 on; each team has one row. `clusters`: the GPU has them.
inline RowPlan row_plain_plan(int64_t rows, int64_t length, int vec, bool clusters) {
  RowPlan p;
  if (length % vec != 0 || rows < 1) return p;
  int elements = 32;
  if (length <= 1024) {
    p.group = length <= 64 ? 4 : length <= 256 ? 8 : 32;
    if (length <= 128 || (length > 256 && length <= 512)) elements = 16;
    p.block = rows * p.group < int64_t{kProcessors} * 512 ? 128 : 256;
  } else {
    p.group = 0;
    while (length > int64_t{16384} * p.cluster && p.cluster < 8) p.cluster *= 2;
    if (length > int64_t{16384} * p.cluster || (p.cluster > 1 && !clusters)) return p;
    p.block = whole_warps((length + 32 * p.cluster - 1) / (32 * p.cluster));
  }
  const int64_t per = p.group ? p.block / p.group : 1, blocks = (rows + per - 1) / per * p.cluster;
  if (blocks >= int64_t{1} << 31) return p;
  p.rows = rows, p.length = static_cast<int>(length), p.k = elements / vec, p.blocks = blocks;
  p.ok = true;
  return p;
}

inline RowPlan row_forward_plan(int64_t rows, int64_t length, int vec, bool clusters) {
  RowPlan p;
  if (length % vec != 0 || length >= (int64_t{1} << 30) || rows < 1) return p;
  p.rows = rows, p.length = static_cast<int>(length);
  int elements = 0;  // that a thread holds
  if (length <= 1024) {  // lanes of a warp; neighbours fill the block
    p.group = length <= 256 ? 8 : 32;
    elements = length <= 64 ? 8 : length <= 128 ? 16 : length <= 256 ? 32 : length <= 512 ? 16 : 32;
    p.block = rows * p.group < int64_t{kProcessors} * 512 ? 128 : 256;
  } else if (length <= 16384) {
    p.group = 0, elements = 16;
    p.block = whole_warps((length + 15) / 16);
  } else if (clusters && cluster_of(length)) {
    p.group = 0, elements = 16;
    p.cluster = cluster_of(length);
    p.block = whole_warps((length + 16 * p.cluster - 1) / (16 * p.cluster));
  } else {
    if (rows < kProcessors) return p;  // few long rows: the general kernel cuts them into chunks
    p.group = 0, p.block = 512;
  }
  p.k = elements / vec;
  const int64_t per = p.group ? p.block / p.group : 1, blocks = (rows + per - 1) / per;
  p.blocks = (blocks < (int64_t{1} << 27) ? blocks : int64_t{1} << 27) * p.cluster;
  p.ok = true;
  return p;
}

// Backward holds the sums of dscale and dbias: two floats an element, so few elements and many threads. `room`: floats for
// the blocks' sums. `plain`: as RowPlan's, and nothing of the statistics but their values; else the code needs registers.
inline RowPlan row_backward_plan(int64_t rows, int64_t length, int vec, bool plain, bool sums, int64_t room, bool clusters) {
  RowPlan p;
  if (length % vec != 0 || rows < 1) return p;
  int64_t elements, resident;
  if (length <= (plain ? 512 : 256)) {
    p.group = length <= (plain ? 128 : 64) ? 8 : 32;
    elements = !plain || length <= 64 || (length > 128 && length <= 256) ? 8 : 16;
    p.block = 256;
    resident = elements > 8 || !plain ? 2 : 3;
  } else {
    p.group = 0;
    elements = length <= 2048 ? 8 : length <= 4096 || !plain || vec < 8 ? 16 : 32;  // three stages of float32 rows leave no room for more
    while (length > 512 * elements * p.cluster && p.cluster < 8) p.cluster *= 2;
    if (length > 512 * elements * p.cluster || (p.cluster > 1 && !clusters)) return p;
    p.block = whole_warps((length + elements * p.cluster - 1) / (elements * p.cluster));
    resident = (elements > 8 || !plain ? 512 : 1024) / p.block;
    if (resident > 16) resident = 16;
  }
  p.rows = rows, p.length = static_cast<int>(length);
  p.k = static_cast<int>(elements) / vec;
  const int64_t per = p.group ? p.block / p.group : 1;
  int64_t blocks = (rows + per - 1) / per;
  const int64_t fill = kProcessors * resident / p.cluster;  // a cluster counts as one here
  if (blocks > fill) blocks = fill;
  if (sums) {
    const int64_t most = room / (2 * length);
    if (most < blocks && most < 16) return p;  // too few blocks to be worth it
    if (blocks > most) blocks = most;
  }
  p.blocks = blocks * p.cluster;
  p.ok = blocks > 0;
  return p;
}

// Rows that are not whole vectors: one vector more may lie over them. `backward`: `room` as above; the rows of a block are a
// multiple of a vector apart.
inline RowPlan row_odd_plan(int64_t rows, int64_t length, int vec, bool backward, bool sums, int64_t room) {
  RowPlan p;
  if (rows < 1 || length < 64 || length > (!backward ? 16384 : vec < 8 ? 8192 : 12288) - 2 * vec || rows * length < (1 << 15)) return p;
  p.rows = rows, p.length = static_cast<int>(length);
  const int64_t over = ((length + vec - 1) / vec + 1) * vec;
  int64_t elements = 32;
  if (over <= (backward ? 512 : 1024)) {
    p.group = 32, p.block = 256;
    if (over <= 512) elements = 16;
  } else {
    p.group = 0;
    if (backward) elements = over <= 2048 ? 8 : over <= 4096 || vec < 8 ? 16 : 32;
    p.block = whole_warps((over + elements - 1) / elements);
  }
  p.k = static_cast<int>(elements) / vec;
  const int64_t per = p.group ? 8 : 1;
  int64_t blocks = (rows + per - 1) / per;
  if (backward) {
    int64_t resident = p.group ? 2 : (elements > 16 ? 384 : 512) / p.block;
    if (resident > 8) resident = 8;
    int64_t fill = kProcessors * resident;
    if (sums && fill > room / (2 * length)) fill = room / (2 * length);
    fill = fill / 8 * 8;
    if (blocks > fill) blocks = fill;
  } else if (blocks >= int64_t{1} << 31) {
    return p;
  }
  p.blocks = blocks;
  p.ok = blocks >= (rows < 16 ? 1 : 2);
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
