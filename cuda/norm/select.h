// Which norm calls the vector kernels take (columns.cu), and how they cut the work: pure functions of sizes and of
// index forms, no CUDA, tested on any machine. Everything they refuse runs in the general kernels (kernels.cuh).
#pragma once
#include "common/act.cuh"
#include "norm/index.h"

namespace jaxprims {
namespace norm {

// The activations that the vector kernels inline, eight elements at a time; the others would be eight copies of a long switch.
inline bool act_inlined(Act a) { return a == Act::kNone || a == Act::kRelu || a == Act::kRelu6 || a == Act::kSilu; }

// In an index space [outer, rows, width]: the place does not depend on the row.
inline bool same_in_rows(const Runs& r, int64_t rows, int64_t width) {
  if (r.mode == Runs::kZero) return true;
  if (r.mode == Runs::kSame) return rows == 1;
  auto term = [&](const Div& post, const Div& size, bool mod) {
    return post.d % (rows * width) == 0 || (mod && width % (post.d * size.d) == 0) || (rows == 1);
  };
  return term(r.inner_post, r.inner, r.inner_mod) && (r.mode != Runs::kTwo || term(r.outer_post, r.outer, r.outer_mod));
}

constexpr int kProcessors = 132;  // of an H200; a constant, so that the order of a sum depends on the shape alone

// ---- columns: the index space is [outer, rows, width]; a statistic is all rows of `share` neighbouring columns. A block of 256
// threads has `cols` vectors side by side and `lanes` rows at a time, of one of `chunks` pieces of the rows.
struct ColumnPlan {
  bool ok = false;
  int cols = 1, lanes = 256, strips = 1, share = 1;
  int64_t outer = 1, rows = 1, width = 1, chunks = 1, length = 1;
  int64_t blocks() const { return outer * strips * chunks; }
};

// `target`: blocks that fill the GPU; `room`: columns' values that the workspace holds (chunks * outer * width).
inline ColumnPlan column_plan(const View& v, int vec, int64_t target, int64_t room) {
  ColumnPlan p;
  p.outer = v.s0, p.rows = v.r0, p.width = v.s1 * v.r1, p.share = static_cast<int>(v.r1);
  if (p.width % vec != 0 || v.r1 > 256 || p.rows < 16) return p;
  const int64_t n = p.width / vec;
  p.strips = static_cast<int>((n + 63) / 64);
  p.cols = static_cast<int>((n + p.strips - 1) / p.strips);
  p.lanes = 256 / p.cols;
  int64_t k = target / (p.outer * p.strips);
  const int64_t most = p.rows / (p.lanes * 8);  // at least two steps of four rows a thread
  if (k > most) k = most;
  if (k > room / (p.outer * p.width)) k = room / (p.outer * p.width);
  else if (k < 1) k = 1;
  if (k < 1) return p;  // no room for a single chunk
  p.length = (p.rows + k - 1) / k;
  p.chunks = (p.rows + p.length - 1) / p.length;
  p.ok = p.blocks() < 0x7fffffff;
  return p;
}

}  // namespace norm
}  // namespace jaxprims
