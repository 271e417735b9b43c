// Average (and sum) pool over 3x3 and 2x2 windows, over the whole image, and their transposes: avg.cu's formulas, by strips.
//   y[p,q]  = sum over (r,s) of x[p*U + r - pad, q*U + s - pad] / count(p,q)
//   dx[h,w] = sum over the windows (p,q) over (h,w) of dy[p,q] / count(p,q)
// Layout   x, dx [N,H,W,C]; y, dy [N,P,Q,C] row-major; V channels at once: 16 bytes, or one element.
// Work     strip kernels: a thread = V channels of one column of outputs (backward: of a block of U columns of the image), down a
//          strip of rows; the sum over a row's R columns is taken once and serves every window that the row is in.
//          image kernels (one window = the whole image): a thread = V channels of an image, or of a part of its places backward.
// Cost     reads the source once (the columns at a window's sides from L1), writes the result once; bound: memory.
// Measured on an H200, bf16, share of a copy (4.08 TB/s in that run): 128x56x56x256, 3x3 stride 1, 71 % (0.142 ms), backward 50 %
//          (0.204 ms); 1024x7x7x2048 to one pixel 87 % (0.059 ms), backward 82 % (0.063 ms).
// Sums     float32, one rounding. Half types multiply by float32 1/count, whose error is far below theirs; float32 divides.
#include "pool/strip.cuh"

namespace jaxprims::pool {
namespace {

template <class T>
__device__ __forceinline__ float over(float sum, float count, float inverse) {
  if constexpr (sizeof(T) == 4) return sum / count;
  else return sum * inverse;
}

// The places of window o that are inside [0, size).
template <int R, int U>
__device__ __forceinline__ int places_inside(int o, int pad, int size) {
  const int start = o * U - pad, end = start + R;
  const int count = (end < size ? end : size) - (start > 0 ? start : 0);
  return count > 0 ? count : 0;
}

template <class T, int V, int R, int U>
__global__ void __launch_bounds__(kThreads, V == 1 ? 5 : 3)
    avg_strip_kernel(const Strip g, const Items items, int divisor, const T* __restrict__ x, T* __restrict__ y) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= items.total) return;
  const Item at = item_at(items, n);
  const int p0 = at.i1 * g.length, p1 = p0 + g.length < g.p ? p0 + g.length : g.p;
  const int left = at.i2 * U - g.pad_w;
  const T* image = x + at.image * g.in_image + at.group * V;
  bool inside[R];
#pragma unroll
  for (int s = 0; s < R; ++s) inside[s] = static_cast<unsigned>(left + s) < static_cast<unsigned>(g.w);

  float row[R][V];
  auto fetch = [&](uint32_t(&w)[R][kWords<T, V>], int h) {
    const bool row_inside = static_cast<unsigned>(h) < static_cast<unsigned>(g.h);
    const T* src = image + (h * g.w + left) * g.channels;
#pragma unroll
    for (int s = 0; s < R; ++s) {
      if (row_inside && inside[s]) {
        load_words<T, V>(w[s], src + s * g.channels);
      } else {
#pragma unroll
        for (int i = 0; i < kWords<T, V>; ++i) w[s][i] = 0u;
      }
    }
  };
  auto add = [&](float(&to)[V], const uint32_t(&w)[R][kWords<T, V>]) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      to[v] = number<T, V>(w[0], v);
#pragma unroll
      for (int s = 1; s < R; ++s) to[v] += number<T, V>(w[s], v);
    }
  };
#pragma unroll
  for (int r = 0; r < R - U; ++r) {
    uint32_t w[R][kWords<T, V>];
    fetch(w, p0 * U - g.pad_h + r);
    add(row[r], w);
  }
  uint32_t w[U][R][kWords<T, V>];
