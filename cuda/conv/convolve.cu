// One launch for each route of choose.h.
#include "conv/convolve.h"

#include "conv/depthwise_launch.h"
#include "conv/implicit_gemm.h"
#include "conv/sm90_f32_launch.h"
#include "conv/sm90_launch.h"

namespace jaxprims {
namespace conv {

cudaError_t convolve(const Problem& p, void* workspace, int64_t bytes, cudaStream_t stream) {
  bool sm90 = p.in_type == Type::kF32 ? sm90_f32_usable() : sm90_usable();
  for (;;) {
    const Choice c = choose(p, sm90, bytes);
    switch (c.route) {
      case Route::kDepthwise: return depthwise_launch(p, c.depthwise, workspace, stream);
      case Route::kIm2col: return im2col_launch(p, c.im2col, workspace, stream);
      case Route::kGeneral: return launch(p, c.config, workspace, stream);
      case Route::kSm90:
      case Route::kSm90F32: break;
    }
    const cudaError_t e = c.route == Route::kSm90F32 ? sm90_f32_launch(p, c.sm90_f32, stream)
                                                     : sm90_launch(p, c.config.sm90, workspace, stream);
    if (e != cudaErrorInvalidValue) return e;
    (void)cudaGetLastError();  // the driver takes no tensor map of these arrays: the kernels without one do
    sm90 = false;
  }
}

}  // namespace conv
}  // namespace jaxprims
