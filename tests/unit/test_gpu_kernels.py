"""The Triton kernels, in Triton's interpreter on a host, against their torch forms.

The interpreter does not round to bfloat16 as a GPU does, so 16-bit numbers are float16 here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mrlhf.gpu import library
from mrlhf.gpu.examples import EXAMPLES, Sizes, largest_gap
from mrlhf.inference.native import delta_net, experts, operators, sampler
from mrlhf.inference.native.operators import Layer, StepInputs
from mrlhf.models.attention import attend_gathered
from mrlhf.models.ops import torch_gated, torch_rms_norm, torch_rotate
from mrlhf.parallel import vocab_sums
from mrlhf.parallel.masks import Paged
from tests import sharded_draws
from tests.pages import ROOT

EPS = 1e-6
TOLERANCES = {torch.float32: 2e-6, torch.float16: 4e-3}
H100 = {"multiprocessor_count": 132, "max_shared_mem": 227 * 1024}
both_dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@pytest.fixture(scope="module")
def launch() -> Iterator[ModuleType]:
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # read where the kernels are defined
        from mrlhf.gpu import launch

        patch.setattr(launch, "_properties", lambda device: H100)
        yield launch


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(),
        Sizes(128, 7, 200, 64, delta=(1, 24, 32, 2)),
        Sizes(256, 1, 3000, 32, has_wide_norms=True),
        Sizes(512, 8, 200, 16, has_wide_norms=True),
        Sizes(latent=(20, 40, 6)),
    ],
    ids=str,
)
def test_the_examples_tell_a_kernel_that_works(launch: ModuleType, name: str, sizes: Sizes) -> None:
    assert delta_net and experts and sampler and vocab_sums  # have defined the last operators
    kernel = getattr(launch, name)
    assert largest_gap(kernel, getattr(torch.ops.mrlhf, name), name, torch.randn, sizes) < 1e-5

    def broken(*arguments: Any) -> Any:
        results = kernel(*arguments)
        if results is None:  # it writes over the first
            arguments[0].mul_(1.1)
            return None
        return tuple(1.1 * part for part in results) if isinstance(results, tuple) else results / 2

    assert largest_gap(broken, kernel, name, torch.randn, sizes) > 0.05


def test_a_gpu_without_triton_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "_faults", {})
    monkeypatch.setattr(library, "_has_triton", lambda: False)
    library.try_kernels(Sizes(hidden=97))
    (said,) = caplog.messages
    assert said.startswith("15 of 15") and "(Triton is not installed)" in said


def test_kernels_that_fail_at_a_models_sizes_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A small model has none; of a larger one two fail, and torch's operators replace them."""
    tried: list[tuple[str, Sizes]] = []

    def fault(name: str, sizes: Sizes) -> str:
        tried.append((name, sizes))
        fails = sizes.dim > 128 and name in ("paged_attention", "rotate")
        return f"OutOfResources: {name}\nand more" if fails else ""

    monkeypatch.setattr(library, "_faults", {})
    monkeypatch.setattr(library, "_fault", fault)

    library.try_kernels(Sizes(128))
    assert {name for name, _ in tried} == set(EXAMPLES) and library.fallen_back() == ""
    large = Sizes(256, 4, 4096, 64)
    library.try_kernels(replace(large, page=0))  # of a trainer, which has no cache
    library.try_kernels(large)
    library.try_kernels(large)
    training, engine = caplog.messages
    assert training.startswith("1 of 15 kernels do not work here") and "rotate (Out" in training
    assert "2 of 15" in engine and "paged_attention, rotate (Out" in engine
    assert "\n" not in engine and engine == library.fallen_back() and "more slowly" in engine

    assert library._kernel_or_form("rotate") is library._forms["rotate"]
    monkeypatch.setitem(sys.modules, "mrlhf.gpu.launch", SimpleNamespace(gated="kernel"))
    monkeypatch.setattr("mrlhf.gpu.launch", SimpleNamespace(gated="kernel"), raising=False)
    assert library._kernel_or_form("gated") == "kernel"


