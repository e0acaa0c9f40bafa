// The engine's kernels for a host: everything of a decoder layer but its matrix products, and sampling.
//
// Compiled by kernels.py on the machine that runs them. They see flat tokens and blocks of the KV cache; they know no
// sequences' ids, no schedule and no torch. Sums are float32 whatever the storage, float64 where a whole vocabulary is
// added up. `threads` of 1 starts no team.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct bfloat16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}
inline void store(float* to, float x) { *to = x; }
inline void store(bfloat16* to, float x) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
template <typename T>
inline float rounded(float x) {
    T stored;
    store(&stored, x);
    return widen(stored);
}

// e^x to about 1e-7 relative (a degree-6 polynomial after removing powers of two), 0-like below -87; NaN stays.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float n = std::nearbyint(x * 1.44269504088896341f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return p * scale;
}

template <typename T>
void add_rms_norm(T* hidden, const T* delta, const T* weight, T* out, int64_t tokens, int64_t size, float eps,
                  int threads) {
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
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) store(o + i, widen(weight[i]) * rounded<T>(widen(h[i]) * scale));
    }
}

template <typename T>
void gated(const T* gate_up, T* out, int64_t tokens, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < tokens; ++t) {
        const T* gate = gate_up + t * 2 * size;
        const T* up = gate + size;
        T* o = out + t * size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            const float g = widen(gate[i]);
            store(o + i, rounded<T>(g / (1.0f + exponential(-g))) * widen(up[i]));
        }
    }
}

// One head: normalised where there is a norm, then rotated.
template <typename T>
inline void rotate_head(const T* x, const T* norm, float eps, const float* cos, const float* sin, T* out, int64_t dim,
                        float* scratch) {
    const int64_t half = dim / 2;
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
}

// qkv [tokens, groups, per_group + 2, dim] becomes q [tokens, groups, per_group, dim]; k and v go to their cache slots.
// A block of keys is stored [groups, dim, block_size], so that a query meets many of them at once; one of values
// [block_size, groups, dim].
template <typename T>
void rotate_store(const T* qkv, const T* q_norm, const T* k_norm, float eps, const float* cos, const float* sin,
                  const int64_t* positions, const int64_t* slots, T* q, T* keys, T* values, int64_t tokens,
                  int64_t groups, int64_t per_group, int64_t dim, int64_t block_size, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> scratch(dim);
        std::vector<T> key(dim);
#pragma omp for
        for (int64_t t = 0; t < tokens; ++t) {
            const float* c = cos + positions[t] * (dim / 2);
            const float* s = sin + positions[t] * (dim / 2);
            for (int64_t g = 0; g < groups; ++g) {
                const T* in = qkv + (t * groups + g) * (per_group + 2) * dim;
                for (int64_t h = 0; h < per_group; ++h)
                    rotate_head(in + h * dim, q_norm, eps, c, s, q + ((t * groups + g) * per_group + h) * dim, dim,
                                scratch.data());
                rotate_head(in + per_group * dim, k_norm, eps, c, s, key.data(), dim, scratch.data());
                const int64_t block = slots[t] / block_size, place = slots[t] % block_size;
                for (int64_t i = 0; i < dim; ++i)
                    keys[((block * groups + g) * dim + i) * block_size + place] = key[i];
                std::memcpy(values + (slots[t] * groups + g) * dim, in + (per_group + 1) * dim, dim * sizeof(T));
            }
        }
    }
}

constexpr int64_t kQueries = 8;  // of one sequence, attended to together while a block of keys is near
constexpr int64_t kLanes = 8;    // numbers worked on at once

typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

inline Lanes load(const float* from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof(lanes));
    return lanes;
}
inline Lanes load(const bfloat16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof(halves));
    return (Lanes)(__builtin_convertvector(halves, Words) << 16);
}
inline void save(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof(lanes)); }

