// Attention over a paged KV cache of a host: what is written to its blocks, and what is read of them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"

namespace paged {

constexpr int64_t kLanes = 8;  // a block of 16 keys has two vectors
using Lanes = Vectors<kLanes>::Lanes;

// Normalises one head, if there is a norm, and rotates its first `rotary` dimensions.
template <typename T>
inline void rotate_head(const T* x, const T* norm, float eps, const float* cos, const float* sin, T* out, int64_t dim,
                        int64_t rotary, float* scratch) {
    const int64_t half = rotary / 2;
    if (norm) {
        float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < dim; ++i) squares += widen(x[i]) * widen(x[i]);
        const float scale = 1.0f / std::sqrt(squares / float(dim) + eps);
#pragma omp simd
        for (int64_t i = 0; i < dim; ++i) scratch[i] = rounded<T>(widen(norm[i]) * rounded<T>(widen(x[i]) * scale));
    } else {
#pragma omp simd
        for (int64_t i = 0; i < dim; ++i) scratch[i] = widen(x[i]);
    }
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        store(out + i, scratch[i] * cos[i] - scratch[i + half] * sin[i]);
        store(out + i + half, scratch[i + half] * cos[i] + scratch[i] * sin[i]);
    }
    for (int64_t i = rotary; i < dim; ++i) store(out + i, scratch[i]);
}

// Takes qkv [tokens, kv_heads, per_kv_head + 2, dim] apart: rotated q goes to q [tokens, kv_heads,
// per_kv_head, dim], rotated k and plain v go to their cache slots. A block of keys is stored as
// [kv_heads, dim, block_size], so that a query is multiplied with many keys at once. A block of
// values is stored as [block_size, kv_heads, dim].
template <typename T>
void rotate_store(const T* qkv, const T* q_norm, const T* k_norm, float eps, const float* cos, const float* sin,
                  const int64_t* positions, const int64_t* slots, T* q, T* keys, T* values, int64_t tokens,
                  int64_t kv_heads, int64_t per_kv_head, int64_t dim, int64_t rotary, int64_t block_size, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> scratch(dim);
        std::vector<T> key(dim);
#pragma omp for
        for (int64_t t = 0; t < tokens; ++t) {
            const float* c = cos + positions[t] * (rotary / 2);
            const float* s = sin + positions[t] * (rotary / 2);
            for (int64_t g = 0; g < kv_heads; ++g) {
                const T* in = qkv + (t * kv_heads + g) * (per_kv_head + 2) * dim;
                for (int64_t h = 0; h < per_kv_head; ++h)
                    rotate_head(in + h * dim, q_norm, eps, c, s, q + ((t * kv_heads + g) * per_kv_head + h) * dim, dim,
                                rotary, scratch.data());
                rotate_head(in + per_kv_head * dim, k_norm, eps, c, s, key.data(), dim, rotary, scratch.data());
                const int64_t block = slots[t] / block_size, place = slots[t] % block_size;
                for (int64_t i = 0; i < dim; ++i)
                    keys[((block * kv_heads + g) * dim + i) * block_size + place] = key[i];
                std::memcpy(values + (slots[t] * kv_heads + g) * dim, in + (per_kv_head + 1) * dim, dim * sizeof(T));
            }
        }
    }
}

constexpr int64_t kQueries = 8;  // queries of one sequence that share a block of keys while it is in cache

// Up to four rows are computed together, so that a key or value is loaded once for all of them. One
// or two rows use more vectors along the other axes instead, so that no sum waits for the one before.

// scores[r][j] = dot product of query[r] and the key of token j; the keys are [dim, block_size].
template <typename T, int kRows>
inline void score_rows(const float* query, const T* keys, float* scores, int64_t dim, int64_t block_size) {
    constexpr int kChains = kRows <= 2 ? 2 : 1;
    int64_t j = 0;
    for (; j + 2 * kLanes <= block_size; j += 2 * kLanes) {
        Lanes sums[kChains][kRows][2] = {};
        for (int64_t i = 0; i + kChains <= dim; i += kChains)
#pragma GCC unroll 2
            for (int c = 0; c < kChains; ++c) {
                const Lanes first = load<kLanes>(keys + (i + c) * block_size + j);
                const Lanes second = load<kLanes>(keys + (i + c) * block_size + j + kLanes);
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    sums[c][r][0] += query[r * dim + i + c] * first;
                    sums[c][r][1] += query[r * dim + i + c] * second;
                }
            }
        for (int r = 0; r < kRows; ++r)
            for (int half = 0; half < 2; ++half) {
                Lanes sum = sums[0][r][half];
                if (kChains == 2) sum += sums[kChains - 1][r][half];
                if (dim % kChains) sum += query[r * dim + dim - 1] * load<kLanes>(keys + (dim - 1) * block_size + j + half * kLanes);
                save<kLanes>(scores + r * block_size + j + half * kLanes, sum);
            }
    }
    for (; j < block_size; ++j)
        for (int r = 0; r < kRows; ++r) {
            float sum = 0.0f;
            for (int64_t i = 0; i < dim; ++i) sum += query[r * dim + i] * widen(keys[i * block_size + j]);
            scores[r * block_size + j] = sum;
        }
}

