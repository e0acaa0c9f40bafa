// A product of linear.cpp as other libraries call it, and how many threads some work is worth.

#pragma once

#include <cstdint>

namespace {

// As `threads_for` of library.py: starting a team costs some microseconds.
inline int threads_for(int64_t elements, int threads) { return elements >= (1 << 14) ? threads : 1; }

// x [rows, size] times a weight in panels, plus the bias if there is one: [rows, columns].
struct Product {
    void (*multiply)(const float* x, const float* panels, const float* bias, float* out, int64_t rows, int64_t size,
                     int64_t columns, int threads);
    const float *panels, *bias;
    int64_t size, columns;

    void operator()(const float* x, float* out, int64_t rows, int threads) const {
        multiply(x, panels, bias, out, rows, size, columns, threads_for(rows * size * columns / 4, threads));
    }
};

}  // namespace
