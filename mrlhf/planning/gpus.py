"""What a GPU can do, as its maker states it, and the share of that which runs reach."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from mrlhf.config.yaml_text import parse_yaml
from mrlhf.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU and the links of its machine; rates are peaks, in one direction."""

    name: str
    memory_gb: float  # 10⁹ bytes
    tflops: float  # dense products in bfloat16, 10¹² operations a second
    memory_gb_s: float  # of its own memory, 10⁹ bytes a second
    link_gb_s: float  # to the other GPUs of its machine together, 10⁹ bytes a second
    network_gb_s: float  # of its share of the machine's network, 10⁹ bytes a second
    host_gb_s: float  # to the memory of its host, 10⁹ bytes a second
    per_machine: int = 8


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

# The shares of these rates that a run is taken to reach. They are assumed, not measured: training
# reports of dense models give 35 to 45 % of the products' peak.
PRODUCTS = 0.4
MEMORY = 0.6
LINKS = 0.6
# Seconds of one exchange between the GPUs of a machine, however few its bytes.
LATENCY_S = 1e-5


def gpu_of(name: str) -> Gpu:
    """The GPU of a name in `GPUS`, or that of a YAML file with the fields of `Gpu`.

    Raises:
        ConfigError: there is no such name or file, or the file lacks a field.
    """
    if name in GPUS:
        return GPUS[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--gpu {name} is neither a file nor one of {', '.join(GPUS)}")
    values = parse_yaml(path.read_text(encoding="utf-8"), name)
    names = [field.name for field in fields(Gpu)][1:]
    if not isinstance(values, dict) or not set(names[:-1]) <= values.keys() <= set(names):
        raise ConfigError(f"{name}: give exactly {', '.join(names[:-1])}, and {names[-1]} if not 8")
    wrong = [key for key, value in values.items() if not _is_positive(value)]
    if wrong:
        raise ConfigError(f"{name}: {', '.join(wrong)} must be a number above 0")
    return Gpu(path.stem, **values)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
