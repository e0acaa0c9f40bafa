// Products with weights that lie in panels of columns, in the order in which they are read.
//
// A panel is [size, kPanel]: kPanel columns of the transposed weight. Sums are float32, in one order
// however many rows there are, so that the product of a row does not depend on the other rows, to
// the last bit. bfloat16 is widened in registers.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#ifdef __AVX512F__
#define LANES 16
#endif
#include "lanes.h"

namespace {

constexpr int kRows = LANES == 16 ? 12 : 6;  // whose sums fit into the registers, two vectors each
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
        const Lanes low = load(row), high = load(row + kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < kR; ++r) {
            sums[r][0] += x[r][i] * low;
            sums[r][1] += x[r][i] * high;
        }
    }
    for (int r = 0; r < kR; ++r) {
        save(out + r * kPanel, sums[r][0]);
        save(out + r * kPanel + kLanes, sums[r][1]);
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

}  // namespace
