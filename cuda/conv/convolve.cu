// One launch for each route of choose.h. A route that its GPU or driver refuses (cudaErrorInvalidValue) is taken out, and the
// choice made again.
#include "conv/convolve.h"

#include "conv/depthwise_launch.h"
#include "conv/first_launch.h"
#include "conv/grouped_launch.h"
#include "conv/implicit_gemm.h"
#include "conv/sm90_f32_launch.h"
#include "conv/sm90_launch.h"

namespace jaxprims {
namespace conv {

cudaError_t convolve(const Problem& p, void* workspace, int64_t bytes, cudaStream_t stream) {
  Usable usable;
  usable.sm90 = p.in_type == Type::kF32 ? sm90_f32_usable() : sm90_usable();
  usable.first = first_usable();
  for (;;) {
    const Choice c = choose(p, usable, bytes);
    cudaError_t e = cudaSuccess;
    switch (c.route) {
      case Route::kDepthwise: return depthwise_launch(p, c.depthwise, workspace, stream);
      case Route::kIm2col: return im2col_launch(p, c.im2col, workspace, stream);
      case Route::kGeneral: return launch(p, c.config, workspace, stream);
      case Route::kGrouped: e = grouped_launch(p, c.grouped, workspace, stream); break;
      case Route::kFirst: e = first_launch(p, c.first, workspace, stream); break;
      case Route::kSm90: e = sm90_launch(p, c.config.sm90, workspace, stream); break;
      case Route::kSm90F32: e = sm90_f32_launch(p, c.sm90_f32, stream); break;
    }
    if (e != cudaErrorInvalidValue) return e;
    (void)cudaGetLastError();
    if (c.route == Route::kGrouped) usable.grouped = false;     // a block has less shared memory than the plan needs
    else if (c.route == Route::kFirst) usable.first = false;    // likewise
    else usable.sm90 = false;                                   // the driver takes no tensor map of these arrays
  }
}

}  // namespace conv
}  // namespace jaxprims
