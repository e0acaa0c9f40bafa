"""The compiled kernels against torch's operators, for every shape that a pass may have."""

import errno
import itertools
import subprocess

import pytest
import torch

from mrlhf.host import library
from mrlhf.inference.native import sampler
from mrlhf.inference.native.operators import StepInputs, add_norm, rotate_store
from mrlhf.models.attention import attend
from mrlhf.parallel.masks import Paged
from tests import sharded_draws
from tests.compilers import both_ways

EPS = 1e-5


def tables(dim):
    angles = torch.outer(torch.arange(64.0), 1.0 / 100 ** (torch.arange(0, dim, 2) / dim))
    return angles.cos(), angles.sin()


def inputs(block_size, generator):
    """Four sequences: a whole prompt, the middle of one, a decoded token, and the first token."""
    starts = [0, 11, 37, 0]
    counts = [19, 6, 1, 1]
    width = -(-38 // block_size)
    tables = torch.randperm(4 * width, generator=generator).to(torch.int32).view(4, width)
    positions = torch.cat(
        [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    )
    sequence = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    slots = tables[sequence, positions // block_size].long() * block_size + positions % block_size
    ends = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    lengths = torch.tensor([a + b for a, b in zip(starts, counts, strict=True)], dtype=torch.int32)
    mask = Paged(ends, lengths, tables, 19, 38)
    return StepInputs(positions, positions, slots, mask, ends[1:].long() - 1), 4 * width


def history(block_size):
    """The same sequences from their beginning, to fill the cache with."""
    starts = [11, 37]
    lengths = [1, 2]
    positions = torch.cat([torch.arange(count) for count in starts])
    return positions, torch.repeat_interleave(torch.tensor(lengths), torch.tensor(starts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 4, 16, 24, 32])
@pytest.mark.parametrize(
    ("kv_heads", "per_kv_head", "dim"),
    [(2, 3, 32), (1, 1, 20), (3, 1, 64), (1, 4, 128), (2, 2, 10)],
)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("normed", "untouched"), [(False, 0), (True, 0), (True, 6)])
def test_attention_from_a_paged_cache_equals_torch(
    dtype, block_size, kv_heads, per_kv_head, dim, window, normed, untouched
):
    rotation = tables(dim - untouched)
    generator = torch.Generator().manual_seed(dim)
    step, blocks = inputs(block_size, generator)
    norms = None
    if normed:
        norms = tuple((1 + 0.2 * torch.randn(dim, generator=generator)).to(dtype) for _ in range(2))
    old_positions, old_sequence = history(block_size)
    old_slots = (
        step.mask.block_tables[old_sequence, old_positions // block_size].long() * block_size
    )
    old = StepInputs(
        tokens=old_positions,
        positions=old_positions,
        cache_places=old_slots + old_positions % block_size,
        mask=step.mask,
        last=old_positions,
    )
    before = torch.randn(
        len(old_positions), kv_heads, per_kv_head + 2, dim, generator=generator
    ).to(dtype)
    now = torch.randn(len(step.tokens), kv_heads, per_kv_head + 2, dim, generator=generator).to(
        dtype
    )
    contexts = []
    queries = []
    for way in both_ways(dtype):
        cache = tuple(torch.zeros(blocks, block_size, kv_heads, dim, dtype=dtype) for _ in range(2))
        with way:
            rotate_store(before, norms, EPS, rotation, old, cache)
            query = rotate_store(now, norms, EPS, rotation, step, cache)
            scale = 0.8 * dim**-0.5
            contexts.append(attend(query, *cache, step.mask, scale=scale, window=window))
        queries.append(query)

    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(queries[0], queries[1], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(*contexts, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 64, 100])
def test_norms_equal_torch(dtype, size):
    hidden, delta = torch.randn(2, 300, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = (1 + 0.1 * torch.arange(size) / size).to(dtype)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2

    for added in (None, delta):
        states = hidden.clone(), hidden.clone()
        results = []
        for way, state in zip(both_ways(dtype), states, strict=True):
            with way:
                results.append(add_norm(state, added, weight, EPS))
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
        assert torch.equal(*states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [(1,), (5,), (128,), (129,), (1000,), (500, 500), (300, 40, 0)])
def test_tokens_are_drawn_on_one_rank_and_on_several(dtype, widths):
    columns = sum(widths)
    generator = torch.Generator().manual_seed(columns)
    logits = (6 * torch.randn(64, columns, generator=generator)).to(dtype)
    uniform = torch.rand(64, generator=generator, dtype=torch.float64)
    uniform[::7] = -1.0
    wanted, exact = sharded_draws.plain(logits, 0.7, uniform)

    for way in both_ways(dtype):
        with way:
            tokens, logprobs = sharded_draws.draw(sampler, logits, 0.7, uniform, widths, 128)
        assert torch.equal(tokens, wanted)
        torch.testing.assert_close(logprobs.double(), exact, rtol=1e-6, atol=3e-6)


def test_several_threads_give_what_one_gives():
    threads = torch.get_num_threads()
    logits = torch.randn(64, 3000, generator=torch.Generator().manual_seed(0))
    hidden = logits.clone()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            norm = add_norm(hidden.clone(), logits, torch.ones(3000), EPS)
            results.append((norm, sampler.logit_blocks(logits, 1.0, 24, 128)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_a_machine_without_a_compiler_is_told_and_runs_on(monkeypatch, caplog):
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    assert library.load_library.__wrapped__(library.SOURCES / "kernels.cpp") is None
    assert "no C++ compiler (g++) found: training and generation run on torch" in caplog.text


def no_locks(file, kind):
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_file_system_without_locks_holds_the_library(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library.fcntl, "flock", no_locks)
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int seven() { return 7; }')

    assert library.load_library.__wrapped__(source).seven() == 7
    left = sorted(path.suffix for path in (tmp_path / "mrlhf").iterdir())
    assert left == [".lock", ".so"]


def test_who_waited_for_a_compiler_that_failed_does_not_repeat_it(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is not C++")
    compiled_by = []
    run = subprocess.run

    def count(command, **options):
        compiled_by.append("--version" not in command)
        return run(command, **options)

    def another_process_fails(file, kind):
        monkeypatch.setattr(library.fcntl, "flock", no_locks)
        assert library.load_library.__wrapped__(broken) is None

    monkeypatch.setattr(library.subprocess, "run", count)
    monkeypatch.setattr(library.fcntl, "flock", another_process_fails)
    assert library.load_library.__wrapped__(broken) is None
    assert sum(compiled_by) == 1
    assert caplog.text.count("broken.cpp could not be compiled: training ") == 2
    assert caplog.text.count("1 | this is not C++") == 2

    assert library.load_library.__wrapped__(broken) is None
    assert sum(compiled_by) == 2  # who comes later tries again
