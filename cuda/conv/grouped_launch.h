// The door to the kernels of grouped convolutions (grouped.h), and how some of them ask for their shared memory.
#pragma once
#include <cuda_runtime.h>

#include <atomic>

#include "conv/depthwise_launch.h"
#include "conv/grouped.h"

namespace jaxprims {
namespace conv {

// Lets a kernel have more than 48 KB of shared memory: once on each device.
class SharedMemory {
 public:
  cudaError_t allow(const void* kernel, int most) {
    int device = 0;
    cudaError_t e = cudaGetDevice(&device);
    if (e != cudaSuccess) return e;
    const uint64_t bit = uint64_t{1} << (device & 63);
    if (device < 64 && (done_.load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    if (e == cudaSuccess && device < 64) done_.fetch_or(bit, std::memory_order_release);
    return e;
  }

 private:
  std::atomic<uint64_t> done_{0};
};

cudaError_t band_launch(const Problem& p, const BandPlan& d, cudaStream_t stream);
cudaError_t wide_launch(const Problem& p, const WidePlan& d, cudaStream_t stream);
cudaError_t row_wgrad_launch(const Problem& p, const RowWgradPlan& d, void* workspace, cudaStream_t stream);  // then its sums
cudaError_t narrow_launch(const Problem& p, const NarrowPlan& d, cudaStream_t stream);

// workspace: the bytes that the plan was told of.
inline cudaError_t grouped_launch(const Problem& p, const GroupedPlan& d, void* workspace, cudaStream_t stream) {
  switch (d.kernel) {
    case Grouped::kBand: return band_launch(p, d.band, stream);
    case Grouped::kWide: return wide_launch(p, d.wide, stream);
    case Grouped::kNarrow: return narrow_launch(p, d.narrow, stream);
    case Grouped::kRowWgrad: return row_wgrad_launch(p, d.wgrad, workspace, stream);
    case Grouped::kDepthwise: return depthwise_launch(p, d.depthwise, workspace, stream);
    case Grouped::kNone: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace conv
}  // namespace jaxprims
