"""PPO's update as one slow loop in one process: transformers, torch.optim.AdamW, a sequence at a time, nothing packed.

It is what training has to equal. It shares no code with mrlhf but the batch types; the formulas are written out again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from mrlhf.batch import Experience, Prompts, Rollout, pad_responses

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
CLIP_LOW, CLIP_HIGH, CLIP_C, CLIP_VALUE = 0.2, 0.3, 3.0, 0.5
SCALE = 10.0  # loss_scale_factor
LR, WEIGHT_DECAY, BETAS = 1e-2, 0.1, (0.9, 0.95)
# As large as many gradients here. So the step depends on how large a gradient is, which Adam would else divide out, and
# where a gradient is near 0 its rounding (1e-9) is not blown up to a step of full length.
EPS = 1e-3


@dataclass(frozen=True)
class Case:
    """One way of training: the model, how its loss is made, and what the gradient is clipped to (0: not)."""

    model: str
    agg: str
    settings: dict[str, Any] = field(default_factory=dict)
    clip_grad: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What a loop leaves: metrics over all its mini-batches, and the trained weights by Hugging Face name."""

    metrics: dict[str, float]
    weights: dict[str, Tensor]


def save_models(root: Path) -> None:
    """Checkpoints with random weights: `<model>` to train, `<model>-ref` not far from it, `<model>-critic`."""
    kinds: dict[str, Any] = {
        "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
        "qwen2-tied": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    }
    language, scalar = transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification
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
    """The checkpoint at `path` as transformers' model, a sequence classifier where it has a score head."""
    critic = path.name.endswith("-critic")
    auto = transformers.AutoModelForSequenceClassification if critic else transformers.AutoModelForCausalLM
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
    nothing = torch.zeros(mask.shape)
    return Rollout(prompts, [0] * count, ids, mask, nothing, torch.ones(count, dtype=torch.bool), version=0)


def make_experience(model: Path) -> Experience:
    """Old log-probs and values in the neighbourhood of the model's, so that some ratios and values are clipped."""
    rollout = make_rollout()
    generator = torch.Generator().manual_seed(6)
    mask = rollout.response_mask

    def noise(size: float) -> Tensor:
        return torch.where(mask, size * torch.randn(mask.shape, generator=generator), 0.0)

    logprobs, values = evaluate(load(model), rollout)[0], token_values(load(Path(f"{model}-critic")), rollout)
    return Experience(
        rollout=rollout,
        scores=torch.zeros(len(rollout)),
        old_logprobs=logprobs + noise(0.7),
        ref_logprobs=evaluate(load(Path(f"{model}-ref")), rollout)[0],
        token_rewards=torch.zeros(mask.shape),
        values=values + noise(0.5),
        advantages=noise(1.0),
        returns=values + noise(1.0),
    )


