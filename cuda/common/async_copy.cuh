// cp.async, sm_80 and later: copies from global to shared memory that a thread starts, and waits for by groups of its own.
#pragma once
#include <cstdint>

namespace jaxprims {

// Bytes (16, or 4) to the shared address `to`, of which the first `take` are read and the others are zeros.
template <int Bytes = 16>
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int take) {
  static_assert(Bytes == 16 || Bytes == 4, "16 bytes pass by the L1 cache, 4 do not");
  if constexpr (Bytes == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(take) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(take) : "memory");
}
// Ends a group / waits until at most Pending groups are under way.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace jaxprims
