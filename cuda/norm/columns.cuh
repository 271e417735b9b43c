// What the kernels of norms along columns share: the parameters and statistics of a thread's vector of columns.
#pragma once
#include "norm/vectors.cuh"

namespace jaxprims {
namespace norm {

// Values first, first + 1, ... of an array: one access where they are aligned.
template <class T>
__device__ __forceinline__ float value_at(const Array& a, int64_t j) {
  return a.type == Type::kSame ? to_float(static_cast<const T*>(a.data)[j]) : static_cast<const float*>(a.data)[j];
}
template <class T, int V>
__device__ __forceinline__ void neighbours(const Array& a, int64_t first, float (&v)[V]) {
  if constexpr (V == 1) {
    v[0] = value_at<T>(a, first);
  } else if (sizeof(T) == 4 || a.type == Type::kSame) {
    widen<T>(load16(static_cast<const T*>(a.data) + first), v);
  } else {
    const float4* const f = reinterpret_cast<const float4*>(static_cast<const float*>(a.data) + first);
#pragma unroll
    for (int i = 0; i < V / 4; ++i) {
      const float4 w = f[i];
      v[4 * i] = w.x, v[4 * i + 1] = w.y, v[4 * i + 2] = w.z, v[4 * i + 3] = w.w;
    }
  }
}

// An array's values at a vector of columns; i is the element of the first.
template <class T, int V>
__device__ __forceinline__ void column_values(const Array& a, int64_t i, bool wide, float otherwise, float (&v)[V]) {
  if (!a.here()) {
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = otherwise;
    return;
  }
  const int64_t first = a.runs.at(i, wide);
  if (a.runs.mode != Runs::kZero && a.runs.inner_post.d == 1 && (a.runs.inner.d & (V - 1)) == 0) {
    neighbours<T>(a, first, v);
    return;
  }
#pragma unroll
  for (int e = 0; e < V; ++e) v[e] = value_at<T>(a, e == 0 ? first : a.runs.at(i + e, wide));
}

// The numbers of the statistics of a thread's columns: statistics' arrays lie in this order (columns_fit).
template <int V>
struct Numbers {
  int64_t first;
  int up[V];  // the number less `first`
  bool next;  // one for each column
};
template <int V>
__device__ __forceinline__ Numbers<V> numbers(int share, int64_t width, int64_t outer, int64_t column_) {
  Numbers<V> n;
  n.next = share == 1;
  const int column = static_cast<int>(column_), group = column / share;
  int rest = column - group * share, up = 0;
  n.first = outer * (width / share) + group;
#pragma unroll
  for (int e = 0; e < V; ++e) {
    n.up[e] = up;
    if (++rest == share) rest = 0, ++up;
  }
  return n;
}
template <class T, int V>
__device__ __forceinline__ void stat_values(const Array& a, const Numbers<V>& n, float (&v)[V]) {
  if (!a.here()) {
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = 0.f;
  } else if (n.next) {
    neighbours<T>(a, n.first, v);
  } else {
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = value_at<T>(a, n.first + n.up[e]);
  }
}

// z = fmaf(x - mean, factor, bias): factor = rstd * scale, and the low word of the mean is part of the bias. Forward and backward
// form it alike, so that both see the same side of a kink.
template <class T, int V>
__device__ __forceinline__ void line(const Problem& p, const Numbers<V>& at, int64_t i, float (&factor)[V], float (&bias)[V]) {
  float scale[V];
  stat_values<T>(p.a[kVar], at, factor);
  column_values<T>(p.a[kScale], i, p.wide, 1.f, scale);
#pragma unroll
  for (int e = 0; e < V; ++e) factor[e] = inverse_root(factor[e], p.eps) * scale[e];
  stat_values<T>(p.a[kLow], at, scale);
  column_values<T>(p.a[kBias], i, p.wide, 0.f, bias);
#pragma unroll
  for (int e = 0; e < V; ++e) bias[e] = fmaf(-scale[e], factor[e], bias[e]);
}

}  // namespace norm
}  // namespace jaxprims