// scores[j] = query . key of token j, for a block whose keys are stored [dim, block_size].
template <typename T>
inline void score_block(const float* query, const T* keys, float* scores, int64_t dim, int64_t block_size) {
    int64_t j = 0;
    for (; j + 2 * kLanes <= block_size; j += 2 * kLanes) {
        Lanes even[2] = {}, odd[2] = {};
        int64_t i = 0;
        for (; i + 2 <= dim; i += 2) {
            const T* row = keys + i * block_size + j;
            even[0] += query[i] * load(row);
            even[1] += query[i] * load(row + kLanes);
            odd[0] += query[i + 1] * load(row + block_size);
            odd[1] += query[i + 1] * load(row + block_size + kLanes);
        }
        if (i < dim) {
            even[0] += query[i] * load(keys + i * block_size + j);
            even[1] += query[i] * load(keys + i * block_size + j + kLanes);
        }
        save(scores + j, even[0] + odd[0]);
        save(scores + j + kLanes, even[1] + odd[1]);
    }
    for (; j < block_size; ++j) {
        float sum = 0.0f;
        for (int64_t i = 0; i < dim; ++i) sum += query[i] * widen(keys[i * block_size + j]);
        scores[j] = sum;
    }
}

// sums = sums * shrink + weights[low .. high) . values, for values stored [token, dim].
template <typename T>
inline void add_values(float* sums, float shrink, const float* weights, const T* values, int64_t low, int64_t high,
                       int64_t stride, int64_t dim) {
    int64_t i = 0;
    for (; i + 4 * kLanes <= dim; i += 4 * kLanes) {
        Lanes a = load(sums + i) * shrink, b = load(sums + i + kLanes) * shrink;
        Lanes c = load(sums + i + 2 * kLanes) * shrink, d = load(sums + i + 3 * kLanes) * shrink;
        for (int64_t j = low; j < high; ++j) {
            const T* value = values + j * stride + i;
            const float weight = weights[j];
            a += weight * load(value);
            b += weight * load(value + kLanes);
            c += weight * load(value + 2 * kLanes);
            d += weight * load(value + 3 * kLanes);
        }
        save(sums + i, a);
        save(sums + i + kLanes, b);
        save(sums + i + 2 * kLanes, c);
        save(sums + i + 3 * kLanes, d);
    }
    for (; i + kLanes <= dim; i += kLanes) {
        Lanes a = load(sums + i) * shrink;
        for (int64_t j = low; j < high; ++j) a += weights[j] * load(values + j * stride + i);
        save(sums + i, a);
    }
    for (; i < dim; ++i) {
        float sum = sums[i] * shrink;
        for (int64_t j = low; j < high; ++j) sum += weights[j] * widen(values[j * stride + i]);
        sums[i] = sum;
    }
}

struct Cut {
    int64_t sequence, first, count;  // queries of one sequence: flat number of the first, and how many
};

// Attention of up to kQueries queries of one sequence to the blocks in `table`, with a running maximum.
template <typename T>
void attend_cut(const T* q, const T* keys, const T* values, const int32_t* table, int64_t first_position, T* out,
                const Cut& cut, int64_t groups, int64_t per_group, int64_t dim, int64_t block_size, int64_t window,
                float scale, float* scratch) {
    const int64_t heads = groups * per_group, rows = cut.count * heads;
    float* query = scratch;
    float* sums = query + rows * dim;
    float* highest = sums + rows * dim;
    float* totals = highest + rows;
    float* scores = totals + rows;
    for (int64_t i = 0; i < rows * dim; ++i) query[i] = widen(q[cut.first * heads * dim + i]) * scale;
    std::fill(sums, sums + rows * dim, 0.0f);
    std::fill(highest, highest + rows, -INFINITY);
    std::fill(totals, totals + rows, 0.0f);
    const int64_t last_position = first_position + cut.count - 1;
    const int64_t from = window > 0 ? std::max<int64_t>(0, first_position - window + 1) / block_size : 0;
    for (int64_t b = from; b <= last_position / block_size; ++b) {
        const T* k = keys + int64_t(table[b]) * block_size * groups * dim;
        const T* v = values + int64_t(table[b]) * block_size * groups * dim;
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t g = row % heads / per_group, position = first_position + row / heads;
            const int64_t low = window > 0 ? std::max<int64_t>(0, position - window + 1 - b * block_size) : 0;
            const int64_t high = std::min(block_size, position + 1 - b * block_size);
            if (low >= high) continue;
            score_block(query + row * dim, k + g * dim * block_size, scores, dim, block_size);
            float top = highest[row];
            for (int64_t j = low; j < high; ++j) top = scores[j] > top ? scores[j] : top;
            const float shrink = exponential(highest[row] - top);
            highest[row] = top;
            float total = 0.0f;
#pragma omp simd reduction(+ : total)
            for (int64_t j = low; j < high; ++j) {
                scores[j] = exponential(scores[j] - top);
                total += scores[j];
            }
            totals[row] = totals[row] * shrink + total;
            add_values(sums + row * dim, shrink, scores, v + g * dim, low, high, groups * dim, dim);
        }
    }
    for (int64_t row = 0; row < rows; ++row) {
        const float share = 1.0f / totals[row];
        for (int64_t i = 0; i < dim; ++i) store(out + (cut.first * heads + row) * dim + i, sums[row * dim + i] * share);
    }
}