def close(found: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCES[wanted.dtype]
    torch.testing.assert_close(found.to(wanted.dtype), wanted, atol=tolerance, rtol=tolerance)


@both_dtypes
@pytest.mark.parametrize("wide", [False, True])
def test_the_norm_of_a_sum(launch: ModuleType, dtype: torch.dtype, wide: bool) -> None:
    hidden, delta = torch.randn(2, 5, 96).to(dtype)
    weight = torch.randn(96).to(torch.float32 if wide else dtype)
    total = hidden + delta
    wanted = torch_rms_norm(total.to(weight.dtype), weight, EPS).to(dtype)

    close(launch.add_rms_norm(hidden, delta, weight, EPS), wanted)
    assert torch.equal(hidden, total)
    close(launch.add_rms_norm(hidden, None, weight, EPS), wanted)


@both_dtypes
def test_a_norm_and_its_gradients(launch: ModuleType, dtype: torch.dtype) -> None:
    rows = 2 * launch.ROWS_EACH - 3  # of two programs, the second not full
    x = torch.randn(rows, 20).to(dtype)
    grad = torch.randn_like(x)
    weight = torch.randn(20).to(dtype)

    out, scales = launch.rms_norm(x, weight, EPS)
    grad_x, grad_weight = launch.rms_norm_backward(grad, x, weight, scales)

    exact = [part.float().requires_grad_() for part in (x, weight)]
    wanted = torch_rms_norm(exact[0], exact[1], EPS)
    wanted_x, wanted_weight = torch.autograd.grad(wanted, exact, grad.float())
    close(out, wanted.to(dtype))
    close(grad_x, wanted_x.to(dtype))
    torch.testing.assert_close(grad_weight, wanted_weight, atol=1e-2, rtol=1e-3)


@both_dtypes
def test_the_gated_activation(launch: ModuleType, dtype: torch.dtype) -> None:
    gate_up = torch.randn(3, 2 * 1030).to(dtype)  # of two programs a row
    grad = torch.randn(3, 1030).to(dtype)
    exact = gate_up.float().requires_grad_()
    wanted = torch_gated(exact)

    close(launch.gated(gate_up), wanted.to(dtype))
    wanted_grad = torch.autograd.grad(wanted, exact, grad.float())[0]
    close(launch.gated_backward(grad, gate_up), wanted_grad.to(dtype))


@both_dtypes
def test_rotation_and_back(launch: ModuleType, dtype: torch.dtype) -> None:
    x = torch.randn(5, 2, 4, 12).to(dtype)[:, :, 1:]  # heads of a wider tensor
    angles = torch.randn(5, 4)  # 8 of 12 dimensions turn
    cosines, sines = angles.cos(), angles.sin()

    turned = launch.rotate(x, cosines, sines, False)
    close(turned, torch_rotate(x, cosines, sines))
    close(launch.rotate(turned, cosines, sines, True), x)


@both_dtypes
@pytest.mark.parametrize("has_reference", [True, False])
@pytest.mark.parametrize("valid", [2500, 2600, 0])  # of three blocks of columns
@pytest.mark.parametrize("beta", [1.0, 0.0, 0.3])
def test_sums_over_a_vocabulary_and_their_gradient(
    launch: ModuleType, dtype: torch.dtype, has_reference: bool, valid: int, beta: float
) -> None:
    # The highest logit is in the last block, in the first, and anywhere.
    logits = (8 * torch.randn(3, 2600)).to(dtype)
    logits[0] = logits[0].sort().values
    logits[1] = logits[1].sort(descending=True).values
    ref_logits = (8 * torch.randn(3, 2600)).to(dtype) if has_reference else None
    targets = torch.tensor([100, 2000, 40])  # the last on another rank
    sizes = (100, valid, 0.7)

    found, wanted = torch.zeros(2, 8, 5).unbind()
    flags = (True, True, beta == 0)
    launch.vocab_sums(found[:, 1:4], logits, targets, ref_logits, *sizes, *flags)
    if valid:
        vocab_sums._write_sums_by_torch(wanted[:, 1:4], logits, targets, ref_logits, *sizes, *flags)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)

    totals = [torch.tensor([20.0, 21.0, 22.0]), torch.tensor([19.0, 18.0, 23.0])]
    terms: list[Tensor | None] = [*torch.randn(4, 3), torch.tensor(0.3).expand(3)]
    if not has_reference:
        terms[1] = terms[4] = None  # the KL and its gradient
    both = logits.clone(), logits.clone()
    for write, out in zip(
        (launch.vocab_gradient, vocab_sums._write_gradient_by_torch), both, strict=True
    ):
        write(out, targets, ref_logits, *totals, *terms, *sizes, beta)
    close(*both)
    assert not both[0][:, valid:].any()


class Case(NamedTuple):
    """A pass over three sequences."""

    kv_heads: int
    group: int
    dim: int
    page: int
    counts: list[int]  # tokens of each in this pass
    lengths: list[int]  # of each after it
    window: int | None


