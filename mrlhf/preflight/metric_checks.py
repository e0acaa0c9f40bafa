"""Checks the names of the metrics by which the best step is kept.

It knows the prefixes of metric names. The metrics of a run are only known after its first
validation.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrlhf.config.roots import AnyConfig, DPOConfig, PPOConfig, SFTConfig
from mrlhf.metrics.table import KINDS

_TEST = ("test", "test_sampled")
_PPO = tuple(kind for kind in KINDS if kind not in (*_TEST, "sft", "rm", "dpo"))
_SUPERVISED = ("perf", "timing_s", "val")


def metric_problems(config: AnyConfig) -> Iterator[str]:
    """Names that no metric of such a run can have, one line each."""
    if isinstance(config, PPOConfig):
        kinds: tuple[str, ...] = _PPO
    elif isinstance(config, SFTConfig):
        kinds = ("sft", *_SUPERVISED)
    else:
        kinds = ("dpo" if isinstance(config, DPOConfig) else "rm", *_SUPERVISED)

    trainer = config.trainer
    for key, name in (("keep_best", trainer.keep_best), ("export_best", trainer.export_best)):
        if name is None:
            continue
        kind, slash, rest = name.partition("/")
        if kind in _TEST and isinstance(config, PPOConfig):
            yield (
                f"trainer.{key} is {name}, but no step is chosen by data.test_files, whose figures "
                f"would then be too good; use {kind.replace('test', 'val')}/{rest}"
            )
        elif kind not in kinds or not slash or not rest:
            yield (
                f"trainer.{key} is {name}, which is no metric of this run; their names begin with "
                f"{', '.join(f'{known}/' for known in kinds)}"
            )
