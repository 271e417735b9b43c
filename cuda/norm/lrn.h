// Which local response norms run in registers (lrn_vector.cu), and their launcher.
#pragma once
#include "norm/problem.h"

namespace jaxprims {
namespace norm {

// Why not; null where it does. bytes: of an element; aligned: every array starts at a multiple of 16 bytes.
inline const char* lrn_vector_refuses(const LrnShape& s, int64_t bytes, bool aligned) {
  if (s.inner != 1) return "channels are not innermost";
  if (s.size != 5) return "the window is not of five channels";
  if (s.channels % (16 / bytes) != 0 || !aligned) return "rows are not of whole 16-byte vectors";
  const int64_t total = s.outer * s.channels;
  if (s.x_period != total || s.d_period != total) return "an operand lacks a batch axis";
  if (total / (16 / bytes) >= int64_t{1} << 31) return "more than 2^31 vectors";
  return nullptr;
}

// Forward, or backward where dy is given.
cudaError_t lrn_vector(ffi::DataType dtype, const void* x, const void* dy, void* out, const LrnShape& s, cudaStream_t stream);

}  // namespace norm
}  // namespace jaxprims
