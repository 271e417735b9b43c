// Which softmax kernel takes a contiguous row. Pure: no CUDA, no state.
#pragma once
#include <cstdint>

namespace jaxprims {

// Threads of a row and how many 16-byte vectors each of them keeps in registers.
struct RowShape {
  int threads, vectors;  // threads: 32 (eight rows a block), 256 or 1024; 0: the row does not fit
};

// `n` elements of which V make a vector; `pair`: two operands are kept. A row that does not start at a multiple of V reaches over up to one
// vector more. A warp up to 1024 elements: no barrier at all. 256 threads as long as 16 elements a thread do: that many leave
// registers for 2048 threads per SM; then 32 elements; then a block of 1024, the most that one barrier can hold together.
inline RowShape row_shape(int64_t n, int V, bool pair) {
  const int64_t vectors = n % V == 0 ? n / V : (n + V - 1) / V + 1;
  const int few = 16 / V, many = 32 / V;
  if (vectors <= 32) return {32, 1};
  if (vectors <= 32 * many) return {32, many};
  if (vectors <= 256 * few) return {256, few};
  if (vectors <= 256 * many) return {256, many};
  if (vectors <= 1024 * (pair ? few : many)) return {1024, pair ? few : many};
  return {0, 0};
}

}  // namespace jaxprims
