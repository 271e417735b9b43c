// Max (and min) pool over 3x3 and 2x2 windows and its gradient, by strips: max.cu's and pick.cu's formulas.
//   y[p,q] = max over (r,s) of x[p*U + r - pad, q*U + s - pad],  place[p,q] = r*R + s of the first that is equal to it
//   dx[h,w] = sum over (p,q) with place[p,q] = (h + pad - p*U)*R + (w + pad - q*U) of dy[p,q]
// Layout   x, dx [N,H,W,C]; y, dy, place [N,P,Q,C] row-major, place one byte; V channels at once: 16 bytes, or one element.
// Work     forward: a thread = V channels of one column of outputs, down a strip of rows. A row's maximum over its R columns and
//          which column has it are found once and serve every window that the row is in. Two 16-bit elements are compared by one
//          instruction. A window whose maximum is NaN or -inf (padding counts as -inf) is done again by max.cu's walk.
//          backward: a thread = V channels of a block of U x U elements of the image, down a strip of such blocks; the at most
//          ceil(R/U)^2 outputs over a block are loaded once, those of the row above are still in registers.
// Cost     reads x once (the two columns at a window's sides from L1), writes y and place once; backward reads dy and place once,
//          writes dx once. Bound: memory.
// Measured on an H200, bf16, share of a copy (4.08 TB/s in that run). 256x112x112x64, 3x3 stride 2: before (a thread walks one
//          window, all sizes at run time) 42 % (0.287 ms), backward 15 % (0.868 ms); now 75 % (0.168 ms) and 75 % (0.184 ms).
//          Now, 2x2 stride 2: 85 % and 80 %; one by one channel (251x111x109x61, 3x3 stride 2) 37 % and 45 %.
// Sums     backward: float32, in the order of pick.cu, one rounding.
#include "pool/strip.cuh"

namespace jaxprims::pool {
namespace {

template <class T, int V, int R>
struct RowMax {
  uint32_t max[kWords<T, V>], column[kWords<T, V>];
};

// The exact walk over one window, one channel at a time.
template <class T, int V, int R, int U>
__device__ __forceinline__ void walk(const Strip& g, const T* x, T* y, uint8_t* place, int p, int q, float sign) {
  const Window w1 = window_of(Axis{g.h, g.p, R, U, g.pad_h, 1}, false, p), w2 = window_of(Axis{g.w, g.q, R, U, g.pad_w, 1}, false, q);
#pragma unroll 1
  for (int v = 0; v < V; ++v) {
    float best = -INFINITY;
    int where = w1.first * R + w2.first;
#pragma unroll 1
    for (int r = w1.first; r < w1.end; ++r)
#pragma unroll 1
      for (int s = w2.first; s < w2.end; ++s) {
        const float key = sign * to_float(x[((w1.start + r) * g.w + w2.start + s) * g.channels + v]);
        if (key > best || (key != key && best == best)) {
          best = key;
          where = r * R + s;
        }
      }
    y[v] = from_float<T>(sign * best);
    if (place != nullptr) place[v] = static_cast<uint8_t>(where);
  }
}

template <class T, int V, int R, int U, bool Places>
__global__ void __launch_bounds__(kThreads, V == 1 ? 5 : 3)
    max_strip_kernel(const Strip g, const Items items, uint32_t flip, const T* __restrict__ x, T* __restrict__ y,
                     uint8_t* __restrict__ place) {
  using L = Lanes<T>;
  constexpr int W = kWords<T, V>;
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= items.total) return;
  const Item at = item_at(items, n);
  const int p0 = at.i1 * g.length, p1 = p0 + g.length < g.p ? p0 + g.length : g.p;
  const int left = at.i2 * U - g.pad_w;
  const T* image = x + at.image * g.in_image + at.group * V;
  bool inside[R];
#pragma unroll
  for (int s = 0; s < R; ++s) inside[s] = static_cast<unsigned>(left + s) < static_cast<unsigned>(g.w);

