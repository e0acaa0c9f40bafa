"""What mrlhf uses of megatron-core is in each of its versions that `setup.py` allows."""

import ast
import re
from functools import partial
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

# Not from megatron-core, before which mrlhf must be imported.
from mrlhf.models import megatron_versions
from mrlhf.models.megatron_versions import MLP, MLPSubmodules, ModuleSpec
from tests import megatron_names
from tests.megatron_names import (
    MEMBERS,
    asked_names,
    describe,
    imports_of,
    sources,
    table,
)
from tests.pages import ROOT

INSTALLED = installed_version("megatron-core")
COLUMNS = table()


def test_each_minor_version_that_is_allowed_stands_in_the_table():
    bounds = re.search(
        r'"megatron-core>=0\.(\d+),<0\.(\d+)"', (ROOT / "setup.py").read_text(encoding="utf-8")
    )
    assert bounds is not None
    allowed = [f"0.{minor}" for minor in range(int(bounds[1]), int(bounds[2]))]
    assert [version.rpartition(".")[0] for version in COLUMNS] == allowed


@pytest.mark.parametrize("version", COLUMNS)
def test_no_name_is_missing(version):
    column = COLUMNS[version]
    assert [name for name in asked_names() if name not in column] == []
    for name, members in MEMBERS.items():
        for member in members.split():
            assert any(f"{name}.{each}" in column for each in member.split("|")), member


@pytest.mark.parametrize("version", COLUMNS)
def test_calls_fit(version):
    column = COLUMNS[version]
    checked = 0
    for file, tree in sources().items():
        for name, call in _calls(tree):
            checked += 1
            problem = _problem(call, column[name].split())
            assert problem is None, f"{file}:{call.lineno}: {name}: {problem}"
    assert checked > 40


def test_a_call_that_does_not_fit_is_found():
    words = "a b= * c d= **rest"
    for text, wrong in {
        "f(1, c=2)": None,
        "f(1, 2, c=3, e=4)": None,
        "f(*given, **more)": None,
        "f(1)": "lacks c",
        "f(c=1)": "lacks a",
        "f(1, 2, 3, c=4)": "3 arguments without a name",
    }.items():
        call = ast.parse(text, mode="eval").body
        assert _problem(call, words.split()) == wrong, text
    call = ast.parse("f(1, c=2, e=3)", mode="eval").body
    assert _problem(call, words.split()[:-1]) == "does not know e"


@pytest.mark.skipif(INSTALLED not in COLUMNS, reason="the table has no such version")
def test_the_table_is_what_the_installed_version_says():
    found = find_spec("megatron.core")
    assert found is not None and found.origin is not None
    directory = Path(found.origin).parents[2]
    column = describe(megatron_names.reader_of(directory))
    assert column == COLUMNS[INSTALLED], "write it anew: tests/megatron_names.py says how"


def _calls(tree):
    """The calls of what a file imports from megatron-core, or extends."""
    imports = imports_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            base = node.bases[0] if node.bases else None
            if isinstance(base, ast.Name) and base.id in imports:
                for call in ast.walk(node):
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
                        yield imports[base.id], call
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in imports:
            yield imports[node.func.id], node
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            meant = f"{imports.get(node.func.value.id, '')}.{node.func.attr}"
            if meant in asked_names():
                yield meant, node


def _problem(call, words):
    """Why a call does not fit these arguments; None: it does."""
    names = [word.strip("*=") for word in words]
    first_named = next((n for n, word in enumerate(words) if word[0] == "*"), len(words))
    given = {keyword.arg for keyword in call.keywords}
    is_open = None in given or any(isinstance(each, ast.Starred) for each in call.args)

    if len(call.args) > first_named and not any(re.match(r"\*\w", word) for word in words):
        return f"{len(call.args)} arguments without a name"
    unknown = given - set(names) - {None}
    if unknown and not words[-1].startswith("**"):
        return f"does not know {', '.join(sorted(unknown))}"
    given |= set(names[: len(call.args)])
    lacking = [word for word in words if not set(word) & set("*=") and word not in given]
    return f"lacks {', '.join(lacking)}" if lacking and not is_open else None


def test_either_name_of_the_gradients_is_called():
    old = SimpleNamespace(get_main_grads_for_grad_norm=lambda: ["old"])
    new = SimpleNamespace(get_grads_for_grad_norm=lambda grad_norm_group=None: ["new"])
    assert megatron_versions.grads_for_norm(old) == ["old"]
    assert megatron_versions.grads_for_norm(new) == ["new"]


def test_either_form_of_an_mlp_is_made_and_read(monkeypatch):
    submodules = MLPSubmodules(linear_fc1=object, linear_fc2=object)
    monkeypatch.delattr(MLP, "as_mlp_submodule", raising=False)
    old = megatron_versions.dense_mlp(submodules)
    assert isinstance(old, ModuleSpec) and old.module is MLP

    made = []
    maker = classmethod(lambda cls, **options: made.append(options))
    monkeypatch.setattr(MLP, "as_mlp_submodule", maker, raising=False)
    new = megatron_versions.dense_mlp(submodules)
    assert isinstance(new, partial)
    new(config="c", pg_collection="p", is_mtp_layer=False, name=None)
    assert made[0]["submodules"] is submodules and made[0]["config"] == "c"
    for mlp in (old, new):
        assert megatron_versions.submodules_of(mlp) is submodules
