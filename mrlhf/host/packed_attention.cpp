// Causal attention of packed sequences, forward and backward, with rotation on the way.
//
// Queries, keys and values are read where the projection wrote them. There may be more keys than
// queries: the queries are the last tokens of their sequence. What a token gets depends on its own
// sequence alone, whatever else the pack holds and however many threads there are.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"

namespace packed {

using Lanes = Vectors<kWidest>::Lanes;

constexpr int64_t kLanes = kWidest;
constexpr int64_t kRows = 6;      // rows of a tile, which stays in registers
constexpr int64_t kQueries = 48;  // queries that are computed together
constexpr int64_t kKeys = 96;     // keys that are computed together

// As numbers.h has it for one number, which is at most 0 here; -inf gives 0.
using ::exponential;
inline Lanes exponential(Lanes y) {
    const Lanes x = y < -87.0f ? Lanes{} - 87.0f : y;
    const Lanes n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;  // to the nearest integer
    const Lanes p = exponential_of_rest(x, n);
    const Lanes scale = (Lanes)((__builtin_convertvector(n, Vectors<kWidest>::Integers) + 127) << 23);
    return y < -87.0f ? Lanes{} : p * scale;
}

inline int64_t padded(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// A matrix whose element (r, c) lies at r * row + c * column.
struct Matrix {
    const float* data;
    int64_t row, column;
};

// kRows rows of c, [kRows, kWide * kLanes], plus or equal to the product of columns low .. high of a
// and those rows of b.
template <int kWide>
inline void tile(float* c, int64_t c_row, Matrix a, const float* b, int64_t b_row, int64_t low, int64_t high,
                 bool add) {
    Lanes sums[kRows][kWide];
    for (int r = 0; r < kRows; ++r)
        for (int w = 0; w < kWide; ++w) sums[r][w] = add ? load<kLanes>(c + r * c_row + w * kLanes) : Lanes{};
    for (int64_t k = low; k < high; ++k) {
        Lanes row[kWide];
#pragma GCC unroll 2
        for (int w = 0; w < kWide; ++w) row[w] = load<kLanes>(b + k * b_row + w * kLanes);
        const float* column = a.data + k * a.column;
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
            for (int w = 0; w < kWide; ++w) sums[r][w] += column[r * a.row] * row[w];
    }
    for (int r = 0; r < kRows; ++r)
        for (int w = 0; w < kWide; ++w) save<kLanes>(c + r * c_row + w * kLanes, sums[r][w]);
}

// The same for `columns` columns, rounded up to whole vectors.
inline void multiply(float* c, int64_t c_row, Matrix a, const float* b, int64_t b_row, int64_t columns, int64_t low,
                     int64_t high, bool add) {
    int64_t j = 0;
    for (; j + kLanes < columns; j += 2 * kLanes) tile<2>(c + j, c_row, a, b + j, b_row, low, high, add);
    if (j < columns) tile<1>(c + j, c_row, a, b + j, b_row, low, high, add);
}

struct Shape {
    int64_t kv_heads, per_kv_head, dim, rotary, window;
    float cap;  // of scores, by tanh; 0 for none
    int64_t width() const { return padded(dim, kLanes); }
    int64_t half() const { return rotary / 2; }
};

// One head of a tensor: token t's numbers begin at data + t * stride.
template <typename T>
struct Head {
    T* data;
    int64_t stride;
};

// Cosines and sines of each position, [positions, rotary / 2].
struct Rotation {
    const float *cos, *sin;
};

// Writes a token's rotated numbers times `factor`, with the precision of T after the rotation.
template <typename T>
inline void read_rotated(const T* from, const Rotation& rotation, int64_t position, const Shape& shape, float factor,
                         float* to) {
    const int64_t half = shape.half();
    const float* cos = rotation.cos + position * half;
    const float* sin = rotation.sin + position * half;
    for (int64_t i = 0; i < half; ++i) {
        const float first = widen(from[i]), second = widen(from[i + half]);
        to[i] = rounded<T>(first * cos[i] - second * sin[i]) * factor;
        to[i + half] = rounded<T>(second * cos[i] + first * sin[i]) * factor;
    }
    for (int64_t i = 2 * half; i < shape.dim; ++i) to[i] = widen(from[i]) * factor;
}

// Writes the gradient of a token's numbers before rotation from that after rotation, times `factor`.
template <typename T>
inline void write_rotated_back(const float* from, const Rotation& rotation, int64_t position, const Shape& shape,
                               float factor, T* to) {
    const int64_t half = shape.half();
    const float* cos = rotation.cos + position * half;
    const float* sin = rotation.sin + position * half;
    for (int64_t i = 0; i < half; ++i) {
        const float first = from[i] * factor, second = from[i + half] * factor;
        store(to + i, first * cos[i] + second * sin[i]);
        store(to + i + half, second * cos[i] - first * sin[i]);
    }
    for (int64_t i = 2 * half; i < shape.dim; ++i) store(to + i, from[i] * factor);
}

// The first and last plus one of the keys first_key .. first_key + kKeys that a query sees, counted
// from first_key.
struct Seen {
    int64_t low, high;
};
inline Seen seen_by(int64_t query, int64_t first_key, int64_t window) {
    const int64_t low = window > 0 ? query - window + 1 - first_key : 0;
    return {std::max<int64_t>(0, low), std::min(kKeys, query + 1 - first_key)};
}

// Where the keys of a sequence that one of its queries sees begin, in whole blocks.
inline int64_t first_block(int64_t query, int64_t window) {
    return window > 0 ? std::max<int64_t>(0, query - window + 1) / kKeys * kKeys : 0;
}

// What one thread works with. Padding is zero.
struct Scratch {
    // The keys and values of one KV head of one sequence, as the products want them: as rows, [keys,
    // width], or each block of kKeys of them transposed, [width, kKeys].
    std::vector<float> keys, keys_transposed, values, values_transposed, key_gradients, value_gradients;
    // Rows of kQueries queries of one head, and of their scores.
    std::vector<float> queries, outputs, output_gradients, query_gradients;
    std::vector<float> scores = std::vector<float>(kQueries * kKeys), slopes = scores;
    float highest[kQueries], totals[kQueries], logsums[kQueries], shares[kQueries];
};

// scores [kQueries, kKeys] of the queries from `query` on and the keys from `key` on, for as many
// columns as some row of a tile sees.
inline void score(float* scores, const float* rows, const float* transposed, int64_t query, int64_t count, int64_t key,
                  const Shape& shape) {
    const float* block = transposed + key * shape.width();
    for (int64_t r = 0; r < count; r += kRows) {
        const Seen seen = seen_by(query + r + kRows - 1, key, 0);
        if (seen.high > 0)
            multiply(scores + r * kKeys, kKeys, {rows + r * shape.width(), shape.width(), 1}, block, kKeys, seen.high,
                     0, shape.dim, false);
    }
}

// c += p b for the rows of p, [kQueries, kKeys], that see anything; b [kKeys, width].
inline void add_weighted(float* c, const float* p, const float* b, int64_t query, int64_t count, int64_t key,
                         const Shape& shape) {
    const int64_t width = shape.width();
    for (int64_t r = 0; r < count; r += kRows) {
        const int64_t low = seen_by(query + r, key, shape.window).low;
        const int64_t high = seen_by(query + r + kRows - 1, key, 0).high;
        if (low < high) multiply(c + r * width, width, {p + r * kKeys, kKeys, 1}, b, width, shape.dim, low, high, true);
    }
}

// c += transposed p times b, for the queries that see a key; c [kKeys, width], b [kQueries, width].
inline void add_transposed(float* c, const float* p, const float* b, int64_t query, int64_t count, int64_t key,
                           int64_t keys, const Shape& shape) {
    const int64_t width = shape.width();
    for (int64_t j = 0; j < std::min(kKeys, keys - key); j += kRows) {
        const int64_t low = std::max<int64_t>(0, key + j - query);
        int64_t high = count;
        if (shape.window > 0) high = std::min(high, key + j + kRows - 1 + shape.window - query);
        if (low < high) multiply(c + j * width, width, {p + j, 1, kKeys}, b, width, shape.dim, low, high, true);
    }
}

// Caps the scores that a row sees, and returns the whole vectors that hold them; what else these hold
// becomes -inf.
inline Seen whole_vectors(float* score, Seen seen, float cap) {
    if (seen.low >= seen.high) return {0, 0};
    const Seen vectors = {seen.low / kLanes * kLanes, padded(seen.high, kLanes)};
    if (cap > 0.0f)
        for (int64_t j = vectors.low; j < vectors.high; j += kLanes)
            save<kLanes>(score + j, cap * hyperbolic_tangent(load<kLanes>(score + j) / cap));
    std::fill(score + vectors.low, score + seen.low, -INFINITY);
    std::fill(score + seen.high, score + vectors.high, -INFINITY);
    return vectors;
}

inline void clear_outside(float* row, Seen vectors) {
    std::fill(row, row + vectors.low, 0.0f);
    std::fill(row + vectors.high, row + kKeys, 0.0f);
}

// Weights and running softmax of one row of scores; what it does not see gets weight 0.
inline void soften(float* score, Seen seen, float* output, float* highest, float* total, const Shape& shape) {
    const int64_t width = shape.width();
    const Seen vectors = whole_vectors(score, seen, shape.cap);
    Lanes tops = Lanes{} - INFINITY;
    for (int64_t j = vectors.low; j < vectors.high; j += kLanes) {
        const Lanes some = load<kLanes>(score + j);
        tops = some > tops ? some : tops;
    }
    float top = *highest;
    for (int l = 0; l < kLanes; ++l) top = std::max(top, tops[l]);

    Lanes sums{};
    for (int64_t j = vectors.low; j < vectors.high; j += kLanes) {
        const Lanes weights = exponential(load<kLanes>(score + j) - top);
        save<kLanes>(score + j, weights);
        sums += weights;
    }
    float sum = 0.0f;
    for (int l = 0; l < kLanes; ++l) sum += sums[l];
    clear_outside(score, vectors);

    if (*highest != top) {
        const float shrink = exponential(*highest - top);
        for (int64_t i = 0; i < width; ++i) output[i] *= shrink;
        *total *= shrink;
    }
    *total += sum;
    *highest = top;
}

// The queries and keys of one sequence: where they begin in their tensors, and how many they are.
struct Sequence {
    int64_t query_begin, queries, key_begin, keys;
    int64_t first() const { return keys - queries; }  // the first query's position
    int64_t token(int64_t position) const { return query_begin + position - first(); }
};

template <typename T>
void attend_head(const Head<const T>& q, const Rotation& rotation, const Sequence& sequence, float scale,
                 const Shape& shape, const Head<T>& out, float* logsums, int64_t heads, Scratch& scratch) {
    const int64_t width = shape.width(), end = sequence.keys;
    for (int64_t query = sequence.first(); query < end; query += kQueries) {
        const int64_t count = std::min(kQueries, end - query), begin = sequence.token(query);
        scratch.queries.assign(kQueries * width, 0.0f);
        scratch.outputs.assign(kQueries * width, 0.0f);
        for (int64_t r = 0; r < count; ++r)
            read_rotated(q.data + (begin + r) * q.stride, rotation, query + r, shape, scale,
                         &scratch.queries[r * width]);
        std::fill(scratch.highest, scratch.highest + kQueries, -INFINITY);
        std::fill(scratch.totals, scratch.totals + kQueries, 0.0f);

        for (int64_t key = first_block(query, shape.window); key < query + count; key += kKeys) {
            score(scratch.scores.data(), scratch.queries.data(), scratch.keys_transposed.data(), query, count,
                  key, shape);
            for (int64_t r = 0; r < padded(count, kRows); ++r)
                soften(&scratch.scores[r * kKeys], seen_by(query + r, key, shape.window), &scratch.outputs[r * width],
                       scratch.highest + r, scratch.totals + r, shape);
            add_weighted(scratch.outputs.data(), scratch.scores.data(), &scratch.values[key * width], query,
                         count, key, shape);
        }

        for (int64_t r = 0; r < count; ++r) {
            const int64_t token = begin + r;
            const float share = 1.0f / scratch.totals[r];
            for (int64_t i = 0; i < shape.dim; ++i)
                store(out.data + token * out.stride + i, scratch.outputs[r * width + i] * share);
            logsums[token * heads] = scratch.highest[r] + std::log(scratch.totals[r]);
        }
    }
}

// Turns scores into weights, and the products of output gradients and values into the gradients of
// scores, in place.
inline void differentiate(float* score, float* slope, Seen seen, float logsum, float share, float cap) {
    const Seen vectors = whole_vectors(score, seen, cap);
    for (int64_t j = vectors.low; j < vectors.high; j += kLanes) {
        const Lanes capped = load<kLanes>(score + j);
        const Lanes weights = exponential(capped - logsum);
        Lanes change = weights * (load<kLanes>(slope + j) - share);
        if (cap > 0.0f) {
            const Lanes part = capped / cap;  // -inf where nothing is seen
            change *= part < -1.0f ? Lanes{} : 1.0f - part * part;
        }
        save<kLanes>(score + j, weights);
        save<kLanes>(slope + j, change);
    }
    clear_outside(score, vectors);
    clear_outside(slope, vectors);
}

template <typename T>
void attend_head_backward(const Head<const T>& q, const Head<const T>& out, const Head<const T>& out_gradient,
                      const Rotation& rotation, const Sequence& sequence, float scale, const Shape& shape,
                      const float* logsums, int64_t heads, const Head<T>& q_gradient, Scratch& scratch) {
    const int64_t width = shape.width(), end = sequence.keys;
    float* scores = scratch.scores.data();
    float* slopes = scratch.slopes.data();
    for (int64_t query = sequence.first(); query < end; query += kQueries) {
        const int64_t count = std::min(kQueries, end - query), begin = sequence.token(query);
        scratch.queries.assign(kQueries * width, 0.0f);
        scratch.output_gradients.assign(kQueries * width, 0.0f);
        scratch.query_gradients.assign(kQueries * width, 0.0f);
        for (int64_t r = 0; r < count; ++r) {
            const int64_t token = begin + r;
            read_rotated(q.data + token * q.stride, rotation, query + r, shape, scale, &scratch.queries[r * width]);
            const T* value = out.data + token * out.stride;
            const T* gradient = out_gradient.data + token * out_gradient.stride;
            float share = 0.0f;
            // Without such locals the loop is not vectorised, and rounds in another way.
            float* own = &scratch.output_gradients[r * width];
            const int64_t dim = shape.dim;
#pragma omp simd reduction(+ : share)
            for (int64_t i = 0; i < dim; ++i) {
                const float slope = widen(gradient[i]);
                own[i] = slope;
                share += slope * widen(value[i]);
            }
            scratch.shares[r] = share;
            scratch.logsums[r] = logsums[token * heads];
        }

        for (int64_t key = first_block(query, shape.window); key < query + count; key += kKeys) {
            score(scores, scratch.queries.data(), scratch.keys_transposed.data(), query, count, key, shape);
            score(slopes, scratch.output_gradients.data(), scratch.values_transposed.data(), query, count, key, shape);
            for (int64_t r = 0; r < padded(count, kRows); ++r) {
                // The rows that fill up the last tile see nothing.
                const Seen seen = r < count ? seen_by(query + r, key, shape.window) : Seen{0, 0};
                differentiate(scores + r * kKeys, slopes + r * kKeys, seen, scratch.logsums[r], scratch.shares[r],
                              shape.cap);
            }
            add_weighted(scratch.query_gradients.data(), slopes, &scratch.keys[key * width], query, count, key, shape);
            add_transposed(&scratch.key_gradients[key * width], slopes, scratch.queries.data(), query, count, key,
                           end, shape);
            add_transposed(&scratch.value_gradients[key * width], scores, scratch.output_gradients.data(), query,
                           count, key, end, shape);
        }

        for (int64_t r = 0; r < count; ++r)
            write_rotated_back(&scratch.query_gradients[r * width], rotation, query + r, shape, scale,
                               q_gradient.data + (begin + r) * q_gradient.stride);
    }
}

// One head of a tensor with strides of tokens, KV heads, and the query heads of a KV head.
template <typename T>
inline Head<T> head_of(T* data, const int64_t* strides, int64_t kv_head, int64_t head = 0) {
    return {data + kv_head * strides[1] + head * strides[2], strides[0]};
}

template <typename T>
void read_keys(const Head<const T>& k, const Head<const T>& v, const Rotation& rotation, const Sequence& sequence,
               const Shape& shape, bool backward, Scratch& scratch) {
    const int64_t width = shape.width();
    const int64_t size = padded(sequence.keys, kKeys) * width;
    const auto transpose = [&](std::vector<float>& panel, int64_t key, const float* row) {
        float* block = panel.data() + key / kKeys * kKeys * width + key % kKeys;
        for (int64_t i = 0; i < shape.dim; ++i) block[i * kKeys] = row[i];
    };
    scratch.keys_transposed.assign(size, 0.0f);
    (backward ? scratch.values_transposed : scratch.values).assign(size, 0.0f);
    if (backward) scratch.keys.assign(size, 0.0f);

    std::vector<float> row(width);
    for (int64_t key = 0; key < sequence.keys; ++key) {
        const int64_t token = sequence.key_begin + key;
        float* target = backward ? &scratch.keys[key * width] : row.data();
        read_rotated(k.data + token * k.stride, rotation, key, shape, 1.0f, target);
        transpose(scratch.keys_transposed, key, target);

        target = backward ? row.data() : &scratch.values[key * width];
        for (int64_t i = 0; i < shape.dim; ++i) target[i] = widen(v.data[token * v.stride + i]);
        if (backward) transpose(scratch.values_transposed, key, target);
    }
}

// Calls run(sequence, kv_head, scratch) for each KV head of each sequence. The edges are where the
// queries and the keys of each sequence begin, and the end, [sequences + 1] each.
template <typename Run>
void for_each(const int32_t* queries, const int32_t* keys, int64_t sequences, int64_t kv_heads, int threads,
              const Run& run) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Scratch scratch;
#pragma omp for schedule(dynamic)
        for (int64_t number = 0; number < sequences * kv_heads; ++number) {
            const int64_t s = number / kv_heads;
            run(Sequence{queries[s], queries[s + 1] - queries[s], keys[s], keys[s + 1] - keys[s]}, number % kv_heads,
                scratch);
        }
    }
}

