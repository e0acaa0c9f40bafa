"""Puts a few prompts with their responses into words, for people who watch a run.

It does not know when they are shown, nor how responses are scored.
"""

from __future__ import annotations

from mrlhf.batch import Rollout
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.rollout.scoring import Scores

_MOST_CHARACTERS = 600


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
