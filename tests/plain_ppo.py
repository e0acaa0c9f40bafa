"""PPO's update as one slow loop in one process, which training has to equal.

It uses transformers and torch.optim.AdamW, computes one sequence at a time, and packs nothing. It
shares no code with mrlhf but the batch types; the formulas are written out again.
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
from tests.feature_models import YARN
from tests.mixture_models import as_in_files
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
DEEP = ("olmo2", "qwen2-tied")
PROMPT_LENGTHS = (1, 5, 3, 8, 2, 6, 4, 1)
RESPONSE_LENGTHS = (4, 1, 9, 3, 7, 2, 5, 10)
# Row and tokens [begin, end) of spans inside a response, at its begin, at its end, and two in one.
HOLES = ((0, 1, 3), (2, 3, 7), (4, 0, 3), (6, 3, 5), (7, 2, 5), (7, 7, 8))
MINI_BATCH = 4
EPOCHS = 2
TEMPERATURE = 0.7
CLIP_VALUE = 0.5
SCALE = 10.0  # loss_scale_factor
LR = 1e-2
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
# As large as many gradients here. With a small one, Adam would divide out how large a gradient is,
# and the rounding (1e-9) of a gradient near 0 would become a step of full length.
EPS = 1e-3

OF_ALL_NUMBERS = ("actor/positive_lm_loss", "actor/entropy")

Tables = dict[str, list[Tensor]]
"""By name, a number for each token of a mini-batch: one tensor [response_len] a sequence."""


@dataclass(frozen=True)
class Case:
    """One way of training.

    Attributes:
        model: name of the checkpoint, as `save_models` writes it.
        agg: how the losses of tokens become one, as `aggregated` knows it.
        settings: more keys of the actor section.
        clip_grad: the norm that the gradient is clipped to; 0 clips nothing.
        loss: name of the policy loss.
        corrected: whether the experience has weights and rejected tokens.
        bypass: a correction of `tests.plain_losses`.
        broken: whether the experience has an advantage that is no number, so that the last
            mini-batch of each epoch is skipped.
        holes: whether the policy did not draw the tokens at `HOLES`, which then do not train.
    """

    model: str
    agg: str
    settings: dict[str, Any] = field(default_factory=dict)
    clip_grad: float = 0.0
    loss: str = "vanilla"
    corrected: bool = False
    bypass: str | None = None
    broken: bool = False
    holes: bool = False

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained too, which no choice of a policy loss changes."""
        return self.loss == "vanilla" and self.bypass is None and not self.broken


@dataclass(frozen=True)
class Outcome:
    """Metrics over all mini-batches of a loop, and the trained weights by Hugging Face name."""

    metrics: dict[str, float]
    weights: dict[str, Tensor]


def save_models(root: Path, layers: int = SIZES["num_hidden_layers"]) -> None:
    """Write random models: `<model>`, `<model>-ref` not far from it, and `<model>-critic`.

    Those in `DEEP` have four layers, and the others `layers`.
    """
    deep = {"num_hidden_layers": 4}
    sizes = SIZES | {"num_hidden_layers": layers}
    one_kv_head = SIZES | {"num_key_value_heads": 1}
    kinds: dict[str, Any] = {
        "llama": transformers.LlamaConfig(**sizes, tie_word_embeddings=False),
        "llama-biases": transformers.LlamaConfig(
            **sizes,
            tie_word_embeddings=True,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=YARN,
        ),
        "olmo2": transformers.Olmo2Config(
            **(SIZES | deep), pad_token_id=None, tie_word_embeddings=False
        ),
        "phi3": transformers.Phi3Config(
            **sizes, pad_token_id=None, partial_rotary_factor=0.5, tie_word_embeddings=False
        ),
        "qwen2-tied": transformers.Qwen2Config(**(one_kv_head | deep), tie_word_embeddings=True),
        "qwen3": transformers.Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=False),
        "qwen2-moe": transformers.Qwen2MoeConfig(
            **sizes,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=24,
            norm_topk_prob=True,
            mlp_only_layers=[0],
        ),
    }
    generator = torch.Generator().manual_seed(4)
    for name, config in kinds.items():
        config.num_labels = 1

        policy = transformers.AutoModelForCausalLM.from_config(config)
        _randomise(policy, generator)
        policy.save_pretrained(root / name)
        for parameter in policy.parameters():
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
        policy.save_pretrained(root / f"{name}-ref")

        critic = transformers.AutoModelForSequenceClassification.from_config(config)
        _randomise(critic, generator)
        critic.save_pretrained(root / f"{name}-critic")


