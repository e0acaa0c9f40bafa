"""Every policy loss and the bypass correction once more, for one sequence at a time.

`tests.oracle.plain_ppo` trains with them, and `tests/unit/test_policy_losses.py` compares losses
and gradients with them. They share no code with mrlhf and are written from the papers' formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

CLIP_LOW = 0.2
CLIP_HIGH = 0.3
CLIP_C = 3.0
# The bounds of the divergences of dppo_*, which are set by the same keys.
TRUST_LOW = 0.003
TRUST_HIGH = 0.004
TAU_POS = 1.0
TAU_NEG = 1.05
COV_FRACTION = 0.2
COV_BOUNDS = (0.05, 0.8)
PPO_KL_COEF = 0.3
THRESHOLD = 1.3  # of bypass weights
BAND = 1.7  # of rejection


@dataclass(frozen=True)
class Numbers:
    """The numbers of the losses; those of the divergences of dppo_* are `trust_low` and so on."""

    clip_low: float = CLIP_LOW
    clip_high: float = CLIP_HIGH
    clip_c: float = CLIP_C
    trust_low: float = TRUST_LOW
    trust_high: float = TRUST_HIGH
    tau_pos: float = TAU_POS
    tau_neg: float = TAU_NEG
    ppo_kl_coef: float = PPO_KL_COEF


@dataclass(frozen=True)
class Row:
    """One response: `logprobs` with gradient, the rest without; all [response_len].

    `kept` and `selected` are bool. The latter are the tokens that a covariance loss treats in
    another way; None: they are found.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    kept: Tensor
    weights: Tensor
    selected: Tensor | None = None


@dataclass(frozen=True)
class RowLoss:
    """The loss of each token of a response, and where a clip acted."""

    losses: Tensor
    clipped: Tensor
    clipped_lower: Tensor


def token_losses(name: str, rows: list[Row], numbers: Numbers = Numbers()) -> list[RowLoss]:
    """The loss of a mini-batch, row by row."""
    if name in ("clip_cov", "kl_cov"):
        selected = _selected_by_covariance(name, rows, numbers)
        rows = [
            row if row.selected is not None else replace(row, selected=mine)
            for row, mine in zip(rows, selected, strict=True)
        ]
    return [_of_row(name, row, numbers) for row in rows]


def bypass(kind: str, rows: list[Row]) -> list[Row]:
    """The rows with the weights and kept tokens that the current policy gives.

    "token": token weights; "reinforce": the same of mean 1; "sequence": one weight a response;
    "geo": rejection by the mean log-ratio.
    """
    ratios = [(row.logprobs.detach() - row.old).exp() for row in rows]

    if kind == "token":
        return [
            replace(row, weights=r.clamp(max=THRESHOLD))
            for r, row in zip(ratios, rows, strict=True)
        ]

    if kind == "reinforce":
        cut = [ratio.clamp(max=THRESHOLD) for ratio in ratios]
        mean = torch.cat([c[row.kept] for c, row in zip(cut, rows, strict=True)]).mean()
        return [replace(row, weights=c / mean) for c, row in zip(cut, rows, strict=True)]
    if kind == "sequence":
        return [
            replace(
                row,
                weights=torch.full_like(row.old, min(math.prod(r[row.kept].tolist()), THRESHOLD)),
            )
            for r, row in zip(ratios, rows, strict=True)
        ]
    assert kind == "geo", (
        f"the oracle has no plain version of {kind}; add it to bypass in "
        "tests/oracle/plain_losses.py"
    )
    inside = [
        1 / BAND <= 1 / math.exp(r[row.kept].log().mean().item()) <= BAND
        for r, row in zip(ratios, rows, strict=True)
    ]
    return [replace(row, kept=row.kept & ok) for ok, row in zip(inside, rows, strict=True)]


def centring(
    kind: str | None, row: Row, log_p: Tensor, ids: Tensor, log_q: Tensor
) -> dict[str, Tensor]:
    """The advantage times the mean of weighted scores under the engine, over the vocabulary.

    Args:
        log_p: [response_len, vocab], of the policy.
        ids: the engine's likeliest tokens, and `log_q` theirs, [response_len, head]; -inf where
            nothing was drawn. Of the others its distribution is that of the policy, scaled.
    """
    p = log_p.detach().exp()
    in_head = torch.zeros_like(p, dtype=torch.bool)
    in_head.scatter_(1, ids, log_q > -math.inf)
    p_tail = (p * ~in_head).sum(dim=1, keepdim=True)
    q_head = log_q.exp().sum(dim=1, keepdim=True)
    scale = torch.where(p_tail > 1e-5, (1 - q_head) / p_tail, 1.0)
    q = (scale * p).scatter(1, ids, log_q.exp()).where(log_q[:, :1] > -math.inf, 0.0)

    ratio = torch.where(p > 0, p, 1.0) / torch.where(q > 0, q, 1.0)
    weighted = q * (ratio.clamp(max=THRESHOLD) if kind == "token" else 1.0)
    of_tail = (weighted / torch.where(p > 0, p, 1.0) * ~in_head).amax(dim=1, keepdim=True)
    of_tail = torch.where(p_tail > 1e-5, of_tail, 1.0)
    finite = log_p.clamp(min=-1e4)
    return {
        "trained": row.advantages * (weighted * finite).sum(dim=1),
        # Without the part that has no gradient.
        "actor/sc_correction": row.advantages
        * ((weighted - of_tail * p) * in_head * finite.detach()).sum(dim=1),
        "actor/sc_sampler_head_mass": q_head[:, 0],
        "actor/sc_train_head_mass": (p * in_head).sum(dim=1),
    }


