// The products of a mixture of experts on a host: gated MLPs, of which each token goes to a few.
//
// It is compiled on the machine that runs it, by mrlhf/compiled/library.py. Tokens are sorted by
// expert, so that each weight is read once however many tokens go to its expert. Weights stay as
// they are stored: bfloat16 is widened in registers, which saves memory and halves what is read.
// Sums are float32. The result of a token does not depend on the other tokens, nor on the number of
// threads, to the last bit. The kernels know no router and no torch.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "lanes.h"
#include "numbers.h"

namespace {

constexpr int kRows = 3;            // rows and columns whose sums fit into the registers
constexpr int kColumns = 4;
constexpr int64_t kRowBlock = 48;   // rows that stay in the cache while they meet some columns
constexpr int64_t kBlock = 32;      // columns that one thread computes at a time

inline float total(Lanes lanes) {
    float parts[kLanes];
    save(parts, lanes);
    return ((parts[0] + parts[4]) + (parts[2] + parts[6])) + ((parts[1] + parts[5]) + (parts[3] + parts[7]));
}

// The totals of kC vectors.
template <int kC>
inline void totals(const Lanes* lanes, float* out) {
    for (int c = 0; c < kC; ++c) out[c] = total(lanes[c]);
}
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
template <>
inline void totals<4>(const Lanes* lanes, float* out) {  // neighbours are added, four vectors at once
    const Lanes a = lanes[0], b = lanes[1], c = lanes[2], d = lanes[3];
    const Lanes ab = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
                     __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    const Lanes cd = __builtin_shufflevector(c, d, 0, 8, 2, 10, 4, 12, 6, 14) +
                     __builtin_shufflevector(c, d, 1, 9, 3, 11, 5, 13, 7, 15);
    const Lanes halves = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
                         __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    for (int i = 0; i < 4; ++i) out[i] = halves[i] + halves[i + 4];
}
#endif
#endif

// out[r][c] = x[r] . w[c], where the columns of the product are the rows of w [columns, size]. Each
// sum has the same order whatever kR is, and so whatever other rows there are.
template <typename W, int kR, int kC>
inline void tile(const float* const* x, const W* w, int64_t size, float* out) {
    Lanes sums[kR][kC] = {};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        Lanes rows[kR];
#pragma GCC unroll 3
        for (int r = 0; r < kR; ++r) rows[r] = load(x[r] + i);
#pragma GCC unroll 4
        for (int c = 0; c < kC; ++c) {
            const Lanes column = load(w + c * size + i);
#pragma GCC unroll 3
            for (int r = 0; r < kR; ++r) sums[r][c] += rows[r] * column;
        }
    }
    for (int r = 0; r < kR; ++r) {
        totals<kC>(sums[r], out + r * kC);
        for (int64_t j = i; j < size; ++j)
            for (int c = 0; c < kC; ++c)
                out[r * kC + c] = __builtin_fmaf(x[r][j], widen(w[c * size + j]), out[r * kC + c]);
    }
}

// Calls emit(row, column, x[row] . w[column]) for all rows and kC columns.
template <typename W, int kC, typename Emit>
inline void few_columns(const float* const* x, int64_t rows, const W* w, int64_t size, const Emit& emit) {
    float out[kRows * kC];
    for (int64_t first = 0; first < rows; first += kRows) {
        const int count = int(std::min<int64_t>(kRows, rows - first));
        switch (count) {
            case 3: tile<W, 3, kC>(x + first, w, size, out); break;
            case 2: tile<W, 2, kC>(x + first, w, size, out); break;
            case 1: tile<W, 1, kC>(x + first, w, size, out); break;
        }
        for (int r = 0; r < count; ++r)
            for (int c = 0; c < kC; ++c) emit(first + r, c, out[r * kC + c]);
    }
}

