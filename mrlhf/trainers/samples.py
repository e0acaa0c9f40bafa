"""Puts a few prompts with their responses into words, and shows them to people who watch a run.

It does not know when they are shown, nor how responses are scored.
"""

from __future__ import annotations

import logging

from mrlhf.batch import Rollout
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.rollout.scoring import Scores
from mrlhf.run.board import ShownSample
from mrlhf.run.startup import Run

logger = logging.getLogger(__name__)

_MOST_CHARACTERS = 600


class SampleViewer:
    """Shows some responses to people and trackers; only the main rank does."""

    def __init__(self, run: Run, tokenizer: Tokenizer, count: int) -> None:
        """Show `count` prompts of each batch; none if that is 0."""
        self._board = run.board if run.is_main_rank and count else None
        self._tokenizer = tokenizer
        self._count = count

    def show(self, kind: str, title: str, rollout: Rollout, scores: Scores) -> None:
        """Show the first responses of a batch.

        Args:
            kind: the name under which trackers keep them.
            title: what they are samples of.
            rollout: the batch.
            scores: its scores.
        """
        if self._board is None:
            return
        text = describe_samples(rollout, scores, self._tokenizer, self._count)
        self._board.add_sample(ShownSample(kind, title, text))
        if not self._board.has_view:
            logger.info("samples of %s\n%s", title, text)


def describe_samples(rollout: Rollout, scores: Scores, tokenizer: Tokenizer, count: int) -> str:
    """The first `count` prompts of a batch, each with its first response, score and answer.

    Texts stand in quotation marks, with their line ends as they are in Python; the middle of a long
    text is left out.

    Args:
        rollout: the batch.
        scores: its scores.
        tokenizer: turns responses into text.
        count: prompts to show.
    """
    prompts = rollout.prompts
    rows = [row for row, sample in enumerate(rollout.sample_index) if sample == 0]
    lines = []

    for row in rows[:count]:
        score = float(scores.total[row])
        tokens = rollout.response_ids[row, : rollout.response_lengths[row]].tolist()
        ending = "" if bool(rollout.stopped[row]) else ", cut off at the longest length"
        lines += [
            f"  {prompts.data_source[row]}, score {score:.4g}{ending}",
            f"    prompt   {_quoted(prompts.text[row])}",
            f"    response {_quoted(tokenizer.decode(tokens))}",
        ]

        answer = prompts.ground_truth[row]
        if answer is not None:
            lines.append(f"    answer   {_quoted(str(answer))}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """The text on one line, without its middle if it is long."""
    left_out = len(text) - _MOST_CHARACTERS
    if left_out > 0:
        half = _MOST_CHARACTERS // 2
        return f"{text[:half]!r} ... {left_out} characters ... {text[-half:]!r}"
    return repr(text)
