"""Decides which replica of the engine draws which samples, so that all have about equal work.

A replica's work is estimated from the lengths that its responses are expected to have. The
assignment is fixed before generation begins. Handing out prompts as replicas come free would
balance better, but a fixed assignment is the same on every rank without any communication, and the
same again when a run is resumed. This file does not know ranks or engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mrlhf.parallel.balance import split_balanced


@dataclass(frozen=True)
class Share:
    """Samples of one prompt that are drawn by one replica.

    `prompt` is the index of the prompt, and `samples` says which of its samples.
    """

    prompt: int
    samples: range


class ResponseLengths:
    """Remembers how long responses have been: a mean for each prompt, and one over all prompts.

    A mean covers about the last `VISITS` batches with the prompt. The state depends only on the
    responses, which every rank sees.
    """

    VISITS = 4  # older responses are forgotten, since the policy changes

    def __init__(self, capacity: int = 100_000) -> None:
        """Remember at most `capacity` prompts; those not seen for longest are forgotten first."""
        assert capacity >= 1, capacity
        self._capacity = capacity
        # Mean length and number of visits; the prompt seen last is the last entry.
        self._means: dict[int, tuple[float, int]] = {}
        self._overall = (0.0, 0)

    def expected(self, uid: int, unknown: float) -> float:
        """Expected tokens of a response to `uid`; of a new one the mean, or `unknown`."""
        if uid in self._means:
            mean, _ = self._means[uid]
            return mean

        mean, visits = self._overall
        return mean if visits else unknown

    def update(self, uids: Sequence[int], lengths: Sequence[int]) -> None:
        """Add one batch: for each sample the id of its prompt, and the tokens of its response."""
        if not uids:
            return

        lengths_of: dict[int, list[int]] = {}
        for uid, length in zip(uids, lengths, strict=True):
            lengths_of.setdefault(uid, []).append(length)

        for uid, of_prompt in lengths_of.items():
            previous = self._means.pop(uid, (0.0, 0))
            self._means[uid] = self._updated(previous, sum(of_prompt) / len(of_prompt))
        self._overall = self._updated(self._overall, sum(lengths) / len(lengths))

        too_many = max(0, len(self._means) - self._capacity)
        for uid in list(self._means)[:too_many]:
            del self._means[uid]

    def state_dict(self) -> dict[str, Any]:
        """The state as plain lists and numbers."""
        return {
            "uids": list(self._means),
            "means": [mean for mean, _ in self._means.values()],
            "visits": [visits for _, visits in self._means.values()],
            "all": list(self._overall),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` gave."""
        entries = zip(state["means"], state["visits"], strict=True)
        self._means = dict(zip(state["uids"], entries, strict=True))

        mean, visits = state["all"]
        self._overall = (mean, visits)

    def _updated(self, previous: tuple[float, int], new_mean: float) -> tuple[float, int]:
        """The running mean and its number of visits after one more visit."""
        mean, visits = previous
        visits = min(visits + 1, self.VISITS)
        return mean + (new_mean - mean) / visits, visits


def assign(
    prompt_lengths: Sequence[int], response_lengths: Sequence[float], n: int, replicas: int
) -> list[list[Share]]:
    """Share out all samples of all prompts over the replicas.

    The samples of a prompt stay together, so that the prompt is computed once. They are split only
    if they alone are more than a replica's fair share, for example if there are fewer prompts than
    replicas: other replicas would have to wait for that one.

    Args:
        prompt_lengths: tokens of each prompt.
        response_lengths: expected tokens of a response to each prompt.
        n: samples of a prompt.

    Returns:
        The shares of each replica. Long responses come first: if not all can run at once, no long
        one is left for the end. If there are fewer shares than replicas, the last replicas get
        none.
    """
    lengths = zip(prompt_lengths, response_lengths, strict=True)
    weights = [round(prompt + n * response) for prompt, response in lengths]

    shares = []
    loads = []
    for number, weight in enumerate(weights):
        # The weight over the fair share, rounded up; in integers, so that equal weights are never
        # split by rounding.
        parts = min(n, -(-weight * replicas // sum(weights)))
        for part in range(parts):
            samples = range(part * n // parts, (part + 1) * n // parts)
            shares.append(Share(number, samples))
            loads.append(round(prompt_lengths[number] + len(samples) * response_lengths[number]))

    def long_responses_first(index: int) -> tuple[float, int]:
        return -response_lengths[shares[index].prompt], index

    busy = min(replicas, len(shares))
    assigned: list[list[Share]] = []
    for indices in split_balanced(loads, busy) if busy else []:
        assigned.append([shares[i] for i in sorted(indices, key=long_responses_first)])
    assigned += [[] for _ in range(replicas - busy)]
    return assigned
