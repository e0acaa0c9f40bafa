// Products of a host with weights in panels, for rows of float32.
//
// It is compiled on the machine that runs it, by mrlhf/host/library.py. What a row gets does not
// depend on the other rows, nor on the number of threads, to the last bit.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "panels.h"

namespace {

// out [rows, columns] = x [rows, size] times the weight, plus the bias if there is one. Threads share
// out blocks of rows and runs of panels; one thread keeps a run in its cache for all rows.
void multiply(const float* x, const float* panels, const float* bias, float* out, int64_t rows, int64_t size,
              int64_t columns, int threads) {
    const int64_t count = (columns + kPanel - 1) / kPanel;
    const int64_t at_once = std::min(kPanels, (count + threads - 1) / threads);
    std::vector<const float*> x_rows(rows);
    for (int64_t r = 0; r < rows; ++r) x_rows[r] = x + r * size;

#pragma omp parallel for num_threads(threads) if (threads > 1) collapse(2)
    for (int64_t low = 0; low < count; low += at_once)
        for (int64_t first = 0; first < rows; first += kRowBlock)
            for (int64_t p = low; p < std::min(count, low + at_once); ++p) {
                const int64_t begin = p * kPanel, width = std::min(kPanel, columns - begin);
                times_panel(x_rows.data() + first, std::min(kRowBlock, rows - first), panels + p * size * kPanel, size,
                            [&](int64_t r, const float* sums) {
                                float* to = out + (first + r) * columns + begin;
                                for (int64_t i = 0; i < width; ++i) to[i] = sums[i] + (bias ? bias[begin + i] : 0.0f);
                            });
            }
}

}  // namespace

extern "C" int64_t columns_of_a_panel() { return kPanel; }

extern "C" void multiply_float32(const float* x, const float* panels, const float* bias, float* out, int64_t rows,
                                 int64_t size, int64_t columns, int threads) {
    multiply(x, panels, bias, out, rows, size, columns, threads);
}
