// Average (and sum) pool and its transpose, NHWC; NCHW is N*C images of one channel.
//   y[n,p,q,c]  = sum over the places (r,s) inside the image of x[n, start(p) + r*dil, start(q) + s*dil, c] / count(p,q)
//   dx[n,h,w,c] = sum over the outputs (p,q) whose window has (h,w) of dy[n,p,q,c] / count(p,q)
//   count: 1 (a sum), the window's places, or those of them inside the image.
// Layout   x, dx [N,D,H,W,C]; y, dy [N,O,P,Q,C] row-major; 16-byte vectors of channels where C allows it.
// Work     3x3 and 2x2 windows, and the whole image: avg_strip.cu. avg_pool_kernel: one thread = one output position x V channels. avg_pool_block_kernel (large windows, few outputs):
//          one block = one output position x up to 32 groups of V channels; its threads split the window by fixed stride and add in a fixed
//          tree. avg_pool_dx_kernel: one thread = one input position x V channels, looks at the windows over it: no atomics.
// Cost     reads the source (overlaps from L1/L2) and writes the result once; bound: memory. Sums in float32, one rounding.
#include "pool/strip.cuh"

namespace jaxprims::pool {
namespace {

__device__ __forceinline__ float count_of(const Pool& p, const Window& w0, const Window& w1, const Window& w2) {
  if (p.divisor == kSum) return 1.f;
  if (p.divisor == kAllPlaces) return static_cast<float>(p.places);
  return static_cast<float>(w0.end - w0.first) * static_cast<float>(w1.end - w1.first) * static_cast<float>(w2.end - w2.first);
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks)
    avg_pool_kernel(const Pool p, const Items items, const T* __restrict__ x, T* __restrict__ y) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= items.total) return;
  const Item at = item_at(items, n);
  const Axis &a0 = p.axis[0], &a1 = p.axis[1], &a2 = p.axis[2];
  const Window w0 = window_of(a0, p.adaptive, at.i0), w1 = window_of(a1, p.adaptive, at.i1),
               w2 = window_of(a2, p.adaptive, at.i2);
  const T* image = x + at.image * p.in_image + at.group * V;
  const int64_t step = int64_t{a2.dilation} * p.channels;
  float sum[V] = {};
  for (int r0 = w0.first; r0 < w0.end; ++r0)
    for (int r1 = w1.first; r1 < w1.end; ++r1) {
      const T* src = image + element(w0.start + r0 * a0.dilation, w1.start + r1 * a1.dilation,
                                     w2.start + w2.first * a2.dilation, a1.size, a2.size, p.channels);
      for (int r2 = w2.first; r2 < w2.end; ++r2, src += step) {
        float value[V];
        load(value, src);
#pragma unroll
        for (int v = 0; v < V; ++v) sum[v] += value[v];
      }
    }
  const float count = count_of(p, w0, w1, w2);
#pragma unroll
  for (int v = 0; v < V; ++v) sum[v] /= count;
  store(y + at.image * p.out_image + element(at.i0, at.i1, at.i2, a1.out, a2.out, p.channels) + at.group * V, sum);
}

constexpr int kInFlight = 4;  // loads of one thread

template <class T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks)
    avg_pool_block_kernel(const Pool p, const Items items, int groups, int lanes, const T* __restrict__ x, T* __restrict__ y) {
  __shared__ float sums[V][kThreads];
  const Item at = item_at(items, blockIdx.x);
  const int lane = threadIdx.x & (lanes - 1), row = threadIdx.x / lanes, rows = kThreads / lanes;
  const int group = at.group * lanes + lane;  // at.group numbers the tiles of `lanes` channel groups
  const Axis &a0 = p.axis[0], &a1 = p.axis[1], &a2 = p.axis[2];
  const Window w0 = window_of(a0, p.adaptive, at.i0), w1 = window_of(a1, p.adaptive, at.i1),
               w2 = window_of(a2, p.adaptive, at.i2);
  float sum[V] = {};
  if (group < groups) {
    const T* image = x + at.image * p.in_image + group * V;
    const int n1 = w1.end - w1.first, n2 = w2.end - w2.first;
    const uint32_t count = static_cast<uint32_t>((w0.end - w0.first) * n1 * n2);  // at most one image: below 2^31
    const bool whole = n2 == a2.size && n1 == a1.size && a0.dilation == 1;  // the places are neighbours
    const T* src = image + element(w0.start + w0.first * a0.dilation, 0, 0, a1.size, a2.size, p.channels);
    for (uint32_t k = row; whole && k < count; k += kInFlight * rows) {
      uint32_t w[kInFlight][kWords<T, V>];  // all loads before the first use of one
#pragma unroll
      for (int i = 0; i < kInFlight; ++i)
        if (k + i * rows < count) load_words<T, V>(w[i], src + static_cast<int64_t>(k + i * rows) * p.channels);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i)
        if (k + i * rows < count) {
#pragma unroll
          for (int v = 0; v < V; ++v) sum[v] += number<T, V>(w[i], v);
        }
    }
    for (uint32_t k = row; !whole && k < count; k += rows) {
      const int line = static_cast<int>(k) / n2;
      const int r0 = w0.first + line / n1, r1 = w1.first + line % n1, r2 = w2.first + (static_cast<int>(k) - line * n2);
      float value[V];
      load(value, image + element(w0.start + r0 * a0.dilation, w1.start + r1 * a1.dilation, w2.start + r2 * a2.dilation,
                                  a1.size, a2.size, p.channels));
#pragma unroll
      for (int v = 0; v < V; ++v) sum[v] += value[v];
    }
  }
