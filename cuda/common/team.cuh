// Threads that hold a row together: some lanes of a warp, a block, or a cluster of blocks. Their place in the row, reductions over
// them in a fixed order, and the launch.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace jaxprims {
namespace team {

struct Sum2 {
  float a, b;
};
__device__ __forceinline__ float shuffled(float v, int by) { return __shfl_xor_sync(0xffffffffu, v, by); }
__device__ __forceinline__ Sum2 shuffled(Sum2 v, int by) { return {shuffled(v.a, by), shuffled(v.b, by)}; }
__device__ __forceinline__ float from_lane(float v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
__device__ __forceinline__ Sum2 from_lane(Sum2 v, int lane) { return {from_lane(v.a, lane), from_lane(v.b, lane)}; }
__device__ __forceinline__ Sum2 operator+(Sum2 u, Sum2 v) { return {u.a + v.a, u.b + v.b}; }

// Who holds a row: 8 or 32 neighbouring lanes, a block, or a cluster of blocks.
constexpr int kBlock = 0, kCluster = -1;

// A thread's place in its row, and its row's in the grid.
template <int kGroup>
struct Team {
  int size, lane, per;     // threads of a row, this one's number, rows of a block
  int64_t row, top, step;  // this thread's first row, the block's first row, rows of the grid
  __device__ __forceinline__ explicit Team(int cluster) {
    if constexpr (kGroup == kCluster) {
      size = blockDim.x * cluster, per = 1;
      lane = threadIdx.x + blockIdx.x % cluster * blockDim.x;
      row = top = blockIdx.x / cluster;
      step = gridDim.x / cluster;
    } else {
      size = kGroup == kBlock ? blockDim.x : kGroup, per = blockDim.x / size;
      lane = threadIdx.x % size;
      top = static_cast<int64_t>(blockIdx.x) * per;
      row = top + threadIdx.x / size;
      step = static_cast<int64_t>(gridDim.x) * per;
    }
  }
};

__device__ __forceinline__ void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void store_remote(float* here, int block, float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(here));
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.f32 [there], %2;\n}\n" ::"r"(at),
               "r"(block), "f"(v)
               : "memory");
#endif
}
__device__ __forceinline__ void store_remote(Sum2* here, int block, Sum2 v) {
  store_remote(&here->a, block, v.a);
  store_remote(&here->b, block, v.b);
}

// One value a warp.
template <class S, int kGroup>
struct alignas(16) Scratch {
  S of[kGroup == kCluster ? 128 : 32];
};
struct Plus {
  template <class S>
  __device__ __forceinline__ S operator()(S a, S b) const { return a + b; }
};

// op over a row's threads, the same bits in each, by one barrier: two calls in turn use two scratches.
template <int kGroup, class S, class F>
__device__ __forceinline__ S row_reduce(S v, F op, Scratch<S, kGroup>& scratch, int cluster) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
#pragma unroll
  for (int o = (kGroup <= 0 ? 32 : kGroup) >> 1; o > 0; o >>= 1) v = op(v, shuffled(v, o));
  if constexpr (kGroup == kBlock) {
    if (lane == 0) scratch.of[warp] = v;
    __syncthreads();
    constexpr int kAtOnce = 16 / sizeof(S);
#pragma unroll
    for (int w = 0; w < 32; w += kAtOnce) {
      if (w >= warps) break;
      S part[kAtOnce];  // one load
      const float4 u = *reinterpret_cast<const float4*>(scratch.of + w);
      memcpy(part, &u, 16);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (w + i < warps) v = w + i == 0 ? part[0] : op(v, part[i]);
    }
  } else if constexpr (kGroup == kCluster) {  // every warp's value to all blocks; each warp reduces them all
    if (lane < cluster) store_remote(&scratch.of[static_cast<int>(blockIdx.x % cluster) * warps + warp], lane, v);
    cluster_sync();
    v = scratch.of[lane % (cluster * warps)];
    for (int w = lane + 32; w < cluster * warps; w += 32) v = op(v, scratch.of[w]);
    const int many = cluster * warps < 32 ? cluster * warps : 32;  // lanes with values of their own
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
      const S other = shuffled(v, o);
      if (((lane ^ o) < many) && lane < many) v = op(v, other);
    }
    v = from_lane(v, 0);
  }
  return v;
}
template <int kGroup, class S>
__device__ __forceinline__ S row_sum(S v, Scratch<S, kGroup>& scratch, int cluster) {
  return row_reduce<kGroup>(v, Plus{}, scratch, cluster);
}

// Whether the current device runs kernels in clusters of blocks.
bool clusters_usable();

// A kernel on `blocks` blocks of `threads`, in clusters of `cluster`, with `bytes` of dynamic shared memory.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int cluster, int bytes, cudaStream_t stream,
                   const Arguments&... arguments) {
  if (bytes > 32 * 1024) {  // beside what is static
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e != cudaSuccess) return e;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  const cudaError_t e = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  return e == cudaSuccess ? cudaGetLastError() : e;
}

}  // namespace team
}  // namespace jaxprims
