"""PPO's update as one slow loop in one process, which training has to equal.

It uses transformers and torch.optim.AdamW, computes one sequence at a time, and packs nothing. It
shares no code with mrlhf but the batch types; the formulas are written out again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrlhf.batch import Experience
from tests.oracle.plain_experience import RESPONSE_LENGTHS, taught
from tests.oracle.plain_losses import (
    Row,
    RowLoss,
    bypass,
    centring,
    geometric_mean,
    token_losses,
)
from tests.oracle.plain_models import critic_of, load, weights_of
from tests.oracle.plain_optimizer import LR, Outcome, differentiate, make_optimizer
from tests.oracle.plain_routers import Routers
from tests.oracle.plain_tables import (
    TEMPERATURE,
    distribution,
    drawn,
    entropy,
    head_of,
    kl_between,
    values,
)
from tests.token_loss import divergence

MINI_BATCH = 4
EPOCHS = 2
CLIP_VALUE = 0.5
SCALE = 10.0  # loss_scale_factor

OF_ALL_NUMBERS = ("actor/positive_lm_loss", "actor/entropy")

Tables = dict[str, list[Tensor]]
"""By name, a number for each token of a mini-batch: one tensor [response_len] a sequence."""


@dataclass(frozen=True)
class Case:
    """One way of training."""

    model: str  # name of the checkpoint, as `save_models` writes it
    agg: str  # how the losses of tokens become one, as `aggregated` knows it
    settings: dict[str, Any] = field(default_factory=dict)  # more keys of the actor section
    clip_grad: float = 0.0  # the norm that the gradient is clipped to; 0 clips nothing
    loss: str = "vanilla"  # name of the policy loss
    corrected: bool = False  # whether the experience has weights and rejected tokens
    bypass: str | None = None  # a correction of `tests.oracle.plain_losses`
    # Whether the experience has an advantage that is no number, so that the last mini-batch of each
    # epoch is skipped.
    broken: bool = False
    # Whether the policy did not draw the tokens at `HOLES`, which then do not train.
    holes: bool = False
    contexts: bool = False  # whether some responses have several contexts
    router_losses: bool = False  # whether the routers of a mixture have losses of their own
    lora: bool = False  # whether adapters are trained, and not the models
    optimizer: str = "adamw"  # or "muon"
    teacher: dict[str, Any] = field(default_factory=dict)  # keys of the distillation, if any
    # Whether teacher and critic read prompts of their own; the teacher is then the policy without
    # its adapters, if that has any.
    demonstrates: bool = False
    freeze: bool = False  # whether what `FROZEN` matches does not train
    truncated: bool = False  # whether not all tokens could be drawn
    centred: bool = False  # whether the engine's mean of the scores is subtracted

    @property
    def has_full_kl(self) -> bool:
        """Whether the loss compares whole distributions with those of the reference."""
        return self.settings.get("kl_loss_type") == "full"

    @property
    def teacher_is_base(self) -> bool:
        """Whether the teacher is the policy without its adapters."""
        return self.demonstrates and self.lora

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained too, which no choice of a policy loss changes."""
        return self.loss == "vanilla" and self.bypass is None and not self.broken


