"""PPO's update as one slow loop in one process: transformers, torch.optim.AdamW, a sequence at a
time, nothing packed.

It is what training has to equal. It shares no code with mrlhf but the batch types; the formulas are
written out again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from mrlhf.batch import Experience, Prompts, Rollout
from tests import rollouts
from tests.padding import pad_responses
from tests.plain_losses import Row, RowLoss, bypass, geometric_mean, token_losses

SIZES: dict[str, Any] = {
    "vocab_size": 67,  # odd: with tensor parallelism the last rank's shard is padded
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}
PROMPT_LENGTHS = (1, 5, 3, 8, 2, 6, 4, 1)
RESPONSE_LENGTHS = (4, 1, 9, 3, 7, 2, 5, 10)
MINI_BATCH = 4
EPOCHS = 2
TEMPERATURE = 0.7
CLIP_VALUE = 0.5
SCALE = 10.0  # loss_scale_factor
LR, WEIGHT_DECAY, BETAS = 1e-2, 0.1, (0.9, 0.95)
# As large as many gradients here. So the step depends on how large a gradient is, which Adam would
# else divide out, and where a gradient is near 0 its rounding (1e-9) is not blown up to a step of
# full length.
EPS = 1e-3


Tables = dict[str, list[Tensor]]  # numbers of the tokens of a mini-batch, a tensor a sequence


@dataclass(frozen=True)
class Case:
    """One way of training: the model, how its loss is made, and what the gradient is clipped to (0:
    not).

    `corrected` experiences have weights and rejected tokens; `bypass` names a correction of
    `tests.plain_losses`; `broken` experiences have an advantage that is no number, so that the last
    mini-batch of each epoch is skipped.
    """

    model: str
    agg: str
    settings: dict[str, Any] = field(default_factory=dict)
    clip_grad: float = 0.0
    loss: str = "vanilla"
    corrected: bool = False
    bypass: str | None = None
    broken: bool = False

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained too: the policy's loss is nothing to it."""
        return self.loss == "vanilla" and self.bypass is None and not self.broken


@dataclass(frozen=True)
class Outcome:
    """What a loop leaves: metrics over all its mini-batches, and the trained weights by Hugging
    Face name.
    """

    metrics: dict[str, float]
    weights: dict[str, Tensor]


def save_models(root: Path) -> None:
    """Checkpoints with random weights: `<model>` to train, `<model>-ref` not far from it,
    `<model>-critic`.
    """
    kinds: dict[str, Any] = {
        "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
        "qwen2-tied": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    }
    language, scalar = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSequenceClassification,
    )
    generator = torch.Generator().manual_seed(4)
    for name, config in kinds.items():
        for suffix, auto in (("", language), ("-critic", scalar)):
            config.num_labels = 1
            model = auto.from_config(config)
            for key, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data = 1 + 0.1 * noise if "norm" in key else 0.15 * noise
            model.save_pretrained(root / (name + suffix))
            if auto is language:
                for parameter in model.parameters():
                    parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
                model.save_pretrained(root / f"{name}-ref")


def load(path: Path) -> Any:
    """The checkpoint at `path` as transformers' model, a sequence classifier where it has a score
    head.
    """
    critic = path.name.endswith("-critic")
    auto = (
        transformers.AutoModelForSequenceClassification
        if critic
        else transformers.AutoModelForCausalLM
    )
    return auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def make_rollout() -> Rollout:
    """Random tokens with ragged prompts and responses."""
    generator = torch.Generator().manual_seed(5)

    def draw(length: int) -> list[int]:
        return torch.randint(0, SIZES["vocab_size"], (length,), generator=generator).tolist()

    count = len(PROMPT_LENGTHS)
    prompts = Prompts(
        [draw(length) for length in PROMPT_LENGTHS], list(range(count)), [""] * count, [""] * count, [""] * count,
        [{} for _ in range(count)],
    )  # fmt: skip
    ids, mask = pad_responses([draw(length) for length in RESPONSE_LENGTHS], torch.int64)
    stopped = torch.ones(count, dtype=torch.bool)
    return rollouts.make_rollout(prompts, [0] * count, ids, mask, torch.zeros(mask.shape), stopped)


