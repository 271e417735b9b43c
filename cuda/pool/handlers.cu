// The five pool targets: buffers and options -> Pool, checks, launch.
//   max_pool (x) -> y[, place]      max_pool_gather (t, place) -> y      max_pool_scatter (dy, place) -> dx
//   avg_pool (x) -> y             avg_pool_dx (dy) -> dx
// Arrays are (N, *spatial, C) or (N, C, *spatial), with one to three spatial axes; gather's and scatter's result has `batch_axes` more
// axes in front, of which each operand has those in its mask.
#include <algorithm>

#include "pool/params.h"

namespace jaxprims::pool {
namespace {

enum class Side { kIn, kOut };

// The sizes of a buffer behind its `lead` batch axes: images N, channels C.
struct Extent {
  int64_t n = 0, c = 0;
};

ffi::Error read_extent(const char* op, const char* name, const Buffer& b, const PoolConfig& cfg, int lead, Side side, Extent& e) {
  const Ints& size = side == Side::kIn ? cfg.in_size : cfg.out_size;
  const int rank = static_cast<int>(size.size());
  bool fits = b.rank() == lead + rank + 2;
  if (fits) {
    const int64_t* d = b.dims.data() + lead;
    e.n = d[0];
    e.c = cfg.channels_last ? d[rank + 1] : d[1];
    for (int k = 0; k < rank; ++k) fits = fits && d[k + (cfg.channels_last ? 1 : 2)] == size.begin()[k];
  }
  if (fits) return ok();
  std::string shape;
  for (int64_t d : b.dims) shape += (shape.empty() ? "" : ",") + std::to_string(d);
  return bad(std::string(op) + ": " + name + " has shape (" + shape + "), which does not fit the pool's sizes");
}

// Options to Pool; fails where an index of the kernels would leave int32.
ffi::Error read_options(const char* op, const PoolConfig& cfg, const Extent& e, Pool& p) {
  const int rank = static_cast<int>(cfg.in_size.size());
  if (rank < 1 || rank > 3) return unsupported(std::string(op) + ": one to three spatial axes");
  const int64_t top = INT32_MAX;
  int64_t places = 1, in = 1, out = 1;
  bool fits = e.c <= top;
  for (int k = 0; k < rank; ++k) {
    const int64_t size = cfg.in_size.begin()[k], o = cfg.out_size.begin()[k], w = cfg.window.begin()[k],
                  s = cfg.strides.begin()[k], pad = cfg.padding.begin()[k], d = cfg.dilation.begin()[k];
    fits = fits && w >= 1 && s >= 1 && d >= 1 && w <= top && s <= top && d <= top && size <= top && o <= top;
    if (!fits) break;
    fits = std::max({pad < 0 ? -pad : pad, o * s, w * d}) + size <= top;
    in *= size, out *= o, places *= w;
    fits = fits && in <= top && out <= top && places <= top;
    if (!fits) break;
    p.axis[3 - rank + k] = {static_cast<int>(size), static_cast<int>(o),   static_cast<int>(w),
                            static_cast<int>(s),    static_cast<int>(pad), static_cast<int>(d)};
  }
  p.channels = cfg.channels_last ? static_cast<int>(e.c) : 1;
  p.in_image = in * p.channels;
  p.out_image = out * p.channels;
  if (!fits || p.in_image > top || p.out_image > top)
    return unsupported(std::string(op) + ": one image, its channels, strides and padding must stay below 2^31");
  p.images = cfg.channels_last ? e.n : e.n * e.c;
  p.window1 = FastDiv(p.axis[1].window);
  p.window2 = FastDiv(p.axis[2].window);
  p.size1 = FastDiv(std::max(1, p.axis[1].size));
  p.size2 = FastDiv(std::max(1, p.axis[2].size));
  p.places = static_cast<uint32_t>(places);
  p.adaptive = cfg.adaptive != 0;
  p.minimum = cfg.minimum != 0;
  p.flat = cfg.flat != 0;
  p.divisor = static_cast<int>(cfg.divisor);
  return ok();
}

ffi::Error place_width(const char* op, const Buffer& b, const PoolConfig& cfg, int& bytes) {
  if (cfg.flat && b.dtype != ffi::DataType::S32) return unsupported(std::string(op) + ": flat indices are int32");
  switch (b.dtype) {
    case ffi::DataType::U8: bytes = 1; return ok();
    case ffi::DataType::U16: bytes = 2; return ok();
    case ffi::DataType::S32: bytes = 4; return ok();
    default: return unsupported(std::string(op) + ": places are uint8, uint16 or int32");
  }
}

ffi::Error arity(const char* op, const Buffers& in, const Buffers& out, size_t n_in, size_t n_out) {
  if (in.size() == n_in && out.size() == n_out) return ok();
  return bad(std::string(op) + ": wrong number of operands or results");
}

#define JAXPRIMS_TRY(expr)                            \
  if (ffi::Error error = (expr); error.failure()) return error

// Operand and result of an op with one image each for every image of the other.
ffi::Error read_dense(const char* op, const PoolConfig& cfg, const Buffer& from, Side from_side, const Buffer& to, Side to_side,
                      Pool& p) {
  Extent a, b;
  JAXPRIMS_TRY(read_extent(op, "the operand", from, cfg, 0, from_side, a));
  JAXPRIMS_TRY(read_extent(op, "the result", to, cfg, 0, to_side, b));
  if (a.n != b.n || a.c != b.c || from.dtype != to.dtype) return bad(std::string(op) + ": operand and result do not fit");
  return read_options(op, cfg, a, p);
}

// Operands and result of gather (in -> out) and scatter (out -> in), with the batch axes that either operand may lack.
ffi::Error read_pair(const char* op, const PoolConfig& cfg, const Buffer& data, Side data_side, const Buffer& place,
                     const Buffer& to, Side to_side, Pool& p) {
  const int axes = static_cast<int>(cfg.batch_axes);
  if (axes < 0 || axes > kMaxBatchAxes) return unsupported(std::string(op) + ": too many batch axes of one operand alone");
  int data_axes = 0, index_axes = 0;
  for (int k = 0; k < axes; ++k) {
    data_axes += cfg.data_mask >> k & 1;
    index_axes += cfg.index_mask >> k & 1;
  }
  Extent a, b, c;
  JAXPRIMS_TRY(read_extent(op, "the data operand", data, cfg, data_axes, data_side, a));
  JAXPRIMS_TRY(read_extent(op, "the places", place, cfg, index_axes, Side::kOut, b));
  JAXPRIMS_TRY(read_extent(op, "the result", to, cfg, axes, to_side, c));
  if (a.n != b.n || a.n != c.n || a.c != b.c || a.c != c.c || data.dtype != to.dtype)
    return bad(std::string(op) + ": operands and result do not fit");
  JAXPRIMS_TRY(read_options(op, cfg, a, p));
  p.batch.axes = axes;
  p.batch.inner = p.images;
  int64_t data_stride = p.images, index_stride = p.images;
  for (int k = axes - 1; k >= 0; --k) {
    const int64_t size = to.dims[k];
    p.batch.size[k] = size;
    p.images *= size;
    if (cfg.data_mask >> k & 1) {
      if (data.dims[--data_axes] != size) return bad(std::string(op) + ": batch axes do not fit");
      p.batch.data_stride[k] = data_stride;
      data_stride *= size;
    }
    if (cfg.index_mask >> k & 1) {
      if (place.dims[--index_axes] != size) return bad(std::string(op) + ": batch axes do not fit");
      p.batch.index_stride[k] = index_stride;
      index_stride *= size;
    }
  }
  return ok();
}

// Without an output there is nothing to read: then a result in the input's shape is zero.
template <class T>
ffi::Error zeros(const char* op, T* to, int64_t n, cudaStream_t stream) {
  return n == 0 ? ok() : status(op, cudaMemsetAsync(to, 0, n * sizeof(T), stream));
}

ffi::Error max_pool(cudaStream_t stream, const Buffers& in, const Buffers& out, const PoolConfig& cfg) {
  const char* op = "max_pool";
  Pool p;
  int bytes = 0;
  const bool places = out.size() == 2;
  JAXPRIMS_TRY(arity(op, in, out, 1, places ? 2 : 1));
  JAXPRIMS_TRY(read_dense(op, cfg, in[0], Side::kIn, out[0], Side::kOut, p));
  if (places) {
    JAXPRIMS_TRY(place_width(op, out[1], cfg, bytes));
  }
  if (places && out[1].dims != out[0].dims) return bad("max_pool: both results have one shape");
  if (out[0].size() == 0) return ok();
  if (in[0].size() == 0) return bad("max_pool: an empty image has no maximum");
  return by_dtype(op, in[0].dtype, [&](auto t) {
    using T = decltype(t);
    return status(op, launch_max<T>(p, in[0].as<T>(), out[0].as<T>(), places ? out[1].data : nullptr, bytes, stream));
  });
}

ffi::Error max_pool_gather(cudaStream_t stream, const Buffers& in, const Buffers& out, const PoolConfig& cfg) {
  const char* op = "max_pool_gather";
  Pool p;
  int bytes = 0;
  JAXPRIMS_TRY(arity(op, in, out, 2, 1));
  JAXPRIMS_TRY(read_pair(op, cfg, in[0], Side::kIn, in[1], out[0], Side::kOut, p));
  JAXPRIMS_TRY(place_width(op, in[1], cfg, bytes));
  if (out[0].size() == 0) return ok();
  return by_dtype(op, in[0].dtype, [&](auto t) {
    using T = decltype(t);
    if (in[0].size() == 0) return zeros(op, out[0].as<T>(), out[0].size(), stream);
    return status(op, launch_gather<T>(p, in[0].as<T>(), in[1].data, bytes, out[0].as<T>(), stream));
  });
}

ffi::Error max_pool_scatter(cudaStream_t stream, const Buffers& in, const Buffers& out, const PoolConfig& cfg) {
  const char* op = "max_pool_scatter";
  Pool p;
  int bytes = 0;
  JAXPRIMS_TRY(arity(op, in, out, 2, 1));
  JAXPRIMS_TRY(read_pair(op, cfg, in[0], Side::kOut, in[1], out[0], Side::kIn, p));
  JAXPRIMS_TRY(place_width(op, in[1], cfg, bytes));
  if (out[0].size() == 0) return ok();
  return by_dtype(op, in[0].dtype, [&](auto t) {
    using T = decltype(t);
    if (in[0].size() == 0) return zeros(op, out[0].as<T>(), out[0].size(), stream);
    return status(op, launch_scatter<T>(p, in[0].as<T>(), in[1].data, bytes, out[0].as<T>(), stream));
  });
}

ffi::Error avg_pool(cudaStream_t stream, const Buffers& in, const Buffers& out, const PoolConfig& cfg) {
  const char* op = "avg_pool";
  Pool p;
  JAXPRIMS_TRY(arity(op, in, out, 1, 1));
  JAXPRIMS_TRY(read_dense(op, cfg, in[0], Side::kIn, out[0], Side::kOut, p));
  if (out[0].size() == 0) return ok();
  if (in[0].size() == 0) return bad("avg_pool: an empty image has no average");
  return by_dtype(op, in[0].dtype, [&](auto t) {
    using T = decltype(t);
    return status(op, launch_avg<T>(p, in[0].as<T>(), out[0].as<T>(), stream));
  });
}

ffi::Error avg_pool_dx(cudaStream_t stream, const Buffers& in, const Buffers& out, const PoolConfig& cfg) {
  const char* op = "avg_pool_dx";
  Pool p;
  JAXPRIMS_TRY(arity(op, in, out, 1, 1));
  JAXPRIMS_TRY(read_dense(op, cfg, in[0], Side::kOut, out[0], Side::kIn, p));
  if (out[0].size() == 0) return ok();
  return by_dtype(op, in[0].dtype, [&](auto t) {
    using T = decltype(t);
    if (in[0].size() == 0) return zeros(op, out[0].as<T>(), out[0].size(), stream);
    return status(op, launch_avg_dx<T>(p, in[0].as<T>(), out[0].as<T>(), stream));
  });
}

}  // namespace
}  // namespace jaxprims::pool

using jaxprims::pool::PoolConfig;
using jaxprims::Ints;
JAXPRIMS_CONFIG(PoolConfig, FIELD(Ints, in_size), FIELD(Ints, out_size), FIELD(Ints, window), FIELD(Ints, strides),
                FIELD(Ints, padding), FIELD(Ints, dilation), FIELD(int64_t, adaptive), FIELD(int64_t, channels_last),
                FIELD(int64_t, minimum), FIELD(int64_t, flat), FIELD(int64_t, divisor), FIELD(int64_t, batch_axes), FIELD(int64_t, data_mask),
                FIELD(int64_t, index_mask));

JAXPRIMS_HANDLER(max_pool, PoolConfig, jaxprims::pool::max_pool);
JAXPRIMS_HANDLER(max_pool_gather, PoolConfig, jaxprims::pool::max_pool_gather);
JAXPRIMS_HANDLER(max_pool_scatter, PoolConfig, jaxprims::pool::max_pool_scatter);
JAXPRIMS_HANDLER(avg_pool, PoolConfig, jaxprims::pool::avg_pool);
JAXPRIMS_HANDLER(avg_pool_dx, PoolConfig, jaxprims::pool::avg_pool_dx);