// sums[r] = sums[r] * shrinks[r] + weights[r][low .. high) . values; the values are [token, dim].
template <typename T, int kRows>
inline void add_rows(float* sums, const float* shrinks, const float* weights, const T* values, int64_t low, int64_t high,
                     int64_t stride, int64_t dim, int64_t block_size) {
    constexpr int kWide = kRows <= 2 ? 4 : 2;
    int64_t i = 0;
    for (; i + kWide * kLanes <= dim; i += kWide * kLanes) {
        Lanes tiles[kRows][kWide];
        for (int r = 0; r < kRows; ++r)
            for (int w = 0; w < kWide; ++w) tiles[r][w] = load<kLanes>(sums + r * dim + i + w * kLanes) * shrinks[r];
        for (int64_t j = low; j < high; ++j) {
#pragma GCC unroll 4
            for (int w = 0; w < kWide; ++w) {
                const Lanes value = load<kLanes>(values + j * stride + i + w * kLanes);
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) tiles[r][w] += weights[r * block_size + j] * value;
            }
        }
        for (int r = 0; r < kRows; ++r)
            for (int w = 0; w < kWide; ++w) save<kLanes>(sums + r * dim + i + w * kLanes, tiles[r][w]);
    }
    for (; i < dim; ++i)
        for (int r = 0; r < kRows; ++r) {
            float sum = sums[r * dim + i] * shrinks[r];
            for (int64_t j = low; j < high; ++j) sum += weights[r * block_size + j] * widen(values[j * stride + i]);
            sums[r * dim + i] = sum;
        }
}

// Consecutive queries of one sequence: the flat number of the first, and how many.
struct Cut {
    int64_t sequence, first, count;
};

struct Shape {
    int64_t kv_heads, per_kv_head, dim, block_size, window;
    float cap;  // of scores, by tanh; 0 for none
};

// Running softmax of the rows of one KV head; row n * per_kv_head + p is head p of query n. For each
// row: its query, the weighted sum of values, the highest score, and the sum of the weights.
struct Rows {
    float *query, *sums, *highest, *totals;
};

// Adds one block to kRows rows of one KV head. `first_position` is the position of query 0, counted
// from the first token of the block.
template <typename T, int kRows>
inline void add_block(const Rows& rows, int64_t row, const T* keys, const T* values, int64_t first_position,
                      const Shape& shape, float* scores) {
    const int64_t dim = shape.dim;
    const int64_t block_size = shape.block_size;
    score_rows<T, kRows>(rows.query + row * dim, keys, scores, dim, block_size);

    float shrinks[kRows];
    int64_t lowest = block_size, furthest = 0;
    for (int r = 0; r < kRows; ++r) {
        const int64_t position = first_position + (row + r) / shape.per_kv_head;
        const int64_t low = shape.window > 0 ? std::max<int64_t>(0, position - shape.window + 1) : 0;
        const int64_t high = std::min(block_size, position + 1);
        float* score = scores + r * block_size;
        shrinks[r] = 1.0f;
        if (low >= high) {
            std::fill(score, score + block_size, 0.0f);
            continue;
        }
        if (shape.cap > 0.0f) {
#pragma omp simd
            for (int64_t j = 0; j < block_size; ++j) score[j] = shape.cap * hyperbolic_tangent(score[j] / shape.cap);
        }
        std::fill(score, score + low, -INFINITY);
        std::fill(score + high, score + block_size, -INFINITY);

        float top = rows.highest[row + r];
#pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < block_size; ++j) top = score[j] > top ? score[j] : top;
        float total = 0.0f;
#pragma omp simd reduction(+ : total)
        for (int64_t j = 0; j < block_size; ++j) {
            score[j] = exponential(score[j] - top);
            total += score[j];
        }

        shrinks[r] = exponential(rows.highest[row + r] - top);
        rows.highest[row + r] = top;
        rows.totals[row + r] = rows.totals[row + r] * shrinks[r] + total;
        lowest = std::min(lowest, low);
        furthest = std::max(furthest, high);
    }

    add_rows<T, kRows>(rows.sums + row * dim, shrinks, scores, values, lowest, furthest, shape.kv_heads * dim, dim,
                       block_size);
}

