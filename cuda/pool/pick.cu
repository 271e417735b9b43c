// The linear pair behind the maximum: gather (its tangent) and scatter (its gradient), each the other's transpose.
//   gather   y[n,p,q,c]  = t[n, element at place[n,p,q,c]]                       0 where that is not in the window
//   (place: the place in the window, or the element's flat index in the image)
//   scatter  dx[n,h,w,c] = sum over the outputs (p,q) whose window has (h,w) at place[n,p,q,c] of dy[n,p,q,c]
// Layout   t, dx [N,D,H,W,C]; y, dy, place [N,O,P,Q,C]; an operand may lack leading batch axes of the result (stride 0).
// Work     gather: one thread = one output position x V channels. scatter: one thread = one input position x V channels; it looks at the
//          windows that reach over it, at most ceil(R/u)*ceil(S/v) of them: no atomics, no zero-fill, always the same order.
//          3x3 and 2x2 windows without batch axes scatter by max_strip.cu.
// Cost     gather: reads place and t's winners, writes y. scatter: reads dy and place (overlaps from L1/L2), writes dx once:
//          NHWC*sizeof(T) + NPQC*(sizeof(T) + place bytes); bound: memory. Sums in float32, one rounding.
#include "pool/common.cuh"

namespace jaxprims::pool {
namespace {

__device__ __forceinline__ bool within(const Window& w, int r) { return r >= w.first && r < w.end; }

// Whether output o's window w has the element i, 0 <= i < size.
__device__ __forceinline__ bool has(const Axis& a, bool adaptive, int o, const Window& w, int i) {
  return i >= w.start && within(w, place_of(a, adaptive, o, i));
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks)
    max_pool_gather_kernel(const Pool p, const Items items, const T* __restrict__ t, const void* __restrict__ place,
                           int place_bytes, T* __restrict__ y) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= items.total) return;
  const Item at = item_at(items, n);
  const Axis &a0 = p.axis[0], &a1 = p.axis[1], &a2 = p.axis[2];
  const Window w0 = window_of(a0, p.adaptive, at.i0), w1 = window_of(a1, p.adaptive, at.i1),
               w2 = window_of(a2, p.adaptive, at.i2);
  const uint32_t elements = static_cast<uint32_t>(a0.size) * a1.size * a2.size;
  int64_t data, index;
  operand_images(p.batch, at.image, data, index);

