// RMSNorm and the gated activation, forward and backward.
//
// They see rows of numbers and no model. The rows of a result do not depend on each other.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

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

// A float sums at most so many rows. Sums of blocks are added up apart, since the error of a sum
// grows with the number of additions.
constexpr int64_t BLOCK = 1024;

// The gradients of x, and of the weight in float32; each thread sums the rows of its share.
template <typename T>
void rms_norm_backward(const T* grad, const T* x, const T* weight, const float* scales, T* grad_x, float* grad_weight,
                       int64_t rows, int64_t size, int threads) {
    std::vector<float> sums(2 * size_t(threads) * size, 0.0f);
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int64_t share = 0; share < threads; ++share) {
        float* total = sums.data() + 2 * share * size;
        float* sum = total + size;
        const int64_t begin = rows * share / threads;
        const int64_t end = rows * (share + 1) / threads;
        for (int64_t r = begin; r < end; ++r) {
            const T* g = grad + r * size;
            const T* in = x + r * size;
            T* to = grad_x + r * size;
            const float scale = scales[r];
            float product = 0.0f;
#pragma omp simd reduction(+ : product)
            for (int64_t i = 0; i < size; ++i) {
                const float normed = widen(in[i]) * scale;
                sum[i] += widen(g[i]) * rounded<T>(normed);
                product += rounded<T>(widen(g[i]) * widen(weight[i])) * normed;
            }
            const float mean = product / float(size);
#pragma omp simd
            for (int64_t i = 0; i < size; ++i) {
                const float inner = rounded<T>(widen(g[i]) * widen(weight[i]));
                store(to + i, scale * (inner - widen(in[i]) * scale * mean));
            }
            if ((r + 1 - begin) % BLOCK == 0 || r + 1 == end) {
                for (int64_t i = 0; i < size; ++i) {
                    total[i] += sum[i];
                    sum[i] = 0.0f;
                }
            }
        }
    }

    std::fill(grad_weight, grad_weight + size, 0.0f);
    for (int64_t share = 0; share < threads; ++share)
        for (int64_t i = 0; i < size; ++i) grad_weight[i] += sums[2 * share * size + i];
}

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

template <typename T>
void gated_backward(const T* grad, const T* gate_up, T* grad_gate_up, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; ++r) {
        const T* from = grad + r * size;
        const T* gate = gate_up + r * 2 * size;
        const T* up = gate + size;
        T* grad_gate = grad_gate_up + r * 2 * size;
        T* grad_up = grad_gate + size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            const float g = widen(gate[i]);
            const float sigmoid = 1.0f / (1.0f + exponential(-g));
            const float inner = rounded<T>(widen(from[i]) * widen(up[i]));
            store(grad_gate + i, inner * sigmoid * (1.0f + g * (1.0f - sigmoid)));
            store(grad_up + i, widen(from[i]) * rounded<T>(g * sigmoid));
        }
    }
}

}  // namespace