  RowMax<T, V, R> row[R];
  // Loads of all rows stand before the first use of one.
  auto fetch = [&](uint32_t(&w)[R][W], int h) {
    const bool row_inside = static_cast<unsigned>(h) < static_cast<unsigned>(g.h);
    const T* src = image + (h * g.w + left) * g.channels;
#pragma unroll
    for (int s = 0; s < R; ++s) {
#pragma unroll
      for (int i = 0; i < W; ++i) w[s][i] = L::kLowest ^ flip;
      if (row_inside && inside[s]) load_words<T, V>(w[s], src + s * g.channels);
    }
  };
  auto reduce = [&](RowMax<T, V, R>& to, uint32_t(&w)[R][W]) {
#pragma unroll
    for (int i = 0; i < W; ++i) {
#pragma unroll
      for (int s = 0; s < R; ++s) w[s][i] ^= flip;
      uint32_t m = w[0][i], k = (R - 1) * L::kOnes;
#pragma unroll
      for (int s = 1; s < R; ++s) m = L::max(m, w[s][i]);
      if constexpr (Places) {
#pragma unroll
        for (int s = R - 2; s >= 0; --s) k = L::pick(w[s][i], m, s * L::kOnes, k);
      }
      to.max[i] = m;
      to.column[i] = k;
    }
  };

#pragma unroll
  for (int r = 0; r < R - U; ++r) {
    uint32_t w[R][W];
    fetch(w, p0 * U - g.pad_h + r);
    reduce(row[r], w);
  }
  T* to = y + at.image * g.out_image + at.group * V;
  uint8_t* to_place = place + at.image * g.out_image + at.group * V;
  uint32_t w[U][R][W];
#pragma unroll
  for (int r = 0; r < U; ++r) fetch(w[r], p0 * U - g.pad_h + R - U + r);
  for (int p = p0; p < p1; ++p) {
#pragma unroll
    for (int r = 0; r < U; ++r) reduce(row[R - U + r], w[r]);
    // The next rows are on their way while this window is finished and stored.
#pragma unroll
    for (int r = 0; r < U; ++r) fetch(w[r], p + 1 < p1 ? (p + 1) * U - g.pad_h + R - U + r : -1);
    uint32_t m[W], k[W];
    bool ordinary = true;
#pragma unroll
    for (int i = 0; i < W; ++i) {
      m[i] = row[0].max[i];
#pragma unroll
      for (int r = 1; r < R; ++r) m[i] = L::max(m[i], row[r].max[i]);
      if constexpr (Places) {
        k[i] = row[R - 1].column[i] + (R - 1) * R * L::kOnes;
#pragma unroll
        for (int r = R - 2; r >= 0; --r) k[i] = L::pick(row[r].max[i], m[i], row[r].column[i] + r * R * L::kOnes, k[i]);
      }
      ordinary = ordinary && L::ordinary(m[i]);
      m[i] ^= flip;
    }
    const int out = (p * g.q + at.i2) * g.channels;
    if (ordinary) {
      store_words<T, V>(to + out, m);
      if constexpr (Places) store_place_words<T, V>(to_place + out, k);
    } else {
      walk<T, V, R, U>(g, image, to + out, Places ? to_place + out : nullptr, p, at.i2, flip ? -1.f : 1.f);
    }
#pragma unroll
    for (int r = 0; r < R - U; ++r) row[r] = row[r + U];
  }
}

template <class T, int V>
struct Cell {
  uint32_t dy[kWords<T, V>], place[kPlaceWords<V>];
};

template <class T, int V, int R, int U>
__global__ void __launch_bounds__(kThreads, V == 1 ? 5 : U == 1 ? 2 : 3)
    max_strip_dx_kernel(const Strip g, const Items items, const T* __restrict__ dy, const uint8_t* __restrict__ place,
                        T* __restrict__ dx) {
  constexpr int D = (R + U - 1) / U;  // outputs over an element, along an axis
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= items.total) return;
  const Item at = item_at(items, n);
  const int k0 = g.row0 + at.i1 * g.length;
  const int k1 = k0 + g.length < g.row0 + g.rows ? k0 + g.length : g.row0 + g.rows;
  const int j = g.col0 + at.i2;
  const T* from = dy + at.image * g.out_image + at.group * V;
  const uint8_t* from_place = place + at.image * g.out_image + at.group * V;