template <typename T>
void attend(const T* q, const T* keys, const T* values, const int32_t* tables, int64_t table_stride,
            const int32_t* query_starts, const int32_t* lengths, T* out, int64_t sequences, int64_t groups,
            int64_t per_group, int64_t dim, int64_t block_size, int64_t window, float scale, int threads) {
    std::vector<Cut> cuts;
    for (int64_t s = 0; s < sequences; ++s)
        for (int64_t first = query_starts[s]; first < query_starts[s + 1]; first += kQueries)
            cuts.push_back({s, first, std::min<int64_t>(kQueries, query_starts[s + 1] - first)});
    const int64_t heads = groups * per_group;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> scratch(kQueries * heads * (2 * dim + 2) + block_size);
#pragma omp for schedule(dynamic)
        for (size_t c = 0; c < cuts.size(); ++c) {
            const int64_t s = cuts[c].sequence;
            const int64_t position = lengths[s] - (query_starts[s + 1] - cuts[c].first);
            attend_cut(q, keys, values, tables + s * table_stride, position, out, cuts[c], groups, per_group,
                                dim, block_size, window, scale, scratch.data());
        }
    }
}

constexpr int64_t kColumns = 128;  // of the vocabulary, summed together

// One pass over a shard of the logits: by row the highest scaled logit and where it is, and by row and block of columns
// the sum of exp(logit - highest of the block), and that highest.
template <typename T>
void logit_blocks(const T* logits, float inverse_temperature, float* block_highest, float* block_sums,
                  int64_t* likeliest, int64_t rows, int64_t columns, int threads) {
    const int64_t blocks = (columns + kColumns - 1) / kColumns;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; ++r) {
        float best = -INFINITY;
        int64_t best_block = 0;
        for (int64_t b = 0; b < blocks; ++b) {
            const T* x = logits + r * columns + b * kColumns;
            const int64_t count = std::min(kColumns, columns - b * kColumns);
            float scaled[kColumns];
            float top = -INFINITY;
#pragma omp simd reduction(max : top)
            for (int64_t i = 0; i < count; ++i) {
                scaled[i] = widen(x[i]) * inverse_temperature;
                top = scaled[i] > top ? scaled[i] : top;
            }
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < count; ++i) sum += exponential(scaled[i] - top);
            block_highest[r * blocks + b] = top;
            block_sums[r * blocks + b] = sum;
            if (top > best) best = top, best_block = b;
        }
        const T* x = logits + r * columns + best_block * kColumns;
        const int64_t count = std::min(kColumns, columns - best_block * kColumns);
        int64_t found = 0;
        while (found + 1 < count && widen(x[found]) * inverse_temperature != best) ++found;
        likeliest[r] = best_block * kColumns + found;
    }
}

