"""Reward-model training on preference pairs: the loss is -log sigmoid(chosen - rejected).

This is the Bradley-Terry loss of https://arxiv.org/abs/2203.02155, equation 1, with one pair for
each comparison. It knows the loss and the pair accuracy; the loop is in `supervised`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn.functional import logsigmoid

from mrlhf.config.roots import RewardModelConfig
from mrlhf.data.preferences import PreferencePairs, encode_preferences, split_by_prompt
from mrlhf.data.rows import Row, read_rows
from mrlhf.data.tokenizer import Tokenizer, load_tokenizer
from mrlhf.metrics import Tally
from mrlhf.models.families import load_spec
from mrlhf.roles.reward_model import score_sequences, scored_tokens, with_pad_token
from mrlhf.run.startup import start
from mrlhf.trainers.supervised import SupervisedTrainer
from mrlhf.training.engine import ModelEngine, PackResult


def train_reward_model(config: RewardModelConfig) -> None:
    """Train a reward model as configured; every rank calls it."""
    with start(config, config.distributed, config.trainer, config.seed) as run:
        tokenizer = load_tokenizer(config.data.tokenizer, config.data.chat_template)
        task = PreferenceLearning(config, tokenizer)
        stored = load_spec(config.model.path, "scalar")
        spec = with_pad_token(stored, tokenizer.pad_id, tokenizer.vocab_size)
        SupervisedTrainer(config, run, spec, tokenizer, task, config.data.batch_size).fit()


class PreferenceLearning:
    """Learns to score the chosen response of each pair above the rejected one."""

    columns = (
        ("loss", "rm/loss"),
        ("accuracy", "rm/accuracy"),
        ("val accuracy", "val/accuracy"),
        ("tokens/s", "perf/throughput"),
    )

    def __init__(self, config: RewardModelConfig, tokenizer: Tokenizer) -> None:
        """Read the pairs.

        Raises:
            DataError: a file is missing or malformed.
        """
        train = read_rows(config.data.train_files)
        if config.data.val_files:
            held_out = read_rows(config.data.val_files)
        else:
            train, held_out = split_by_prompt(train, config.data.held_out_fraction, config.seed)
        self._pairs = _encode(train, tokenizer, config)
        self._held_out = _encode(held_out, tokenizer, config) if held_out else None

    @property
    def has_held_out(self) -> bool:
        """Whether there are held-out rows to validate on."""
        return self._held_out is not None

    def __len__(self) -> int:
        return len(self._pairs)

    def step(self, engine: ModelEngine, rows: Sequence[int]) -> dict[str, float]:
        """One optimizer step on these pairs; returns loss (nats), accuracy and margin over them."""
        sequences = scored_tokens(_interleave(self._pairs, rows), engine.spec)
        cut = engine.cut(sequences, [1] * len(sequences), "last", together=2)

        def loss(output: Tensor, number: int) -> tuple[Tensor, PackResult]:
            margin = output[0::2, 0].float() - output[1::2, 0].float()
            total = -logsigmoid(margin).sum()
            tally = Tally()
            tally.add("rm/loss", total, len(margin))
            tally.add("rm/accuracy", (margin > 0).sum(), len(margin))
            tally.add("rm/margin", margin.sum(), len(margin))
            return total / len(rows), PackResult(tally)

        names = ("rm/loss", "rm/accuracy", "rm/margin")
        result = engine.train_mini_batch(cut.packs, loss, names)
        metrics = engine.end_update("rm", result.tally, 1)
        return metrics | {"perf/total_num_tokens": sum(len(tokens) for tokens in sequences)}

    def validate(self, engine: ModelEngine) -> dict[str, float]:
        """`val/accuracy` and `val/loss` on the held-out pairs.

        The accuracy is the share of pairs whose chosen response scores higher.
        """
        if self._held_out is None:
            return {}
        sequences = _interleave(self._held_out, range(len(self._held_out)))
        scores = score_sequences(engine, sequences, together=2)
        margin = scores[0::2] - scores[1::2]
        return {
            "val/accuracy": float((margin > 0).float().mean()),
            "val/loss": float(-logsigmoid(margin).mean()),
        }

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """`rm_pair_accuracy` on the held-out pairs, or of the last step where there are none."""
        held_out = self._held_out is not None
        return {"rm_pair_accuracy": metrics["val/accuracy"] if held_out else metrics["rm/accuracy"]}


def _encode(
    rows: Sequence[Row], tokenizer: Tokenizer, config: RewardModelConfig
) -> PreferencePairs:
    return encode_preferences(
        rows, tokenizer, max_length=config.data.max_length, overlong=config.data.overlong
    )


def _interleave(pairs: PreferencePairs, rows: Sequence[int]) -> list[list[int]]:
    """Chosen and rejected token ids of each pair, in turn."""
    return [tokens for row in rows for tokens in (pairs.chosen_ids[row], pairs.rejected_ids[row])]
