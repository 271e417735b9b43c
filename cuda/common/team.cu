// Whether the device has clusters of blocks.
#include "common/team.cuh"

#include <atomic>

namespace jaxprims {
namespace team {

bool clusters_usable() {
#ifdef JAXPRIMS_SM90A
  static std::atomic<int> known[64] = {};  // by device: 1 yes, -1 no
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= 64) return false;
  if (const int before = known[device].load(std::memory_order_relaxed); before != 0) return before > 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return false;
  known[device].store(major == 9 ? 1 : -1, std::memory_order_relaxed);
  return major == 9;
#else
  return false;
#endif
}

}  // namespace team
}  // namespace jaxprims
