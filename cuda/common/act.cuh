// Activations by code (jaxprims/core/activations.py has the same codes and the names), and their slope at z.
//   apply(code, z) and slope(code, z) compute in float32 with the formulas of jax.nn; NaN passes through.
#pragma once
#include <cmath>

namespace jaxprims {

enum class Act : int {
  kNone = 0, kRelu = 1, kRelu6 = 2, kLeakyRelu = 3, kElu = 4, kSelu = 5, kSigmoid = 6, kTanh = 7, kSilu = 8, kGelu = 9,
  kGeluExact = 10, kSoftplus = 11, kHardSigmoid = 12, kHardSilu = 13, kHardTanh = 14, kMish = 15, kSoftSign = 16,
  kLogSigmoid = 17,
};
constexpr int kActCount = 18;

namespace act {
constexpr float kSeluAlpha = 1.6732632423543772848170429916717f;
constexpr float kSeluScale = 1.0507009873554804934193349852946f;
constexpr float kGeluA = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float kGeluB = 0.044715f;

__device__ __forceinline__ float sigmoid(float z) {
  const float e = expf(-fabsf(z));  // never overflows
  return (z >= 0.f ? 1.f : e) / (1.f + e);
}
// sigmoid'(z) = s(z) s(-z): no 1 - s that would lose a small slope.
__device__ __forceinline__ float sigmoid_slope(float z) {
  const float e = expf(-fabsf(z)), d = 1.f + e;
  return e / (d * d);
}
__device__ __forceinline__ float softplus(float z) { return z != z ? z : fmaxf(z, 0.f) + log1pf(expf(-fabsf(z))); }
__device__ __forceinline__ float clip(float z, float lo, float hi) { return z != z ? z : fminf(fmaxf(z, lo), hi); }
}  // namespace act

// Not inlined on purpose where a kernel calls it once per element: one switch on a uniform value.
__device__ inline float act_apply(Act code, float z) {
  using namespace act;
  switch (code) {
    case Act::kNone: return z;
    case Act::kRelu: return z > 0.f || z != z ? z : 0.f;
    case Act::kRelu6: return clip(z, 0.f, 6.f);
    case Act::kLeakyRelu: return z >= 0.f ? z : 0.01f * z;
    case Act::kElu: return z > 0.f ? z : expm1f(z);
    case Act::kSelu: return kSeluScale * (z > 0.f ? z : kSeluAlpha * expm1f(z));
    case Act::kSigmoid: return sigmoid(z);
    case Act::kTanh: return tanhf(z);
    case Act::kSilu: return z * sigmoid(z);
    case Act::kGelu: return 0.5f * z * (1.f + tanhf(kGeluA * (z + kGeluB * z * z * z)));
    case Act::kGeluExact: return 0.5f * z * erfcf(-z * 0.70710678118654752440f);
    case Act::kSoftplus: return softplus(z);
    case Act::kHardSigmoid: return clip(z + 3.f, 0.f, 6.f) / 6.f;
    case Act::kHardSilu: return z * (clip(z + 3.f, 0.f, 6.f) / 6.f);  // z * 6 could overflow
    case Act::kHardTanh: return clip(z, -1.f, 1.f);
    case Act::kMish: return z * tanhf(softplus(z));
    case Act::kSoftSign: return z / (1.f + fabsf(z));
    case Act::kLogSigmoid: return -softplus(-z);
  }
  return z;
}

__device__ inline float act_slope(Act code, float z) {
  using namespace act;
  switch (code) {
    case Act::kNone: return 1.f;
    case Act::kRelu: return z > 0.f ? 1.f : 0.f;
    case Act::kRelu6: return z > 0.f && z < 6.f ? 1.f : 0.f;
    case Act::kLeakyRelu: return z >= 0.f ? 1.f : 0.01f;
    case Act::kElu: return z > 0.f ? 1.f : expf(z);
    case Act::kSelu: return kSeluScale * (z > 0.f ? 1.f : kSeluAlpha * expf(z));
    case Act::kSigmoid: return sigmoid_slope(z);
    case Act::kTanh: return 4.f * sigmoid_slope(2.f * z);  // 1 / cosh^2
    case Act::kSilu: { const float s = sigmoid(z); return s * (1.f + z * (1.f - s)); }
    case Act::kGelu: {
      if (fabsf(z) > 12.f) return z > 0.f ? 1.f : 0.f;  // tanh is +-1; z * z may overflow
      const float t = tanhf(kGeluA * (z + kGeluB * z * z * z));
      return 0.5f * (1.f + t) + 0.5f * z * (1.f - t * t) * kGeluA * (1.f + 3.f * kGeluB * z * z);
    }
    case Act::kGeluExact:
      return 0.5f * erfcf(-z * 0.70710678118654752440f) + z * 0.39894228040143267794f * expf(-0.5f * z * z);
    case Act::kSoftplus: return sigmoid(z);
    case Act::kHardSigmoid: return z > -3.f && z < 3.f ? 1.f / 6.f : 0.f;
    case Act::kHardSilu: return z <= -3.f ? 0.f : z >= 3.f ? 1.f : (2.f * z + 3.f) / 6.f;
    case Act::kHardTanh: return z >= -1.f && z <= 1.f ? 1.f : 0.f;
    case Act::kMish: {
      const float t = tanhf(softplus(z));
      return t + z * (1.f - t * t) * sigmoid(z);
    }
    case Act::kSoftSign: { const float d = 1.f + fabsf(z); return 1.f / (d * d); }
    case Act::kLogSigmoid: return sigmoid(-z);
  }
  return 1.f;
}

}  // namespace jaxprims
