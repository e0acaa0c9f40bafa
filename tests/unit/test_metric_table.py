"""Every metric has one row in the table, and the rows say what can be true."""

import ast
import json
import re
from pathlib import Path

import pytest

from mrlhf.metrics.metric import Metric
from mrlhf.metrics.table import COLUMNS, CURVES, KINDS, TABLE, names_of, row_of
from tests.faults.runs import FREE, FREE_WITH_ADAPTERS
from tests.metric_rows import without_row

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mrlhf"
RECORDINGS = sorted((ROOT / "tests" / "recordings").glob("*.jsonl"))
NAMES = [name for row in TABLE for name in row.names]


def literals(path):
    """The strings of a module that are whole names of metrics."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
             for part in node.values}  # fmt: skip
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in parts:
            continue
        kind, slash, rest = str(node.value).partition("/")
        if slash and kind in KINDS and rest.replace("/", "").isidentifier() and rest[-1] != "/":
            yield node.value


def test_a_pattern_stands_for_its_names():
    row = Metric("{a,b}/<term>/{mean,max}", "named", "tokens", "nats", "a test")
    assert row.names == ["a/<term>/mean", "a/<term>/max", "b/<term>/mean", "b/<term>/max"]
    assert row.describes("b/order/letters/max")
    assert not row.describes("b//max") and not row.describes("a/x/mean/y")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_has_one_row(name):
    assert [row.name for row in TABLE if row.describes(name)] == [row_of(name).name]


def test_a_metric_without_a_row_is_told():
    assert without_row(["step", "actor/ppo_kl", "actor/forgotten"]) == ["actor/forgotten"]
    with pytest.raises(KeyError, match="add one"):
        row_of("actor/forgotten")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_row_is_complete(row):
    assert row.unit and row.meaning and not row.meaning.endswith(".")
    assert bool(row.over) == (row.how not in ("whole", "main"))
    assert row.above is None or row.below is None or row.above < row.below


def test_what_is_shown_has_a_whole_name():
    shown = [name for _, name in COLUMNS] + list(CURVES)
    assert shown and not any("<" in name for name in shown)
    assert dict(COLUMNS)["reward"] == "critic/score/mean"


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_metrics_of_recorded_runs_have_rows(path):
    for line in path.read_text(encoding="utf-8").splitlines():
        assert without_row(json.loads(line)) == []


def test_every_name_in_the_code_has_a_row():
    files = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "metrics"]
    found = {name for path in files for name in literals(path)}
    assert {"actor/ppo_kl", "training/equal_scores", "perf/throughput"} <= found
    beginnings = tuple(name.rpartition("/")[0] for name in NAMES)
    assert [name for name in without_row(found) if name not in beginnings] == []


def test_names_of_an_update():
    assert {"critic/vf_loss", "critic/grad_norm"} <= set(names_of("critic"))
    assert names_of("rm")[:3] == ("rm/loss", "rm/accuracy", "rm/margin")


def test_the_page_names_every_metric_that_is_not_exact():
    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    section = page.split("### What is exact")[1].split("\n### ")[0]
    named = {
        name
        for row in section.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`([a-z_]+/[a-z_]*)`", row.split("|")[1])
    }
    assert {*FREE, *FREE_WITH_ADAPTERS} <= named

    # Whatever a clock measures is among those that are never exact.
    always = next(row for row in section.splitlines() if "| always" in row)
    for row in TABLE:
        if row.unit in ("seconds", "milliseconds", "tokens/s"):
            assert all(
                any(name.startswith(free) and f"`{free}`" in always for free in FREE)
                for name in row.names
            ), row.name
