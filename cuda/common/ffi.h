// The seam between XLA and the kernels: how a handler is declared, what it receives, how it answers.
//
// Every handler of jaxprims has one signature:
//     ffi::Error F(cudaStream_t stream, Buffers in, Buffers out, Config config)
// `in` and `out` are the custom call's operands and results in order (optional operands are simply absent, the config
// says which), a workspace is the last result. `config` is a struct decoded from the one attribute "config", which
// mirrors the Python dataclass field by field. A handler never allocates, synchronises or initialises: it can be
// recorded into a CUDA graph and says so.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jaxprims {
namespace ffi = xla::ffi;
using Ints = ffi::Span<const int64_t>;  // a tuple of ints in the config

// One operand or result: address, element type, row-major dimensions.
struct Buffer {
  void* data = nullptr;
  ffi::DataType dtype = ffi::DataType::INVALID;
  std::vector<int64_t> dims;
  int64_t size() const {
    int64_t n = 1;
    for (int64_t d : dims) n *= d;
    return n;
  }
  int rank() const { return static_cast<int>(dims.size()); }
  template <class T>
  T* as() const { return static_cast<T*>(data); }
};
using Buffers = std::vector<Buffer>;

inline Buffer to_buffer(const ffi::AnyBuffer& b) {
  Buffer r;
  r.data = b.untyped_data();
  r.dtype = b.element_type();
  for (int64_t d : b.dimensions()) r.dims.push_back(d);
  return r;
}

inline Buffers collect(ffi::RemainingArgs args) {
  Buffers r;
  for (size_t i = 0; i < args.size(); ++i) r.push_back(to_buffer(*args.get<ffi::AnyBuffer>(i)));
  return r;
}

inline Buffers collect(ffi::RemainingRets rets) {
  Buffers r;
  for (size_t i = 0; i < rets.size(); ++i) r.push_back(to_buffer(**rets.get<ffi::AnyBuffer>(i)));
  return r;
}

inline ffi::Error ok() { return ffi::Error::Success(); }
inline ffi::Error bad(const std::string& what) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, what); }
inline ffi::Error unsupported(const std::string& what) { return ffi::Error(ffi::ErrorCode::kUnimplemented, what); }

// What a launcher returns (always cudaGetLastError() after its last launch) as XLA's status.
inline ffi::Error status(const char* op, cudaError_t e) {
  if (e == cudaSuccess) return ok();
  return ffi::Error(ffi::ErrorCode::kInternal, std::string(op) + ": " + cudaGetErrorName(e) + ": " + cudaGetErrorString(e));
}

// Calls f(T{}) with the C++ type of a kernel dtype: float, __half or __nv_bfloat16.
template <class F>
ffi::Error by_dtype(const char* op, ffi::DataType dtype, F&& f) {
  switch (dtype) {
    case ffi::DataType::F32: return f(float{});
    case ffi::DataType::F16: return f(__half{});
    case ffi::DataType::BF16: return f(__nv_bfloat16{});
    default: return unsupported(std::string(op) + ": the kernels take float32, float16 and bfloat16");
  }
}
}  // namespace jaxprims

// JAXPRIMS_HANDLER(max_pool, MaxPoolConfig, run_max_pool) exports the symbol and FFI target jaxprims_max_pool.
// Put it at global scope; Config must have been given to JAXPRIMS_CONFIG before.
#define JAXPRIMS_HANDLER(op, Config, run)                                                                         \
  static ::xla::ffi::Error jaxprims_##op##_entry(cudaStream_t stream, ::xla::ffi::RemainingArgs args,             \
                                                 ::xla::ffi::RemainingRets rets, Config config) {                 \
    return run(stream, ::jaxprims::collect(args), ::jaxprims::collect(rets), config);                             \
  }                                                                                                               \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxprims_##op(XLA_FFI_CallFrame*);             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxprims_##op, jaxprims_##op##_entry,                                             \
                                ::xla::ffi::Ffi::Bind()                                                           \
                                    .Ctx<::xla::ffi::PlatformStream<cudaStream_t>>()                              \
                                    .RemainingArgs()                                                              \
                                    .RemainingRets()                                                              \
                                    .Attr<Config>("config"),                                                      \
                                {::xla::ffi::Traits::kCmdBufferCompatible})

// JAXPRIMS_CONFIG(jaxprims::MaxPoolConfig, FIELD(Ints, window), FIELD(int64_t, layout)) - global scope, fields in
// the order of the struct. The Python dictionary's keys are exactly these names.
#define FIELD(type, name) ::xla::ffi::StructMember<type>(#name)
#define JAXPRIMS_CONFIG(Config, ...) XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(Config, __VA_ARGS__)