#pragma unroll
  for (int r = 0; r < U; ++r) fetch(w[r], p0 * U - g.pad_h + R - U + r);
  T* to = y + at.image * g.out_image + at.group * V;
  const int columns = places_inside<R, U>(at.i2, g.pad_w, g.w);
  float count = divisor == kSum ? 1.f : R * R, inverse = 1.f / count;
  for (int p = p0; p < p1; ++p) {
#pragma unroll
    for (int r = 0; r < U; ++r) add(row[R - U + r], w[r]);
    // The next rows are on their way while this window is finished and stored.
#pragma unroll
    for (int r = 0; r < U; ++r) fetch(w[r], p + 1 < p1 ? (p + 1) * U - g.pad_h + R - U + r : -1);
    if (divisor == kPlacesInside) {
      count = static_cast<float>(places_inside<R, U>(p, g.pad_h, g.h) * columns);
      inverse = 1.f / count;
    }
    float sum[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      sum[v] = row[0][v];
#pragma unroll
      for (int r = 1; r < R; ++r) sum[v] += row[r][v];
      sum[v] = over<T>(sum[v], count, inverse);
    }
    store(to + (p * g.q + at.i2) * g.channels, sum);
#pragma unroll
    for (int r = 0; r < R - U; ++r)
#pragma unroll
      for (int v = 0; v < V; ++v) row[r][v] = row[r + U][v];
  }
}

template <class T, int V, int R, int U>
__global__ void __launch_bounds__(kThreads, V == 1 ? 5 : 3)
    avg_strip_dx_kernel(const Strip g, const Items items, int divisor, const T* __restrict__ dy, T* __restrict__ dx) {
  constexpr int D = (R + U - 1) / U;  // outputs over an element, along an axis
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= items.total) return;
  const Item at = item_at(items, n);
  const int k0 = g.row0 + at.i1 * g.length;
  const int k1 = k0 + g.length < g.row0 + g.rows ? k0 + g.length : g.row0 + g.rows;
  const int j = g.col0 + at.i2;
  const T* from = dy + at.image * g.out_image + at.group * V;

  float row[D][U][V];  // [d][b]: row k - d of dy, summed over the columns whose windows have column b of the block
  float across[D];     // 1 / places along the row, of the windows (k, j - e)
#pragma unroll
  for (int e = 0; e < D; ++e) {
    const int q = j - e, places = places_inside<R, U>(q, g.pad_w, g.w);
    across[e] = divisor == kPlacesInside && places > 0 ? 1.f / static_cast<float>(places) : 1.f;
  }
  auto fetch = [&](uint32_t(&w)[D][kWords<T, V>], int p) {
#pragma unroll
    for (int e = 0; e < D; ++e) {
      const int q = j - e;
#pragma unroll
      for (int i = 0; i < kWords<T, V>; ++i) w[e][i] = 0u;
      if (static_cast<unsigned>(p) < static_cast<unsigned>(g.p) && static_cast<unsigned>(q) < static_cast<unsigned>(g.q))
        load_words<T, V>(w[e], from + (p * g.q + q) * g.channels);
    }
  };
  auto add = [&](float(&to)[U][V], const uint32_t(&w)[D][kWords<T, V>], int p) {
    float cell[D][V];
    const int places = places_inside<R, U>(p, g.pad_h, g.h);
    const float down = divisor == kPlacesInside && places > 0 ? 1.f / static_cast<float>(places) : 1.f;
#pragma unroll
    for (int e = 0; e < D; ++e) {
#pragma unroll
      for (int v = 0; v < V; ++v) cell[e][v] = number<T, V>(w[e], v);
      if (divisor == kPlacesInside) {
        if constexpr (sizeof(T) == 4) {
          const int count = places * places_inside<R, U>(j - e, g.pad_w, g.w);
#pragma unroll
          for (int v = 0; v < V; ++v) cell[e][v] = count > 0 ? cell[e][v] / static_cast<float>(count) : 0.f;
        } else {
          const float scale = down * across[e];
#pragma unroll
          for (int v = 0; v < V; ++v) cell[e][v] *= scale;
        }
      }
    }
#pragma unroll
    for (int b = 0; b < U; ++b)
#pragma unroll
      for (int v = 0; v < V; ++v) {
        to[b][v] = 0.f;
#pragma unroll
        for (int e = D - 1; e >= 0; --e)
          if (b + e * U < R) to[b][v] += cell[e][v];
      }
  };
  uint32_t w[D][kWords<T, V>];
