"""What a run leaves for people: the closing report, a PNG of curves, one summary over several runs.

Everything is read from the files that the run wrote, so that it can be told again afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from mrlhf.log import plot_curves, read_metrics
from mrlhf.run.summary import write_summary

logger = logging.getLogger(__name__)

CURVES = (
    "critic/score/mean",
    "actor/entropy",
    "response_length/mean",
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "actor/reward_kl_penalty",
    "actor/kl_loss",
    "critic/vf_explained_var",
    "training/rollout_probs_diff_max",
)
Record = Mapping[str, Any]


def closing_report(output_dir: Path, checkpoint: Path, steps: int, seconds: float) -> None:
    """Write summary.json and curves.png, and log what the run achieved and where its time went."""
    records = read_metrics(output_dir / "metrics.jsonl")
    summary = _achievements(records) | {
        "steps": steps,
        "seconds": round(seconds, 1),
        "checkpoint": str(checkpoint),
    }
    write_summary(output_dir, summary)
    known = {name for record in records for name in record}
    validation = sorted(name for name in known if name.startswith(("val/", "val_sampled/")))
    curves = [name for name in (*validation, *CURVES) if name in known]
    plot_curves(output_dir / "metrics.jsonl", output_dir / "curves.png", curves)
    lines = [f"{name}: {_short(value)}" for name, value in summary.items()]
    lines += ["seconds by phase:", *_phase_lines(records), f"curves: {output_dir / 'curves.png'}"]
    logger.info("finished\n%s", "\n".join(f"  {line}" for line in lines))


def _achievements(records: Sequence[Record]) -> dict[str, float | None]:
    """Start and final accuracy, reward and KL, as far as the run measured them."""
    found: dict[str, float | None] = {}
    for title, prefix in (("accuracy", "val/"), ("sampled_accuracy", "val_sampled/")):
        values = _history(records, prefix, "/acc@1")
        if values:
            found |= {f"start_{title}": values[0], f"final_{title}": values[-1]}
    # What PPO raises is the reward of sampled responses: that of held-out prompts if it was
    # measured.
    rewards = (
        _history(records, "val_sampled/", "/reward_mean")
        or _history(records, "val/", "/reward_mean")
        or [record["critic/score/mean"] for record in records if "critic/score/mean" in record]
    )
    found |= {"reward_start": rewards[0], "reward_final": rewards[-1]}
    kls = [
        record["actor/reward_kl_penalty"]
        for record in records
        if "actor/reward_kl_penalty" in record
    ]
    if kls:
        found["kl_final"] = kls[-1]
    return found


def _history(records: Sequence[Record], prefix: str, ending: str) -> list[float]:
    """One validation metric over the run, averaged over data sets."""
    measured = (
        [
            value
            for name, value in record.items()
            if name.startswith(prefix) and name.endswith(ending)
        ]
        for record in records
    )
    return [fmean(values) for values in measured if values]


def _phase_lines(records: Sequence[Record]) -> list[str]:
    totals: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith("timing_s/") and value is not None:
                phase = name.removeprefix("timing_s/")
                totals[phase] = totals.get(phase, 0.0) + value
    return [
        f"  {phase}: {seconds:.1f}"
        for phase, seconds in sorted(totals.items(), key=lambda item: -item[1])
    ]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