CASES = {
    "decode": Case(2, 3, 12, 4, [1, 1, 1], [5, 17, 150], None),
    "decode in a window": Case(2, 2, 16, 8, [1, 1, 1], [5, 17, 150], 7),
    "decode from large pages": Case(2, 3, 12, 128, [1, 1, 1], [5, 17, 150], 40),
    "prompts in chunks": Case(1, 3, 12, 4, [5, 1, 40], [9, 5, 70], None),
    "prompts in large pages": Case(1, 3, 12, 64, [5, 1, 40], [9, 5, 70], None),
    "prompts in a window": Case(1, 4, 16, 8, [5, 1, 18], [20, 5, 30], 6),
}


def step(case: Case) -> StepInputs:
    counts = torch.tensor(case.counts)
    width = -(-max(case.lengths) // case.page)
    tables = torch.randperm(3 * width).view(3, width).int()
    edges = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    sequences = torch.repeat_interleave(torch.arange(3), counts)
    spans = zip(case.lengths, case.counts, strict=True)
    positions = torch.cat([torch.arange(length - count, length) for length, count in spans])
    blocks = tables[sequences, positions // case.page].long()

    lengths = torch.tensor(case.lengths).int()
    return StepInputs(
        tokens=torch.zeros(len(positions), dtype=torch.int64),
        positions=positions,
        cache_places=blocks * case.page + positions % case.page,
        mask=Paged(edges, lengths, tables, max(case.counts), max(case.lengths)),
        last=edges[1:].long() - 1,
    )


def cache(case: Case, dtype: torch.dtype) -> Layer:
    blocks = 3 * -(-max(case.lengths) // case.page)
    keys, values = torch.randn(2, blocks, case.page, case.kv_heads, case.dim).to(dtype)
    return keys, values


@both_dtypes
@pytest.mark.parametrize("norm", ["", "own dtype", "float32"])
def test_rotated_keys_are_stored(
    launch: ModuleType, dtype: torch.dtype, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["decode"]
    inputs = step(case)
    qkv = torch.randn(3, case.kv_heads, case.group + 2, case.dim).to(dtype)
    weights = torch.randn(2, case.dim).to(torch.float32 if norm == "float32" else dtype)
    norms = tuple(weights) if norm else None
    angles = torch.randn(max(case.lengths), case.dim // 2 - 1)
    tables = (angles.cos(), angles.sin())

    wanted = cache(case, dtype)
    found = tuple(part.clone() for part in wanted)
    monkeypatch.setattr(operators.kernels, "find_for", lambda *tensors: None)
    wanted_q = operators.rotate_store(qkv, norms, EPS, tables, inputs, wanted)
    q = launch.rotate_store(
        qkv, *(norms or (None, None)), EPS, *tables, inputs.positions, inputs.cache_places, *found
    )

    close(q.view_as(wanted_q), wanted_q)
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs)


@both_dtypes
@pytest.mark.parametrize(("has_sinks", "cap"), [(False, None), (True, None), (False, 0.6)])
@pytest.mark.parametrize("name", CASES)
def test_attention_to_pages(
    launch: ModuleType, dtype: torch.dtype, has_sinks: bool, cap: float | None, name: str
) -> None:
    case = CASES[name]
    mask = step(case).mask
    keys, values = cache(case, dtype)
    q = torch.randn(sum(case.counts), case.kv_heads, case.group, case.dim).to(dtype)
    sinks = torch.randn(case.kv_heads * case.group).to(dtype) if has_sinks else None
    wanted = attend_gathered(q, keys, values, mask, 0.25, case.window, sinks, cap)

    for splits in (1, 4) if mask.most_queries == 1 else (1,):
        found = launch.paged_attention(
            q.flatten(1, 2), keys, values, mask.block_tables, mask.query_edges, mask.lengths,
            mask.most_queries, mask.most_keys, case.window or 0, 0.25, sinks, cap or 0.0, splits,
        )  # fmt: skip
        close(found.flatten(1), wanted)


@both_dtypes
@pytest.mark.parametrize(
    ("heads", "rank", "rotated", "shared"), [(1, 19, 6, 227), (20, 300, 18, 99), (20, 300, 18, 227)]
)
@pytest.mark.parametrize(("counts", "splits"), [([1, 1, 1], 1), ([1, 1, 1], 4), ([5, 1, 11], 1)])
def test_attention_to_latents(
    launch: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype,
    heads: int, rank: int, rotated: int, shared: int, counts: list[int], splits: int,
) -> None:  # fmt: skip
    """Values are the first numbers of keys, which are those of rows; many heads take several
    programs.

    `shared` is the memory of a program in KiB.
    """
    monkeypatch.setattr(launch, "_properties", lambda d: H100 | {"max_shared_mem": shared << 10})
    case = Case(1, heads, rank + rotated, 4, counts, [9, 5, 70], None)
    scale = case.dim**-0.5
    mask = step(case).mask
    keys = cache(case._replace(dim=case.dim + 16), dtype)[0][..., : case.dim]
    values = keys[..., :rank]
    q = torch.randn(sum(case.counts), 1, heads, case.dim).to(dtype)
    found = launch.paged_attention(
        q.flatten(1, 2), keys, values, mask.block_tables, mask.query_edges, mask.lengths,
        mask.most_queries, mask.most_keys, 0, scale, splits=splits,
    )  # fmt: skip
    close(found.flatten(1), attend_gathered(q, keys, values, mask, scale, None))


def test_the_sweep_of_attention_to_pages_measures_each_choice(
    launch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu_paged import SWEEPS, rows

    found = [row for sweep in SWEEPS["tiny"] for row in rows(sweep, "cpu")]
    assert [row.get("KEYS") for row in found] == [None, 32, 64, None, 16]
    assert all(row["bytes_per_s"] > 0 for row in found), found


@both_dtypes
@pytest.mark.parametrize(
    "widths", [(2100,), (1100, 1000), (700, 700, 700, 0), (2000, 100)], ids=str
)
def test_tokens_are_drawn(launch: ModuleType, dtype: torch.dtype, widths: tuple[int, ...]) -> None:
    """On one rank of three blocks, or on several: widths within a block, uneven ones, and none."""
    logits = torch.randn(40, 2500).to(dtype)[:, :2100]
    logits[:, 7] = -torch.inf
    logits[0, :2000] = -torch.inf  # blocks without any weight
    logits[3, [300, 2050]] = 9.0  # of equal ones the first is the likeliest
    uniform = torch.rand(40, dtype=torch.float64)
    uniform[:5] = torch.tensor([0.0, 0.0, 1 - 1e-16, -1.0, -1.0])

    tokens, logprobs = sharded_draws.draw(launch, logits, 0.7, uniform, widths, 1024)
    wanted, exact = sharded_draws.plain(logits, 0.7, uniform)
    assert torch.equal(tokens, wanted) and tokens[3] == 300
    torch.testing.assert_close(logprobs.double(), exact, atol=1e-5, rtol=0)

    logits[5, 2060] = torch.nan
    tokens, logprobs = sharded_draws.draw(launch, logits, 0.7, uniform, widths, 1024)
    assert logprobs.isfinite().logical_not().nonzero().tolist() == [[5]]
    assert 0 <= tokens[5] < 2100 and torch.equal(tokens[6:], wanted[6:])


@pytest.mark.parametrize(("tokens", "first", "count"), [(1, 0, 7), (400, 0, 7), (400, 2, 3)])
def test_rows_are_sorted_by_expert_and_joined(
    launch: ModuleType, tokens: int, first: int, count: int
) -> None:
    """The second case has more choices than a program reads at once; expert 5 gets none."""
    chosen = torch.rand(tokens, 6).topk(3).indices
    chosen[chosen == 5] = 6
    shares = torch.rand(tokens, 3)
    sorted_rows = launch.sort_by_expert(chosen, first, count)
    for found, wanted in zip(
        sorted_rows, experts._sort_by_torch(chosen, first, count), strict=True
    ):
        assert torch.equal(found, wanted)

    of_rows, places, ends = sorted_rows
    outputs = torch.randn(tokens * 3, 1030)
    outputs[ends[-1] :] = torch.nan  # what no expert here has computed
    local = (chosen >= first) & (chosen < first + count)
    by_choice = torch.where(local[..., None], outputs[places].view(tokens, 3, -1), 0.0)
    close(
        launch.join_experts(outputs, places, ends, shares), (by_choice * shares[..., None]).sum(1)
    )
    assert torch.equal(of_rows[places.long()].view(tokens, 3)[:, 0], torch.arange(tokens).int())


def test_few_sequences_are_split_over_the_processors(
    launch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_properties", lambda device: H100)
    device = torch.device("cpu")
    assert launch.count_splits(8, 8192, device) == 32  # 8 programs for 132 processors
    assert launch.count_splits(8, 1000, device) == 2  # no part below 256 keys
    assert launch.count_splits(512, 8192, device) == 1


@pytest.mark.recipes
def test_all_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    program = [sys.executable, "-m", "tests.unit.compile_kernels"]
    done = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "paged_attention" in done.stdout.split()
