"""What a reward model is worth on held-out rows: how often, how surely and by what it is right.

It knows scores and lengths, and neither models nor the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from mrlhf.data.preferences import ComparedPair
from mrlhf.metrics.tally import standard_errors

_BINS = 10
_BUCKETS = ("small", "medium", "large")
PAYS_FOR_LENGTH = 0.1
"""By how much more often than people do a model prefers the longer response before it is named."""


def score_moments(scores: Tensor, name: str = "score") -> dict[str, float]:
    """The mean and the standard deviation of the scores, which PPO should expect."""
    std = float(scores.double().std(unbiased=False))
    return {f"val/{name}/mean": float(scores.double().mean()), f"val/{name}/std": std}


def fit_of(names: Sequence[str], scores: Tensor, targets: Tensor) -> dict[str, float]:
    """Measure the scores of each head against its targets, [heads, rows], NaN where there is none.

    The correlation is Pearson's; it is left out if all scores, or all targets, are equal.
    """
    metrics: dict[str, float] = {}
    for name, own, wanted in zip(names, scores.double(), targets.double(), strict=True):
        metrics |= score_moments(own, "score" if len(names) == 1 else f"score/{name}")
        both = torch.stack([own, wanted])[:, ~wanted.isnan()]
        if both.numel():
            metrics[f"val/squared_error/{name}"] = float((both[0] - both[1]).square().mean())
        if len(both.T) > 1 and float(both.std(1).min()) > 0:
            metrics[f"val/correlation/{name}"] = float(torch.corrcoef(both)[0, 1])
    return metrics


def quality_of(
    pairs: Sequence[ComparedPair], scores: Tensor, lengths: Sequence[int]
) -> dict[str, float]:
    """Measure the scores [responses] of responses with these lengths; ties are left out.

    The margins of the buckets, each a third of the pairs, are those of the data, or the model's own
    if the data have none. Calibration is https://arxiv.org/abs/1706.04599, equation 3, with the
    probability sigmoid(score - score) of the response that scores higher in 10 bins from 0.5 to 1.
    """
    decided = [pair for pair in pairs if not pair.is_tie]
    if not decided:
        return {"val/accuracy": math.nan}
    each = scores.double().tolist()
    gaps = [each[pair.better] - each[pair.worse] for pair in decided]
    right = [gap > 0 for gap in gaps]
    metrics = {"val/accuracy": fmean(right), **standard_errors({"val/accuracy": right})}

    stated = [abs(pair.margin) for pair in decided]
    margins = stated if any(stated) else list(map(abs, gaps))
    order = sorted(range(len(gaps)), key=margins.__getitem__)
    for number, name in enumerate(_BUCKETS if len(gaps) >= len(_BUCKETS) else ()):
        bucket = order[number * len(order) // 3 : (number + 1) * len(order) // 3]
        metrics[f"val/accuracy/{name}_margin"] = fmean(right[pair] for pair in bucket)
    metrics["val/calibration_error"] = _calibration_error(gaps)

    longer = [lengths[pair.better] - lengths[pair.worse] for pair in decided]
    apart = [(more > 0, gap * more > 0) for more, gap in zip(longer, gaps, strict=True) if more]
    if apart:
        metrics["val/longer_preferred"] = fmean(preferred for preferred, _ in apart)
        metrics["val/longer_scores_higher"] = fmean(higher for _, higher in apart)
    return metrics


def words_on_length(metrics: Mapping[str, float]) -> str | None:
    """A sentence on a model that pays for length; None of another one."""
    people = metrics.get("val/longer_preferred", math.nan)
    model = metrics.get("val/longer_scores_higher", math.nan)
    if not model - people > PAYS_FOR_LENGTH:
        return None
    return (
        f"it pays for length: the longer response scores higher in {model:.0%} of the held-out "
        f"pairs, and is preferred in {people:.0%}"
    )


def _calibration_error(gaps: Sequence[float]) -> float:
    """The expected calibration error of the scores' differences, the better response's first."""
    sure = torch.tensor(gaps, dtype=torch.float64).abs().sigmoid()
    right = torch.tensor(gaps, dtype=torch.float64) > 0
    bins = ((sure - 0.5) * 2 * _BINS).long().clamp(max=_BINS - 1)
    off = torch.zeros(_BINS, dtype=torch.float64).index_add(0, bins, right.double() - sure)
    return float(off.abs().sum()) / len(gaps)
