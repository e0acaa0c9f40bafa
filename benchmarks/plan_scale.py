"""Measures what it costs one rank to plan a hand-over of weights, against the number of ranks.

    python benchmarks/plan_scale.py [--ranks 64 1024 8192] [--json FILE]

The models have the shapes of Llama 70B, and of Qwen3 235B-A22B and Qwen3 30B-A3B, mixtures of 128
experts; no weight is allocated and no other rank is started. For each case one rank in the middle
of the job plans. The table gives the seconds on the processor, the peak of the memory that Python
allocates meanwhile (`tracemalloc`, in a run of its own, since it slows planning), and what the plan
holds. Machines have 8 ranks each, and their table, which a job gathers once, is counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, Qwen3MoeConfig

from mrlhf.models.families import FAMILIES
from mrlhf.models.parameters import engine_pieces, role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.reshard.plan import Planner, ReshardPlan
from mrlhf.reshard.sides import sides_around

WORLD_SIZES = (8, 64, 256, 1024, 2048, 4096, 8192)
RANKS_PER_MACHINE = 8
BYTES_OF_A_NUMBER = 2
REPEATS = 3
MakeSpec = Callable[[int], ModelSpec]


def _spec(context: int) -> ModelSpec:
    """The model; another context makes another spec, for which nothing has been computed yet."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=context,
        tie_word_embeddings=False,
    )
    return FAMILIES["llama"].read_config(config.to_dict(), "lm")


def _mixture(context: int, layers: int, hidden: int, ffn: int, heads: int) -> ModelSpec:
    """The same of a mixture of 128 experts."""
    config = Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        moe_intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        max_position_embeddings=context,
        tie_word_embeddings=False,
    )
    return FAMILIES["qwen3_moe"].read_config(config.to_dict(), "lm")


MIXTURES = {
    "235B": partial(_mixture, layers=94, hidden=4096, ffn=1536, heads=64),
    "30B": partial(_mixture, layers=48, hidden=2048, ffn=768, heads=32),
}
# The model; tp, ep and the most stages of training; tp and ep of the engine.
MIXTURE_CASES = (
    ("235B", 8, 8, 8, 8, 8),
    ("235B", 8, 8, 8, 8, 1),
    ("235B", 8, 8, 8, 16, 16),
    ("235B", 8, 32, 8, 8, 8),
    ("235B", 8, 32, 8, 8, 1),
    ("235B", 4, 32, 8, 8, 8),
    ("30B", 4, 8, 4, 4, 1),
    ("30B", 4, 8, 4, 4, 4),
    ("30B", 4, 8, 1, 1, 1),
)


def _engines(world_size: int) -> dict[str, EngineLayout]:
    """The hand-overs to measure at a world size; a small job has fewer stages."""
    pp = min(8, world_size // 8)
    actor = ParallelLayout(tp=8, pp=pp, dp=world_size // 8 // pp)
    training = f"TP8 PP{pp} DP{actor.dp}"
    cases = {
        f"{training} → TP8": EngineLayout.inside(actor, 8),
        f"{training} → TP1": EngineLayout.inside(actor, 1),
    }
    if world_size % 16 == 0:
        cases[f"{training} → TP16 of consecutive ranks"] = EngineLayout.consecutive(actor, 16)
    return cases


def _engines_of_mixtures(world_size: int) -> Iterator[tuple[MakeSpec, str, EngineLayout]]:
    """The same for mixtures; replicas share the experts out, or split each of them."""
    for model, tp, ep, most_stages, engine_tp, engine_ep in MIXTURE_CASES:
        pp = min(most_stages, world_size // max(tp, ep))
        if pp == 0 or world_size < engine_tp:
            continue
        actor = ParallelLayout(tp=tp, pp=pp, dp=world_size // tp // pp, ep=ep)
        engines = EngineLayout.closest(actor, engine_tp, engine_ep)
        case = f"{model}, TP{tp} EP{ep} PP{pp} DP{actor.dp} → TP{engine_tp} EP{engine_ep}"
        yield MIXTURES[model], case, engines


def _plan(spec: ModelSpec, engines: EngineLayout) -> ReshardPlan:
    """What a rank does when its job starts."""
    rank = engines.actor.world_size // 2 + 3
    sides = sides_around(
        rank,
        engines,
        partial(role_pieces, spec, engines.actor),
        partial(engine_pieces, spec, engines),
        partial(engine_pieces, spec, engines),
    )

    machines: dict[int, range] = {}
    for first in range(0, engines.actor.world_size, RANKS_PER_MACHINE):
        machine = range(first, first + RANKS_PER_MACHINE)
        machines |= dict.fromkeys(machine, machine)
    return Planner(sides, BYTES_OF_A_NUMBER, machines.__getitem__).plan(rank)


def _measure(make_spec: MakeSpec, engines: EngineLayout, contexts: Iterator[int]) -> dict[str, Any]:
    """One row of the table."""
    seconds: list[float] = []
    for _ in range(REPEATS):
        spec = make_spec(next(contexts))
        began = time.process_time()
        plan = _plan(spec, engines)
        seconds.append(time.process_time() - began)

    tracemalloc.start()
    plan = _plan(make_spec(next(contexts)), engines)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    return {
        "ranks": engines.actor.world_size,
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "peak_bytes": peak,
        "receives": len(plan.receives),
        "sends": len(plan.sends),
        "copies": len(plan.copies),
        "aliases": len(plan.aliases),
        "bytes_received": plan.bytes_received,
        "bytes_minimum": plan.bytes_minimum,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=list(WORLD_SIZES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    contexts = itertools.count(4096)
    rows: list[dict[str, Any]] = []
    print("| ranks | case | seconds | peak, MB | receives | sends | copies | aliases |")
    print("|---|---|---|---|---|---|---|---|")
    for world_size in arguments.ranks:
        cases: list[tuple[MakeSpec, str, EngineLayout]] = [
            (_spec, *case) for case in _engines(world_size).items()
        ]
        cases += _engines_of_mixtures(world_size)
        for make_spec, case, engines in cases:
            row = {"case": case, **_measure(make_spec, engines, contexts)}
            assert row["bytes_received"] == row["bytes_minimum"]
            rows.append(row)
            print(
                f"| {row['ranks']:,} | {case} | {row['seconds']:.2f} | "
                f"{row['peak_bytes'] / 1e6:.1f} | {row['receives']:,} | {row['sends']:,} | "
                f"{row['copies']:,} | {row['aliases']:,} |",
                flush=True,
            )

    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