#pragma unroll
  for (int d = 1; d < D; ++d) {
    fetch(w, k0 - d);
    add(row[d], w, k0 - d);
  }
  fetch(w, k0);
  T* image = dx + at.image * g.in_image + at.group * V;
  const float count = divisor == kAllPlaces ? R * R : 1.f, inverse = 1.f / count;
  for (int k = k0; k < k1; ++k) {
    add(row[0], w, k);
    fetch(w, k + 1 < k1 ? k + 1 : -1);  // on its way while this block is stored
#pragma unroll
    for (int a = 0; a < U; ++a) {
      const int h = k * U + a - g.pad_h;
#pragma unroll
      for (int b = 0; b < U; ++b) {
        const int w = j * U + b - g.pad_w;
        float sum[V];
#pragma unroll
        for (int v = 0; v < V; ++v) {
          sum[v] = 0.f;
#pragma unroll
          for (int d = D - 1; d >= 0; --d)
            if (a + d * U < R) sum[v] += row[d][b][v];
          sum[v] = over<T>(sum[v], count, inverse);
        }
        if (static_cast<unsigned>(h) < static_cast<unsigned>(g.h) && static_cast<unsigned>(w) < static_cast<unsigned>(g.w))
          store(image + (h * g.w + w) * g.channels, sum);
      }
    }
#pragma unroll
    for (int d = D - 1; d > 0; --d)
#pragma unroll
      for (int b = 0; b < U; ++b)
#pragma unroll
        for (int v = 0; v < V; ++v) row[d][b][v] = row[d - 1][b][v];
  }
}

// 3x3 windows of stride 1, forward and backward: both sum 3x3 neighbours of the source, the backward with the padding 2 - pad, of
// dy / count (Before) instead of a division behind. A thread has two neighbouring columns, which share two of their columns' sums.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kSingles = 4;  // blocks a multiprocessor, of one channel a thread: five leave it too few registers here
#else
constexpr int kSingles = 5;
#endif
template <class T, int V, bool Before>
__global__ void __launch_bounds__(kThreads, V == 1 ? kSingles : 2)
    avg3_kernel(const Strip g, const Items items, int divisor, const T* __restrict__ x, T* __restrict__ y) {
  constexpr int kColumns = 4, W = kWords<T, V>;
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= items.total) return;
  const Item at = item_at(items, n);
  const int p0 = at.i1 * g.length, p1 = p0 + g.length < g.p ? p0 + g.length : g.p;
  const int q = at.i2 * 2, left = q - g.pad_w;
  const T* image = x + at.image * g.in_image + at.group * V;
  const bool inside_count = divisor == kPlacesInside;
  bool inside[kColumns];
  float across[kColumns];  // 1 / places along the row, of the windows at the source's columns
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    inside[c] = static_cast<unsigned>(left + c) < static_cast<unsigned>(g.w);
    if constexpr (Before) {
      const int places = places_inside<3, 1>(left + c, 2 - g.pad_w, g.q);
      across[c] = inside_count && places > 0 ? 1.f / static_cast<float>(places) : 1.f;
    }
  }
  auto fetch = [&](uint32_t(&w)[kColumns][W], int h) {
    const bool row_inside = static_cast<unsigned>(h) < static_cast<unsigned>(g.h);
    const T* src = image + (h * g.w + left) * g.channels;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < W; ++i) w[c][i] = 0u;
      if (row_inside && inside[c]) load_words<T, V>(w[c], src + c * g.channels);
    }
  };
  auto add = [&](float(&to)[2][V], const uint32_t(&w)[kColumns][W], int h) {
    float scale[kColumns];
    if constexpr (Before) {
      const int places = places_inside<3, 1>(h, 2 - g.pad_h, g.p);
      const float down = inside_count && places > 0 ? 1.f / static_cast<float>(places) : 1.f;
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        scale[c] = sizeof(T) == 4 ? static_cast<float>(places * places_inside<3, 1>(left + c, 2 - g.pad_w, g.q)) : down * across[c];
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float c[kColumns];
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        c[k] = number<T, V>(w[k], v);
        if (Before && inside_count) c[k] = sizeof(T) == 4 ? (scale[k] > 0.f ? c[k] / scale[k] : 0.f) : c[k] * scale[k];
      }
      const float both = c[1] + c[2];
      to[0][v] = c[0] + both, to[1][v] = both + c[3];
    }
  };

  float row[3][2][V];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint32_t w[kColumns][W];
    fetch(w, p0 - g.pad_h + r);
    add(row[r], w, p0 - g.pad_h + r);
  }
  uint32_t w[kColumns][W];
  fetch(w, p0 - g.pad_h + 2);
  T* to = y + at.image * g.out_image + at.group * V;
  for (int p = p0; p < p1; ++p) {
    add(row[2], w, p - g.pad_h + 2);
    fetch(w, p + 1 < p1 ? p - g.pad_h + 3 : -1);  // on its way while this row is finished and stored
    const int places = places_inside<3, 1>(p, g.pad_h, g.h);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (q + k >= g.q) break;
      float count = divisor == kAllPlaces ? 9.f : 1.f;
      if (!Before && inside_count) count = static_cast<float>(places * places_inside<3, 1>(q + k, g.pad_w, g.w));
      const float inverse = 1.f / count;
      float sum[V];
#pragma unroll
      for (int v = 0; v < V; ++v) sum[v] = over<T>(row[0][k][v] + row[1][k][v] + row[2][k][v], count, inverse);
      store(to + (p * g.q + q + k) * g.channels, sum);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int v = 0; v < V; ++v) row[r][k][v] = row[r + 1][k][v];
  }
}

