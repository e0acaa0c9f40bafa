"""What a GPU can do, as its maker states it, and the share that runs reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from mrlhf.config.yaml_text import parse_yaml
from mrlhf.errors import ConfigError


@dataclass(frozen=True)
class Reached:
    """The share of each rate of a machine that a run reaches."""

    products: float
    experts: float  # products of experts, which have few rows each
    memory: float
    links: float


# Of rates that a maker states: assumed, not measured. With what passes through memory, a dense
# layer comes to 40 % of the products' peak; training reports give 35 to 45 %. Experts: NVIDIA's
# Megatron-Bridge (performance summary, 26.02) trains GPT-OSS 120B in bfloat16 on 64 H100 at 163
# TFLOP/s each without dropping tokens; what is counted here beside the products leaves them 20 %.
STATED = Reached(products=0.5, experts=0.2, memory=0.6, links=0.6)
# Seconds of one exchange between the GPUs of a machine, however few its bytes; assumed.
LATENCY_S = 1e-5


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, or a rank's part of a host; the links of its machine in one direction.

    The rates are peaks that a maker states.
    """

    name: str
    memory_gb: float  # 10⁹ bytes
    tflops: float  # dense products in the run's number format, 10¹² operations a second
    memory_gb_s: float  # of its own memory, 10⁹ bytes a second
    link_gb_s: float  # to the other GPUs of its machine together, 10⁹ bytes a second
    network_gb_s: float  # of its share of the machine's network, 10⁹ bytes a second
    host_gb_s: float  # to the memory of its host, 10⁹ bytes a second
    per_machine: int = 8
    latency_s: float = LATENCY_S  # of an exchange inside the machine
    device: Literal["cuda", "cpu"] = "cuda"

    def computing_s(self, operations: float) -> float:
        """Seconds that these operations of products or attention take."""
        return operations / (1e12 * STATED.products * self.tflops)

    def memory_s(self, nbytes: float) -> float:
        """Seconds that it takes to read or write these bytes of its memory."""
        return nbytes / (1e9 * STATED.memory * self.memory_gb_s)


# Memory, products and links from the data sheets of NVIDIA's SXM modules; the network is that of
# its DGX machines, an adapter of 200 (A100) or 400 Gbit/s for each GPU. The host is behind PCIe 4
# (A100) or 5 with 16 lanes.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 80, 312, 2039, 300, 25, 32),
        Gpu("h100", 80, 989, 3350, 450, 50, 64),
        Gpu("h200", 141, 989, 4800, 450, 50, 64),
        Gpu("b200", 180, 2250, 8000, 900, 50, 64),
    )
}


def gpu_of(name: str) -> Gpu:
    """The GPU of a name in `GPUS` or of a YAML file of its fields; ConfigError if there is none."""
    if name in GPUS:
        return GPUS[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--gpu {name} is neither a file nor one of {', '.join(GPUS)}")
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"), name)
    except UnicodeDecodeError:
        raise ConfigError(f"--gpu {name} is not UTF-8 text; save it as such") from None

    own = {field.name: field for field in fields(Gpu) if field.name != "name"}
    needed = [name for name, field in own.items() if field.default is MISSING]
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name}: give {', '.join(needed)}, each with a value")
    missing = [field for field in needed if field not in values]
    if missing:
        raise ConfigError(f"{name}: {', '.join(missing)} missing; give {', '.join(needed)}")
    unknown = sorted(map(str, values.keys() - own))
    if unknown:
        raise ConfigError(f"{name}: no field is called {unknown[0]}; there are {', '.join(own)}")

    hints = get_type_hints(Gpu)
    return Gpu(
        path.stem,
        **{key: _value(hints[key], value, f"{name}: {key}") for key, value in values.items()},
    )


def _value(kind: Any, value: Any, where: str) -> Any:
    if kind not in (int, float):
        choices = get_args(kind)
        if value not in choices:
            raise ConfigError(f"{where} must be {' or '.join(choices)}, and is {value!r}")
        return value
    # Beyond these, what is computed of a rate overflows.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 1e-30 < value < 1e30) or (kind is int and value % 1):
        whole = "whole " * (kind is int)
        raise ConfigError(f"{where} must be a {whole}number above 0, and is {value!r}")
    return value
