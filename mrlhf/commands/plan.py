"""Finds layouts for a configuration on a number of GPUs that need not be there.

Usage: mrlhf plan --config FILE [--config FILE ...] --gpus N [--gpu h100|FILE] [--out DIR]
                  [--prompt-tokens P] [--response-tokens R] [key.path=value ...]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from mrlhf.commands.endings import end_command
from mrlhf.config.load import keys_as_yaml, read_any
from mrlhf.config.roots import PROGRAMS, AnyConfig, PPOConfig
from mrlhf.errors import ConfigError
from mrlhf.inputs.paths import with_local_inputs
from mrlhf.log import quiet_transformers
from mrlhf.models.published import how_to_get
from mrlhf.planning.gpus import GPUS, Gpu, gpu_of
from mrlhf.planning.search import Found, Plan, on_one_rank, search
from mrlhf.planning.seconds import Lengths
from mrlhf.preflight.batches import trained_models
from mrlhf.preflight.dry_run import check_ranks
from mrlhf.preflight.footprint import GENERATION, Specs
from mrlhf.preflight.model_checks import check_models, of_shipped_sizes
from mrlhf.printable import show
from mrlhf.version import add_version_option

_RESERVE_GB = 10.0
_SILENT_S = 10.0
_MORE_GPUS = (2, 4, 8)  # times as many are tried where nothing fits


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Find layouts that fit so many GPUs, the fastest first. A model needs only its "
        "config.json. Bytes come from shapes; seconds are estimates from a GPU's stated rates."
    )
    add_version_option(parser)
    add = parser.add_argument
    add("--config", action="append", metavar="FILE", required=True, help="the run")
    add("--program", choices=list(PROGRAMS), help="what it is for (default: found out)")
    add("--gpus", type=int, metavar="N", required=True, help="how many there will be")
    add("--gpu", default="h100", metavar="KIND", help=f"{', '.join(GPUS)}, or a YAML file")
    add("--prompt-tokens", type=float, metavar="P", help="mean length (default: half of the most)")
    add("--response-tokens", type=float, metavar="R", help="the same of responses")

    reserve = (
        "left free on each GPU, for NCCL's buffers, CUDA itself and memory in pieces too small to "
        "use (default: an eighth of its memory, at most 10)"
    )
    add("--reserve-gb", type=float, metavar="GB", help=reserve)
    add("--out", type=Path, metavar="DIR", help="write 1.yaml to 5.yaml, to give after your own")
    add("overrides", nargs="*", metavar="key.path=value", help="keys of the run")
    return parser.parse_intermixed_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Search and tell; 0 if a layout fits, 1 if none does, 2 on bad input."""
    options = parse(arguments)
    quiet_transformers()
    return end_command(lambda: _plan(options), options.out or Path("."))


def _plan(options: argparse.Namespace) -> int:
    gpu = gpu_of(options.gpu)
    check_ranks("--gpus", options.gpus)
    reserve = options.reserve_gb
    if reserve is None:
        reserve = min(_RESERVE_GB, gpu.memory_gb / 8)
    if not 0 <= reserve < gpu.memory_gb:
        raise ConfigError(f"--reserve-gb {reserve:g} is not between 0 and {gpu.memory_gb:g} GB")
    # On a GPU, "auto" means bfloat16 and other blocks of the KV cache.
    overrides = [*options.overrides, f"distributed.device={gpu.device}"]
    given = read_any(options.program, options.config, overrides)
    config, _, reasons = with_local_inputs(given, {}, weights=False, rows=False)
    for line in reasons.values():
        show(line)

    specs = _specs(config)
    for line in of_shipped_sizes(config):
        show(line)
    lengths = _lengths(options, config)
    search_on = partial(search, config, specs, gpu=gpu, lengths=lengths, reserve=reserve)
    found = search_on(options.gpus, advance=_Progress())
    if not found.tried:
        raise ConfigError(f"no layout of the models fits {options.gpus} GPUs; give another number")

    show("\n".join(_in_words(found, options.gpus, gpu, lengths, reserve)))
    if not found.best:
        show(_remedy(config, search_on, options.gpus))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        for number, plan in enumerate(found.best, start=1):
            (options.out / f"{number}.yaml").write_text(as_yaml(plan, config), encoding="utf-8")
        if found.best:
            show(f"wrote {options.out}/1.yaml to {len(found.best)}.yaml: give one after your own")
    return 0 if found.best else 1