template <class T>
cudaError_t launch3(const Pool& pool, bool backward, const T* from, T* to, cudaStream_t stream) {
  return by_width<T>(pool.channels, {from, to}, [&](auto width) {
    constexpr int V = decltype(width)::value;
    const Axis &a0 = pool.axis[0], &a1 = pool.axis[1], &a2 = pool.axis[2];
    Strip g;
    g.h = backward ? a1.out : a1.size, g.w = backward ? a2.out : a2.size, g.p = backward ? a1.size : a1.out, g.q = backward ? a2.size : a2.out;
    g.pad_h = backward ? 2 - a1.pad : a1.pad, g.pad_w = backward ? 2 - a2.pad : a2.pad, g.channels = pool.channels;
    const int64_t x = pool.in_image / a0.size, y = pool.out_image / a0.out, images = pool.images * a0.size;
    g.in_image = backward ? y : x, g.out_image = backward ? x : y;
    const int columns = (g.q + 1) / 2, groups = pool.channels / V;
    g.rows = g.p, g.length = strip_length(images * columns * groups, g.rows);
    const Items items(images, 1, static_cast<int>(ceil_div(g.rows, g.length)), columns, groups);
    const unsigned blocks = blocks_for(items.total);
    if (blocks == 0) return cudaErrorInvalidConfiguration;
    if (backward) avg3_kernel<T, V, true><<<blocks, kThreads, 0, stream>>>(g, items, pool.divisor, from, to);
    else avg3_kernel<T, V, false><<<blocks, kThreads, 0, stream>>>(g, items, pool.divisor, from, to);
    return cudaGetLastError();
  });
}

template <class T, int R, int U>
cudaError_t launch(const Pool& pool, bool backward, const T* from, T* to, cudaStream_t stream) {
  return by_width<T>(pool.channels, {from, to}, [&](auto width) {
    constexpr int V = decltype(width)::value;
    Items items(0, 1, 1, 1, 1);
    const Strip g = strip_of<U>(pool, pool.channels / V, backward, items);
    const unsigned blocks = blocks_for(items.total);
    if (blocks == 0) return cudaErrorInvalidConfiguration;
    if (backward) avg_strip_dx_kernel<T, V, R, U><<<blocks, kThreads, 0, stream>>>(g, items, pool.divisor, from, to);
    else avg_strip_kernel<T, V, R, U><<<blocks, kThreads, 0, stream>>>(g, items, pool.divisor, from, to);
    return cudaGetLastError();
  });
}

template <class T>
cudaError_t launch(StripWindow window, const Pool& p, bool backward, const T* from, T* to, cudaStream_t s) {
  switch (window) {
    case StripWindow::k3s2: return launch<T, 3, 2>(p, backward, from, to, s);
    case StripWindow::k3s1: return launch3<T>(p, backward, from, to, s);
    case StripWindow::k2s2: return launch<T, 2, 2>(p, backward, from, to, s);
    default: return cudaErrorInvalidValue;
  }
}

// --- one window, the whole image ---------------------------------------------------------------------------------------------

constexpr int kAhead = 8;  // loads in flight, and places of one thread backward

