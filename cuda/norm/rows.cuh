// What the kernels of rows share (rows_forward.cu, rows_backward.cu, rows_odd.cu): places of a row's parameters and statistics,
// the pre-activation, the launch.
#pragma once
#include "common/team.cuh"
#include "norm/fast.cuh"

namespace jaxprims {
namespace norm {

using namespace team;

// 1 / sqrt(var + eps) to the last bit but one; 0 for 0 (a constant input gives beta at eps = 0 too).
__device__ __forceinline__ float quick_inverse_root(float var, float eps) {
  const float v = var + eps;
  float r = rsqrtf(v);
  if (v > 0.f && v < INFINITY) r = fmaf(0.5f * r, fmaf(-v * r, r, 1.f), r);
  return v == 0.f ? 0.f : r;
}

// Where an array that has one element for a row has it.
__device__ __forceinline__ int64_t row_place(const Problem& p, const RowPlan& q, const Array& a, int64_t row) {
  return q.direct ? row : a.runs.at(row * q.length, p.wide);
}
template <class T>
__device__ __forceinline__ float get_row(const Problem& p, const RowPlan& q, const Array& a, int64_t row) {
  if (!a.here()) return 0.f;
  const int64_t at = row_place(p, q, a, row);
  return a.type == Type::kSame ? to_float(static_cast<const T*>(a.data)[at]) : static_cast<const float*>(a.data)[at];
}
template <class T>
__device__ __forceinline__ void put_row(const Problem& p, const RowPlan& q, const Array& a, int64_t row, float v) {
  if (!a.here()) return;
  const int64_t at = row_place(p, q, a, row);
  if (a.type == Type::kSame) static_cast<T*>(a.data)[at] = from_float<T>(v);
  else static_cast<float*>(a.data)[at] = v;
}

// Bases of a row's parameters.
struct Bases {
  int64_t scale = 0, bias = 0;
};
__device__ __forceinline__ Bases bases(const Problem& p, const RowPlan& q, int64_t row) {
  Bases b;
  if (q.scale.kind > 1 || (q.scale.kind == 1 && !q.plain)) b.scale = p.a[kScale].runs.at(row * q.length, p.wide);
  if (q.bias.kind > 1 || (q.bias.kind == 1 && !q.plain)) b.bias = p.a[kBias].runs.at(row * q.length, p.wide);
  return b;
}

// z of a vector whose normalised values are c, in place.
template <class T, bool kPlain>
__device__ __forceinline__ void pre(const Problem& p, const RowPlan& q, const Bases& b, int64_t i, int j, float (&c)[kVec<T>]) {
  constexpr int V = kVec<T>;
  float w[V], add[V];
  row_values<T, kPlain>(p.a[kScale], q.scale, b.scale, j, 1.f, w);
  row_values<T, kPlain>(p.a[kBias], q.bias, b.bias, j, 0.f, add);
#pragma unroll
  for (int v = 0; v < V; ++v) c[v] = fmaf(c[v], w[v], add[v]);
  if constexpr (!kPlain) {
    if (p.a[kResidual].here()) {
      unpack<T>(take_once(static_cast<const T*>(p.a[kResidual].data) + i + j), w);
#pragma unroll
      for (int v = 0; v < V; ++v) c[v] += w[v];
    }
  }
}

// A row kernel on q.blocks blocks, in clusters where the plan says so.
template <class... Parameters, class... Arguments>
cudaError_t launch_rows(void (*kernel)(Parameters...), const RowPlan& q, int bytes, cudaStream_t stream, const Arguments&... arguments) {
  return team::launch(kernel, q.blocks, q.block, q.cluster, bytes, stream, arguments...);
}

}  // namespace norm
}  // namespace jaxprims
