"""The contender "plain" of `train_step.py`: the same update, with `transformers` and torch alone.

It is what one writes first: each mini-batch is one padded batch, the model gives the logits of
every position, and torch's AdamW takes the step. Only updates are measured.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train_step_case import EPOCHS, FIRST_WORD, LEARNING_RATE, Case, read_case
from train_step_turns import Stopwatch, Turns
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

CLIP = 0.2
DUAL_CLIP = 3.0
VALUE_CLIP = 0.5
CLIP_GRAD = 1.0
BETAS = (0.9, 0.999)
WEIGHT_DECAY = 0.01


def main() -> None:
    """Answer the word `update`."""
    turns = Turns()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    directory = Path(sys.argv[1])
    plain = _Plain(read_case(directory), directory)
    turns.answer({})

    for _ in turns:
        watch = Stopwatch()
        plain.update()
        turns.answer({"seconds": {"update": watch.read()}})


class _Plain:
    """A policy and a critic with a batch to learn from."""

    def __init__(self, case: Case, directory: Path) -> None:
        self._case = case
        self._policy = LlamaForCausalLM.from_pretrained(directory / "policy")
        self._critic = LlamaForSequenceClassification.from_pretrained(directory / "critic")
        self._optimizers = {
            model: torch.optim.AdamW(
                model.parameters(),
                lr=LEARNING_RATE,
                betas=BETAS,
                weight_decay=WEIGHT_DECAY,
                fused=True,
            )
            for model in (self._policy, self._critic)
        }

        self._make_batch()
        with torch.no_grad():
            whole = slice(0, len(case.prompts))
            self._old_logprobs = self._logprobs(whole)
            self._old_values = self._values(whole)

    def update(self) -> None:
        """The passes over the batch, of the critic and of the policy."""
        for model, loss in (
            (self._critic, self._critic_loss),
            (self._policy, self._policy_loss),
        ):
            for rows in self._mini_batches():
                self._train(model, loss, rows)

    def _make_batch(self) -> None:
        """Sequences padded on the right, and numbers to learn from."""
        generator = torch.Generator().manual_seed(5)
        sequences = self._case.sequences
        shape = (len(sequences), max(length for length, _ in sequences))
        vocab = self._policy.config.vocab_size

        self._ids = torch.zeros(shape, dtype=torch.int64)
        self._mask = torch.zeros(shape, dtype=torch.int64)
        self._response = torch.zeros(shape[0], shape[1] - 1, dtype=torch.bool)
        rows = enumerate(zip(self._case.prompts, sequences, strict=True))
        for row, (prompt, (length, response)) in rows:
            drawn = torch.randint(FIRST_WORD, vocab, (response,), generator=generator)
            self._ids[row, :length] = torch.cat([torch.tensor(prompt), drawn])
            self._mask[row, :length] = 1
            self._response[row, length - response - 1 : length - 1] = True  # what is predicted

        self._advantages = torch.randn(self._response.shape, generator=generator)
        self._returns = torch.randn(self._response.shape, generator=generator)

    def _mini_batches(self) -> Iterator[slice]:
        size = self._case.mini_batch
        for _ in range(EPOCHS):
            for begin in range(0, len(self._case.prompts), size):
                yield slice(begin, begin + size)

    def _train(self, model: Any, loss: Callable[[slice], Tensor], rows: slice) -> None:
        loss(rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        self._optimizers[model].step()
        self._optimizers[model].zero_grad()

    def _policy_loss(self, rows: slice) -> Tensor:
        advantages = self._advantages[rows]
        ratio = (self._logprobs(rows) - self._old_logprobs[rows]).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = torch.maximum(-advantages * ratio, -advantages * clipped)
        dual = torch.minimum(loss, -advantages * DUAL_CLIP)
        return self._mean(torch.where(advantages < 0, dual, loss), rows)

    def _critic_loss(self, rows: slice) -> Tensor:
        values = self._values(rows)
        old = self._old_values[rows]
        near = values.clamp(old - VALUE_CLIP, old + VALUE_CLIP)
        returns = self._returns[rows]
        squared = torch.maximum((values - returns).square(), (near - returns).square())
        return self._mean(0.5 * squared, rows)

    def _mean(self, table: Tensor, rows: slice) -> Tensor:
        return table[self._response[rows]].mean()

    def _logprobs(self, rows: slice) -> Tensor:
        ids, mask = self._narrowed(rows)
        with self._autocast():
            output = self._policy(input_ids=ids, attention_mask=mask, use_cache=False)
            logits = output.logits[:, :-1].float()
            del output  # in bfloat16, the logits before `float`
        chosen = logits.gather(-1, ids[:, 1:, None])[..., 0]
        return self._widened(chosen - logits.logsumexp(-1))

    def _values(self, rows: slice) -> Tensor:
        ids, mask = self._narrowed(rows)
        with self._autocast():
            output = self._critic.model(input_ids=ids, attention_mask=mask, use_cache=False)
            values = self._critic.score(output.last_hidden_state)[:, :-1, 0]
        return self._widened(values.float())

    def _narrowed(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Ids and mask of the rows, as wide as their longest sequence."""
        mask = self._mask[rows]
        width = int(mask.sum(dim=1).max())
        return self._ids[rows, :width], mask[:, :width]

    def _widened(self, table: Tensor) -> Tensor:
        """The table as wide as that of the whole batch."""
        return torch.nn.functional.pad(table, (0, self._response.shape[1] - table.shape[1]))

    def _autocast(self) -> AbstractContextManager[object]:
        """The usual way to train in bfloat16: float32 weights, and products in bfloat16."""
        if self._case.dtype == "bfloat16":
            return torch.autocast("cpu", torch.bfloat16)
        return nullcontext()


if __name__ == "__main__":
    main()