template <class T, int V>
__global__ void __launch_bounds__(kThreads, 4)
    avg_image_kernel(int64_t total, int groups, int places, float count, int channels, const T* __restrict__ x, T* __restrict__ y) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= total) return;
  const int64_t image = n / groups;
  const int channel = static_cast<int>(n - image * groups) * V;
  const T* src = x + image * places * channels + channel;
  float sum[V] = {};
  for (int i = 0; i < places; i += kAhead) {
    uint32_t w[kAhead][kWords<T, V>];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (i + k < places) {
        load_words<T, V>(w[k], src + static_cast<int64_t>(i + k) * channels);
      } else {
#pragma unroll
        for (int j = 0; j < kWords<T, V>; ++j) w[k][j] = 0u;
      }
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
#pragma unroll
      for (int v = 0; v < V; ++v) sum[v] += number<T, V>(w[k], v);
  }
#pragma unroll
  for (int v = 0; v < V; ++v) sum[v] /= count;
  store(y + image * channels + channel, sum);
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads, 4)
    avg_image_dx_kernel(const Items items, int places, float count, int channels, const T* __restrict__ dy, T* __restrict__ dx) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= items.total) return;
  const Item at = item_at(items, n);  // i2: which kAhead places
  const int channel = at.group * V;
  float value[V];
  load(value, dy + at.image * channels + channel);
#pragma unroll
  for (int v = 0; v < V; ++v) value[v] /= count;
  T* to = dx + at.image * places * channels + channel;
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    const int i = at.i2 * kAhead + k;
    if (i < places) store(to + static_cast<int64_t>(i) * channels, value);
  }
}

}  // namespace

template <class T>
cudaError_t launch_avg_strip(StripWindow window, const Pool& p, const T* x, T* y, cudaStream_t s) {
  return launch(window, p, false, x, y, s);
}
template <class T>
cudaError_t launch_avg_strip_dx(StripWindow window, const Pool& p, const T* dy, T* dx, cudaStream_t s) {
  return launch(window, p, true, dy, dx, s);
}

template <class T>
cudaError_t launch_avg_image(const Pool& p, const T* x, T* y, cudaStream_t stream) {
  return by_width<T>(p.channels, {x, y}, [&](auto width) {
    constexpr int V = decltype(width)::value;
    const int64_t total = p.images * (p.channels / V);
    const unsigned blocks = blocks_for(total);
    if (blocks == 0) return cudaErrorInvalidConfiguration;
    const int places = static_cast<int>(p.in_image / p.channels);
    avg_image_kernel<T, V><<<blocks, kThreads, 0, stream>>>(total, p.channels / V, places,
                                                            p.divisor == kSum ? 1.f : static_cast<float>(places), p.channels, x, y);
    return cudaGetLastError();
  });
}

template <class T>
cudaError_t launch_avg_image_dx(const Pool& p, const T* dy, T* dx, cudaStream_t stream) {
  return by_width<T>(p.channels, {dy, dx}, [&](auto width) {
    constexpr int V = decltype(width)::value;
    const int places = static_cast<int>(p.in_image / p.channels);
    const Items items(p.images, 1, 1, static_cast<int>(ceil_div(places, kAhead)), p.channels / V);
    const unsigned blocks = blocks_for(items.total);
    if (blocks == 0) return cudaErrorInvalidConfiguration;
    avg_image_dx_kernel<T, V><<<blocks, kThreads, 0, stream>>>(items, places, p.divisor == kSum ? 1.f : static_cast<float>(places),
                                                               p.channels, dy, dx);
    return cudaGetLastError();
  });
}

#define JAXPRIMS_POOL_AVG_STRIP(T)                                                          \
  template cudaError_t launch_avg_strip(StripWindow, const Pool&, const T*, T*, cudaStream_t);    \
  template cudaError_t launch_avg_strip_dx(StripWindow, const Pool&, const T*, T*, cudaStream_t); \
  template cudaError_t launch_avg_image(const Pool&, const T*, T*, cudaStream_t);                 \
  template cudaError_t launch_avg_image_dx(const Pool&, const T*, T*, cudaStream_t)
JAXPRIMS_POOL_AVG_STRIP(float);
JAXPRIMS_POOL_AVG_STRIP(__half);
JAXPRIMS_POOL_AVG_STRIP(__nv_bfloat16);

}  // namespace jaxprims::pool
