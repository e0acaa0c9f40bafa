// Draws tokens from logits; sums over a whole vocabulary are float64.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "numbers.h"

namespace {

constexpr int64_t kColumns = 128;  // columns of the vocabulary that form a block

// Writes for each block of columns the highest scaled logit, and after those of all rows the sum of
// exp(logit - that highest). A block past the last column has no weight.
template <typename T>
void logit_blocks(const T* logits, float scale, float* summaries, int64_t rows, int64_t columns, int64_t blocks,
                  int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t b = 0; b < blocks; ++b) {
            const T* x = logits + r * columns + b * kColumns;
            const int64_t count = std::min(kColumns, columns - b * kColumns);
            float scaled[kColumns];
            float top = -INFINITY;
#pragma omp simd reduction(max : top)
            for (int64_t i = 0; i < count; ++i) {
                scaled[i] = widen(x[i]) * scale;
                top = scaled[i] > top ? scaled[i] : top;
            }
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < count; ++i) sum += exponential(scaled[i] - top);
            summaries[r * blocks + b] = top;
            summaries[(rows + r) * blocks + b] = sum;
        }
    }
}

// Finds the block, of all ranks' one after the other, in which the running sum of exp(logit - top)
// passes `uniform` times the whole, and on the rank of that block the column; the other ranks write
// zeros. If rounding leaves the sum below the target, the last that has weight is taken. A `uniform`
// below 0 takes the likeliest token.
template <typename T>
void draw(const T* logits, float scale, const float* summaries, const double* uniform, int64_t* tokens, float* logprobs,
          int64_t ranks, int64_t rank, int64_t first, int64_t rows, int64_t columns, int64_t blocks, int threads) {
    const int64_t all = ranks * blocks;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> highest(all);
        std::vector<double> weights(all);
#pragma omp for
        for (int64_t r = 0; r < rows; ++r) {
            const bool greedy = uniform[r] < 0.0;
            int64_t block = 0;
            for (int64_t i = 0; i < all; ++i) {
                highest[i] = summaries[(i / blocks * 2 * rows + r) * blocks + i % blocks];
                if (highest[i] > highest[block]) block = i;
            }
            const float top = highest[block];
            double total = 0.0;
            for (int64_t i = 0; i < all; ++i) {
                const float sum = summaries[((i / blocks * 2 + 1) * rows + r) * blocks + i % blocks];
                weights[i] = double(sum) * std::exp(double(highest[i]) - double(top));
                total += weights[i];
            }

            const double target = uniform[r] * total;
            double before = 0.0, weight = 0.0;
            for (int64_t i = 0; i < all && !greedy; ++i) {
                if (!(weights[i] > 0.0)) continue;
                before += weight;
                block = i;
                weight = weights[i];
                if (before + weight > target) break;
            }

            tokens[r] = 0;
            logprobs[r] = 0.0f;
            if (block / blocks != rank) continue;
            const T* x = logits + r * columns;
            const int64_t begin = block % blocks * kColumns, end = std::min(columns, begin + kColumns);
            const double share = std::exp(double(highest[block]) - double(top));
            int64_t column = begin;
            for (int64_t i = begin; i < end; ++i) {
                const float scaled = widen(x[i]) * scale;
                if (greedy && scaled != top) continue;
                const double mass = double(exponential(scaled - highest[block])) * share;
                if (!(mass > 0.0)) continue;
                column = i;
                before += mass;
                if (greedy || before > target) break;
            }
            tokens[r] = first + column;
            logprobs[r] = float(double(widen(x[column]) * scale) - double(top) - std::log(total));
        }
    }
}

}  // namespace
