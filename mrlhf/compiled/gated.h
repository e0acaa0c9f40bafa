// The gated activation, which trainer and engine share, so that both compute the same numbers.

#pragma once

#include <cstdint>

#include "numbers.h"

namespace {

// out = silu(gate) * up, where each row of gate_up has all gate columns before all up columns.
template <typename T>
void gated(const T* gate_up, T* out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; ++r) {
        const T* gate = gate_up + r * 2 * size;
        const T* up = gate + size;
        T* to = out + r * size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            const float g = widen(gate[i]);
            store(to + i, rounded<T>(g / (1.0f + exponential(-g))) * widen(up[i]));
        }
    }
}

}  // namespace
