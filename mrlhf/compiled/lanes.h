// Vectors of float, loaded from memory of either type.

#pragma once

#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace {

constexpr int64_t kLanes = 8;  // numbers in one vector

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

}  // namespace