@torch.no_grad()
def evaluate(model: Any, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the response tokens, [batch, response_len], 0 after the end."""
    rows = [_distribution(model, rollout, row) for row in range(len(rollout))]
    logprobs = [_drawn(log_p, rollout, row).tolist() for row, log_p in enumerate(rows)]
    entropies = [-(log_p.exp() * log_p).sum(-1) for log_p in rows]
    return pad_responses(logprobs, torch.float32)[0], pad_responses([e.tolist() for e in entropies], torch.float32)[0]


@torch.no_grad()
def token_values(critic: Any, rollout: Rollout) -> Tensor:
    """Values before the response tokens, [batch, response_len], 0 after the end."""
    return pad_responses([_values(critic, rollout, row).tolist() for row in range(len(rollout))], torch.float32)[0]


@torch.no_grad()
def full_kl(model: Any, reference: Any, rollout: Rollout) -> Tensor:
    """KL of the two over the vocabulary, [batch, response_len], 0 after the end."""
    rows = range(len(rollout))
    kls = [_full_kl(_distribution(model, rollout, row), _distribution(reference, rollout, row)) for row in rows]
    return pad_responses([kl.tolist() for kl in kls], torch.float32)[0]


def train_actor(case: Case, model: Path, experience: Experience) -> Outcome:
    """The policy's update: `EPOCHS` times each mini-batch."""
    policy, reference = load(model), load(Path(f"{model}-ref")).requires_grad_(False)
    settings = case.settings

    def sequence(row: int) -> tuple[dict[str, Tensor], Tensor]:
        log_p = _distribution(policy, experience.rollout, row)
        length = len(log_p)
        logprobs = _drawn(log_p, experience.rollout, row)
        advantages = experience.advantages[row, :length]
        ratio = (logprobs - experience.old_logprobs[row, :length]).exp()
        plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        worse = torch.maximum(plain, clipped)
        losses = torch.where(advantages < 0, torch.minimum(worse, -advantages * CLIP_C), worse)
        terms = {"actor/pg_loss": losses}
        total = losses
        if settings.get("entropy_coeff"):
            total = total + settings["entropy_coeff"] * (log_p.exp() * log_p).sum(-1)
        if settings.get("use_kl_loss"):
            if settings["kl_loss_type"] == "full":
                kl = _full_kl(log_p, _distribution(reference, experience.rollout, row))
            else:
                assert experience.ref_logprobs is not None and settings["kl_loss_type"] == "low_var_kl"
                log_ratio = experience.ref_logprobs[row, :length] - logprobs
                kl = (log_ratio.exp() - log_ratio - 1).clamp(max=10)
            terms["actor/kl_loss"] = kl
            total = total + settings["kl_loss_coef"] * kl
        told = {
            "actor/ppo_kl": -ratio.log(),
            "actor/pg_clipfrac": (clipped > plain).float(),
            "actor/pg_clipfrac_lower": ((advantages < 0) & (worse > -advantages * CLIP_C)).float(),
        }
        return {**terms, **told}, total

    losses = ("actor/pg_loss", "actor/kl_loss")
    return _train("actor", policy, case, sequence, losses)


def train_critic(case: Case, model: Path, experience: Experience) -> Outcome:
    """The value model's update: `EPOCHS` times each mini-batch."""
    critic = load(Path(f"{model}-critic"))

    def sequence(row: int) -> tuple[dict[str, Tensor], Tensor]:
        values = _values(critic, experience.rollout, row)
        old, returns = experience.values[row, : len(values)], experience.returns[row, : len(values)]
        near = torch.minimum(torch.maximum(values, old - CLIP_VALUE), old + CLIP_VALUE)
        plain, clipped = (values - returns) ** 2, (near - returns) ** 2
        losses = 0.5 * torch.maximum(plain, clipped)
        told = {"critic/vf_clipfrac": (clipped > plain).float(), "critic/vpred_mean": values}
        return {"critic/vf_loss": losses, **told}, losses

    return _train("critic", critic, case, sequence, ("critic/vf_loss",))


def _train(
    role: str,
    model: Any,
    case: Case,
    sequence: Callable[[int], tuple[dict[str, Tensor], Tensor]],
    losses: tuple[str, ...],
) -> Outcome:
    """Mini-batches in order; losses are aggregated and averaged over mini-batches, the rest is averaged over tokens."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    told: dict[str, list[float]] = {}
    for _ in range(EPOCHS):
        for first in range(0, len(RESPONSE_LENGTHS), MINI_BATCH):
            results = [sequence(row) for row in range(first, first + MINI_BATCH)]
            optimizer.zero_grad()
            aggregated([total for _, total in results], case.agg).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip_grad or float("inf"))
            optimizer.step()
            told.setdefault(f"{role}/grad_norm", []).append(norm.item())
            for name in results[0][0]:
                rows = [numbers[name].detach() for numbers, _ in results]
                told.setdefault(name, []).extend(
                    [aggregated(rows, case.agg).item()] if name in losses else torch.cat(rows).tolist()
                )
    metrics = {name: sum(numbers) / len(numbers) for name, numbers in told.items()}
    return Outcome(metrics, {name: p.detach().clone() for name, p in model.named_parameters()})


def aggregated(rows: list[Tensor], mode: str) -> Tensor:
    """The loss of a mini-batch from the losses of its tokens, a tensor a sequence."""
    if mode == "token-mean":
        return torch.cat(rows).mean()
    if mode == "token-sum":
        return torch.cat(rows).sum()
    of_sequence: dict[str, Callable[[Tensor], Tensor]] = {
        "seq-mean-token-sum": torch.sum,
        "seq-mean-token-sum-norm": lambda row: row.sum() / SCALE,
        "seq-mean-token-mean": torch.mean,
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