def _remedy(config: AnyConfig, search_on: Callable[[int], Found], gpus: int) -> str:
    """What would fit, if nothing does: so many more GPUs, if these are not too many."""
    numbers = [gpus * times for times in _MORE_GPUS]
    for number in numbers:
        if best := search_on(number).best:
            enough = f"{number} GPUs would do ({layout_of(best[0].config)})"
            break
    else:
        enough = f"{numbers[-1]} GPUs would not do either"
    keys = [f"{name}.lora.rank" for name in trained_models(config)]
    return f"{enough}; adapters ({', '.join(keys)}) or shorter sequences need less memory"


class _Progress:
    """Says on standard error how far a search is, if it takes long."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        if time.monotonic() > self._last + _SILENT_S:
            self._last = time.monotonic()
            sys.stderr.write(f"{done} of {of} layouts tried\n")


def _lengths(options: argparse.Namespace, config: AnyConfig) -> Lengths:
    """The mean lengths that are given, or half of the longest."""
    data = config.data
    most = (data.max_length / 2, data.max_length / 2)
    if isinstance(config, PPOConfig):
        most = (config.data.max_prompt_length, config.data.max_response_length)
    given = (options.prompt_tokens, options.response_tokens)
    prompt, response = (
        longest / 2 if mean is None else mean for mean, longest in zip(given, most, strict=True)
    )
    if not (0 < prompt <= most[0] and 0 < response <= most[1]):
        raise ConfigError(
            f"mean lengths of {prompt:g} and {response:g} tokens are not between 0 and the longest "
            f"of the data, {most[0]:g} and {most[1]:g}"
        )
    return Lengths(prompt, response)


def _specs(config: AnyConfig) -> Specs:
    """The model of each role.

    Raises:
        ConfigError: a model has no `config.json` here, or is not supported, or the layout of one
            that is not trained does not fit it.
    """
    try:
        specs = check_models(config)
    except ConfigError:  # perhaps of a layout, instead of which others are tried
        specs = check_models(on_one_rank(config))
    found = {}
    for name, spec in specs.items():
        if spec is None:
            role = config.roles()["actor" if name == "rollout" else name]
            if (Path(role.path) / "config.json").is_file():
                raise ConfigError(f"{name}.lora.path {role.value_of('lora.path')} does not exist")
            get = how_to_get(role.path, "config.json")
            raise ConfigError(f"{name}: {role.path} holds no config.json; it alone is needed{get}")
        found[name] = spec
    return found


def _in_words(found: Found, gpus: int, gpu: Gpu, lengths: Lengths, reserve: float) -> Iterator[str]:
    yield (
        f"{gpus} x {gpu.name} of {gpu.memory_gb:g} GB, {reserve:g} GB of each left free; prompts "
        f"of {lengths.prompt:g} and responses of {lengths.response:g} tokens on average"
    )
    yield (
        f"{found.tried} layouts tried, the fastest first; within 10 %, the one that offloads "
        "least, then the one that needs least memory"
    )
    yield "seconds are estimates, good for comparing layouts"
    yield ""
    yield from _table(found, gpus)
    yield from _on_own(found, gpus, gpu.memory_gb - reserve)

    if found.best:
        yield ""
        yield "memory of 1 on the GPU that has most, GB"
        yield from _memory(found.best[0])
    if found.too_large:
        yield ""
        room = gpu.memory_gb - reserve
        yield "would be faster, but do not fit:" if found.best else "none fits; the nearest:"
        for plan in found.too_large:
            yield f"  {layout_of(plan.config)}: {_lacks(plan, room)}"


def _on_own(found: Found, gpus: int, room: float) -> Iterator[str]:
    """Why the layout that was given is not among the best, or which of them it is."""
    own = found.own
    if isinstance(own, str):
        yield f"yours does not fit {gpus} GPUs: {own.splitlines()[0]}"
    elif own.most > room * 1e9:
        yield f"yours does not fit: {_lacks(own, room)}"
    elif found.best:
        first = found.best[0]
        seconds = own.time.step - first.time.step
        more = {phase: -took for phase, took in first.time.seconds.items()}
        for phase, took in own.time.seconds.items():
            more[phase] = more.get(phase, 0.0) + took
        most = sorted(more, key=lambda phase: -abs(more[phase]))[:2]

        digits = _digits(found.best)
        of_it = ", ".join(f"{phase} {more[phase]:+.{digits}f}" for phase in most)
        gigabytes = (own.most - first.most) / 1e9
        yield f"yours beside 1: {seconds:+.{digits}f} s ({of_it}), {gigabytes:+.0f} GB"


def _digits(plans: Sequence[Plan]) -> int:
    """Digits behind the point in which the seconds of a step have two that count, at least one."""
    fastest = min((plan.time.step for plan in plans), default=1.0)
    return max(1, 1 - math.floor(math.log10(fastest)))


def _table(found: Found, gpus: int) -> Iterator[str]:
    named = {str(number): plan for number, plan in enumerate(found.best, start=1)}
    if not isinstance(found.own, str):
        named["yours"] = found.own
    plans = list(named.values())
    phases = list(dict.fromkeys(phase for plan in plans for phase in plan.time.seconds))

    rows = [["", "layout", "peak GB", "step s", *(f"{phase} s" for phase in phases), "tokens/s"]]
    digits = _digits(plans)
    for name, plan in named.items():
        time = plan.time
        seconds = [f"{time.seconds.get(phase, 0.0):.{digits}f}" for phase in phases]
        speed = f"{time.tokens / time.step / gpus:.0f}"
        peak = f"{plan.most / 1e9:.0f}"
        step = f"{time.step:.{digits}f}"
        rows.append([name, layout_of(plan.config), peak, step, *seconds, speed])

    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first = [row[0].ljust(widths[0]), row[1].ljust(widths[1])]
        rest = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        yield "  ".join([*first, *rest])
    yield "tokens/s: of prompts and responses, for each GPU"


def layout_of(config: AnyConfig) -> str:
    """The layout of the policy and the engine in few words; axes of size 1 are left out."""
    role = next(iter(config.roles().values()))
    axes = ("tp", "cp", "pp", "vpp", "ep")
    words = [f"{axis} {role.value_of(axis)}" for axis in axes if role.value_of(axis) > 1]
    if isinstance(config, PPOConfig):
        words.append(f"rollout.tp {config.rollout.tp}")
    words.append(f"{role.micro_batch_tokens} tokens")
    words += ["recompute"] if role.recompute == "full" else []
    words += [f"offload {' '.join(role.offload)}"] if role.offload else []
    _, optim = next(iter(trained_models(config).values()))
    words += ["stream"] if optim.stream is not None else []
    return ", ".join(words)


def _memory(plan: Plan) -> Iterator[str]:
    rank = plan.memory.fullest
    for phase, owners in rank.phases.items():
        more = "".join(f", {owner} {nbytes / 1e9:.1f}" for owner, nbytes in owners.items())
        yield f"  {phase}: {rank.total(phase) / 1e9:.1f}{more.replace(',', ', of it', 1)}"
        if phase == GENERATION:
            at_once = plan.time.decoded_at_once
            yield f"    room for {at_once} responses at once on each replica"
    held = ", ".join(f"{owner} {size / 1e9:.1f}" for owner, size in rank.held.items())
    yield f"  held all the time: {held}"


def _lacks(plan: Plan, room: float) -> str:
    peak = plan.memory.peak
    lacking = plan.most / 1e9 - room
    largest = list(plan.memory.fullest.owners(peak).items())[:2]
    owners = ", ".join(f"{owner} {nbytes / 1e9:.0f}" for owner, nbytes in largest)
    return f"{peak} lacks {lacking:.0f} GB ({owners})"


def as_yaml(plan: Plan, given: AnyConfig) -> str:
    """The keys of a plan that the configuration does not have already."""
    keys = {key: value for key, value in plan.keys.items() if given.value_of(key) != value}
    return keys_as_yaml(keys)
