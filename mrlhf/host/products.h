// Products with weights in panels of columns: of a linear layer, and of a mixture of experts.
//
// A panel is [size, kPanel]: kPanel columns of the transposed weight, in the order in which they are
// read. bfloat16 is widened in registers, which saves memory and halves what is read. Each sum has one
// order: what a row gets does not depend on the other rows, nor on the number of threads, to the last
// bit.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "numbers.h"

namespace products {

using Lanes = Vectors<kWidest>::Lanes;

constexpr int64_t kLanes = kWidest;
constexpr int kRows = kWidest == 16 ? 12 : 6;  // whose sums fit into the registers, two vectors each
constexpr int64_t kPanel = 2 * kLanes;  // columns of a panel
constexpr int64_t kRowBlock = 96;       // rows that stay in the cache while they meet some panels
constexpr int64_t kPanels = 8;          // panels that one thread computes at a time, at most

// out [kR, kPanel] = x [kR, size] times a panel [size, kPanel]. Each sum has one order, whatever kR
// is, and so whatever other rows there are. Meanwhile memory is fetched from `next` on, `step`
// numbers for each row of the panel.
template <typename W, int kR>
void tile(const float* const* x, const W* panel, int64_t size, const W* next, int64_t step, float* out) {
    Lanes sums[kR][2] = {};
    for (int64_t i = 0; i < size; ++i) {
        const W* row = panel + i * kPanel;
        __builtin_prefetch(next + i * step, 0, 3);
        const Lanes low = load<kLanes>(row), high = load<kLanes>(row + kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < kR; ++r) {
            sums[r][0] += x[r][i] * low;
            sums[r][1] += x[r][i] * high;
        }
    }
    for (int r = 0; r < kR; ++r) {
        save<kLanes>(out + r * kPanel, sums[r][0]);
        save<kLanes>(out + r * kPanel + kLanes, sums[r][1]);
    }
}

template <typename W, int... kCounts>
inline void tile_of(int rows, const float* const* x, const W* panel, int64_t size, const W* next, int64_t step,
                    float* out, std::integer_sequence<int, kCounts...>) {
    using Tile = void (*)(const float* const*, const W*, int64_t, const W*, int64_t, float*);
    static constexpr Tile tiles[] = {tile<W, kCounts + 1>...};
    tiles[rows - 1](x, panel, size, next, step, out);
}

// Calls emit(row, x[row] times the panel) for all rows. All tiles together fetch the panel that lies
// behind, so that reading it takes no time of its own if it comes next.
template <typename W, typename Emit>
inline void times_panel(const float* const* x, int64_t rows, const W* panel, int64_t size, const Emit& emit) {
    constexpr auto counts = std::make_integer_sequence<int, kRows>();
    float out[kRows * kPanel];
    const int64_t tiles = (rows + kRows - 1) / kRows;
    const int64_t step = (kPanel + tiles - 1) / tiles;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
        tile_of(int(count), x + first, panel, size, panel + size * (kPanel + t * step), step, out, counts);
        for (int64_t r = 0; r < count; ++r) emit(first + r, out + r * kPanel);
    }
}

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

// Pairs of a token and an expert, in the order of the experts: those of expert e are numbered from
// starts[e] to starts[e + 1]. Only the experts first .. first + count are there.
struct Pairs {
    std::vector<int64_t> starts, tokens;
    std::vector<float> shares;

    Pairs(const int64_t* chosen, const float* given, int64_t all, int64_t per_token, int64_t first, int64_t count)
        : starts(count + 1, 0) {
        for (int64_t p = 0; p < all; ++p)
            if (first <= chosen[p] && chosen[p] < first + count) ++starts[chosen[p] - first + 1];
        for (int64_t e = 0; e < count; ++e) starts[e + 1] += starts[e];

        tokens.resize(starts[count]);
        shares.resize(starts[count]);
        std::vector<int64_t> next(starts.begin(), starts.end() - 1);
        for (int64_t p = 0; p < all; ++p)
            if (first <= chosen[p] && chosen[p] < first + count) {
                const int64_t place = next[chosen[p] - first]++;
                tokens[place] = p / per_token;
                shares[place] = given[p];
            }
    }
};

template <typename T>
inline float gated_number(float gate, float up) {
    const float g = rounded<T>(gate);
    return rounded<T>(rounded<T>(g / (1.0f + exponential(-g))) * rounded<T>(up));
}

