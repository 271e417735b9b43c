// Division by a number known before the launch, as one multiply and one shift (Hacker's Delight, ch. 10).
//   q = mulhi(n, m) + n >> s with m, s from the divisor; exact for 0 <= n < 2^31 and 1 <= d < 2^31.
#pragma once
#include <cstdint>

namespace jaxprims {

struct FastDiv {
  uint32_t d = 1, m = 0, s = 0;
  FastDiv() = default;
#ifdef __CUDACC__
  __host__ __device__
#endif
  explicit FastDiv(uint32_t divisor) : d(divisor) {
    while ((uint64_t{1} << s) < d) ++s;
    m = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << s) - d)) / d + 1);
  }
#ifdef __CUDACC__
  __device__ __forceinline__ uint32_t div(uint32_t n) const { return (__umulhi(n, m) + n) >> s; }
  __device__ __forceinline__ void divmod(uint32_t n, uint32_t& q, uint32_t& r) const {
    q = div(n);
    r = n - q * d;
  }
#endif
};

}  // namespace jaxprims
