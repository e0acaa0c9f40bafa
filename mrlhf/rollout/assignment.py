"""Which replica of the engine draws which samples: shared out by the length that responses are
expected to have.

The assignment is fixed before generation begins, though one that hands out prompts as replicas come
free would balance
better: this one is the same on every rank without asking, and the same again when a run is resumed.
    It knows neither
ranks nor engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mrlhf.parallel.microbatch import split_balanced


@dataclass(frozen=True)
class Share:
    """Samples of one prompt that are drawn by one replica.

    Attributes:
        prompt: index of the prompt.
        samples: which of its samples.
    """

    prompt: int
    samples: range


class ResponseLengths:
    """How long the responses to each prompt have been: a mean over its last visits, and one over
    all prompts.

    The state depends on nothing but the responses, which every rank sees.
    """

    VISITS = 4  # a mean forgets at this rate, since the policy changes

    def __init__(self, capacity: int = 100_000) -> None:
        """Remember at most `capacity` prompts; those longest not seen are forgotten first."""
        assert capacity >= 1, capacity
        self._capacity = capacity
        self._means: dict[int, tuple[float, int]] = {}
        self._all = (0.0, 0)

    def expected(self, uid: int, unknown: float) -> float:
        """Tokens expected of a response to prompt `uid`; `unknown` before any prompt has been
        answered.
        """
        if uid in self._means:
            return self._means[uid][0]
        return self._all[0] if self._all[1] else unknown

    def update(self, uids: Sequence[int], lengths: Sequence[int]) -> None:
        """Take in one batch.

        Args:
            uids: of the prompt of each sample.
            lengths: tokens of each response.
        """
        if not uids:
            return
        by_uid: dict[int, list[int]] = {}
        for uid, length in zip(uids, lengths, strict=True):
            by_uid.setdefault(uid, []).append(length)
        for uid, found in by_uid.items():
            # Taken out and put in again, a prompt is the youngest.
            self._means[uid] = self._moved(self._means.pop(uid, (0.0, 0)), sum(found) / len(found))
        self._all = self._moved(self._all, sum(lengths) / len(lengths))
        for uid in list(self._means)[: max(0, len(self._means) - self._capacity)]:
            del self._means[uid]

    def state_dict(self) -> dict[str, Any]:
        """The state as plain lists and numbers."""
        return {
            "uids": list(self._means),
            "means": [mean for mean, _ in self._means.values()],
            "visits": [visits for _, visits in self._means.values()],
            "all": list(self._all),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        entries = zip(state["means"], state["visits"], strict=True)
        self._means = dict(zip(state["uids"], entries, strict=True))
        mean, visits = state["all"]
        self._all = (mean, visits)

    def _moved(self, entry: tuple[float, int], found: float) -> tuple[float, int]:
        mean, visits = entry
        visits = min(visits + 1, self.VISITS)
        return mean + (found - mean) / visits, visits


def assign(
    prompt_lengths: Sequence[int], response_lengths: Sequence[float], n: int, replicas: int
) -> list[list[Share]]:
    """The shares of each replica; some have none where samples are fewer.

    In each, long responses come first: where not all can run at once, none that is long is then
    left for the end. The samples of a prompt stay together, so that the prompt is computed once;
    they are split only where they alone are more than a replica's fair share, as when prompts are
    fewer than replicas, so that others would have to wait.

    Args:
        prompt_lengths: tokens of each prompt.
        response_lengths: tokens that a response to each is expected to have.
        n: samples a prompt.
        replicas: number of replicas.
    """
    pairs = list(zip(prompt_lengths, response_lengths, strict=True))
    weights = [round(prompt + n * response) for prompt, response in pairs]
    shares, loads = [], []
    for number, (prompt, response) in enumerate(pairs):
        # Its weight over the fair share, rounded up; in integers, so that equal weights are never
        # split by rounding.
        parts = min(n, -(-weights[number] * replicas // sum(weights)))
        for part in range(parts):
            samples = range(part * n // parts, (part + 1) * n // parts)
            shares.append(Share(number, samples))
            loads.append(round(prompt + len(samples) * response))
    parts = min(replicas, len(shares))
    chosen = split_balanced(loads, parts) if parts else []
    ordered = [
        sorted(part, key=lambda i: (-response_lengths[shares[i].prompt], i)) for part in chosen
    ]
    return [[shares[i] for i in part] for part in ordered] + [[] for _ in range(replicas - parts)]