  const int inside = element(at.i0, at.i1, at.i2, a1.out, a2.out, p.channels) + at.group * V;
  uint32_t where[V];
  load_places(where, place, place_bytes, index * p.out_image + inside);
  const T* image = t + data * p.in_image + at.group * V;
  float value[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    value[v] = 0.f;
    if (where[v] >= (p.flat ? elements : p.places)) continue;
    uint32_t j0, j1, j2, line;  // the element's position, or its place along each axis
    (p.flat ? p.size2 : p.window2).divmod(where[v], line, j2);
    (p.flat ? p.size1 : p.window1).divmod(line, j0, j1);
    bool inside_window;
    if (p.flat) {
      inside_window = has(a0, p.adaptive, at.i0, w0, j0) && has(a1, p.adaptive, at.i1, w1, j1) && has(a2, p.adaptive, at.i2, w2, j2);
    } else {
      inside_window = within(w0, j0) && within(w1, j1) && within(w2, j2);
      j0 = w0.start + j0 * a0.dilation;
      j1 = w1.start + j1 * a1.dilation;
      j2 = w2.start + j2 * a2.dilation;
    }
    if (inside_window) value[v] = to_float(image[element(j0, j1, j2, a1.size, a2.size, p.channels) + v]);
  }
  store(y + at.image * p.out_image + inside, value);
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks)
    max_pool_scatter_kernel(const Pool p, const Items items, const T* __restrict__ dy, const void* __restrict__ place,
                            int place_bytes, T* __restrict__ dx) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= items.total) return;
  const Item at = item_at(items, n);
  const Axis &a0 = p.axis[0], &a1 = p.axis[1], &a2 = p.axis[2];
  const Outputs o0 = outputs_over(a0, p.adaptive, at.i0), o1 = outputs_over(a1, p.adaptive, at.i1),
                o2 = outputs_over(a2, p.adaptive, at.i2);
  int64_t data, index;
  operand_images(p.batch, at.image, data, index);
  const int64_t dy_at = data * p.out_image + at.group * V, place_at = index * p.out_image + at.group * V;

  const int flat = element(at.i0, at.i1, at.i2, a1.size, a2.size, 1);
  float sum[V] = {};
  for (int q0 = o0.lo; q0 < o0.end; ++q0) {
    const int r0 = place_of(a0, p.adaptive, q0, at.i0);
    if (r0 < 0) continue;
    for (int q1 = o1.lo; q1 < o1.end; ++q1) {
      const int r1 = place_of(a1, p.adaptive, q1, at.i1);
      if (r1 < 0) continue;
      const int row = (r0 * a1.window + r1) * a2.window;
      for (int q2 = o2.lo; q2 < o2.end; ++q2) {
        const int r2 = place_of(a2, p.adaptive, q2, at.i2);
        if (r2 < 0) continue;
        const int here = element(q0, q1, q2, a1.out, a2.out, p.channels);
        uint32_t where[V];
        float value[V];
        load_places(where, place, place_bytes, place_at + here);
        load(value, dy + dy_at + here);
#pragma unroll
        for (int v = 0; v < V; ++v)
          if (where[v] == static_cast<uint32_t>(p.flat ? flat : row + r2)) sum[v] += value[v];
      }
    }
  }
  store(dx + at.image * p.in_image + element(at.i0, at.i1, at.i2, a1.size, a2.size, p.channels) + at.group * V, sum);
}

}  // namespace

template <class T>
cudaError_t launch_gather(const Pool& p, const T* t, const void* place, int place_bytes, T* y, cudaStream_t stream) {
  return by_width<T>(p.channels, {t, place, y}, [&](auto width) {
    constexpr int V = decltype(width)::value;
    const Items items(p.images, p.axis[0].out, p.axis[1].out, p.axis[2].out, p.channels / V);
    const unsigned blocks = blocks_for(items.total);
    if (blocks == 0) return cudaErrorInvalidConfiguration;
    max_pool_gather_kernel<T, V><<<blocks, kThreads, 0, stream>>>(p, items, t, place, place_bytes, y);
    return cudaGetLastError();
  });
}

template <class T>
cudaError_t launch_scatter(const Pool& p, const T* dy, const void* place, int place_bytes, T* dx, cudaStream_t stream) {
  const StripWindow window = strip_window(p.axis, p.adaptive);
  if (window != StripWindow::kNone && place_bytes == 1 && p.batch.axes == 0)
    return launch_max_strip_dx(window, p, dy, static_cast<const uint8_t*>(place), dx, stream);
  return by_width<T>(p.channels, {dy, place, dx}, [&](auto width) {
    constexpr int V = decltype(width)::value;
    const Items items(p.images, p.axis[0].size, p.axis[1].size, p.axis[2].size, p.channels / V);
    const unsigned blocks = blocks_for(items.total);
    if (blocks == 0) return cudaErrorInvalidConfiguration;
    max_pool_scatter_kernel<T, V><<<blocks, kThreads, 0, stream>>>(p, items, dy, place, place_bytes, dx);
    return cudaGetLastError();
  });
}

#define JAXPRIMS_POOL_PICK(T)                                                                            \
  template cudaError_t launch_gather(const Pool&, const T*, const void*, int, T*, cudaStream_t); \
  template cudaError_t launch_scatter(const Pool&, const T*, const void*, int, T*, cudaStream_t)
JAXPRIMS_POOL_PICK(float);
JAXPRIMS_POOL_PICK(__half);
JAXPRIMS_POOL_PICK(__nv_bfloat16);

}  // namespace jaxprims::pool
