// Draws tokens from logits; sums over a whole vocabulary are float64.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "numbers.h"

namespace {

constexpr int64_t kColumns = 128;  // columns of the vocabulary that form a block

// One pass over a row of logits. Returns the column of the highest scaled logit. Writes for each
// block of columns the highest scaled logit and the sum of exp(logit - that highest).
template <typename T>
int64_t blocks_of_row(const T* logits, float scale, float* block_highest, float* block_sums, int64_t columns) {
    float best = -INFINITY;
    int64_t best_start = 0;
    for (int64_t start = 0, b = 0; start < columns; start += kColumns, ++b) {
        const T* x = logits + start;
        const int64_t count = std::min(kColumns, columns - start);
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
        block_highest[b] = top;
        block_sums[b] = sum;
        if (top > best) {
            best = top;
            best_start = start;
        }
    }
    int64_t found = best_start;
    while (found + 1 < std::min(columns, best_start + kColumns) && widen(logits[found]) * scale != best) ++found;
    return found;
}

// The column at which the running sum of exp(logit - top) passes `target`; -1 if no column has any
// weight. If rounding leaves the sum below the target, take the last column that has weight.
template <typename T>
int64_t pick_in_row(const T* logits, float scale, const float* block_highest, const float* block_sums, float top,
                    double target, int64_t columns) {
    double before = 0.0, weight = 0.0;
    int64_t chosen = -1;
    for (int64_t start = 0, b = 0; start < columns; start += kColumns, ++b) {
        const double mass = double(block_sums[b]) * std::exp(double(block_highest[b]) - double(top));
        if (!(mass > 0.0)) continue;
        before += weight;
        chosen = b;
        weight = mass;
        if (before + weight > target) break;
    }
    if (chosen < 0) return -1;
    const double highest = std::exp(double(block_highest[chosen]) - double(top));
    int64_t column = -1;
    for (int64_t i = chosen * kColumns; i < std::min(columns, (chosen + 1) * kColumns); ++i) {
        const double mass = double(exponential(widen(logits[i]) * scale - block_highest[chosen])) * highest;
        if (!(mass > 0.0)) continue;
        column = i;
        before += mass;
        if (before > target) break;
    }
    return column;
}

template <typename T>
void logit_blocks(const T* logits, float scale, float* block_highest, float* block_sums, int64_t* likeliest,
                  int64_t rows, int64_t columns, int threads) {
    const int64_t blocks = (columns + kColumns - 1) / kColumns;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; ++r)
        likeliest[r] = blocks_of_row(logits + r * columns, scale, block_highest + r * blocks, block_sums + r * blocks,
                                     columns);
}

// As pick_in_row for each row; a row with a target below 0 is skipped and gets -1.
template <typename T>
void pick(const T* logits, float scale, const float* block_highest, const float* block_sums, const float* tops,
          const double* targets, int64_t* tokens, float* chosen, int64_t rows, int64_t columns, int threads) {
    const int64_t blocks = (columns + kColumns - 1) / kColumns;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; ++r) {
        const T* x = logits + r * columns;
        tokens[r] = targets[r] < 0 ? -1
                                   : pick_in_row(x, scale, block_highest + r * blocks, block_sums + r * blocks, tops[r],
                                                 targets[r], columns);
        chosen[r] = tokens[r] < 0 ? 0.0f : widen(x[tokens[r]]) * scale;
    }
}

// Draws from logits of the whole vocabulary: one token for each row, and its log-probability. A
// `uniform` below 0 takes the likeliest token.
template <typename T>
void draw(const T* logits, float scale, const double* uniform, int64_t* tokens, float* logprobs, int64_t rows,
          int64_t columns, int threads) {
    const int64_t blocks = (columns + kColumns - 1) / kColumns;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> highest(blocks), sums(blocks);
#pragma omp for
        for (int64_t r = 0; r < rows; ++r) {
            const T* x = logits + r * columns;
            const int64_t likeliest = blocks_of_row(x, scale, highest.data(), sums.data(), columns);
            const float top = widen(x[likeliest]) * scale;
            double total = 0.0;
            for (int64_t b = 0; b < blocks; ++b)
                total += double(sums[b]) * std::exp(double(highest[b]) - double(top));
            const int64_t token = uniform[r] < 0 ? likeliest
                                                 : pick_in_row(x, scale, highest.data(), sums.data(), top,
                                                               uniform[r] * total, columns);
            tokens[r] = std::max<int64_t>(0, token);
            logprobs[r] = float(double(widen(x[tokens[r]]) * scale) - double(top) - std::log(total));
        }
    }
}

}  // namespace
