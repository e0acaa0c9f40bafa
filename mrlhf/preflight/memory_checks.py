"""Whether a run keeps within the bound on a rank's memory, and which keys would make room.

The bytes come from `footprint`; nothing is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from mrlhf.config.fields import Section
from mrlhf.config.roots import AnyConfig, PPOConfig, SupervisedConfig, section_of
from mrlhf.device import device_kind
from mrlhf.errors import ConfigError
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.device_memory import BOUND_KEY
from mrlhf.preflight.batches import trained_models
from mrlhf.preflight.footprint import OWNERS, Specs, footprint
from mrlhf.printable import size_text

SectionT = TypeVar("SectionT", bound=Section)
_REMEDIES = 3
_LARGEST_GPU = 300 * 10**9  # bytes


def describe_phases(
    config: AnyConfig, specs: Mapping[str, ModelSpec | None], world_size: int, on: str
) -> Iterator[str]:
    """The bytes of each phase on the fullest rank, whose device is `on`, if all are known."""
    known = _known(specs)
    if known is None:
        return
    sizes = footprint(config, known, world_size)
    of_phases = [f"{phase} {size_text(sizes.total(phase))}" for phase in sizes.phases]
    yield f"memory of each phase on the rank that has most ({on}): {', '.join(of_phases)}"
    yield "  with activations of full micro-batches, one response in the cache, and no buffers"
    if device_kind(config.distributed.device) == "cuda" and sizes.total(sizes.peak) > _LARGEST_GPU:
        yield f"  no GPU has so much; mrlhf plan --gpus {world_size} finds layouts that may fit"


def check_memory(
    config: AnyConfig,
    specs: Mapping[str, ModelSpec | None],
    world_size: int,
    gpu_mb: float | None = None,
) -> None:
    """Compare the phases with `distributed.device_memory_mb`, or if that is not set with `gpu_mb`.

    Args:
        gpu_mb: the memory of each GPU, in MiB; None if it is not known.

    Raises:
        ConfigError: a phase needs more.
    """
    known = _known(specs)
    own = config.distributed.device_memory_mb
    bound = gpu_mb if own is None else own
    if bound is None or known is None:
        return
    room = int(bound * 2**20)
    sizes = footprint(config, known, world_size)
    phase = max(sizes.phases, key=sizes.owned)
    if sizes.owned(phase) <= room:
        return

    title = f"a GPU of {size_text(room)}" if own is None else f"{BOUND_KEY} {bound:g}"
    fullest = max(sizes.ranks, key=lambda rank: rank.owned(phase))
    owners = ", ".join(
        f"{owner} {size_text(nbytes)}"
        for owner, nbytes in fullest.owners(phase).items()
        if not owner.endswith("/activations")
    )
    remedies = list(_remedies(config, known, world_size, room))
    choices = "; or ".join(remedies[:_REMEDIES]) or "more ranks or adapters, since no offload does"
    raise ConfigError(
        f"{title} is too little for the phase '{phase}', which needs "
        f"{size_text(sizes.owned(phase))} on a rank ({owners}). Room is made by {choices}"
    )


def _known(specs: Mapping[str, ModelSpec | None]) -> Specs | None:
    """The models of a run; None if one of them is not known."""
    known = {name: spec for name, spec in specs.items() if spec is not None}
    return known if len(known) == len(specs) else None


def _remedies(config: AnyConfig, specs: Specs, world_size: int, room: int) -> Iterator[str]:
    """Keys that let all phases fit, the cheapest first."""
    for keys in offloads(config)[1:]:
        sizes = footprint(with_keys(config, keys), specs, world_size)
        if all(sizes.owned(phase) <= room for phase in sizes.phases):
            yield " ".join(
                f"{key}=[{','.join(value)}]" if isinstance(value, list) else f"{key}={value}"
                for key, value in keys.items()
            )


def offloads(config: AnyConfig) -> list[dict[str, Any]]:
    """Keys by which more and more leaves the GPUs.

    As configured, then gradients, then optimizer states too, then all, then all with states that
    pass through the GPUs in parts.
    """
    trained = trained_models(config)
    frozen = set()
    if isinstance(config, PPOConfig):
        frozen = config.roles().keys() - trained
        frozen |= {"teacher"} if config.earlier_actor is not None else set()
    choices: list[dict[str, Any]] = [{}]
    for owners in (["grads"], ["grads", "optimizer"], list(OWNERS)):
        choice = {f"{name}.offload": owners for name in trained}
        if "params" in owners:
            choice |= {f"{section_of(name)}.offload": ["params"] for name in frozen}
        choices.append(choice)

    optim = "optim" if isinstance(config, SupervisedConfig) else "{}.optim"
    streamed = [name for name, (_, section) in trained.items() if section.name != "muon"]
    streams = {f"{optim.format(name)}.stream": "host" for name in streamed}
    without_states = {f"{name}.offload": list(OWNERS[:2]) for name in streamed}
    return [*choices, choices[-1] | without_states | streams]


def with_keys(section: SectionT, keys: Mapping[str, Any]) -> SectionT:
    """A section, or a whole configuration, with other values of some keys; nothing is checked."""
    update: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        name, _, rest = key.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            update[name] = value
    for name, own in inner.items():
        update[name] = with_keys(getattr(section, name), own)
    return section.model_copy(update=update)
