"""Compares the packages of this environment with what mrlhf needs and with what was tested.

`setup.py` has an upper bound only where a newer version is likely to break: megatron-core and vLLM,
of which mrlhf uses names that are not public, and a next major version. So an install keeps most of
what an image brought, and this file names what was not tested.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from packaging.specifiers import SpecifierSet

from mrlhf.doctor.findings import Finding, broken, look, ok


class Tested(NamedTuple):
    """Versions of a package.

    Attributes:
        bounds: those that mrlhf works with, as in `setup.py`.
        whole: the one with which all tests ran.
        in_part: those with which some ran.
        read: those whose source was compared alone.
    """

    bounds: str
    whole: str
    in_part: tuple[str, ...] = ()
    read: tuple[str, ...] = ()


TESTED = {
    "Python": Tested(">=3.10", "3.11", in_part=("3.12",)),
    "torch": Tested(">=2.6", "2.13.0", in_part=("2.11.0", "2.15.0")),
    "megatron-core": Tested(">=0.16,<0.20", "0.16.1", ("0.19.2",), ("0.17.1", "0.18.2")),
    "transformers": Tested(">=5.17,<6", "5.19.0", in_part=("5.23.0",)),
    "vllm": Tested(">=0.32,<0.34", "0.32.0", read=("0.33.0",)),
}


def versions() -> Iterator[Finding]:
    """Look at the versions of this environment."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for distribution in importlib.metadata.distributions():
        # The first one on the path is the one that is imported; vLLM has a build for CPUs.
        found.setdefault(distribution.name.lower().removesuffix("-cpu"), distribution.version)
    yield from judge_versions(found)


def judge_versions(found: Mapping[str, str]) -> Iterator[Finding]:
    """Judge versions by the names of packages."""
    as_tested = []
    for name, tested in TESTED.items():
        if name not in found:
            continue
        version = found[name].partition("+")[0]  # without the build, as in 2.13.0+cpu
        seen = f"{name} {found[name]}"
        if not SpecifierSet(tested.bounds).contains(version, prereleases=True):
            wanted = f"{name}{tested.bounds}"
            yield broken("versions", f"{seen}; mrlhf needs {wanted}", f"install '{wanted}'")
        elif version == tested.whole:
            as_tested.append(seen)
        else:
            how = "was not tried"
            if version in tested.in_part:
                how = "was tested in part"
            elif version in tested.read:
                how = "was read, but not run"
            advice = f"all tests ran with {tested.whole}; 'mrlhf docs install' says what else ran"
            yield look("versions", f"{seen} {how}", advice)
    if as_tested:
        yield ok("versions", f"{', '.join(as_tested)}, as tested")