def make_experience(model: Path) -> Experience:
    """Old log-probs and values in the neighbourhood of the model's, so that some ratios and values
    are clipped.
    """
    rollout = make_rollout()
    generator = torch.Generator().manual_seed(6)
    mask = rollout.response_mask

    def noise(size: float) -> Tensor:
        return torch.where(mask, size * torch.randn(mask.shape, generator=generator), 0.0)

    logprobs, values = (
        evaluate(load(model), rollout)[0],
        token_values(load(Path(f"{model}-critic")), rollout),
    )
    return Experience(
        rollout=rollout,
        scores=torch.zeros(len(rollout)),
        loss_mask=mask,
        old_logprobs=logprobs + noise(0.7),
        ref_logprobs=evaluate(load(Path(f"{model}-ref")), rollout)[0],
        token_rewards=torch.zeros(mask.shape),
        values=values + noise(0.5),
        advantages=noise(1.0),
        returns=values + noise(1.0),
        positive=torch.arange(len(rollout)) % 3 == 0,
    )


def broken(experience: Experience) -> Experience:
    """The same with one advantage that is no number, in the last response."""
    advantages = experience.advantages.clone()
    advantages[-1, 0] = float("nan")
    return replace(experience, advantages=advantages)


def with_correction(experience: Experience) -> Experience:
    """The same with weights, some tokens rejected, and one whole response rejected."""
    generator = torch.Generator().manual_seed(7)
    mask = experience.rollout.response_mask
    kept = mask & (torch.rand(mask.shape, generator=generator) < 0.7)
    kept[2] = False
    weights = torch.where(mask, 0.5 + torch.rand(mask.shape, generator=generator), 0.0)
    return replace(experience, loss_mask=kept, weights=weights)


