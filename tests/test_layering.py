"""Imports point down the layers, each third party has its doors, and no assertion does work; read
from the source, nothing is imported.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = [
    {"printable"},
    {"errors", "nvidia", "version"},
    {"records"},
    {"batch", "messages", "rl"},
    {"metrics"},
    {"config", "device", "gpu", "host", "log", "workers"},
    {"parallel", "data", "rewards"},
    {"weights"},
    {"models"},
    {"training"},
    {"reshard", "inference", "checkpoint"},
    {"roles"},
    {"rollout"},
    {"episodes"},
    {"inputs", "run"},
    {"trainers", "report", "preflight"},
    {"doctor", "planning"},
    {"commands"},
    {"__main__"},
]
LEVEL = {name: number for number, layer in enumerate(LAYERS) for name in layer}
DOORS = {
    "megatron": {"parallel", "models", "training", "checkpoint"},
    "pydantic": {"config", "episodes"},
    "yaml": {"config"},
    "tree_sitter": {"config"},
    "tree_sitter_bash": {"config"},
    "jinja2": {"config", "data"},
    "sentencepiece": {"data"},
    "pyarrow": {"data"},
    "rich": {"run"},
    "matplotlib": {"run"},
    "safetensors": {"weights", "checkpoint"},
    "transformers": {"data", "models"},
    "huggingface_hub": {"data"},
    "tensorboard": {"metrics"},
    "triton": {"gpu"},
    "wandb": {"metrics"},
    "trackio": {"metrics"},
    "vllm": {"inference"},
}
MODULES = sorted((ROOT / "mrlhf").rglob("*.py"))
PROGRAMS = [*MODULES, *(ROOT / "launch").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
# All that an assertion may call: what these do is to look.
LOOKS = {
    *("all", "any", "int", "isinstance", "len", "set", "sorted", "sum", "tuple", "type"),
    *("dim", "is_contiguous", "keys", "size", "isfinite", "equal", "arange"),
    *("_fit", "_keys"),  # of reshard/execute.py
}


def _package(path: Path) -> str:
    return path.relative_to(ROOT / "mrlhf").parts[0].removesuffix(".py")


def _imports(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "mrlhf"
                else [str(node.module)]
            )
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    own = _package(path)
    if own == "__init__":
        return
    for name in _imports(path):
        if name.startswith("mrlhf."):
            other = name.split(".")[1]
            # errors are below everything, though batch and rl stand on their line
            assert other == own or LEVEL[other] < LEVEL[own] or other == "errors", (
                f"{path} imports {name}"
            )


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_third_parties_have_doors(path: Path) -> None:
    for name in _imports(path):
        allowed = DOORS.get(name.split(".")[0])
        assert allowed is None or _package(path) in allowed, f"{path} imports {name}"


def test_vllm_has_a_package_of_its_own() -> None:
    users = {
        path.parent
        for path in MODULES
        if any(name.split(".")[0] == "vllm" for name in _imports(path))
    }
    assert users == {ROOT / "mrlhf" / "inference" / "vllm"}


def test_every_package_has_a_layer() -> None:
    assert {_package(path) for path in MODULES} - {"__init__"} == set(LEVEL)


def test_rl_is_pure() -> None:
    for path in (ROOT / "mrlhf" / "rl").glob("*.py"):
        assert not {
            name for name in _imports(path) if name.startswith(("torch.distributed", "megatron"))
        }, path


def test_one_file_creates_process_groups() -> None:
    creators = {path.name for path in MODULES if "new_group(" in path.read_text(encoding="utf-8")}
    assert creators == {"groups.py"}


def _work_in_assertions(source: str) -> list[str]:
    """What assertions do but look; `python -O` leaves all of them out."""
    work = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
    found = []
    for statement in ast.walk(ast.parse(source)):
        if not isinstance(statement, ast.Assert):
            continue
        for node in ast.walk(statement):
            name = None
            if isinstance(node, ast.Call):
                called = node.func
                name = called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)
            if isinstance(node, work) or (name is not None and name not in LOOKS):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_no_assertion_does_work() -> None:
    for source in ("assert x.pop()", "assert (n := f)", "assert ok, log(1)", "assert d[k()]"):
        assert len(_work_in_assertions(source)) == 1, source
    assert _work_in_assertions("assert len(x) == 2 and x[0] not in y, f'{type(x)}'") == []
    for path in PROGRAMS:
        assert _work_in_assertions(path.read_text(encoding="utf-8")) == [], path


def test_the_step_is_a_page() -> None:
    path = ROOT / "mrlhf" / "trainers" / "ppo" / "step.py"
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 120, f"a newcomer reads {path.name} first; it has {lines} lines, at most 120"