template <typename T>
void attend(const T* q, const T* k, const T* v, const int64_t* strides, const float* cos, const float* sin,
            const int32_t* query_edges, const int32_t* key_edges, T* out, float* logsums, int64_t sequences,
            int64_t kv_heads, int64_t per_kv_head, int64_t dim, int64_t rotary, int64_t window, float scale,
            float cap, int threads) {
    const Shape shape = {kv_heads, per_kv_head, dim, rotary, window, cap};
    const int64_t heads = kv_heads * per_kv_head, out_strides[3] = {heads * dim, per_kv_head * dim, dim};
    const Rotation rotation = {cos, sin};
    for_each(query_edges, key_edges, sequences, kv_heads, threads,
             [&](const Sequence& sequence, int64_t g, Scratch& scratch) {
        read_keys(head_of(k, strides + 3, g), head_of(v, strides + 6, g), rotation, sequence, shape, false, scratch);
        for (int64_t p = 0; p < per_kv_head; ++p)
            attend_head(head_of(q, strides, g, p), rotation, sequence, scale, shape, head_of(out, out_strides, g, p),
                        logsums + g * per_kv_head + p, heads, scratch);
    });
}

template <typename T>
void attend_backward(const T* q, const T* k, const T* v, const int64_t* strides, const float* cos, const float* sin,
                     const int32_t* query_edges, const int32_t* key_edges, const T* out, const T* out_gradient,
                     const float* logsums, T* q_gradient, T* k_gradient, T* v_gradient,
                     const int64_t* gradient_strides, int64_t sequences, int64_t kv_heads, int64_t per_kv_head,
                     int64_t dim, int64_t rotary, int64_t window, float scale, float cap, int threads) {
    const Shape shape = {kv_heads, per_kv_head, dim, rotary, window, cap};
    const int64_t width = shape.width();
    const int64_t heads = kv_heads * per_kv_head, out_strides[3] = {heads * dim, per_kv_head * dim, dim};
    const Rotation rotation = {cos, sin};
    for_each(query_edges, key_edges, sequences, kv_heads, threads,
             [&](const Sequence& sequence, int64_t g, Scratch& scratch) {
        read_keys(head_of(k, strides + 3, g), head_of(v, strides + 6, g), rotation, sequence, shape, true, scratch);
        scratch.key_gradients.assign(padded(sequence.keys, kKeys) * width, 0.0f);
        scratch.value_gradients.assign(padded(sequence.keys, kKeys) * width, 0.0f);
        for (int64_t p = 0; p < per_kv_head; ++p)
            attend_head_backward(head_of(q, strides, g, p), head_of(out, out_strides, g, p),
                                 head_of(out_gradient, out_strides, g, p), rotation, sequence, scale, shape,
                                 logsums + g * per_kv_head + p, heads, head_of(q_gradient, gradient_strides, g, p),
                                 scratch);

        const Head<T> keys = head_of(k_gradient, gradient_strides + 3, g);
        const Head<T> values = head_of(v_gradient, gradient_strides + 6, g);
        for (int64_t key = 0; key < sequence.keys; ++key) {
            const int64_t token = sequence.key_begin + key;
            write_rotated_back(&scratch.key_gradients[key * width], rotation, key, shape, 1.0f,
                               keys.data + token * keys.stride);
            for (int64_t i = 0; i < dim; ++i)
                store(values.data + token * values.stride + i, scratch.value_gradients[key * width + i]);
        }
    });
}

}  // namespace packed

extern "C" {
EXPORT(attend_packed, packed::attend)
EXPORT(attend_packed_backward, packed::attend_backward)
}