  Cell<T, V> cell[D][D], next[D];  // [d][e]: output (k - d, j - e)
  auto fill = [&](Cell<T, V>(&to)[D], int p) {
#pragma unroll
    for (int e = 0; e < D; ++e) {
      const int q = j - e;
      if (static_cast<unsigned>(p) < static_cast<unsigned>(g.p) && static_cast<unsigned>(q) < static_cast<unsigned>(g.q)) {
        const int at_out = (p * g.q + q) * g.channels;
        load_words<T, V>(to[e].dy, from + at_out);
        load_place_words<V>(to[e].place, from_place + at_out);
      } else {
#pragma unroll
        for (int i = 0; i < kWords<T, V>; ++i) to[e].dy[i] = 0u;
#pragma unroll
        for (int i = 0; i < kPlaceWords<V>; ++i) to[e].place[i] = ~0u;  // no place of a window
      }
    }
  };
#pragma unroll
  for (int d = 1; d < D; ++d) fill(cell[d], k0 - d);
  T* image = dx + at.image * g.in_image + at.group * V;
  fill(next, k0);
  for (int k = k0; k < k1; ++k) {
#pragma unroll
    for (int e = 0; e < D; ++e) cell[0][e] = next[e];
    fill(next, k + 1 < k1 ? k + 1 : -1);  // on its way while this block is summed and stored
#pragma unroll
    for (int a = 0; a < U; ++a) {
      const int h = k * U + a - g.pad_h;
#pragma unroll
      for (int b = 0; b < U; ++b) {
        const int w = j * U + b - g.pad_w;
        float sum[V] = {};
#pragma unroll
        for (int d = D - 1; d >= 0; --d)
#pragma unroll
          for (int e = D - 1; e >= 0; --e) {
            if (a + d * U >= R || b + e * U >= R) continue;
            const uint32_t want = (a + d * U) * R + b + e * U;
#pragma unroll
            for (int v = 0; v < V; ++v) {
              const int shift = v % 4 * 8;
              if (((cell[d][e].place[v / 4] ^ (want << shift)) & (0xffu << shift)) == 0) sum[v] += number<T, V>(cell[d][e].dy, v);
            }
          }
        if (static_cast<unsigned>(h) < static_cast<unsigned>(g.h) && static_cast<unsigned>(w) < static_cast<unsigned>(g.w))
          store(image + (h * g.w + w) * g.channels, sum);
      }
    }
#pragma unroll
    for (int d = D - 1; d > 0; --d)
#pragma unroll
      for (int e = 0; e < D; ++e) cell[d][e] = cell[d - 1][e];
  }
}

template <class T, int R, int U>
cudaError_t launch_forward(const Pool& pool, const T* x, T* y, uint8_t* place, cudaStream_t stream) {
  return by_width<T>(pool.channels, {x, y, place}, [&](auto width) {
    constexpr int V = decltype(width)::value;
    Items items(0, 1, 1, 1, 1);
    const Strip g = strip_of<U>(pool, pool.channels / V, false, items);
    const unsigned blocks = blocks_for(items.total);
    if (blocks == 0) return cudaErrorInvalidConfiguration;
    const auto kernel = place != nullptr ? max_strip_kernel<T, V, R, U, true> : max_strip_kernel<T, V, R, U, false>;
    kernel<<<blocks, kThreads, 0, stream>>>(g, items, pool.minimum ? Lanes<T>::kSign : 0u, x, y, place);
    return cudaGetLastError();
  });
}

template <class T, int R, int U>
cudaError_t launch_backward(const Pool& pool, const T* dy, const uint8_t* place, T* dx, cudaStream_t stream) {
  return by_width<T>(pool.channels, {dy, place, dx}, [&](auto width) {
    constexpr int V = decltype(width)::value;
    Items items(0, 1, 1, 1, 1);
    const Strip g = strip_of<U>(pool, pool.channels / V, true, items);
    const unsigned blocks = blocks_for(items.total);
    if (blocks == 0) return cudaErrorInvalidConfiguration;
    max_strip_dx_kernel<T, V, R, U><<<blocks, kThreads, 0, stream>>>(g, items, dy, place, dx);
    return cudaGetLastError();
  });
}

}  // namespace

template <class T>
cudaError_t launch_max_strip(StripWindow window, const Pool& p, const T* x, T* y, uint8_t* place, cudaStream_t s) {
  switch (window) {
    case StripWindow::k3s2: return launch_forward<T, 3, 2>(p, x, y, place, s);
    case StripWindow::k3s1: return launch_forward<T, 3, 1>(p, x, y, place, s);
    case StripWindow::k2s2: return launch_forward<T, 2, 2>(p, x, y, place, s);
    default: return cudaErrorInvalidValue;
  }
}

template <class T>
cudaError_t launch_max_strip_dx(StripWindow window, const Pool& p, const T* dy, const uint8_t* place, T* dx, cudaStream_t s) {
  switch (window) {
    case StripWindow::k3s2: return launch_backward<T, 3, 2>(p, dy, place, dx, s);
    case StripWindow::k3s1: return launch_backward<T, 3, 1>(p, dy, place, dx, s);
    case StripWindow::k2s2: return launch_backward<T, 2, 2>(p, dy, place, dx, s);
    default: return cudaErrorInvalidValue;
  }
}

#define JAXPRIMS_POOL_MAX_STRIP(T)                                                                             \
  template cudaError_t launch_max_strip(StripWindow, const Pool&, const T*, T*, uint8_t*, cudaStream_t);       \
  template cudaError_t launch_max_strip_dx(StripWindow, const Pool&, const T*, const uint8_t*, T*, cudaStream_t)
JAXPRIMS_POOL_MAX_STRIP(float);
JAXPRIMS_POOL_MAX_STRIP(__half);
JAXPRIMS_POOL_MAX_STRIP(__nv_bfloat16);

}  // namespace jaxprims::pool
