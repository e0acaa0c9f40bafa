"""Writes training batches to files for people to look at.

This file does not know metrics, nor when a batch is to be written.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from mrlhf.batch import Experience
from mrlhf.data.rows import write_rows
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.rollout.scoring import Scores


def dump_rollout(
    output_dir: Path, step: int, experience: Experience, scores: Scores, tokenizer: Tokenizer
) -> None:
    """Write every prompt, response and score of a step to `rollouts/step_<step>.jsonl`."""
    rollout = experience.rollout
    prompts = rollout.prompts
    lengths = rollout.response_lengths

    rows = []
    for row in range(len(rollout)):
        tokens = rollout.response_ids[row, : lengths[row]].tolist()
        numbers = {name: column[row] for name, column in scores.terms.items()}
        rows.append(
            {
                "uid": prompts.uid[row],
                "sample": rollout.sample_index[row],
                "data_source": prompts.data_source[row],
                "prompt": prompts.text[row],
                "response": tokenizer.decode(tokens),
                "ground_truth": prompts.ground_truth[row],
                "stopped": bool(rollout.stopped[row]),
                "score": float(experience.scores[row]),
                "terms": {name: x for name, x in numbers.items() if not math.isnan(x)},
            }
        )

    directory = output_dir / "rollouts"
    directory.mkdir(exist_ok=True)
    write_rows(directory / f"step_{step:06d}.jsonl", rows)


def save_batch(path: Path, experience: Experience) -> None:
    """Write a training batch for study: tensors and lists, which `torch.load` reads.

    `weights_only=True` is enough. Its `loss_mask` is the experience's; `versions` tells which
    tokens the policy drew.
    """
    rollout = experience.rollout

    tables = vars(rollout) | vars(experience)  # of two loss masks, the experience's
    del tables["prompts"]
    del tables["rollout"]
    tables["prompts"] = rollout.prompts.token_ids
    tables["uid"] = rollout.prompts.uid
    torch.save(tables, path)
