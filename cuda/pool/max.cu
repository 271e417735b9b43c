// Max (and min) pool forward, NHWC; NCHW is N*C images of one channel.
//   y[n,p,q,c] = max over the places (r,s) of x[n, start(p) + r*dil, start(q) + s*dil, c] that are inside the image,
//   place[n,p,q,c] = the winner's place in its window, r*S + s, or (flat) its index h*W + w in the image. Ties: the first in row-major order; NaN beats every number, the
//   first NaN wins; all -inf: the first place inside. A minimum is the maximum of -x.
// Layout   x [N,D,H,W,C], y and place [N,O,P,Q,C] row-major; 16-byte vectors of channels where C allows it. place: 1, 2 or 4 bytes.
// Work     3x3 and 2x2 windows with one-byte places: max_strip.cu. max_pool_kernel: one thread = one output position x V channels, walks its window. max_pool_block_kernel (large
//          windows, few outputs): one block = one output position x up to 32 groups of V channels, its threads split the window and meet
//          in shared memory; the order among winners is total, so the split does not show.
// Cost     reads x (overlaps from L1/L2), writes y and place once: (NHWC + NPQC)*sizeof(T) + NPQC*place bytes; bound: memory.
#include "pool/common.cuh"

namespace jaxprims::pool {
namespace {

// Whether b at place bp goes before a at place ap.
__device__ __forceinline__ bool wins(float b, int bp, float a, int ap) {
  const bool bn = b != b, an = a != a;
  if (bn || an) return bn && (!an || bp < ap);
  return b > a || (b == a && bp < ap);
}

// Index of the (virtual) place 0 in row (r0, r1) of a window; each further place adds 1, or the dilation to a flat index. Both
// kinds of index grow in the window's row-major order.
__device__ __forceinline__ int index_of(const Pool& p, const Window& w0, const Window& w1, const Window& w2, int r0, int r1) {
  const Axis &a0 = p.axis[0], &a1 = p.axis[1], &a2 = p.axis[2];
  if (!p.flat) return (r0 * a1.window + r1) * a2.window;
  return ((w0.start + r0 * a0.dilation) * a1.size + w1.start + r1 * a1.dilation) * a2.size + w2.start;
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks)
    max_pool_kernel(const Pool p, const Items items, const T* __restrict__ x, T* __restrict__ y, void* __restrict__ place,
                    int place_bytes) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= items.total) return;
  const Item at = item_at(items, n);
  const Axis &a0 = p.axis[0], &a1 = p.axis[1], &a2 = p.axis[2];
  const Window w0 = window_of(a0, p.adaptive, at.i0), w1 = window_of(a1, p.adaptive, at.i1),
               w2 = window_of(a2, p.adaptive, at.i2);
  const float sign = p.minimum ? -1.f : 1.f;

  const int col = p.flat ? a2.dilation : 1;

  // -inf at the first place inside: nothing but a greater value or a NaN takes its place, so ties stay with the first.
  float best[V];
  int where[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    best[v] = -INFINITY;
    where[v] = index_of(p, w0, w1, w2, w0.first, w1.first) + w2.first * col;
  }
  const T* image = x + at.image * p.in_image + at.group * V;
  const int64_t step = int64_t{a2.dilation} * p.channels;
  for (int r0 = w0.first; r0 < w0.end; ++r0)
    for (int r1 = w1.first; r1 < w1.end; ++r1) {
      const T* src = image + element(w0.start + r0 * a0.dilation, w1.start + r1 * a1.dilation,
                                     w2.start + w2.first * a2.dilation, a1.size, a2.size, p.channels);
      const int row = index_of(p, w0, w1, w2, r0, r1);
      for (int r2 = w2.first; r2 < w2.end; ++r2, src += step) {
        float value[V];
        load(value, src);
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const float key = sign * value[v];
          if (key > best[v] || (key != key && best[v] == best[v])) {
            best[v] = key;
            where[v] = row + r2 * col;
          }
        }
      }
    }
