"""The rows of the mismatch between engine and trainer, and of what correction does about it."""

from __future__ import annotations

from mrlhf.metrics.metric import SAME, Chapter, Metric

_NATS = "nats/token"
_IS = "rollout_corr/rollout_is"
_RS = "rollout_corr/rollout_rs"
_ONE = f"{_RS}_<statistic>_k{{1,2,3}}"

# fmt: off
# A row a metric: name; how it is reduced, over what; unit; meaning.
PROBABILITIES = Chapter(
    "Probabilities of the engine and of the trainer",
    "Of the tokens that the newest version drew: probability before the update against the "
    "engine's. In bypass mode those of the step's first mini-batch alone, where it still is that.",
    Metric("training/rollout_probs_diff_mean", "mean", "tokens", "probability",
           "size of the difference", below=0.02, verl=SAME),
    Metric("training/rollout_probs_diff_max", "max", "tokens", "probability",
           "the same", curve=True, verl=SAME),
    Metric("training/rollout_probs_diff_std", "named", "tokens", "probability",
           "the same, an unbiased estimate", verl=SAME),
    Metric("training/rollout_probs_diff_valid", "whole", "", "0 or 1",
           "whether there was a token to compare", verl=SAME),
    Metric("training/rollout_actor_probs_pearson_corr", "whole", "", "correlation",
           "Pearson's correlation of the two", verl=SAME),
    Metric("training/rollout_experts_differ", "mean", "tokens and mixtures", "share",
           "native engine, not in bypass mode: trainer and engine chose different experts "
           "([router replay](models.md#router-replay)); with partial rollouts tokens that older "
           "versions drew count too, whose experts the updates since have changed"),
)

CORRECTION = Chapter(
    "Rollout correction",
    "lr is old − rollout log-probability (bypass mode: current − rollout), logp one of the two. "
    "`<statistic>_k{1,2,3}` is one of `algorithm.rollout_correction.rollout_rs`, such as "
    "`token_k1`; with k1, numbers and bounds are logarithms.",
    Metric("rollout_corr/kl", "mean", "tokens", _NATS, "−lr", verl=SAME),
    Metric("rollout_corr/k3_kl", "mean", "tokens", _NATS, "e^lr − 1 − lr", verl=SAME),
    Metric("rollout_corr/{training,rollout}_ppl", "mean", "responses", "perplexity",
           "e^(−mean_t logp)", verl=SAME),
    Metric("rollout_corr/{training,rollout}_log_ppl", "mean", "responses", _NATS,
           "−mean_t logp", verl=SAME),
    Metric("rollout_corr/log_ppl_diff", "mean", "responses", _NATS, "−mean_t lr", verl=SAME),
    Metric("rollout_corr/log_ppl_abs_diff", "mean", "responses", _NATS,
           "abs(mean_t lr)", verl=SAME),
    Metric("rollout_corr/log_ppl_diff_{max,min}", "named", "responses", _NATS,
           "−mean_t lr", verl=SAME),
    Metric("rollout_corr/ppl_ratio", "mean", "responses", "ratio", "e^(−mean_t lr)", verl=SAME),
    Metric("rollout_corr/chi2_token", "mean", "tokens", "divergence", "e^(2·lr) − 1", verl=SAME),
    Metric("rollout_corr/chi2_seq", "mean", "responses", "divergence",
           "e^(2·Σ_t lr) − 1", verl=SAME),
    Metric(f"{_IS}_mean", "mean", "tokens", "weight",
           "weight before normalisation, cut to threshold or band",
           above=0.0, verl=SAME),
    Metric(f"{_IS}_{{std,max,min}}", "named", "tokens", "weight",
           "the same; `max`, `min` of `sequence` weights before the cut", verl=SAME),
    Metric(f"{_IS}_eff_sample_size", "whole", "", "share",
           "(mean w)² / mean w²; 0 if all weights are 0", verl=SAME),
    Metric(f"{_IS}_ratio_fraction_{{high,low}}", "mean", "tokens or responses", "share",
           "weights before the cut above the threshold, below the band or 1/threshold", verl=SAME),
    Metric(f"{_IS}_oob_ratio", "mean", "tokens", "share",
           "outside the band", verl=SAME),
    Metric(f"{_IS}_seq_{{mean,std,max,min,max_deviation}}", "named", "responses", "weight",
           "mean weight of a response; `max_deviation`: largest distance from 1",
           verl=SAME),
    Metric(f"{_IS}_seq_fraction_{{high,low}}", "mean", "responses", "share",
           "whose mean weight before the cut is beyond these bounds", verl=SAME),
    Metric(f"{_IS}_batch_norm_factor", "whole", "", "weight",
           "`rollout_is_batch_normalize`: divisor of the weights", verl=SAME),
    Metric(f"{_RS}_masked_fraction", "mean", "tokens", "share",
           "rejected tokens", below=1.0, verl=SAME),
    Metric(f"{_RS}_seq_masked_fraction", "mean", "responses", "share",
           "responses that lost a token", verl=SAME),
    Metric(f"{_ONE}_masked_fraction", "mean", "tokens", "share",
           "tokens that the statistic alone rejects", verl=SAME),
    Metric(f"{_ONE}_seq_masked_fraction", "mean", "responses", "share",
           "responses that lose a token by it", verl=SAME),
    Metric(f"{_ONE}_{{mean,std,max,min}}", "named", "tokens or responses", "nats",
           "the statistic; `std` of values cut to the bounds", verl=SAME),
    Metric(f"{_ONE}_fraction_{{high,low}}", "mean", "tokens or responses", "share",
           "above and below the bounds", verl=SAME),
    Metric(f"{_ONE}_seq_{{mean,std,max,min,max_deviation}}", "named", "responses", "nats",
           "the statistic of a response, of tokens their mean; `max_deviation`: largest size",
           verl=SAME),
    Metric(f"{_ONE}_seq_fraction_{{high,low}}", "mean", "responses", "share",
           "above and below the bounds; `low` with k1 alone", verl=SAME),
)
