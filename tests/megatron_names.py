"""What mrlhf imports from megatron-core, in the versions of it that `setup.py` allows.

The names and their arguments are read out of the source, so that no version has to be installed:
those after 0.16 want Python 3.12. They are kept in `megatron_names.txt`. After a change of what
mrlhf imports, or for another version, download one wheel of each and write the table anew:

    for version in 0.16.1 0.17.1 0.18.2 0.19.2; do
        pip download --no-deps --python-version 3.12 --only-binary=:all: -d wheels \
            megatron-core==$version
    done
    python -m tests.megatron_names wheels/*.whl
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
TABLE = HERE / "megatron_names.txt"
Read = Callable[[str], str | None]  # a file of a version by its path; None: there is none

# Methods and attributes that mrlhf uses of objects that megatron-core makes. Behind a bar stands
# the name of later versions, which `mrlhf/models/megatron_versions.py` knows.
MEMBERS = {
    "megatron.core.distributed.DistributedDataParallel": (
        "bucket_groups buffers disable_forward_pre_hook expert_parallel_bucket_groups "
        "expert_parallel_buffers module param_to_bucket_group zero_grad_buffer"
    ),
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup": (
        "buckets intra_distributed_optimizer_instance_group start_grad_sync"
    ),
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucket": (
        "gradient_scaling_factor grad_data param_data"
    ),
    "megatron.core.optimizer.MegatronOptimizer": (
        "get_grad_stats_parallel_group get_main_grads_for_grad_norm|get_grads_for_grad_norm "
        "get_parameters param_groups zero_grad"
    ),
    "megatron.core.optimizer.ChainedOptimizer": "chained_optimizers",
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer": (
        "_get_model_param_range_map model_param_group_index_map"
    ),
    "megatron.core.optimizer_param_scheduler.OptimizerParamScheduler": "num_steps step",
    "megatron.core.transformer.transformer_layer.TransformerLayer": (
        "_forward_attention layer_number pre_mlp_layernorm recompute_mlp"
    ),
    "megatron.core.tensor_parallel.layers.ColumnParallelLinear": "gradient_accumulation_fusion",
    "megatron.core.tensor_parallel.layers.RowParallelLinear": "gradient_accumulation_fusion",
}

# What mrlhf replaces in its modules: the optimizer's choice, and for `mrlhf/host/stand_ins.py`.
REPLACED = (
    "megatron.core.optimizer.USING_PYTORCH_OPTIMIZER",
    "megatron.core.tensor_parallel.layers._grad_accum_fusion_available",
    "megatron.core.tensor_parallel.random._get_cuda_rng_state",
    "megatron.core.tensor_parallel.random._set_cuda_rng_state",
)


class Version:
    """The source of one version of megatron-core."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._trees: dict[str, ast.Module | None] = {}

    def describe(self, name: str) -> str | None:
        """The arguments of a function or of a class's constructor; None: there is no such name.

        "a" must be given and "a=" need not; a bare "*" stands before those that need their names.
        What is neither a function nor a class is "", and a module is "module".
        """
        module, _, last = name.rpartition(".")
        found = self._find(module, last)
        if found is None:
            return None if self._tree(name) is None else "module"
        where, node = found
        if isinstance(node, ast.ClassDef):
            return " ".join(self._constructor(where, node))
        return " ".join(_arguments(node.args)) if isinstance(node, ast.FunctionDef) else ""

    def members(self, name: str) -> set[str]:
        """What a class and its bases define: methods, fields, and attributes of `self`."""
        module, _, last = name.rpartition(".")
        found = self._find(module, last)
        return set() if found is None else self._members(*found)

    def _members(self, module: str, node: ast.AST) -> set[str]:
        if not isinstance(node, ast.ClassDef):
            return set()
        names = set()
        for part in ast.walk(node):
            if isinstance(part, ast.FunctionDef):
                names.add(part.name)
            elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                names.add(part.attr)
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                names.add(part.target.id)
        for found in self._bases(module, node):
            names |= self._members(*found)
        return names

    def _constructor(self, module: str, node: ast.ClassDef) -> list[str]:
        bases = list(self._bases(module, node))
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                return _arguments(part.args)[1:]
        inherited = [each for base in bases[:1] for each in self._constructor(*base)]
        if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            return inherited

        fields = {each.rstrip("="): each for each in inherited}
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                text = "" if part.value is None else ast.unparse(part.value)
                if "init=False" not in text:
                    mark = "" if part.value is None else "="
                    fields[part.target.id] = part.target.id + mark
        return list(fields.values())

    def _bases(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        for base in node.bases:
            found = self._find(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                yield found[0], found[1]

    def _find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Where the name is defined, however often it is imported on the way, and how."""
        tree = self._tree(module)
        if tree is None:
            return None
        value: tuple[str, ast.AST] | None = None
        for node in _statements(tree.body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign):
                targets = [to.id for to in node.targets if isinstance(to, ast.Name)]
                value = (module, node) if name in targets and value is None else value
            if isinstance(node, ast.ImportFrom):
                names = [each.name for each in node.names if name == (each.asname or each.name)]
                origin = _source(module, self._is_package(module), node) if names else module
                found = self._find(origin, names[0]) if origin != module else None
                if found is not None:
                    return found
        return value

    def _is_package(self, module: str) -> bool:
        return self._read(module.replace(".", "/") + ".py") is None

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = module.replace(".", "/")
            text = self._read(f"{path}.py")
            if text is None:
                text = self._read(f"{path}/__init__.py")
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]


def _source(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    """The module from which a module imports."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also those that stand under a condition."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for field in ("body", "handlers", "orelse", "finalbody"):
                for part in getattr(node, field, []):
                    yield from _statements(
                        part.body if isinstance(part, ast.ExceptHandler) else [part]
                    )


def _arguments(given: ast.arguments) -> list[str]:
    plain = [each.arg for each in (*given.posonlyargs, *given.args)]
    first = len(plain) - len(given.defaults)
    words = [name + ("=" if number >= first else "") for number, name in enumerate(plain)]
    if given.vararg:
        words.append("*" + given.vararg.arg)
    elif given.kwonlyargs:
        words.append("*")
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        words.append(each.arg + ("" if default is None else "="))
    return words + (["**" + given.kwarg.arg] if given.kwarg else [])


@cache
def sources() -> dict[Path, ast.Module]:
    """The files of mrlhf that import from megatron-core."""
    files = sorted((HERE.parent / "mrlhf").rglob("*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    return {file: ast.parse(text) for file, text in texts.items() if "megatron.core" in text}


def imports_of(tree: ast.Module) -> dict[str, str]:
    """Names in a file, and what of megatron-core they mean."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.core")
        for alias in node.names
    }


@cache
def asked_names() -> tuple[str, ...]:
    """All that mrlhf imports from megatron-core, takes from its modules, and replaces there."""
    names = set(REPLACED)
    for tree in sources().values():
        imports = imports_of(tree)
        names |= set(imports.values())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                meant = imports.get(node.value.id, "")
                if meant.rpartition(".")[2] in ("layers", "parallel_state"):
                    names.add(f"{meant}.{node.attr}")
    return tuple(sorted(names))


def describe(read: Read) -> dict[str, str]:
    """A version's column of the table: each name's arguments, and each class's members."""
    version = Version(read)
    column = {name: version.describe(name) for name in asked_names()}
    for name, wanted in MEMBERS.items():
        members = version.members(name)
        for member in wanted.replace("|", " ").split():
            column[f"{name}.{member}"] = "member" if member in members else None
    return {name: words for name, words in column.items() if words is not None}


def reader_of(directory: Path) -> Read:
    """Reads the files of an unpacked wheel."""

    def read(path: str) -> str | None:
        file = directory / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    return read


def _reader_of_wheel(wheel: Path) -> Read:
    archive = zipfile.ZipFile(wheel)
    files = set(archive.namelist())
    return lambda path: archive.read(path).decode() if path in files else None


def table() -> dict[str, dict[str, str]]:
    """The column of each version."""
    columns: dict[str, dict[str, str]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        name, versions, words = line.split(" | ")
        for version in versions.split():
            columns.setdefault(version, {})[name] = words
    return columns


def write(columns: dict[str, dict[str, str]]) -> None:
    """Keep the columns: a line for each form of a name, with the versions that have it."""
    lines: dict[tuple[str, str], list[str]] = {}
    for version, column in sorted(columns.items()):
        for name, words in sorted(column.items()):
            lines.setdefault((name, words), []).append(version)
    text = [f"{name} | {' '.join(those)} | {words}\n" for (name, words), those in lines.items()]
    TABLE.write_text("".join(sorted(text)), encoding="utf-8")


def main(wheels: list[str]) -> None:
    """Write the table from these wheels."""
    columns = {}
    for wheel in wheels:
        number = re.match(r"megatron_core-([\d.]+)-", Path(wheel).name)
        assert number is not None, f"{wheel} is no wheel of megatron-core"
        columns[number[1]] = describe(_reader_of_wheel(Path(wheel)))
    write(columns)


if __name__ == "__main__":
    main(sys.argv[1:])