@torch.no_grad()
def evaluate(model: Any, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the response tokens, [batch, response_len], 0 after the
    end.
    """
    rows = [_distribution(model, rollout, row) for row in range(len(rollout))]
    logprobs = [_drawn(log_p, rollout, row).tolist() for row, log_p in enumerate(rows)]
    entropies = [-(log_p.exp() * log_p).sum(-1) for log_p in rows]
    return pad_responses(logprobs, torch.float32)[0], pad_responses(
        [e.tolist() for e in entropies], torch.float32
    )[0]


@torch.no_grad()
def token_values(critic: Any, rollout: Rollout) -> Tensor:
    """Values before the response tokens, [batch, response_len], 0 after the end."""
    return pad_responses(
        [_values(critic, rollout, row).tolist() for row in range(len(rollout))], torch.float32
    )[0]


@torch.no_grad()
def full_kl(model: Any, reference: Any, rollout: Rollout) -> Tensor:
    """KL of the two over the vocabulary, [batch, response_len], 0 after the end."""
    rows = range(len(rollout))
    kls = [
        _full_kl(_distribution(model, rollout, row), _distribution(reference, rollout, row))
        for row in rows
    ]
    return pad_responses([kl.tolist() for kl in kls], torch.float32)[0]


def train_actor(case: Case, model: Path, experience: Experience) -> Outcome:
    """The policy's update: `EPOCHS` times each mini-batch."""
    policy, reference = load(model), load(Path(f"{model}-ref")).requires_grad_(False)
    settings = case.settings

    def mini_batch(numbers: range) -> Tables:
        distributions = [_distribution(policy, experience.rollout, row) for row in numbers]
        rows = [
            _row(experience, row, log_p) for row, log_p in zip(numbers, distributions, strict=True)
        ]
        rows = rows if case.bypass is None else bypass(case.bypass, rows)
        found: Tables = {"kept": [row.kept for row in rows]}
        told = token_losses(case.loss, rows)
        weights = [geometric_mean(row) if case.loss == "geo_mean" else row.weights for row in rows]
        found["actor/pg_loss"] = [t.losses * w for t, w in zip(told, weights, strict=True)]
        total = found["actor/pg_loss"]
        if settings.get("entropy_coeff"):
            entropies = [-(log_p.exp() * log_p).sum(-1) for log_p in distributions]
            total = [
                x - settings["entropy_coeff"] * h for x, h in zip(total, entropies, strict=True)
            ]
        if settings.get("use_kl_loss"):
            found["actor/kl_loss"] = [
                _kl(settings["kl_loss_type"], experience, row, log_p, reference)
                for row, log_p in zip(numbers, distributions, strict=True)
            ]
            total = [
                x + settings["kl_loss_coef"] * kl
                for x, kl in zip(total, found["actor/kl_loss"], strict=True)
            ]
        found["total"] = total
        if settings.get("positive_lm_coef"):
            assert experience.positive is not None
            right = [
                row.logprobs[experience.rollout.loss_mask[number, : len(row.logprobs)]]
                for number, row in zip(numbers, rows, strict=True)
                if experience.positive[number]
            ]
            found["extra"] = [-settings["positive_lm_coef"] * torch.cat(right).mean()]
        return found | _told(rows, told)

    return _train("actor", policy, case, mini_batch, ("actor/pg_loss", "actor/kl_loss"))


def _row(experience: Experience, number: int, log_p: Tensor) -> Row:
    length = len(log_p)
    weights = (
        torch.ones(length) if experience.weights is None else experience.weights[number, :length]
    )
    return Row(
        logprobs=_drawn(log_p, experience.rollout, number),
        old=experience.old_logprobs[number, :length],
        advantages=experience.advantages[number, :length],
        kept=experience.loss_mask[number, :length],
        weights=weights,
    )


def _told(rows: list[Row], told: list[RowLoss]) -> Tables:
    return {
        "actor/ppo_kl": [row.old - row.logprobs for row in rows],
        "actor/pg_clipfrac": [t.clipped.float() for t in told],
        "actor/pg_clipfrac_lower": [t.clipped_lower.float() for t in told],
    }


def _kl(kind: str, experience: Experience, row: int, log_p: Tensor, reference: Any) -> Tensor:
    if kind == "full":
        return _full_kl(log_p, _distribution(reference, experience.rollout, row))
    assert experience.ref_logprobs is not None and kind == "low_var_kl"
    log_ratio = experience.ref_logprobs[row, : len(log_p)] - _drawn(log_p, experience.rollout, row)
    return (log_ratio.exp() - log_ratio - 1).clamp(max=10)


def train_critic(case: Case, model: Path, experience: Experience) -> Outcome:
    """The value model's update: `EPOCHS` times each mini-batch."""
    critic = load(Path(f"{model}-critic"))
    assert experience.values is not None
    old_values = experience.values

    def sequence(row: int) -> dict[str, Tensor]:
        values = _values(critic, experience.rollout, row)
        old, returns = old_values[row, : len(values)], experience.returns[row, : len(values)]
        near = torch.minimum(torch.maximum(values, old - CLIP_VALUE), old + CLIP_VALUE)
        plain, clipped = (values - returns) ** 2, (near - returns) ** 2
        losses = 0.5 * torch.maximum(plain, clipped)
        told = {"critic/vf_clipfrac": (clipped > plain).float(), "critic/vpred_mean": values}
        return {
            "critic/vf_loss": losses, "total": losses, "kept": experience.loss_mask[row, : len(values)], **told
        }  # fmt: skip

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
    """Mini-batches in order; losses are aggregated and averaged over mini-batches, the rest is
    averaged over tokens.
    """
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    told: dict[str, list[float]] = {}
    for _ in range(EPOCHS):
        for first in range(0, len(RESPONSE_LENGTHS), MINI_BATCH):
            found = mini_batch(range(first, first + MINI_BATCH))
            kept = found.pop("kept")
            optimizer.zero_grad()
            (
                aggregated(found.pop("total"), kept, case.agg) + sum(found.pop("extra", []))
            ).backward()
            norm = torch.nn.utils.clip_grad_norm_(
                model.parameters(), case.clip_grad or float("inf")
            )
            if not torch.isfinite(norm):
                continue
            optimizer.step()
            told.setdefault(f"{role}/grad_norm", []).append(norm.item())
            for name, table in found.items():
                rows = [row.detach() for row in table]
                told.setdefault(name, []).extend(
                    [aggregated(rows, kept, case.agg).item()]
                    if name in losses
                    else torch.cat([row[k] for row, k in zip(rows, kept, strict=True)]).tolist()
                )
    metrics = {name: sum(numbers) / len(numbers) for name, numbers in told.items()}
    return Outcome(metrics, {name: p.detach().clone() for name, p in model.named_parameters()})


def aggregated(rows: list[Tensor], kept: list[Tensor], mode: str) -> Tensor:
    """The loss of a mini-batch from the losses of its tokens and which of them count, a tensor a
    sequence.
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
    return torch.stack([of_sequence[mode](row) for row in rows]).mean()


def _distribution(model: Any, rollout: Rollout, row: int) -> Tensor:
    """Log-probabilities of all tokens before each response token, [response_len of the row, vocab]."""
    sequence, first = torch.tensor(rollout.sequences()[row]), rollout.prompt_lengths[row] - 1
    return (model(sequence[None]).logits[0, first:-1] / TEMPERATURE).log_softmax(dim=-1)


def _drawn(log_p: Tensor, rollout: Rollout, row: int) -> Tensor:
    return log_p.gather(1, rollout.response_ids[row, : len(log_p), None])[:, 0]


def _values(critic: Any, rollout: Rollout, row: int) -> Tensor:
    sequence, first = torch.tensor(rollout.sequences()[row]), rollout.prompt_lengths[row] - 1
    return critic.score(critic.model(sequence[None])[0])[0, first:-1, 0]


def _full_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)