def geometric_mean(row: Row) -> Tensor:
    """The weights' geometric mean over the tokens that count, at each token."""
    logs = [
        math.log(w) for w, kept in zip(row.weights.tolist(), row.kept.tolist(), strict=True) if kept
    ]
    return torch.full_like(row.weights, math.exp(sum(logs) / max(1, len(logs))))


def _of_row(name: str, row: Row, o: Numbers) -> RowLoss:
    logp = row.logprobs
    old = row.old
    a = row.advantages
    kept = row.kept
    ratio = (logp - old).exp()
    none = torch.zeros(len(logp), dtype=torch.bool)
    count = max(1, int(kept.sum()))

    if name == "vanilla":
        plain = -a * ratio
        clipped = -a * ratio.clamp(1 - o.clip_low, 1 + o.clip_high)
        worse = torch.maximum(plain, clipped)
        losses = torch.where(a < 0, torch.minimum(worse, -a * o.clip_c), worse)
        return RowLoss(losses, clipped > plain, (a < 0) & (worse > -a * o.clip_c))

    if name == "gspo":
        whole = ((logp - old)[kept].sum() / count).exp()
        # Its gradient reaches each token as that of its own log-probability.
        s = whole.detach() * (logp - logp.detach()).exp()
        plain = -a * s
        clipped = -a * s.clamp(1 - o.clip_low, 1 + o.clip_high)
        return RowLoss(torch.maximum(plain, clipped), clipped > plain, none)

    if name == "cispo":
        held = ratio.clamp(1 - o.clip_low, 1 + o.clip_high).detach()
        return RowLoss(
            -held * a * logp, ratio != ratio.clamp(1 - o.clip_low, 1 + o.clip_high), none
        )

    if name == "sapo":
        tau = torch.full_like(a, o.tau_neg).masked_fill(a > 0, o.tau_pos)
        return RowLoss(-4 / tau / (1 + (-tau * (ratio - 1)).exp()) * a, none, none)

    if name in ("gpg", "reinforce"):
        return RowLoss(-logp * a, none, none)
    if name == "surrogate":
        return RowLoss(-a * ratio, none, none)

    if name == "clip_cov":
        clipped = -a * ratio.clamp(1 - o.clip_low, 1 + o.clip_high)
        assert row.selected is not None
        losses = torch.maximum(-a * ratio, clipped) * ~row.selected
        return RowLoss(losses, row.selected, none)
    if name == "kl_cov":
        penalty = o.ppo_kl_coef * (logp - old).abs() * row.selected
        return RowLoss(-a * ratio + penalty, none, none)

    if name == "geo_mean":
        d = logp - old
        narrow = d.clamp(-o.clip_low, o.clip_high)
        held = torch.where(
            a > 0, torch.minimum(d, narrow), torch.where(a < 0, torch.maximum(d, narrow), 0.0)
        )
        mean_a = a[kept].sum() / count
        loss = -mean_a * (held[kept].sum() / count).exp()
        return RowLoss(loss.expand(len(d)), (d != narrow) & (a > 0), (d != narrow) & (a < 0))

    return _of_trust_region(name, row, o)


def _of_trust_region(name: str, row: Row, o: Numbers) -> RowLoss:
    """A token trains while its probability is in the region, or moves back to it."""
    a = row.advantages
    p = row.logprobs.exp().detach()
    q = row.old.exp()
    ratio = p / q

    if name == "dppo_tv":
        valid = torch.where(a > 0, p - q <= o.trust_high, q - p <= o.trust_low)
    else:
        assert name == "dppo_kl", (
            f"the oracle has no plain version of {name}; add it to _of_row in "
            "tests/oracle/plain_losses.py"
        )
        kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        valid = torch.where(a > 0, (kl <= o.trust_high) | (p <= q), (kl <= o.trust_low) | (p >= q))

    losses = -a * ratio.clamp(max=o.clip_c) * row.logprobs * valid
    return RowLoss(losses, ~valid, valid & (ratio > o.clip_c))


def _selected_by_covariance(name: str, rows: list[Row], o: Numbers) -> list[Tensor]:
    """Which tokens have the largest covariances of log-probability and advantage, row by row."""
    kept = torch.cat([row.kept for row in rows])
    logp = torch.cat([row.logprobs.detach() for row in rows])
    a = torch.cat([row.advantages for row in rows])
    old = torch.cat([row.old for row in rows])
    cov = ((a - a[kept].mean()) * (logp - logp[kept].mean())).tolist()
    ratio = (logp - old).exp()
    clips = -a * ratio.clamp(1 - o.clip_low, 1 + o.clip_high) > -a * ratio

    candidates = [i for i in range(len(cov)) if kept[i]]
    if name == "clip_cov":
        low, high = COV_BOUNDS
        candidates = [i for i in candidates if low < cov[i] < high and not clips[i]]
    count = max(1, int(COV_FRACTION * int(kept.sum())))
    selected = torch.zeros(len(cov), dtype=torch.bool)
    selected[sorted(candidates, key=lambda i: -cov[i])[:count]] = True
    return list(selected.split([len(row.old) for row in rows]))