// Attention of up to kQueries queries of one sequence to the blocks in `table`, as a running softmax.
// Sinks, if there are any, are one more score for each head, without a value.
template <typename T>
void attend_cut(const T* q, const T* keys, const T* values, const int32_t* table, int64_t first_position,
                const float* sinks, T* out, const Cut& cut, const Shape& shape, float scale, float* scratch) {
    const int64_t dim = shape.dim, block_size = shape.block_size, heads = shape.kv_heads * shape.per_kv_head;
    const int64_t count = cut.count * shape.per_kv_head;
    const int64_t all = count * shape.kv_heads;
    const Rows rows = {scratch, scratch + all * dim, scratch + 2 * all * dim, scratch + (2 * dim + 1) * all};
    float* scores = rows.totals + all;

    // Where a row's head begins in q and out.
    const auto place = [&](int64_t row) {
        const int64_t g = row / count, n = row % count / shape.per_kv_head, p = row % shape.per_kv_head;
        return ((cut.first + n) * heads + g * shape.per_kv_head + p) * dim;
    };

    for (int64_t row = 0; row < all; ++row)
        for (int64_t i = 0, at = place(row); i < dim; ++i) rows.query[row * dim + i] = widen(q[at + i]) * scale;
    std::fill(rows.sums, rows.sums + all * dim, 0.0f);
    std::fill(rows.highest, rows.highest + all, -INFINITY);
    std::fill(rows.totals, rows.totals + all, 0.0f);

    const int64_t last_block = (first_position + cut.count - 1) / block_size;
    const int64_t first_seen = shape.window > 0 ? std::max<int64_t>(0, first_position - shape.window + 1) : 0;
    for (int64_t b = first_seen / block_size; b <= last_block; ++b) {
        if (b < last_block) {
            const int64_t size = shape.kv_heads * dim * block_size;
            for (int64_t i = 0; i < size; i += int64_t(64 / sizeof(T))) {
                __builtin_prefetch(keys + table[b + 1] * size + i);
                __builtin_prefetch(values + table[b + 1] * size + i);
            }
        }
        for (int64_t g = 0; g < shape.kv_heads; ++g) {
            const T* k = keys + (int64_t(table[b]) * shape.kv_heads + g) * dim * block_size;
            const T* v = values + (int64_t(table[b]) * block_size * shape.kv_heads + g) * dim;
            const Rows own = {rows.query + g * count * dim, rows.sums + g * count * dim, rows.highest + g * count,
                              rows.totals + g * count};
            const int64_t position = first_position - b * block_size;
            int64_t row = 0;
            for (; row + 4 <= count; row += 4) add_block<T, 4>(own, row, k, v, position, shape, scores);
            switch (count - row) {
                case 3: add_block<T, 3>(own, row, k, v, position, shape, scores); break;
                case 2: add_block<T, 2>(own, row, k, v, position, shape, scores); break;
                case 1: add_block<T, 1>(own, row, k, v, position, shape, scores); break;
            }
        }
    }

    for (int64_t row = 0; row < all; ++row) {
        const int64_t head = row / count * shape.per_kv_head + row % shape.per_kv_head;
        const float sink = sinks ? std::exp(sinks[head] - rows.highest[row]) : 0.0f;
        const float share = 1.0f / (rows.totals[row] + sink);
        for (int64_t i = 0, at = place(row); i < dim; ++i) store(out + at + i, rows.sums[row * dim + i] * share);
    }
}

template <typename T>
void attend(const T* q, const T* keys, const T* values, const int32_t* tables, int64_t table_stride,
            const int32_t* query_starts, const int32_t* lengths, const float* sinks, T* out, int64_t sequences,
            int64_t kv_heads, int64_t per_kv_head, int64_t dim, int64_t block_size, int64_t window, float scale,
            float cap, int threads) {
    std::vector<Cut> cuts;
    for (int64_t s = 0; s < sequences; ++s)
        for (int64_t first = query_starts[s]; first < query_starts[s + 1]; first += kQueries)
            cuts.push_back({s, first, std::min<int64_t>(kQueries, query_starts[s + 1] - first)});
    const Shape shape = {kv_heads, per_kv_head, dim, block_size, window, cap};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> scratch(kQueries * kv_heads * per_kv_head * (2 * dim + 2) + 4 * block_size);
#pragma omp for schedule(dynamic)
        for (size_t c = 0; c < cuts.size(); ++c) {
            const int64_t s = cuts[c].sequence;
            const int64_t position = lengths[s] - (query_starts[s + 1] - cuts[c].first);
            attend_cut(q, keys, values, tables + s * table_stride, position, sinks, out, cuts[c], shape, scale,
                       scratch.data());
        }
    }
}

}  // namespace paged
