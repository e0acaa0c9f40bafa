// A router on a host: which experts each token goes to, and what their outputs count.
//
// It is compiled on the machine that runs it, by mrlhf/compiled/library.py. All numbers are float32.
// What a token gets does not depend on the other tokens. The kernel knows no experts and no torch.

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "numbers.h"
#include "products.h"

namespace {

// How experts are chosen; see the Experts of mrlhf/models/spec.py.
struct Rule {
    int64_t experts, per_token, groups, groups_per_token;
    int sigmoid, normalised;
    float scale, smallest_sum;
};

// The scores of one token; returns their sum, which is not finite if one of them is not.
float score(const float* logits, float* scores, const Rule& rule) {
    float highest = -INFINITY;
    if (!rule.sigmoid)
        for (int64_t e = 0; e < rule.experts; ++e) highest = logits[e] > highest ? logits[e] : highest;

    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t e = 0; e < rule.experts; ++e) {
        scores[e] = rule.sigmoid ? 1.0f / (1.0f + exponential(-logits[e])) : exponential(logits[e] - highest);
        total += scores[e];
    }
    if (!rule.sigmoid)
        for (int64_t e = 0; e < rule.experts; ++e) scores[e] /= total;
    return total;
}

// The numbers of the `wanted` highest values, the highest first; of equal ones the first.
void find_highest(const float* values, int64_t count, int64_t wanted, int64_t* numbers) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (found == wanted && !(values[i] > values[numbers[found - 1]])) continue;
        int64_t place = found < wanted ? found++ : wanted - 1;
        for (; place > 0 && values[i] > values[numbers[place - 1]]; --place) numbers[place] = numbers[place - 1];
        numbers[place] = i;
    }
}

// Puts -inf for the experts outside of the best groups. A group is as good as the sum of its two
// best experts.
void leave_out_groups(float* rank_by, const Rule& rule, std::vector<float>& goodness, std::vector<int64_t>& best) {
    const int64_t size = rule.experts / rule.groups;
    for (int64_t g = 0; g < rule.groups; ++g) {
        int64_t two[2];
        find_highest(rank_by + g * size, size, 2, two);
        goodness[g] = rank_by[g * size + two[0]] + rank_by[g * size + two[1]];
    }
    find_highest(goodness.data(), rule.groups, rule.groups_per_token, best.data());
    for (int64_t g = 0; g < rule.groups; ++g) {
        bool is_kept = false;
        for (int64_t b = 0; b < rule.groups_per_token; ++b) is_kept |= best[b] == g;
        for (int64_t i = 0; !is_kept && i < size; ++i) rank_by[g * size + i] = -INFINITY;
    }
}

void route(const float* logits, const float* correction, int64_t* chosen, float* shares, int64_t tokens,
           const Rule& rule, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> scores(rule.experts), rank_by(rule.experts), goodness(rule.groups);
        std::vector<int64_t> best(rule.groups_per_token);
#pragma omp for
        for (int64_t t = 0; t < tokens; ++t) {
            const float total = score(logits + t * rule.experts, scores.data(), rule);
            for (int64_t e = 0; e < rule.experts; ++e) rank_by[e] = scores[e] + (correction ? correction[e] : 0.0f);
            if (rule.groups > 1) leave_out_groups(rank_by.data(), rule, goodness, best);

            int64_t* own = chosen + t * rule.per_token;
            find_highest(rank_by.data(), rule.experts, rule.per_token, own);

            float sum = 0.0f;
            for (int64_t i = 0; i < rule.per_token; ++i) sum += scores[own[i]];
            float factor = rule.normalised ? rule.scale / (sum + rule.smallest_sum) : rule.scale;
            if (!std::isfinite(total)) factor = NAN;  // so that the error does not go unnoticed
            for (int64_t i = 0; i < rule.per_token; ++i) shares[t * rule.per_token + i] = scores[own[i]] * factor;
        }
    }
}

}  // namespace

// The router of one layer; `correction` is null where the choice has none.
struct Router {
    Product logits;
    const float* correction;
    Rule rule;
};

extern "C" void route_float32(const Router* router, const float* x, int64_t* chosen, float* shares, int64_t tokens,
                              int threads) {
    const int64_t experts = router->rule.experts;
    const std::unique_ptr<float[]> logits(new float[tokens * experts]);
    router->logits(x, logits.get(), tokens, threads);
    route(logits.get(), router->correction, chosen, shares, tokens, router->rule,
          threads_for(tokens * experts, threads));
}
