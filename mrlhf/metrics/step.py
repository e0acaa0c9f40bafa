"""Computes the metrics of a PPO step from its whole batch: statistics of the batch, and speed.

Every mean is over the tokens or sequences of the global batch, so that no metric depends on how the
batch was split. This file does not know where metrics are written or which ranks there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mrlhf.batch import Episode, Experience, Rollout
from mrlhf.metrics.tally import quotient
from mrlhf.rl.masking import local_moments, selected

PARTS = 4  # quarters of a response; turns of an episode, the last of which counts all later ones


def data_metrics(experience: Experience, max_prompt_length: int) -> dict[str, float]:
    """Describe the whole batch of a step: rewards, advantages, values and lengths.

    Scores and rewards cover the responses that were drawn; advantages, returns and values the
    tokens whose loss counts; lengths all tokens.
    `prompt_length/clip_ratio` is the share of prompts that are `max_prompt_length` tokens long.
    """
    mask = experience.loss_mask
    drawn = ~experience.rollout.given
    metrics = {
        **_mean_max_min("critic/score", experience.scores[drawn]),
        **_mean_max_min("critic/rewards", experience.token_rewards.sum(dim=1)[drawn]),
        **_mean_max_min("critic/advantages", selected(experience.advantages, mask)),
        **_mean_max_min("critic/returns", selected(experience.returns, mask)),
        **_length_metrics(experience.rollout, max_prompt_length),
    }

    values = experience.values
    if values is not None:
        metrics |= _mean_max_min("critic/values", selected(values, mask))
        episodes = experience.rollout.episodes
        metrics |= value_metrics("critic/vf_", values, experience.returns, mask, episodes)
    return metrics


def throughput_metrics(
    seconds: Mapping[str, float],
    prompt_tokens: int,
    response_tokens: int,
    generated_tokens: int,
    world_size: int,
) -> dict[str, float]:
    """The speed of a step over all its tokens.

    Args:
        seconds: seconds of each phase; `step` is one of them.
        generated_tokens: tokens that the policy drew, also in responses that are not in the batch;
            the phase `gen` is measured by these alone.
        world_size: ranks; `perf/throughput` is tokens per second and rank.
    """
    tokens = prompt_tokens + response_tokens

    metrics = {}
    for phase, spent in seconds.items():
        counted = generated_tokens if phase == "gen" else tokens
        metrics[f"timing_per_token_ms/{phase}"] = quotient(1000 * spent, counted)

    metrics["perf/total_num_tokens"] = tokens
    metrics["perf/time_per_step"] = seconds["step"]
    metrics["perf/throughput"] = quotient(tokens, seconds["step"] * world_size)
    return metrics


def _length_metrics(rollout: Rollout, max_prompt_length: int) -> dict[str, float]:
    """Lengths in tokens; clipped: ended by the limit; aborted: without a token."""
    prompt_lengths = torch.tensor(rollout.prompt_lengths, dtype=torch.float64, device="cpu")
    lengths = rollout.response_mask.sum(dim=1)
    empty = lengths == 0
    clipped = ~rollout.stopped
    return {
        **_mean_max_min("response_length", lengths),
        "response_length/clip_ratio": float(clipped.double().mean()),
        **_mean_max_min("response_length_non_aborted", lengths[~empty]),
        "response_length_non_aborted/clip_ratio": float(clipped[~empty].double().mean()),
        "response/aborted_ratio": float(empty.double().mean()),
        **_mean_max_min("prompt_length", prompt_lengths),
        "prompt_length/clip_ratio": float((prompt_lengths >= max_prompt_length).double().mean()),
    }


def _mean_max_min(prefix: str, x: Tensor) -> dict[str, float]:
    """Mean, maximum and minimum of a flat tensor; NaN where it is empty."""
    if x.numel() == 0:
        return {f"{prefix}/{name}": math.nan for name in ("mean", "max", "min")}

    lowest, highest = x.aminmax()
    return {
        f"{prefix}/mean": float(x.double().mean()),
        f"{prefix}/max": float(highest),
        f"{prefix}/min": float(lowest),
    }


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - var(returns - values) / var(returns) over `mask`; NaN if it is empty."""
    if not mask.any():
        return math.nan
    unexplained = local_moments(returns - values, mask).variance
    return 1 - unexplained / (local_moments(returns, mask).variance + 1e-5)


def value_metrics(
    prefix: str,
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    episodes: Sequence[Episode] | None = None,
) -> dict[str, float]:
    """`<prefix>explained_var`, and for each part of the responses that has a token of the mask
    `<prefix>bias/<part>`, the mean of value - return, and where the returns differ also
    `<prefix>explained_var/<part>`.
    """
    metrics = {f"{prefix}explained_var": explained_variance(values, returns, mask)}
    parts = {"quarter": quarters(mask)}
    if episodes is not None:
        parts["turn"] = turns(episodes, mask)
    for kind, numbers in parts.items():
        for number in range(1, PARTS + 1):
            chosen = mask & (numbers == number)
            if not chosen.any():
                continue
            part = f"{kind}_{number}"
            metrics[f"{prefix}bias/{part}"] = local_moments(values - returns, chosen).mean
            lowest, highest = returns[chosen].aminmax()
            if lowest < highest:  # else there is nothing to explain
                variance = explained_variance(values, returns, chosen)
                metrics[f"{prefix}explained_var/{part}"] = variance
    return metrics


def quarters(mask: Tensor) -> Tensor:
    """The quarter in which each token of the mask lies, of its row's tokens of the mask."""
    return 1 + (mask.cumsum(dim=1) - 1) * PARTS // mask.sum(dim=1, keepdim=True).clamp(min=1)


def turns(episodes: Sequence[Episode], mask: Tensor) -> Tensor:
    """The turn in which each token lies, counted from 1."""
    numbers = torch.zeros_like(mask, dtype=torch.int64)
    for row, episode in enumerate(episodes):
        for number, begin in enumerate(episode.turn_begins, start=1):
            numbers[row, begin:] = min(number, PARTS)
    return numbers