// The column at which the running sum of exp(logit - top) passes `targets` (below 0: the row is not looked at, -1).
template <typename T>
void pick(const T* logits, float inverse_temperature, const float* block_highest, const float* block_sums,
          const float* tops, const double* targets, int64_t* tokens, float* chosen, int64_t rows, int64_t columns,
          int threads) {
    const int64_t blocks = (columns + kColumns - 1) / kColumns;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; ++r) {
        tokens[r] = -1;
        chosen[r] = 0.0f;
        if (targets[r] < 0) continue;
        const T* x = logits + r * columns;
        double before = 0.0;
        int64_t block = -1;
        double weight = 0.0;
        for (int64_t b = 0; b < blocks; ++b) {  // the last block that has weight is taken where rounding leaves a rest
            const double scale = std::exp(double(block_highest[r * blocks + b]) - double(tops[r]));
            const double mass = double(block_sums[r * blocks + b]) * scale;
            if (!(mass > 0.0)) continue;
            if (block >= 0) before += weight;
            block = b, weight = mass;
            if (before + weight > targets[r]) break;
        }
        if (block < 0) continue;
        const double scale = std::exp(double(block_highest[r * blocks + block]) - double(tops[r]));
        for (int64_t i = block * kColumns; i < std::min(columns, (block + 1) * kColumns); ++i) {
            const float scaled = widen(x[i]) * inverse_temperature;
            const double mass = double(exponential(scaled - block_highest[r * blocks + block])) * scale;
            if (!(mass > 0.0)) continue;
            tokens[r] = i;
            chosen[r] = scaled;
            before += mass;
            if (before > targets[r]) break;
        }
    }
}

}  // namespace

#define MRLHF_KERNELS(T, SUFFIX)                                                                                       \
    extern "C" void add_rms_norm_##SUFFIX(T* hidden, const T* delta, const T* weight, T* out, int64_t tokens,          \
                                          int64_t size, float eps, int threads) {                                      \
        add_rms_norm<T>(hidden, delta, weight, out, tokens, size, eps, threads);                                       \
    }                                                                                                                  \
    extern "C" void gated_##SUFFIX(const T* gate_up, T* out, int64_t tokens, int64_t size, int threads) {              \
        gated<T>(gate_up, out, tokens, size, threads);                                                                 \
    }                                                                                                                  \
    extern "C" void rotate_store_##SUFFIX(const T* qkv, const T* q_norm, const T* k_norm, float eps, const float* cos, \
                                          const float* sin, const int64_t* positions, const int64_t* slots, T* q,      \
                                          T* keys, T* values, int64_t tokens, int64_t groups, int64_t per_group,       \
                                          int64_t dim, int64_t block_size, int threads) {                              \
        rotate_store<T>(qkv, q_norm, k_norm, eps, cos, sin, positions, slots, q, keys, values, tokens, groups,         \
                        per_group, dim, block_size, threads);                                                                    \
    }                                                                                                                  \
    extern "C" void attend_##SUFFIX(const T* q, const T* keys, const T* values, const int32_t* tables,                 \
                                    int64_t table_stride, const int32_t* query_starts, const int32_t* lengths, T* out, \
                                    int64_t sequences, int64_t groups, int64_t per_group, int64_t dim,                 \
                                    int64_t block_size, int64_t window, float scale, int threads) {                    \
        attend<T>(q, keys, values, tables, table_stride, query_starts, lengths, out, sequences, groups,       \
                      per_group, dim, block_size, window, scale, threads);                                             \
    }                                                                                                                  \
    extern "C" void logit_blocks_##SUFFIX(const T* logits, float inverse_temperature, float* block_highest,            \
                                          float* block_sums, int64_t* likeliest, int64_t rows, int64_t columns,        \
                                          int threads) {                                                               \
        logit_blocks<T>(logits, inverse_temperature, block_highest, block_sums, likeliest, rows, columns, threads);    \
    }                                                                                                                  \
    extern "C" void pick_##SUFFIX(const T* logits, float inverse_temperature, const float* block_highest,              \
                                  const float* block_sums, const float* tops, const double* targets, int64_t* tokens,  \
                                  float* chosen, int64_t rows, int64_t columns, int threads) {                         \
        pick<T>(logits, inverse_temperature, block_highest, block_sums, tops, targets, tokens, chosen, rows, columns,  \
                threads);                                                                                              \
    }

MRLHF_KERNELS(float, float32)
MRLHF_KERNELS(bfloat16, bfloat16)
