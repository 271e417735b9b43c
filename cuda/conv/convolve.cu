// One launch for each route of choose.h.
#include "conv/convolve.h"

#include "conv/depthwise_launch.h"
#include "conv/grouped_launch.h"
#include "conv/implicit_gemm.h"
#include "conv/sm90_launch.h"

namespace jaxprims {
namespace conv {

cudaError_t convolve(const Problem& p, void* workspace, int64_t bytes, cudaStream_t stream) {
  bool sm90 = sm90_usable(), grouped = true;
  for (;;) {
    const Choice c = choose(p, sm90, bytes, grouped);
    switch (c.route) {
      case Route::kDepthwise: return depthwise_launch(p, c.depthwise, workspace, stream);
      case Route::kIm2col: return im2col_launch(p, c.im2col, workspace, stream);
      case Route::kGeneral: return launch(p, c.config, workspace, stream);
      case Route::kSm90:
      case Route::kGrouped: break;
    }
    if (c.route == Route::kGrouped) {
      const cudaError_t e = grouped_launch(p, c.grouped, workspace, stream);
      if (e != cudaErrorInvalidValue) return e;
      (void)cudaGetLastError();  // a block has less shared memory here
      grouped = false;
      continue;
    }
    const cudaError_t e = sm90_launch(p, c.config.sm90, workspace, stream);
    if (e != cudaErrorInvalidValue) return e;
    (void)cudaGetLastError();  // the driver takes no tensor map of these arrays: the kernels without one do
    sm90 = false;
  }
}

}  // namespace conv
}  // namespace jaxprims
