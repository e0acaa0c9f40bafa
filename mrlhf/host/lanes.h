// Vectors of float, loaded from memory of either type.

#pragma once

#include <cstdint>

#include "numbers.h"

namespace {

#ifndef LANES
#define LANES 8
#endif
constexpr int64_t kLanes = LANES;  // numbers in one vector

typedef float Lanes __attribute__((vector_size(4 * kLanes)));
// The same at any address. A copy by memcpy would be loaded anew for each use.
typedef float LanesInMemory __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint16_t HalvesInMemory __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

inline Lanes load(const float* from) { return *(const LanesInMemory*)from; }
inline Lanes load(const bfloat16* from) {
    const Halves halves = *(const HalvesInMemory*)from;
    return (Lanes)(__builtin_convertvector(halves, Words) << 16);
}
inline void save(float* to, Lanes lanes) { *(LanesInMemory*)to = lanes; }

}  // namespace