def _randomise(model: Any, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.1 * noise if "norm" in name else 0.15 * noise


def load(path: Path) -> Any:
    """The checkpoint at `path` as transformers' model; a critic is a sequence classifier."""
    auto = transformers.AutoModelForCausalLM
    if path.name.endswith("-critic"):
        auto = transformers.AutoModelForSequenceClassification
    return auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def make_rollout() -> Rollout:
    """Random tokens with ragged prompts and responses."""
    generator = torch.Generator().manual_seed(5)

    def draw(length: int) -> list[int]:
        return torch.randint(0, SIZES["vocab_size"], (length,), generator=generator).tolist()

    count = len(PROMPT_LENGTHS)
    prompts = Prompts(
        token_ids=[draw(length) for length in PROMPT_LENGTHS],
        uid=list(range(count)),
        text=[""] * count,
        data_source=[""] * count,
        ground_truth=[""] * count,
        extra_info=[{} for _ in range(count)],
    )
    ids, mask = pad_responses([draw(length) for length in RESPONSE_LENGTHS], torch.int64)
    stopped = torch.ones(count, dtype=torch.bool)
    return rollouts.make_rollout(prompts, [0] * count, ids, mask, torch.zeros(mask.shape), stopped)


def make_experience(model: Path) -> Experience:
    """Old log-probs and values are so near the model's that some, not all, are clipped."""
    rollout = make_rollout()
    generator = torch.Generator().manual_seed(6)
    mask = rollout.response_mask

    def noise(size: float) -> Tensor:
        return torch.where(mask, size * torch.randn(mask.shape, generator=generator), 0.0)

    logprobs, _ = evaluate(load(model), rollout)
    values = token_values(load(Path(f"{model}-critic")), rollout)
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


def with_holes(experience: Experience) -> Experience:
    """The same, but a tool and not the policy has put the tokens at `HOLES` into the responses."""
    not_drawn = torch.zeros_like(experience.loss_mask)
    for row, begin, end in HOLES:
        not_drawn[row, begin:end] = True
    assert experience.rollout.response_mask[not_drawn].all()

    return replace(
        experience,
        rollout=rollouts.with_holes(experience.rollout, not_drawn),
        loss_mask=experience.loss_mask & ~not_drawn,
    )


@torch.no_grad()
def evaluate(model: Any, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the response tokens, [batch, response_len], 0 after the end."""
    logprobs = []
    entropies = []
    for row in range(len(rollout)):
        log_p = _distribution(model, rollout, row)
        logprobs.append(_drawn(log_p, rollout, row))
        entropies.append(_entropy(log_p))
    return _padded(logprobs), _padded(entropies)


@torch.no_grad()
def sum_of_squares(model: Any, rollout: Rollout) -> Tensor:
    """Sums of the vocabulary's squared probabilities, [batch, response_len], 0 after the end."""
    rows = [_distribution(model, rollout, row) for row in range(len(rollout))]
    return _padded([log_p.exp().square().sum(dim=-1) for log_p in rows])


@torch.no_grad()
def token_values(critic: Any, rollout: Rollout) -> Tensor:
    """Values before the response tokens, [batch, response_len], 0 after the end."""
    return _padded([_values(critic, rollout, row) for row in range(len(rollout))])


@torch.no_grad()
def full_kl(model: Any, reference: Any, rollout: Rollout) -> Tensor:
    """KL of the two over the vocabulary, [batch, response_len], 0 after the end."""
    kls = []
    for row in range(len(rollout)):
        log_p = _distribution(model, rollout, row)
        log_q = _distribution(reference, rollout, row)
        kls.append(_full_kl(log_p, log_q))
    return _padded(kls)


def train_actor(case: Case, model: Path, experience: Experience) -> Outcome:
    """Update the policy: `EPOCHS` times each mini-batch."""
    policy = load(model)
    reference = load(Path(f"{model}-ref")).requires_grad_(False)
    settings = case.settings

    def mini_batch(numbers: range) -> Tables:
        distributions = [_distribution(policy, experience.rollout, row) for row in numbers]
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

        if settings.get("entropy_coeff"):
            entropies = [_entropy(log_p) for log_p in distributions]
            total = _sum_of_tables(total, -settings["entropy_coeff"], entropies)
        if settings.get("use_kl_loss"):
            tables["actor/kl_loss"] = [
                _kl(settings["kl_loss_type"], experience, row, log_p, reference)
                for row, log_p in zip(numbers, distributions, strict=True)
            ]
            total = _sum_of_tables(total, settings["kl_loss_coef"], tables["actor/kl_loss"])
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
                _entropy(log_p)[drawn[number, : len(log_p)]]
                for number, log_p in zip(numbers, distributions, strict=True)
            ]
        return tables | _metrics(rows, losses)

    outcome = _train("actor", policy, case, mini_batch, ("actor/pg_loss", "actor/kl_loss"))
    outcome.metrics["actor/approx_kl"] = outcome.metrics["actor/ppo_kl"]
    return outcome


def _row(experience: Experience, number: int, log_p: Tensor) -> Row:
    length = len(log_p)
    weights = torch.ones(length)
    if experience.weights is not None:
        weights = experience.weights[number, :length]
    return Row(
        logprobs=_drawn(log_p, experience.rollout, number),
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
        return _full_kl(log_p, _distribution(reference, experience.rollout, row))
    assert experience.ref_logprobs is not None and kind == "low_var_kl"
    log_ratio = experience.ref_logprobs[row, : len(log_p)] - _drawn(log_p, experience.rollout, row)
    return (log_ratio.exp() - log_ratio - 1).clamp(max=10)


def train_critic(case: Case, model: Path, experience: Experience) -> Outcome:
    """Update the critic: `EPOCHS` times each mini-batch."""
    critic = load(Path(f"{model}-critic"))
    assert experience.values is not None
    old_values = experience.values

    def sequence(row: int) -> dict[str, Tensor]:
        values = _values(critic, experience.rollout, row)
        old = old_values[row, : len(values)]
        returns = experience.returns[row, : len(values)]

        near = torch.minimum(torch.maximum(values, old - CLIP_VALUE), old + CLIP_VALUE)
        plain = (values - returns) ** 2
        clipped = (near - returns) ** 2
        losses = 0.5 * torch.maximum(plain, clipped)
        return {
            "kept": experience.loss_mask[row, : len(values)],
            "total": losses,
            "critic/vf_loss": losses,
            "critic/vf_clipfrac": (clipped > plain).float(),
            "critic/vpred_mean": values,
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
    optimizer = make_optimizer(model)
    numbers: dict[str, list[float]] = {}
    skipped = 0
    for _ in range(EPOCHS):
        for first in range(0, len(RESPONSE_LENGTHS), MINI_BATCH):
            tables = mini_batch(range(first, first + MINI_BATCH))
            kept = tables.pop("kept")
            loss = aggregated(tables.pop("total"), kept, case.agg)
            for of_right in tables.get("actor/positive_lm_loss", []):
                loss = loss + case.settings["positive_lm_coef"] * of_right

            optimizer.zero_grad()
            loss.backward()
            largest = case.clip_grad or float("inf")
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
            if not torch.isfinite(norm):
                skipped += 1
                continue
            optimizer.step()

            numbers.setdefault(f"{role}/grad_norm", []).append(norm.item())
            for name, table in tables.items():
                rows = [row.detach() for row in table]
                if name in losses:
                    values = [aggregated(rows, kept, case.agg).item()]
                elif name in OF_ALL_NUMBERS:
                    values = torch.cat([row.flatten() for row in rows]).tolist()
                else:
                    values = _kept_numbers(rows, kept)
                numbers.setdefault(name, []).extend(values)

    metrics = {name: sum(values) / len(values) for name, values in numbers.items()}
    metrics[f"{role}/optimizer_steps"] = len(numbers[f"{role}/grad_norm"])
    metrics[f"{role}/skipped_steps"] = skipped
    metrics[f"{role}/lr"] = LR
    return Outcome(metrics, weights_of(model))


def weights_of(model: Any) -> dict[str, Tensor]:
    """A copy of the model's weights, by their names in files."""
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return as_in_files(weights, model.config.model_type)


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    """AdamW, with weight decay for matrices alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    parameters = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(parameters, lr=LR, betas=BETAS, eps=EPS)


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
    return torch.stack([of_sequence[mode](row) for row in rows]).mean()


def _distribution(model: Any, rollout: Rollout, row: int) -> Tensor:
    """Log-probs of the whole vocabulary at each token of a response, [response_len, vocab]."""
    sequence = rollout.sequences()[row]
    first = rollout.prompt_lengths[row] - 1
    return (model(sequence[None]).logits[0, first:-1] / TEMPERATURE).log_softmax(dim=-1)


def _drawn(log_p: Tensor, rollout: Rollout, row: int) -> Tensor:
    return log_p.gather(1, rollout.response_ids[row, : len(log_p), None].long())[:, 0]


def _values(critic: Any, rollout: Rollout, row: int) -> Tensor:
    sequence = rollout.sequences()[row]
    first = rollout.prompt_lengths[row] - 1
    return critic.score(critic.model(sequence[None])[0])[0, first:-1, 0]


def _padded(rows: list[Tensor]) -> Tensor:
    return pad_responses([row.tolist() for row in rows], torch.float32)[0]


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(-1)


def _full_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)
