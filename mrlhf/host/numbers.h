// The numbers that compiled kernels work on: float and bfloat16 in memory, float in registers, one by
// one or in vectors.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

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

// e^(x - n ln 2), where n is the integer nearest to x / ln 2, with a relative error of about 1e-7.
template <typename F>
inline F exponential_of_rest(F x, F n) {
    const F r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    F p = F{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * r * r + r + 1.0f;
}

// e^y; below -87 it is 0, and NaN stays NaN.
inline float exponential(float y) {
    float x = y < -87.0f ? -87.0f : y;
    x = x > 88.0f ? 88.0f : x;
    const float n = std::nearbyint(x * 1.44269504088896341f);
    const float p = exponential_of_rest(x, n);
    const int32_t bits = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return y < -87.0f ? 0.0f : p * scale;
}

// tanh(x), by the rational function that Eigen takes for float.
template <typename F>
inline F hyperbolic_tangent(F x) {
    x = x > 7.9053111f ? F{} + 7.9053111f : x;
    x = x < -7.9053111f ? F{} - 7.9053111f : x;
    const F square = x * x;
    F p = F{} - 2.76076847742355e-16f;
    p = p * square + 2.00018790482477e-13f;
    p = p * square - 8.60467152213735e-11f;
    p = p * square + 5.12229709037114e-08f;
    p = p * square + 1.48572235717979e-05f;
    p = p * square + 6.37261928875436e-04f;
    p = p * square + 4.89352455891786e-03f;
    F q = F{} + 1.19825839466702e-06f;
    q = q * square + 1.18534705686654e-04f;
    q = q * square + 2.26843463243900e-03f;
    q = q * square + 4.89352518554385e-03f;
    return x * p / q;
}

// N numbers in registers, loaded from memory of either type at any address. A copy by memcpy would be
// loaded anew for each use.
template <int N>
struct Vectors {
    typedef float Lanes __attribute__((vector_size(4 * N)));
    typedef float LanesInMemory __attribute__((vector_size(4 * N), aligned(4), may_alias));
    typedef int32_t Integers __attribute__((vector_size(4 * N)));
    typedef uint32_t Words __attribute__((vector_size(4 * N)));
    typedef uint16_t Halves __attribute__((vector_size(2 * N)));
    typedef uint16_t HalvesInMemory __attribute__((vector_size(2 * N), aligned(2), may_alias));
};

template <int N>
inline typename Vectors<N>::Lanes load(const float* from) {
    return *(const typename Vectors<N>::LanesInMemory*)from;
}
template <int N>
inline typename Vectors<N>::Lanes load(const bfloat16* from) {
    const typename Vectors<N>::Halves halves = *(const typename Vectors<N>::HalvesInMemory*)from;
    return (typename Vectors<N>::Lanes)(__builtin_convertvector(halves, typename Vectors<N>::Words) << 16);
}
template <int N>
inline void save(float* to, typename Vectors<N>::Lanes lanes) {
    *(typename Vectors<N>::LanesInMemory*)to = lanes;
}

#ifdef __AVX512F__
constexpr int kWidest = 16;
#else
constexpr int kWidest = 8;
#endif

}  // namespace

// Each name is a variable that holds the address of a function.
#define EXPORT(NAME, FUNCTION)                    \
    void* NAME##_float32 = (void*)FUNCTION<float>; \
    void* NAME##_bfloat16 = (void*)FUNCTION<bfloat16>;
