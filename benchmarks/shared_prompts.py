"""Measures what `share_prompts` saves in an update: a prompt computed once for all its responses.

    python benchmarks/shared_prompts.py [--quick] [--sizes 26M] [--repeats 5]

An update is one optimizer step of supervised fine-tuning on groups of responses to one prompt, with
lengths of half to one and a half of their mean. Both forms take turns in one process; figures are
medians of the processor's seconds, and the first turn is not counted. `tokens` is the ratio of
tokens, `work` that of operations (with those of attention), `seconds` what arrives.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.distributed.elastic.utils.distributed import get_free_port

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model_sizes import SIZES, model_config

from mrlhf.config.roots import TrainedModelSection
from mrlhf.config.sections import OptimSection
from mrlhf.data.sft import SftExample
from mrlhf.device import pick_device
from mrlhf.models.families import load_spec
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.job import init_distributed
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.trainers.sft import FineTuning
from mrlhf.training.engine import ModelEngine

LENGTHS = ((256, 64), (160, 160), (64, 256))  # of a prompt and, in the mean, of a response
SAMPLES = (4, 8, 16)
TOKENS = 10240  # of all sequences of an update, if nothing is shared
MICRO_BATCH = 8192
TIMEOUT_S = 600.0


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: a tiny model")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["26M"])
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    arguments = parser.parse_args()
    sizes = ["tiny"] if arguments.quick else arguments.sizes
    repeats = 1 if arguments.quick else arguments.repeats

    torch.set_num_threads(1)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    os.environ.update({**alone, "MASTER_PORT": str(get_free_port()), "LOCAL_WORLD_SIZE": "1"})
    init_distributed(pick_device("cpu", 0), TIMEOUT_S)
    print("| model | prompt : response | n | tokens | work | seconds | seconds / work |")
    print("|---|---|---|---|---|---|---|")
    for size in sizes:
        with tempfile.TemporaryDirectory() as directory:
            model_config(size).save_pretrained(directory)
            engines = {shares: _engine(directory, shares) for shares in (False, True)}
            for prompt, response in LENGTHS:
                for n in SAMPLES:
                    row = _measure(engines, prompt, response, n, repeats)
                    print(f"| {size} | {prompt} : {response} | {n} | {row}", flush=True)
    torch.distributed.destroy_process_group()


def _engine(directory: str, shares: bool) -> ModelEngine:
    section = TrainedModelSection(
        path=directory, micro_batch_tokens=MICRO_BATCH, share_prompts=shares
    )
    groups = GroupFactory(TIMEOUT_S).role_groups(ParallelLayout.for_world("model", 1, AxisSizes()))
    engine = ModelEngine(section, load_spec(directory, "lm"), groups, pick_device("cpu", 0))
    engine.initialise(seed=1)
    engine.attach_optimizer(OptimSection(), total_updates=1_000_000)
    return engine


def _measure(
    engines: dict[bool, ModelEngine], prompt: int, response: int, n: int, repeats: int
) -> str:
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> list[int]:
        vocabulary = engines[True].spec.vocab_size
        return torch.randint(0, vocabulary, (count,), generator=generator).tolist()

    examples = []
    for _ in range(max(1, TOKENS // (n * (prompt + response)))):
        ids = draw(prompt)
        for sample in range(n):
            tokens = response // 2 + response * sample // (n - 1)
            examples.append(SftExample(ids + draw(tokens), [0] * prompt + [1] * tokens))
    task = FineTuning(examples, [])

    seconds: dict[bool, list[float]] = {False: [], True: []}
    losses: dict[bool, float] = {}
    for turn in range(repeats + 1):
        for shares, engine in engines.items():
            began = time.process_time()
            losses[shares] = task.step(engine, range(len(examples)))["sft/loss"]
            if turn:
                seconds[shares].append(time.process_time() - began)
    assert abs(losses[True] / losses[False] - 1) < 1e-3, losses

    balance = task._loss_on(engines[True], range(len(examples)))[1].balance
    assert balance.shared is not None
    ratio = statistics.median(seconds[False]) / statistics.median(seconds[True])
    tokens, work = 1 / (1 - balance.shared), 1 / balance.work
    return f"{tokens:.2f} | {work:.2f} | {ratio:.2f} | {ratio / work:.0%} |"


if __name__ == "__main__":
    main()