// The same for `columns` columns, at most kColumns.
template <typename W, typename Emit>
inline void columns_of(const float* const* x, int64_t rows, const W* w, int64_t columns, int64_t size,
                       const Emit& emit) {
    if (columns == kColumns) {
        few_columns<W, kColumns>(x, rows, w, size, emit);
        return;
    }
    for (int64_t c = 0; c < columns; ++c)
        few_columns<W, 1>(x, rows, w + c * size, size, [&](int64_t r, int, float sum) { emit(r, c, sum); });
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

// inner [pairs, width] = silu(gate) * up of columns low .. high, for the rows of one expert. Its
// weight has all gate rows before all up rows.
template <typename T, typename W>
void enter_expert(const float* const* x, int64_t rows, const W* weight, float* inner, int64_t hidden, int64_t width,
                  int64_t low, int64_t high) {
    float gates[kRowBlock * kBlock], ups[kRowBlock * kBlock];
    for (int64_t first = 0; first < rows; first += kRowBlock) {
        const int64_t count = std::min(kRowBlock, rows - first);
        for (int64_t c = low; c < high; c += kColumns) {
            const int64_t columns = std::min<int64_t>(kColumns, high - c);
            columns_of(x + first, count, weight + c * hidden, columns, hidden,
                       [&](int64_t r, int64_t j, float sum) { gates[r * kBlock + c - low + j] = sum; });
            columns_of(x + first, count, weight + (width + c) * hidden, columns, hidden,
                       [&](int64_t r, int64_t j, float sum) { ups[r * kBlock + c - low + j] = sum; });
        }
        for (int64_t r = 0; r < count; ++r) {
            float* out = inner + (first + r) * width + low;
#pragma omp simd
            for (int64_t i = 0; i < high - low; ++i)
                out[i] = gated_number<T>(gates[r * kBlock + i], ups[r * kBlock + i]);
        }
    }
}

// Adds columns low .. high of the output of one expert to the sums [tokens, high - low].
template <typename W>
void leave_expert(const float* const* inner, const int64_t* tokens, const float* shares, int64_t rows, const W* weight,
                  float* sums, int64_t width, int64_t low, int64_t high) {
    for (int64_t first = 0; first < rows; first += kRowBlock) {
        const int64_t count = std::min(kRowBlock, rows - first);
        for (int64_t c = low; c < high; c += kColumns)
            columns_of(inner + first, count, weight + c * width, std::min<int64_t>(kColumns, high - c), width,
                       [&](int64_t r, int64_t j, float sum) {
                           sums[tokens[first + r] * (high - low) + c - low + j] += shares[first + r] * sum;
                       });
    }
}

// out [tokens, hidden] = the sum over the chosen experts of share * expert(x). An expert has a
// weight fc1 [2 * width, hidden] and a weight fc2 [hidden, width]; only `count` experts from number
// `first` on are here, and the others add nothing.
template <typename T, typename W>
void mixture(const T* x, const int64_t* chosen, const float* shares, const W* const* fc1, const W* const* fc2, T* out,
             int64_t tokens, int64_t hidden, int64_t width, int64_t per_token, int64_t first, int64_t count,
             int threads) {
    const Pairs pairs(chosen, shares, tokens * per_token, per_token, first, count);
    const int64_t all = pairs.starts[count];
    const std::unique_ptr<float[]> wide(new float[tokens * hidden]);
    const std::unique_ptr<float[]> inner(new float[all * width]);
    std::vector<const float*> x_rows(all), inner_rows(all);
    for (int64_t p = 0; p < all; ++p) {
        x_rows[p] = wide.get() + pairs.tokens[p] * hidden;
        inner_rows[p] = inner.get() + p * width;
    }
    std::vector<std::pair<int64_t, int64_t>> blocks;  // expert, first column
    for (int64_t e = 0; e < count; ++e)
        if (pairs.starts[e] < pairs.starts[e + 1])
            for (int64_t low = 0; low < width; low += kBlock) blocks.emplace_back(e, low);

#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int64_t i = 0; i < tokens * hidden; ++i) wide[i] = widen(x[i]);

#pragma omp for schedule(dynamic)
        for (size_t b = 0; b < blocks.size(); ++b) {
            const int64_t e = blocks[b].first, low = blocks[b].second, start = pairs.starts[e];
            enter_expert<T>(x_rows.data() + start, pairs.starts[e + 1] - start, fc1[e], inner.get() + start * width,
                            hidden, width, low, std::min(width, low + kBlock));
        }

        std::vector<float> sums(tokens * kBlock);
#pragma omp for schedule(dynamic)
        for (int64_t low = 0; low < hidden; low += kBlock) {
            const int64_t high = std::min(hidden, low + kBlock);
            std::fill(sums.begin(), sums.end(), 0.0f);
            for (int64_t e = 0; e < count; ++e) {
                const int64_t start = pairs.starts[e];
                leave_expert(inner_rows.data() + start, pairs.tokens.data() + start, pairs.shares.data() + start,
                             pairs.starts[e + 1] - start, fc2[e], sums.data(), width, low, high);
            }
            for (int64_t t = 0; t < tokens; ++t)
                for (int64_t i = low; i < high; ++i) store(out + t * hidden + i, sums[t * (high - low) + i - low]);
        }
    }
}

}  // namespace

#define MRLHF_EXPERTS(T, T_SUFFIX, W, W_SUFFIX)                                                                        \
    extern "C" void mixture_of_##W_SUFFIX##_##T_SUFFIX(                                                                \
        const T* x, const int64_t* chosen, const float* shares, const W* const* fc1, const W* const* fc2, T* out,      \
        int64_t tokens, int64_t hidden, int64_t width, int64_t per_token, int64_t first, int64_t count, int threads) { \
        mixture<T, W>(x, chosen, shares, fc1, fc2, out, tokens, hidden, width, per_token, first, count, threads);      \
    }

MRLHF_EXPERTS(float, float32, float, float32)
MRLHF_EXPERTS(float, float32, bfloat16, bfloat16)
MRLHF_EXPERTS(bfloat16, bfloat16, bfloat16, bfloat16)
