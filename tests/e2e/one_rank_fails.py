"""The program of `test_failure`: the engine of rank 1 raises while the others wait for samples."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from mrlhf.batch import Prompts
from mrlhf.commands.train import main
from mrlhf.config import PPOConfig
from mrlhf.errors import EngineError
from mrlhf.inference.base import Request, SamplingParams
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.reshard.execute import ReshardStats
from mrlhf.rollout.generator import Generator
from mrlhf.run.startup import Run, start
from tests.fake_engine import FakeEngine, FakeResharder


class Raising(FakeEngine):
    def submit(self, requests: Sequence[Request]) -> None:
        raise EngineError(f"no room for {len(requests)} prompts; raise rollout.kv_cache_mb")


def train(config: PPOConfig) -> None:
    """Generate once, for four prompts."""
    with start(config) as run:
        _generate(config, run)


def _generate(config: PPOConfig, run: Run) -> None:
    layout = run.groups("actor", config.actor).layout
    groups = run.factory.engine_groups(EngineLayout.inside(layout, config.rollout.tp))
    engine = Raising() if run.rank == 1 else FakeEngine()
    resharder: Any = FakeResharder(engine, ReshardStats(0, 0, 0, 0.0))
    generator = Generator(engine, groups, resharder, config.seed)
    generator.take_weights(version=0)

    texts = ["a", "b", "c", "d"]
    prompts = Prompts([[1], [2], [3], [4]], [1, 2, 3, 4], texts, texts, texts, [{} for _ in texts])
    sampling = SamplingParams(temperature=1.0, max_tokens=4, seed=0)
    generator.generate(prompts, sampling, "train", step=1)
    print("a rank went on without the others")


if __name__ == "__main__":
    sys.exit(main(PPOConfig, train, sys.argv[1:]))