#pragma unroll
  for (int v = 0; v < V; ++v) sums[v][threadIdx.x] = sum[v];
  for (int half = rows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row < half) {
#pragma unroll
      for (int v = 0; v < V; ++v) sums[v][threadIdx.x] += sums[v][threadIdx.x + half * lanes];
    }
  }
  if (row == 0 && group < groups) {  // these threads wrote the last sums themselves
    const float count = count_of(p, w0, w1, w2);
#pragma unroll
    for (int v = 0; v < V; ++v) sum[v] = sums[v][threadIdx.x] / count;
    store(y + at.image * p.out_image + element(at.i0, at.i1, at.i2, a1.out, a2.out, p.channels) + group * V, sum);
  }
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks)
    avg_pool_dx_kernel(const Pool p, const Items items, const T* __restrict__ dy, T* __restrict__ dx) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= items.total) return;
  const Item at = item_at(items, n);
  const Axis &a0 = p.axis[0], &a1 = p.axis[1], &a2 = p.axis[2];
  const Outputs o0 = outputs_over(a0, p.adaptive, at.i0), o1 = outputs_over(a1, p.adaptive, at.i1),
                o2 = outputs_over(a2, p.adaptive, at.i2);
  const T* image = dy + at.image * p.out_image + at.group * V;
  float sum[V] = {};
  for (int q0 = o0.lo; q0 < o0.end; ++q0) {
    if (place_of(a0, p.adaptive, q0, at.i0) < 0) continue;
    const Window w0 = window_of(a0, p.adaptive, q0);
    for (int q1 = o1.lo; q1 < o1.end; ++q1) {
      if (place_of(a1, p.adaptive, q1, at.i1) < 0) continue;
      const Window w1 = window_of(a1, p.adaptive, q1);
      for (int q2 = o2.lo; q2 < o2.end; ++q2) {
        if (place_of(a2, p.adaptive, q2, at.i2) < 0) continue;
        float value[V];
        load(value, image + element(q0, q1, q2, a1.out, a2.out, p.channels));
        const float count = p.divisor == kPlacesInside ? count_of(p, w0, w1, window_of(a2, p.adaptive, q2)) : 1.f;
#pragma unroll
        for (int v = 0; v < V; ++v) sum[v] += value[v] / count;
      }
    }
  }
  if (p.divisor == kAllPlaces) {
#pragma unroll
    for (int v = 0; v < V; ++v) sum[v] /= static_cast<float>(p.places);
  }
  store(dx + at.image * p.in_image + element(at.i0, at.i1, at.i2, a1.size, a2.size, p.channels) + at.group * V, sum);
}

}  // namespace

template <class T>
cudaError_t launch_avg(const Pool& p, const T* x, T* y, cudaStream_t stream) {
  const StripWindow window = strip_window(p.axis, p.adaptive);
  if (window != StripWindow::kNone) return launch_avg_strip(window, p, x, y, stream);
  return by_width<T>(p.channels, {x, y}, [&](auto width) {
    constexpr int V = decltype(width)::value;
    const int groups = p.channels / V, o0 = p.axis[0].out, o1 = p.axis[1].out, o2 = p.axis[2].out;
    const Items items(p.images, o0, o1, o2, groups);
    const int lanes = block_lanes(groups);
    const Items tiles(p.images, o0, o1, o2, static_cast<int>(ceil_div(groups, lanes)));
    if (whole_block_per_output(items.total, p.places) && tiles.small) {
      avg_pool_block_kernel<T, V><<<static_cast<unsigned>(tiles.total), kThreads, 0, stream>>>(p, tiles, groups, lanes, x, y);
    } else {
      if (!p.adaptive && whole_image(p.axis)) return launch_avg_image(p, x, y, stream);
      const unsigned blocks = blocks_for(items.total);
      if (blocks == 0) return cudaErrorInvalidConfiguration;
      avg_pool_kernel<T, V><<<blocks, kThreads, 0, stream>>>(p, items, x, y);
    }
    return cudaGetLastError();
  });
}

template <class T>
cudaError_t launch_avg_dx(const Pool& p, const T* dy, T* dx, cudaStream_t stream) {
  const StripWindow window = strip_window(p.axis, p.adaptive);
  if (window != StripWindow::kNone) return launch_avg_strip_dx(window, p, dy, dx, stream);
  if (!p.adaptive && whole_image(p.axis)) return launch_avg_image_dx(p, dy, dx, stream);
  return by_width<T>(p.channels, {dy, dx}, [&](auto width) {
    constexpr int V = decltype(width)::value;
    const Items items(p.images, p.axis[0].size, p.axis[1].size, p.axis[2].size, p.channels / V);
    const unsigned blocks = blocks_for(items.total);
    if (blocks == 0) return cudaErrorInvalidConfiguration;
    avg_pool_dx_kernel<T, V><<<blocks, kThreads, 0, stream>>>(p, items, dy, dx);
    return cudaGetLastError();
  });
}

#define JAXPRIMS_POOL_AVG(T)                                             \
  template cudaError_t launch_avg(const Pool&, const T*, T*, cudaStream_t); \
  template cudaError_t launch_avg_dx(const Pool&, const T*, T*, cudaStream_t)
JAXPRIMS_POOL_AVG(float);
JAXPRIMS_POOL_AVG(__half);
JAXPRIMS_POOL_AVG(__nv_bfloat16);

}  // namespace jaxprims::pool
