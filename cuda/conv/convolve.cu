// One launch for each route of choose.h.
#include "conv/convolve.h"

#include "conv/depthwise_launch.h"
#include "conv/first_launch.h"
#include "conv/implicit_gemm.h"
#include "conv/sm90_launch.h"

namespace jaxprims {
namespace conv {

cudaError_t convolve(const Problem& p, void* workspace, int64_t bytes, cudaStream_t stream) {
  bool sm90 = sm90_usable(), first = first_usable();
  for (;;) {
    const Choice c = choose(p, sm90, bytes, first);
    switch (c.route) {
      case Route::kDepthwise: return depthwise_launch(p, c.depthwise, workspace, stream);
      case Route::kIm2col: return im2col_launch(p, c.im2col, workspace, stream);
      case Route::kGeneral: return launch(p, c.config, workspace, stream);
      case Route::kSm90:
      case Route::kFirst: break;
    }
    const bool of_first = c.route == Route::kFirst;
    const cudaError_t e = of_first ? first_launch(p, c.first, workspace, stream) : sm90_launch(p, c.config.sm90, workspace, stream);
    if (e != cudaErrorInvalidValue) return e;
    (void)cudaGetLastError();
    if (of_first) first = false;  // a block has less shared memory than the plan needs
    else sm90 = false;            // the driver takes no tensor map of these arrays: the kernels without one do
  }
}

}  // namespace conv
}  // namespace jaxprims
