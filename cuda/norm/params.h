// The config of the norm ops, and the names of their arrays (jaxprims/norm/params.py has the same list in the same order).
#pragma once
#include "common/ffi.h"

namespace jaxprims {

struct NormConfig {
  int64_t rank;     // axes of the index space
  Ints reduce;      // the axes a statistic is taken over
  Ints operands;    // for each operand: name, number of axes, axes
  Ints results;     // the same for each result
  double eps;
  int64_t rms;         // 1: no mean, var is the mean square
  int64_t activation;  // enum Act
  int64_t fixed;       // 1: mean and var are given, not functions of x
};

struct LrnConfig {
  int64_t axis_from_end;  // 1: channels innermost
  int64_t size;
  double alpha, beta, k;  // alpha is the factor of the sum
};

namespace norm {
enum Name : int {
  kX, kScale, kBias, kResidual, kMask, kMean, kVar, kLow, kDy, kXd, kScaled, kBiasd, kResiduald, kMeand, kVard, kCmean, kCvar,
  kY, kCount, kDx, kDscale, kDbias, kDresidual, kDmean, kDvar, kYd, kTmean, kTvar, kNames,
};
}  // namespace norm
}  // namespace jaxprims

JAXPRIMS_CONFIG(jaxprims::NormConfig, FIELD(int64_t, rank), FIELD(jaxprims::Ints, reduce), FIELD(jaxprims::Ints, operands),
                FIELD(jaxprims::Ints, results), FIELD(double, eps), FIELD(int64_t, rms), FIELD(int64_t, activation),
                FIELD(int64_t, fixed));
JAXPRIMS_CONFIG(jaxprims::LrnConfig, FIELD(int64_t, axis_from_end), FIELD(int64_t, size), FIELD(double, alpha),
                FIELD(double, beta), FIELD(double, k));
