// The numbers that compiled kernels work on: float and bfloat16 in memory, float in registers.

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

// e^x with a relative error of about 1e-7: a polynomial of degree 6 after powers of two are removed.
// Below -87 the result is 0; NaN stays NaN.
inline float exponential(float y) {
    float x = y < -87.0f ? -87.0f : y;
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
    return y < -87.0f ? 0.0f : p * scale;
}

}  // namespace
