"""Writes rollouts and training batches to files for people to look at.

This file does not know metrics, nor when a batch is to be written.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrlhf.batch import Experience, Rollout
from mrlhf.checkpoint.output_files import VALIDATION
from mrlhf.config.rollout import RolloutSection
from mrlhf.data.rows import write_rows
from mrlhf.data.sample_table import EPISODES, TEXTS, SampleTable, write_samples
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.rollout.scoring import Scores


@dataclass(frozen=True)
class Dump:
    """The data of one step that is written down."""

    step: int
    experience: Experience
    scores: Scores
    # Of the distribution of each token, float32 [batch, response_len]; None where it was not
    # measured, or measured before the run was interrupted.
    entropy: Tensor | None = None
    # Log-probabilities after the update, float32 [batch, response_len], or None.
    new_logprobs: Tensor | None = None


def write_dump(output_dir: Path, dump: Dump, section: RolloutSection, tokenizer: Tokenizer) -> None:
    """Write prompts, responses and scores of a step to `rollouts/step_<step>.*`.

    A parquet file also has the numbers of each token.
    """
    directory = output_dir / "rollouts"
    directory.mkdir(exist_ok=True)

    rows = chosen_rows(dump.experience.rollout, section.dump_samples)
    stem = f"step_{dump.step:06d}"
    if section.dump_format == "jsonl":
        samples = [_sample(dump, row, tokenizer) for row in rows]
        write_rows(directory / f"{stem}.jsonl", samples)
    else:
        write_samples(directory / f"{stem}.parquet", _table(dump, rows, tokenizer))


def chosen_rows(rollout: Rollout, most: int | None) -> list[int]:
    """The rows to write down, in order: as many whole prompt groups as fit into `most` rows.

    Which prompts come first depends on their uid alone, so that a prompt that was written down in
    one epoch is written down in the next one as well. If not even one group fits, the first samples
    of one are chosen.
    """
    every = range(len(rollout))
    if most is None or len(rollout) <= most:
        return list(every)

    groups: dict[int, list[int]] = {}
    for row, group in enumerate(rollout.prompt_groups.tolist()):
        groups.setdefault(group, []).append(row)
    uids = rollout.prompts.uid
    in_turn = sorted(groups.values(), key=lambda rows: (zlib.crc32(b"%d" % uids[rows[0]]), rows))

    chosen: list[int] = []
    for rows in in_turn:
        if len(chosen) + len(rows) > most:
            break
        chosen += rows
    return sorted(chosen or in_turn[0][:most])


def write_validation(
    output_dir: Path, step: int, rollout: Rollout, scores: Scores, most: int, tokenizer: Tokenizer
) -> None:
    """Write the answers to the first `most` prompts of a validation, one sample of each."""
    directory = output_dir / VALIDATION
    directory.mkdir(exist_ok=True)
    totals = rollout.with_turn_rewards(scores.total).tolist()[:most]
    rows = [
        describe_sample(rollout, row, tokenizer, total, scores.terms)
        for row, total in enumerate(totals)
    ]
    write_rows(directory / f"step_{step:06d}.jsonl", rows)


def _sample(dump: Dump, row: int, tokenizer: Tokenizer) -> dict[str, Any]:
    score = float(dump.experience.scores[row])
    return describe_sample(dump.experience.rollout, row, tokenizer, score, dump.scores.terms)


def describe_sample(
    rollout: Rollout,
    row: int,
    tokenizer: Tokenizer,
    score: float | None,
    terms: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """One sample as a line of jsonl; `terms` are [batch]."""
    prompts = rollout.prompts
    length = int(rollout.response_mask[row].sum())
    numbers = {name: column[row] for name, column in terms.items()}

    sample = {
        "uid": prompts.uid[row],
        "sample": rollout.sample_index[row],
        "data_source": prompts.data_source[row],
        "prompt": prompts.text[row],
        "response": tokenizer.decode(rollout.response_ids[row, :length].tolist()),
        "ground_truth": prompts.ground_truth[row],
        "stopped": bool(rollout.stopped[row]),
        "score": score,
        "terms": {name: x for name, x in numbers.items() if not math.isnan(x)},
    }
    if rollout.episodes is not None:
        episode = vars(rollout.episodes[row])
        sample |= {name: episode[name] for name in EPISODES}
    return sample


def _table(dump: Dump, rows: Sequence[int], tokenizer: Tokenizer) -> SampleTable:
    """The samples at `rows` with the numbers of their tokens."""
    experience = dump.experience
    rollout = experience.rollout
    index = torch.tensor(rows, dtype=torch.int64)
    is_there = rollout.response_mask[index]

    responses = [rollout.response_ids[row][rollout.response_mask[row]].tolist() for row in rows]
    columns = TEXTS if rollout.episodes is None else TEXTS | EPISODES
    texts: dict[str, list[Any]] = {name: [] for name in columns}
    for row, ids, pieces in zip(rows, responses, tokenizer.pieces(responses), strict=True):
        sample = _sample(dump, row, tokenizer)
        stopped = sample.pop("stopped")
        finish_reason = "stop" if stopped else "length"
        if rollout.episodes is not None:
            sample["tools"] = list(sample["tools"].items())
            finish_reason = "failure" if sample["failure"] else finish_reason
        sample |= {
            "step": dump.step,
            "finish_reason": finish_reason,
            "ground_truth": _as_text(sample["ground_truth"]),
            "length": len(ids),
            "terms": list(sample["terms"].items()),
            "prompt_ids": rollout.prompts.token_ids[row],
            "response_tokens": pieces,
        }
        for name, value in sample.items():
            texts[name].append(value)

    measured = {
        "response_ids": rollout.response_ids,
        "version": rollout.versions if _tells_versions(rollout) else None,
        "loss_mask": experience.loss_mask,
        "advantage": experience.advantages,
        "return": experience.returns,
        "reward": experience.token_rewards,
        "placed": rollout.placed,
        "value": experience.values,
        "old_logprob": experience.old_logprobs,
        "new_logprob": dump.new_logprobs,
        "rollout_logprob": rollout.rollout_logprobs,
        "ref_logprob": experience.ref_logprobs,
        "entropy": dump.entropy,
        "weight": experience.weights,
    }
    tokens = {
        name: table[index][is_there].numpy()
        for name, table in measured.items()
        if table is not None
    }
    return SampleTable(texts, tokens)


def _tells_versions(rollout: Rollout) -> bool:
    """Whether not all tokens have one origin, so that a reader needs to know each token's."""
    drawn = rollout.versions[rollout.loss_mask]
    return rollout.episodes is not None or bool((drawn != drawn[:1]).any())


def _as_text(value: Any) -> str | None:
    """A reference answer as text; an answer of another type as JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def save_batch(path: Path, experience: Experience) -> None:
    """Write a training batch for study: tensors and lists, which `torch.load` reads.

    `weights_only=True` is enough. The `loss_mask` is the experience's; `versions` tells which
    tokens the policy drew.
    """
    rollout = experience.rollout

    tables = vars(rollout) | vars(experience)  # of two loss masks, the experience's
    del tables["prompts"]
    del tables["rollout"]
    tables["prompts"] = rollout.prompts.token_ids
    tables["episodes"] = rollout.episodes and [vars(episode) for episode in rollout.episodes]
    tables["uid"] = rollout.prompts.uid
    records = {
        "engine_experts": rollout.experts,
        "experts": experience.experts,
        "masks": rollout.masks,
    }
    for name, record in records.items():
        tables[name] = None if record is None else vars(record)
    torch.save(tables, path)