def train_actor(case: Case, model: Path, experience: Experience) -> Outcome:
    """Update the policy: `EPOCHS` times each mini-batch."""
    policy = load(model, case.lora, case.freeze)
    reference = load(Path(f"{model}-ref")).requires_grad_(False)
    settings = case.settings
    teacher = load(model) if case.teacher_is_base else reference
    as_taught = taught(experience.rollout) if case.demonstrates else experience.rollout

    def mini_batch(numbers: range) -> Tables:
        distributions = [distribution(policy, experience.rollout, row) for row in numbers]
        rows = [
            _row(experience, row, log_p) for row, log_p in zip(numbers, distributions, strict=True)
        ]
        if case.bypass is not None:
            rows = bypass(case.bypass, rows)
        tables: Tables = {"kept": [row.kept for row in rows]}

        losses = token_losses(case.loss, rows)
        weights = [geometric_mean(row) if case.loss == "geo_mean" else row.weights for row in rows]
        tables["actor/pg_loss"] = [loss.losses * w for loss, w in zip(losses, weights, strict=True)]
        total = tables["actor/pg_loss"]

        if case.centred:
            centred = [
                centring(case.bypass, row, log_p, *head_of(experience.rollout, number, log_p))
                for number, row, log_p in zip(numbers, rows, distributions, strict=True)
            ]
            total = _sum_of_tables(total, 1.0, [row.pop("trained") for row in centred])
            tables |= {name: [row[name] for row in centred] for name in centred[0]}

        if settings.get("entropy_coeff"):
            entropies = [entropy(log_p) for log_p in distributions]
            total = _sum_of_tables(total, -settings["entropy_coeff"], entropies)
        if settings.get("use_kl_loss"):
            tables["actor/kl_loss"] = [
                _kl(settings["kl_loss_type"], experience, row, log_p, reference)
                for row, log_p in zip(numbers, distributions, strict=True)
            ]
            total = _sum_of_tables(total, settings["kl_loss_coef"], tables["actor/kl_loss"])
        if case.teacher:
            kind = case.teacher["kl"]
            beta = {"forward": 0.0, "reverse": 1.0}.get(kind, case.teacher.get("beta"))
            sharpness = TEMPERATURE / case.teacher.get("temperature", TEMPERATURE)
            likeliest = case.teacher.get("top_k")
            teachers = [distribution(teacher, as_taught, row) for row in numbers]
            tables["actor/distillation_kl"] = [
                divergence(log_p, log_q.detach(), beta, likeliest, sharpness)
                for log_p, log_q in zip(distributions, teachers, strict=True)
            ]
            total = _sum_of_tables(total, case.teacher["coef"], tables["actor/distillation_kl"])
        tables["total"] = total

        if settings.get("positive_lm_coef"):
            assert experience.positive is not None
            right = [
                row.logprobs[experience.rollout.loss_mask[number, : len(row.logprobs)]]
                for number, row in zip(numbers, rows, strict=True)
                if experience.positive[number]
            ]
            tables["actor/positive_lm_loss"] = [-torch.cat(right).mean()]

        if case.bypass is not None:
            drawn = experience.rollout.loss_mask
            tables["actor/entropy"] = [
                entropy(log_p)[drawn[number, : len(log_p)]]
                for number, log_p in zip(numbers, distributions, strict=True)
            ]
        return tables | _metrics(rows, losses)

    losses = ("actor/pg_loss", "actor/kl_loss", "actor/distillation_kl", "actor/sc_correction")
    outcome = _train("actor", policy, case, mini_batch, losses)
    outcome.metrics["actor/approx_kl"] = outcome.metrics["actor/ppo_kl"]
    return outcome


def _row(experience: Experience, number: int, log_p: Tensor) -> Row:
    length = len(log_p)
    weights = torch.ones(length)
    if experience.weights is not None:
        weights = experience.weights[number, :length]
    return Row(
        logprobs=drawn(log_p, experience.rollout, number),
        old=experience.old_logprobs[number, :length],
        advantages=experience.advantages[number, :length],
        kept=experience.loss_mask[number, :length],
        weights=weights,
    )


def _sum_of_tables(total: list[Tensor], factor: float, table: list[Tensor]) -> list[Tensor]:
    return [x + factor * y for x, y in zip(total, table, strict=True)]


def _metrics(rows: list[Row], losses: list[RowLoss]) -> Tables:
    return {
        "actor/ppo_kl": [row.old - row.logprobs for row in rows],
        "actor/pg_clipfrac": [loss.clipped.float() for loss in losses],
        "actor/pg_clipfrac_lower": [loss.clipped_lower.float() for loss in losses],
    }


def _kl(kind: str, experience: Experience, row: int, log_p: Tensor, reference: Any) -> Tensor:
    if kind == "full":
        return kl_between(log_p, distribution(reference, experience.rollout, row))
    assert kind == "low_var_kl", (
        f"the oracle has no plain version of {kind}; add it to _kl in tests/oracle/plain_ppo.py"
    )
    assert experience.ref_logprobs is not None
    log_ratio = experience.ref_logprobs[row, : len(log_p)] - drawn(log_p, experience.rollout, row)
    return (log_ratio.exp() - log_ratio - 1).clamp(max=10)


