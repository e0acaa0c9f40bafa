"""DPO and IPO as a slow loop in one process, which ours have to equal.

It uses transformers and torch.optim.AdamW, computes one response at a time, and packs nothing. It
shares no code with mrlhf but the type of the pairs; the formulas are written out again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrlhf.data.preferences import PreferenceRows
from tests.oracle.plain_models import SIZES, load, weights_of
from tests.oracle.plain_optimizer import LR, Outcome, differentiate, make_optimizer

# The pairs of each optimizer step; the metrics are those of the last one.
STEPS = ((0, 1, 2, 3, 4), (7, 5, 1, 0, 6, 2))
HELD_OUT = 3  # fewer than some layouts have data-parallel ranks
LONGEST = 16


@dataclass(frozen=True)
class Method:
    """The loss, by its name in the configuration, and its numbers."""

    loss_type: str
    beta: float
    label_smoothing: float = 0.0


def make_pairs() -> PreferenceRows:
    """Random tokens; the sides of a pair have different lengths, from 1 token on."""
    generator = random.Random(8)

    def draw(most: int) -> list[int]:
        return [generator.randrange(SIZES["vocab_size"]) for _ in range(generator.randint(1, most))]

    prompts = [draw(6) for _ in range(1 + max(max(rows) for rows in STEPS))]
    chosen = [prompt + draw(10) for prompt in prompts]
    rejected = [prompt + draw(10) for prompt in prompts]
    return PreferenceRows(
        responses=[[*sides] for sides in zip(chosen, rejected, strict=True)],
        prompt_lengths=[len(prompt) for prompt in prompts],
    )


def held_out_pairs(pairs: PreferenceRows) -> PreferenceRows:
    """The first few."""
    return PreferenceRows(
        pairs.responses[:HELD_OUT],
        pairs.prompt_lengths[:HELD_OUT],
    )


def response_logprob(model: Any, token_ids: list[int], prompt: int) -> Tensor:
    """The log-probability of the tokens after the prompt, a scalar."""
    tokens = torch.tensor(token_ids)
    log_p = model(tokens[None]).logits[0, :-1].log_softmax(dim=-1)
    return log_p.gather(1, tokens[1:, None])[prompt - 1 :, 0].sum()


@torch.no_grad()
def table(model: Path, pairs: PreferenceRows) -> Tensor:
    """The log-probabilities of both sides of each pair, [pairs, 2]."""
    judge = load(model)
    rows = []
    for row, prompt in enumerate(pairs.prompt_lengths):
        sides = pairs.responses[row]
        rows.append([response_logprob(judge, side, prompt).item() for side in sides])
    return torch.tensor(rows)


def train(
    model: Path, reference: Path, pairs: PreferenceRows, method: Method, clip_grad: float
) -> Outcome:
    """One optimizer step for each of `STEPS`, and a validation on the first pairs."""
    policy = load(model)
    frozen = load(reference)
    optimizer = make_optimizer(policy)
    metrics: dict[str, float] = {}

    for rows in STEPS:
        loss, metrics = _mini_batch("dpo", policy, frozen, pairs, rows, method)
        metrics["dpo/grad_norm"] = differentiate(optimizer, policy, loss, clip_grad)
        optimizer.step()

    metrics |= {"dpo/optimizer_steps": 1, "dpo/skipped_steps": 0, "dpo/lr": LR}
    with torch.no_grad():
        _, held_out = _mini_batch("val", policy, frozen, pairs, range(HELD_OUT), method)
    share = (held_out["val/rewards/accuracies"] * HELD_OUT + 2) / (HELD_OUT + 4)  # Agresti, Coull
    held_out["se/val/rewards/accuracies"] = math.sqrt(share * (1 - share) / HELD_OUT)
    return Outcome(metrics | held_out, weights_of(policy))


def _mini_batch(
    kind: str,
    policy: Any,
    frozen: Any,
    pairs: PreferenceRows,
    rows: Sequence[int],
    method: Method,
) -> tuple[Tensor, dict[str, float]]:
    """The mean loss of these pairs, and the means of what is reported of them."""
    losses: list[Tensor] = []
    seen: list[dict[str, float]] = []
    for row in rows:
        prompt = pairs.prompt_lengths[row]
        chosen, rejected = pairs.responses[row]
        log_p = [response_logprob(policy, side, prompt) for side in (chosen, rejected)]
        with torch.no_grad():
            log_q = [response_logprob(frozen, side, prompt) for side in (chosen, rejected)]
        better = log_p[0] - log_q[0]
        worse = log_p[1] - log_q[1]

        if method.loss_type == "ipo":
            apart = better / (len(chosen) - prompt) - worse / (len(rejected) - prompt)
            losses.append((apart - 0.5 / method.beta) ** 2)
        else:
            margin = method.beta * (better - worse)
            right = (1 + (-margin).exp()).log()
            wrong = (1 + margin.exp()).log()
            smoothing = method.label_smoothing
            losses.append((1 - smoothing) * right + smoothing * wrong)
        seen.append(
            {
                "rewards/chosen": method.beta * better.item(),
                "rewards/rejected": method.beta * worse.item(),
                "rewards/margins": method.beta * (better - worse).item(),
                "rewards/accuracies": float(better > worse),
                "logps/chosen": log_p[0].item(),
                "logps/rejected": log_p[1].item(),
            }
        )

    loss = torch.stack(losses).mean()
    means = {name: sum(each[name] for each in seen) / len(seen) for name in seen[0]}
    metrics = {f"{kind}/{name}": value for name, value in means.items()}
    return loss, metrics | {f"{kind}/loss": loss.item()}
