// RMSNorm, with the residual sum before it.

#pragma once

#include <cmath>
#include <cstdint>

#include "numbers.h"

namespace {

// Adds delta to hidden, if there is one, and writes the RMSNorm of the sum to out; [tokens, size] each.
// scales [tokens], if it is given, gets 1 / sqrt(mean of squares + eps).
template <typename T>
void add_rms_norm(T* hidden, const T* delta, const T* weight, T* out, float* scales, int64_t tokens,
                  int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < tokens; ++t) {
        T* h = hidden + t * size;
        T* o = out + t * size;
        float squares = 0.0f;
        if (delta) {
            const T* d = delta + t * size;
#pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < size; ++i) {
                const float sum = rounded<T>(widen(h[i]) + widen(d[i]));
                store(h + i, sum);
                squares += sum * sum;
            }
        } else {
#pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < size; ++i) squares += widen(h[i]) * widen(h[i]);
        }
        const float scale = 1.0f / std::sqrt(squares / float(size) + eps);
        if (scales) scales[t] = scale;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) store(o + i, widen(weight[i]) * rounded<T>(widen(h[i]) * scale));
    }
}

}  // namespace
