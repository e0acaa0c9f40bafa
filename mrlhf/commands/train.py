"""The four programs that train, each started by torchrun on every rank.

Usage: torchrun --no-python --nproc-per-node=N mrlhf-train-ppo --config FILE [--config FILE ...]
           [key.path=value ...] [--dry-run [--world-size N] [--allow-missing]]

The checks and the trainers are imported once the configuration has been read: the import takes
seconds, and neither --help nor a mistake in the configuration has to wait for it.
"""

from __future__ import annotations

import sys

from mrlhf.config import DPOConfig, PPOConfig, RewardModelConfig, SFTConfig
from mrlhf.config.roots import AnyConfig
from mrlhf.run.program import DryRunReport, Program, main


def dpo() -> int:
    """Train a policy on preference pairs."""

    def train(config: DPOConfig) -> None:
        from mrlhf.trainers.dpo import train_dpo

        train_dpo(config)

    return main(Program(DPOConfig, _check, _dry_run, train, _inputs), sys.argv[1:])


def ppo() -> int:
    """Train a policy with PPO."""

    def train(config: PPOConfig) -> None:
        from mrlhf.trainers.ppo.run import train_ppo

        train_ppo(config)

    return main(Program(PPOConfig, _check, _dry_run, train, _inputs), sys.argv[1:])


def reward_model() -> int:
    """Train a reward model."""

    def train(config: RewardModelConfig) -> None:
        from mrlhf.trainers.reward_model import train_reward_model

        train_reward_model(config)

    return main(Program(RewardModelConfig, _check, _dry_run, train, _inputs), sys.argv[1:])


def sft() -> int:
    """Fine-tune a language model."""

    def train(config: SFTConfig) -> None:
        from mrlhf.trainers.sft import train_sft

        train_sft(config)

    return main(Program(SFTConfig, _check, _dry_run, train, _inputs), sys.argv[1:])


def _check(config: AnyConfig, world_size: int) -> str:
    from mrlhf.preflight import preflight

    return preflight(config, world_size)


def _dry_run(config: AnyConfig, world_size: int | None) -> DryRunReport:
    from mrlhf.preflight import dry_run
    from mrlhf.run.startup import foresee

    return dry_run(config, world_size, lambda: foresee(config, config.trainer))


def _inputs(config: AnyConfig) -> list[tuple[str, str]]:
    from mrlhf.preflight.paths import input_paths

    return [(path.key, path.path) for path in input_paths(config) if path.key != "trainer.resume"]
