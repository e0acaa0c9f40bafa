"""Every policy loss and the bypass correction once more, as plain as can be: one sequence at a
time, nothing padded.

`tests.plain_ppo` trains with them. They share no code with mrlhf, and are written from the papers'
formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CLIP_LOW, CLIP_HIGH, CLIP_C = 0.2, 0.3, 3.0
TRUST_LOW, TRUST_HIGH = (
    0.003,
    0.004,
)  # of the divergences, which take their bounds from the same keys
TAU_POS, TAU_NEG = 1.0, 1.05
COV_FRACTION, COV_BOUNDS, PPO_KL_COEF = 0.2, (0.05, 0.8), 0.3
THRESHOLD = 1.3  # of bypass weights
BAND = 1.7  # of rejection


@dataclass(frozen=True)
class Row:
    """One response: `logprobs` with gradient, the rest without; all [response_len], `kept` bool."""

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    kept: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Told:
    """Loss of each token, and where a clip acted."""

    losses: Tensor
    clipped: Tensor
    clipped_lower: Tensor


def token_losses(name: str, rows: list[Row]) -> list[Told]:
    """The loss of a mini-batch, row by row."""
    if name in ("clip_cov", "kl_cov"):
        return _by_covariance(name, rows)
    return [_of_row(name, row) for row in rows]


def bypass(kind: str, rows: list[Row]) -> list[Row]:
    """Weights and kept tokens as the current policy has them.

    "reinforce": token weights of mean 1; "sequence": one weight a response; "geo": rejection by the
    mean log-ratio.
    """
    ratios = [(row.logprobs.detach() - row.old).exp() for row in rows]
    if kind == "reinforce":
        cut = [ratio.clamp(max=THRESHOLD) for ratio in ratios]
        mean = torch.cat([c[row.kept] for c, row in zip(cut, rows, strict=True)]).mean()
        return [_with(row, weights=c / mean) for c, row in zip(cut, rows, strict=True)]
    if kind == "sequence":
        return [
            _with(
                row,
                weights=torch.full_like(row.old, min(math.prod(r[row.kept].tolist()), THRESHOLD)),
            )
            for r, row in zip(ratios, rows, strict=True)
        ]
    assert kind == "geo"
    inside = [
        1 / BAND <= 1 / math.exp(r[row.kept].log().mean().item()) <= BAND
        for r, row in zip(ratios, rows, strict=True)
    ]
    return [_with(row, kept=row.kept & ok) for ok, row in zip(inside, rows, strict=True)]


def geometric_mean(row: Row) -> Tensor:
    """The weights' geometric mean over the tokens that count, at each token."""
    logs = [
        math.log(w) for w, kept in zip(row.weights.tolist(), row.kept.tolist(), strict=True) if kept
    ]
    return torch.full_like(row.weights, math.exp(sum(logs) / max(1, len(logs))))


def _with(row: Row, kept: Tensor | None = None, weights: Tensor | None = None) -> Row:
    return Row(
        row.logprobs, row.old, row.advantages, row.kept if kept is None else kept,
        row.weights if weights is None else weights,
    )  # fmt: skip


def _of_row(name: str, row: Row) -> Told:
    logp, old, a, kept = row.logprobs, row.old, row.advantages, row.kept
    ratio, none = (logp - old).exp(), torch.zeros(len(logp), dtype=torch.bool)
    count = max(1, int(kept.sum()))
    if name == "vanilla":
        plain, clipped = -a * ratio, -a * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        worse = torch.maximum(plain, clipped)
        losses = torch.where(a < 0, torch.minimum(worse, -a * CLIP_C), worse)
        return Told(losses, clipped > plain, (a < 0) & (worse > -a * CLIP_C))
    if name == "gspo":
        whole = ((logp - old)[kept].sum() / count).exp()
        # Its gradient reaches each token as that of its own log-probability.
        s = whole.detach() * (logp - logp.detach()).exp()
        plain, clipped = -a * s, -a * s.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        return Told(torch.maximum(plain, clipped), clipped > plain, none)
    if name == "cispo":
        held = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH).detach()
        return Told(-held * a * logp, ratio != ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH), none)
    if name == "sapo":
        tau = torch.tensor([TAU_POS if x > 0 else TAU_NEG for x in a])
        return Told(-4 / tau / (1 + (-tau * (ratio - 1)).exp()) * a, none, none)
    if name in ("gpg", "reinforce"):
        return Told(-logp * a, none, none)
    if name == "surrogate":
        return Told(-a * ratio, none, none)
    if name == "geo_mean":
        d = logp - old
        narrow = d.clamp(-CLIP_LOW, CLIP_HIGH)
        held = torch.where(
            a > 0, torch.minimum(d, narrow), torch.where(a < 0, torch.maximum(d, narrow), 0.0)
        )
        mean_a = a[kept].sum() / count
        loss = -mean_a * (held[kept].sum() / count).exp()
        return Told(loss.expand(len(d)), (d != narrow) & (a > 0), (d != narrow) & (a < 0))
    p, q = logp.exp().detach(), old.exp()
    if name == "dppo_tv":
        valid = torch.where(a > 0, p - q <= TRUST_HIGH, q - p <= TRUST_LOW)
    else:
        assert name == "dppo_kl"
        kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        valid = torch.where(a > 0, (kl <= TRUST_HIGH) | (p <= q), (kl <= TRUST_LOW) | (p >= q))
    return Told(
        -a * ratio.detach().clamp(max=CLIP_C) * logp * valid, ~valid, valid & (ratio > CLIP_C)
    )


def _by_covariance(name: str, rows: list[Row]) -> list[Told]:
    kept = torch.cat([row.kept for row in rows])
    logp = torch.cat([row.logprobs.detach() for row in rows])
    a = torch.cat([row.advantages for row in rows])
    old = torch.cat([row.old for row in rows])
    cov = ((a - a[kept].mean()) * (logp - logp[kept].mean())).tolist()
    ratio = (logp - old).exp()
    clips = -a * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) > -a * ratio
    candidates = [i for i in range(len(cov)) if kept[i]]
    if name == "clip_cov":
        candidates = [
            i for i in candidates if COV_BOUNDS[0] < cov[i] < COV_BOUNDS[1] and not clips[i]
        ]
    chosen = sorted(candidates, key=lambda i: -cov[i])[
        : max(1, int(COV_FRACTION * int(kept.sum())))
    ]
    selected = torch.zeros(len(cov), dtype=torch.bool)
    selected[chosen] = True
    told = []
    for row, mine in zip(rows, selected.split([len(row.old) for row in rows]), strict=True):
        none, r = torch.zeros_like(mine), (row.logprobs - row.old).exp()
        if name == "clip_cov":
            worse = torch.maximum(
                -row.advantages * r, -row.advantages * r.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            )  # fmt: skip
            told.append(Told(worse * ~mine, mine, none))
        else:
            told.append(
                Told(
                    -row.advantages * r + PPO_KL_COEF * (row.logprobs - row.old).abs() * mine,
                    none,
                    none,
                )
            )
    return told