def train_critic(case: Case, model: Path, experience: Experience) -> Outcome:
    """Update the critic: `EPOCHS` times each mini-batch."""
    critic = load(model.parent / critic_of(model.name), case.lora, case.freeze)
    assert experience.values is not None
    old_values = experience.values
    rollout = taught(experience.rollout) if case.demonstrates else experience.rollout

    def sequence(row: int) -> dict[str, Tensor]:
        predicted = values(critic, rollout, row)
        old = old_values[row, : len(predicted)]
        returns = experience.returns[row, : len(predicted)]

        near = torch.minimum(torch.maximum(predicted, old - CLIP_VALUE), old + CLIP_VALUE)
        plain = (predicted - returns) ** 2
        clipped = (near - returns) ** 2
        losses = 0.5 * torch.maximum(plain, clipped)
        return {
            "kept": experience.loss_mask[row, : len(predicted)],
            "total": losses,
            "critic/vf_loss": losses,
            "critic/vf_clipfrac": (clipped > plain).float(),
            "critic/vpred_mean": predicted,
        }

    def mini_batch(numbers: range) -> Tables:
        rows = [sequence(row) for row in numbers]
        return {name: [row[name] for row in rows] for name in rows[0]}

    return _train("critic", critic, case, mini_batch, ("critic/vf_loss",))


def _train(
    role: str,
    model: Any,
    case: Case,
    mini_batch: Callable[[range], Tables],
    losses: tuple[str, ...],
) -> Outcome:
    """Train on the mini-batches in order, and skip those whose gradient is no number.

    The metrics named in `losses` are aggregated and averaged over mini-batches, those in
    `OF_ALL_NUMBERS` over all their numbers; the others are averaged over the tokens that count.
    """
    optimizer = make_optimizer(model, case.optimizer)
    routers = Routers(model, case.router_losses)
    numbers: dict[str, list[float]] = {}
    skipped = 0
    for _ in range(EPOCHS):
        for first in range(0, len(RESPONSE_LENGTHS), MINI_BATCH):
            routers.begin()
            tables = mini_batch(range(first, first + MINI_BATCH))
            kept = tables.pop("kept")
            loss = aggregated(tables.pop("total"), kept, case.agg) + routers.losses()
            for of_right in tables.get("actor/positive_lm_loss", []):
                loss = loss + case.settings["positive_lm_coef"] * of_right

            norm = differentiate(optimizer, model, loss, case.clip_grad)
            if not math.isfinite(norm):
                skipped += 1
                continue
            optimizer.step()

            for name, value in {"grad_norm": norm, **routers.metrics()}.items():
                numbers.setdefault(f"{role}/{name}", []).append(value)
            for name, table in tables.items():
                rows = [row.detach() for row in table]
                if name in losses:
                    of_name = [aggregated(rows, kept, case.agg).item()]
                elif name in OF_ALL_NUMBERS:
                    of_name = torch.cat([row.flatten() for row in rows]).tolist()
                else:
                    of_name = _kept_numbers(rows, kept)
                numbers.setdefault(name, []).extend(of_name)

    metrics = {name: sum(of_name) / len(of_name) for name, of_name in numbers.items()}
    metrics[f"{role}/optimizer_steps"] = len(numbers[f"{role}/grad_norm"])
    metrics[f"{role}/skipped_steps"] = skipped
    metrics[f"{role}/lr"] = LR
    return Outcome(metrics, weights_of(model))


def _kept_numbers(rows: list[Tensor], kept: list[Tensor]) -> list[float]:
    numbers: list[float] = []
    for row, row_kept in zip(rows, kept, strict=True):
        numbers += row[row_kept].tolist()
    return numbers


def aggregated(rows: list[Tensor], kept: list[Tensor], mode: str) -> Tensor:
    """The loss of a mini-batch.

    Args:
        rows: the losses of the tokens, a tensor a sequence.
        kept: which tokens count.
        mode: name of the aggregation.
    """
    rows = [row[k] for row, k in zip(rows, kept, strict=True)]
    if mode == "token-mean":
        return torch.cat(rows).mean()
    if mode == "token-sum":
        return torch.cat(rows).sum()

    of_sequence: dict[str, Callable[[Tensor], Tensor]] = {
        "seq-mean-token-sum": torch.sum,
        "seq-mean-token-sum-norm": lambda row: row.sum() / SCALE,
        "seq-mean-token-mean": lambda row: row.sum() / max(1, len(row)),
    }
    assert mode in of_sequence, (
        f"the oracle has no plain version of {mode}; add it to aggregated in "
        "tests/oracle/plain_ppo.py"
    )
    return torch.stack([of_sequence[mode](row) for row in rows]).mean()