#pragma unroll
  for (int v = 0; v < V; ++v) best[v] *= sign;
  const int64_t to = at.image * p.out_image + element(at.i0, at.i1, at.i2, a1.out, a2.out, p.channels) + at.group * V;
  store(y + to, best);
  if (place != nullptr) store_places(place, place_bytes, to, where);
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks)
    max_pool_block_kernel(const Pool p, const Items items, int groups, int lanes, const T* __restrict__ x,
                          T* __restrict__ y, void* __restrict__ place, int place_bytes) {
  __shared__ float values[V][kThreads];
  __shared__ int wheres[V][kThreads];
  const Item at = item_at(items, blockIdx.x);
  const int lane = threadIdx.x & (lanes - 1), row = threadIdx.x / lanes, rows = kThreads / lanes;
  const int group = at.group * lanes + lane;  // at.group numbers the tiles of `lanes` channel groups
  const Axis &a0 = p.axis[0], &a1 = p.axis[1], &a2 = p.axis[2];
  const Window w0 = window_of(a0, p.adaptive, at.i0), w1 = window_of(a1, p.adaptive, at.i1),
               w2 = window_of(a2, p.adaptive, at.i2);
  const float sign = p.minimum ? -1.f : 1.f;

  float best[V];
  int where[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    best[v] = -INFINITY;
    where[v] = INT32_MAX;  // after every place
  }
  if (group < groups) {
    const T* image = x + at.image * p.in_image + group * V;
    const int n1 = w1.end - w1.first, n2 = w2.end - w2.first;
    const uint32_t count = static_cast<uint32_t>((w0.end - w0.first) * n1 * n2);  // at most one image: below 2^31
    for (uint32_t k = row; k < count; k += rows) {
      const int line = static_cast<int>(k) / n2;
      const int r0 = w0.first + line / n1, r1 = w1.first + line % n1, r2 = w2.first + (static_cast<int>(k) - line * n2);
      float value[V];
      load(value, image + element(w0.start + r0 * a0.dilation, w1.start + r1 * a1.dilation, w2.start + r2 * a2.dilation,
                                  a1.size, a2.size, p.channels));
      const int here = index_of(p, w0, w1, w2, r0, r1) + r2 * (p.flat ? a2.dilation : 1);
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (wins(sign * value[v], here, best[v], where[v])) {
          best[v] = sign * value[v];
          where[v] = here;
        }
    }
  }
#pragma unroll
  for (int v = 0; v < V; ++v) {
    values[v][threadIdx.x] = best[v];
    wheres[v][threadIdx.x] = where[v];
  }
  for (int half = rows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row < half) {
      const int other = threadIdx.x + half * lanes;
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (wins(values[v][other], wheres[v][other], values[v][threadIdx.x], wheres[v][threadIdx.x])) {
          values[v][threadIdx.x] = values[v][other];
          wheres[v][threadIdx.x] = wheres[v][other];
        }
    }
  }
  if (row == 0 && group < groups) {  // these threads wrote the last winners themselves
#pragma unroll
    for (int v = 0; v < V; ++v) {
      best[v] = sign * values[v][threadIdx.x];
      where[v] = wheres[v][threadIdx.x];
    }
    const int64_t to = at.image * p.out_image + element(at.i0, at.i1, at.i2, a1.out, a2.out, p.channels) + group * V;
    store(y + to, best);
    if (place != nullptr) store_places(place, place_bytes, to, where);
  }
}

}  // namespace

template <class T>
cudaError_t launch_max(const Pool& p, const T* x, T* y, void* place, int place_bytes, cudaStream_t stream) {
  const StripWindow window = strip_window(p.axis, p.adaptive);
  if (window != StripWindow::kNone && place_bytes <= 1)
    return launch_max_strip(window, p, x, y, static_cast<uint8_t*>(place), stream);
  return by_width<T>(p.channels, {x, y, place}, [&](auto width) {
    constexpr int V = decltype(width)::value;
    const int groups = p.channels / V, o0 = p.axis[0].out, o1 = p.axis[1].out, o2 = p.axis[2].out;
    const Items items(p.images, o0, o1, o2, groups);
    const int lanes = block_lanes(groups);
    const Items tiles(p.images, o0, o1, o2, static_cast<int>(ceil_div(groups, lanes)));
    if (whole_block_per_output(items.total, p.places) && tiles.small) {
      max_pool_block_kernel<T, V><<<static_cast<unsigned>(tiles.total), kThreads, 0, stream>>>(p, tiles, groups, lanes, x, y,
                                                                                               place, place_bytes);
    } else {
      const unsigned blocks = blocks_for(items.total);
      if (blocks == 0) return cudaErrorInvalidConfiguration;
      max_pool_kernel<T, V><<<blocks, kThreads, 0, stream>>>(p, items, x, y, place, place_bytes);
    }
    return cudaGetLastError();
  });
}

template cudaError_t launch_max(const Pool&, const float*, float*, void*, int, cudaStream_t);
template cudaError_t launch_max(const Pool&, const __half*, __half*, void*, int, cudaStream_t);
template cudaError_t launch_max(const Pool&, const __nv_bfloat16*, __nv_bfloat16*, void*, int, cudaStream_t);

}  // namespace jaxprims::pool