// inner [rows, stride] = silu(gate) * up for the rows of one expert and the panels low .. high. A
// panel has kLanes gate columns and the up columns that belong to them.
template <typename T, typename W>
void enter_expert(const float* const* x, int64_t rows, const W* panels, float* inner, int64_t hidden, int64_t stride,
                  int64_t low, int64_t high) {
    for (int64_t first = 0; first < rows; first += kRowBlock)
        for (int64_t p = low; p < high; ++p)
            times_panel(x + first, std::min(kRowBlock, rows - first), panels + p * hidden * kPanel, hidden,
                        [&](int64_t r, const float* sums) {
                            float* out = inner + (first + r) * stride + p * kLanes;
#pragma omp simd
                            for (int64_t i = 0; i < kLanes; ++i) out[i] = gated_number<T>(sums[i], sums[kLanes + i]);
                        });
}

// Adds the panels low .. high of the output of one expert to the sums [tokens, (high - low) * kPanel].
template <typename W>
void leave_expert(const float* const* inner, const int64_t* tokens, const float* shares, int64_t rows, const W* panels,
                  float* sums, int64_t width, int64_t low, int64_t high) {
    for (int64_t first = 0; first < rows; first += kRowBlock)
        for (int64_t p = low; p < high; ++p)
            times_panel(inner + first, std::min(kRowBlock, rows - first), panels + p * width * kPanel, width,
                        [&](int64_t r, const float* product) {
                            const float share = shares[first + r];
                            float* sum = sums + (tokens[first + r] * (high - low) + p - low) * kPanel;
#pragma omp simd
                            for (int64_t i = 0; i < kPanel; ++i) sum[i] += share * product[i];
                        });
}

// Consecutive panels of one expert.
struct Part {
    int64_t expert, low, high;
};

// out [tokens, hidden] = the sum over the chosen experts of share * expert(x). Of an expert fc1 has
// ceil(width / kLanes) panels [hidden, kPanel], and fc2 ceil(hidden / kPanel) panels [width, kPanel].
// Only `count` experts from number `first` on are here, and the others add nothing.
template <typename T, typename W>
void mixture(const T* x, const int64_t* chosen, const float* shares, const W* fc1, const W* fc2, T* out, int64_t tokens,
             int64_t hidden, int64_t width, int64_t per_token, int64_t first, int64_t count, int threads) {
    const Pairs pairs(chosen, shares, tokens * per_token, per_token, first, count);
    const int64_t all = pairs.starts[count];
    const int64_t in_panels = (width + kLanes - 1) / kLanes, out_panels = (hidden + kPanel - 1) / kPanel;
    const int64_t stride = in_panels * kLanes;
    const std::unique_ptr<float[]> wide(new float[tokens * hidden]);
    const std::unique_ptr<float[]> inner(new float[all * stride]);
    std::vector<const float*> x_rows(all), inner_rows(all);
    for (int64_t p = 0; p < all; ++p) {
        x_rows[p] = wide.get() + pairs.tokens[p] * hidden;
        inner_rows[p] = inner.get() + p * stride;
    }
    std::vector<Part> parts;
    for (int64_t e = 0; e < count; ++e)
        if (pairs.starts[e] < pairs.starts[e + 1])
            for (int64_t low = 0; low < in_panels; low += kPanels)
                parts.push_back({e, low, std::min(in_panels, low + kPanels)});
    const int64_t at_once = std::min(kPanels, (out_panels + threads - 1) / threads);

#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int64_t i = 0; i < tokens * hidden; ++i) wide[i] = widen(x[i]);

#pragma omp for schedule(dynamic)
        for (size_t b = 0; b < parts.size(); ++b) {
            const Part part = parts[b];
            const int64_t start = pairs.starts[part.expert];
            enter_expert<T>(x_rows.data() + start, pairs.starts[part.expert + 1] - start,
                            fc1 + part.expert * in_panels * hidden * kPanel, inner.get() + start * stride, hidden,
                            stride, part.low, part.high);
        }

        std::vector<float> sums(tokens * at_once * kPanel);
#pragma omp for schedule(dynamic)
        for (int64_t low = 0; low < out_panels; low += at_once) {
            const int64_t high = std::min(out_panels, low + at_once);
            std::fill(sums.begin(), sums.end(), 0.0f);
            for (int64_t e = 0; e < count; ++e) {
                const int64_t start = pairs.starts[e];
                leave_expert(inner_rows.data() + start, pairs.tokens.data() + start, pairs.shares.data() + start,
                             pairs.starts[e + 1] - start, fc2 + e * out_panels * width * kPanel, sums.data(), width,
                             low, high);
            }
            const int64_t begin = low * kPanel, size = std::min(hidden - begin, (high - low) * kPanel);
            for (int64_t t = 0; t < tokens; ++t)
                for (int64_t i = 0; i < size; ++i)
                    store(out + t * hidden + begin + i, sums[t * (high - low) * kPanel + i]);
        }
    }
}

}  // namespace products
