"""How large the cache is, and what torch's attention and CUDA graphs are asked for.

No graphics card is needed.
"""

import subprocess
import sys

import pytest
import torch

from mrlhf.errors import EngineError
from mrlhf.inference.base import EngineLimits
from mrlhf.inference.native import kv_cache
from mrlhf.inference.native.graphs import bucket_sizes
from mrlhf.inference.native.kv_cache import KVCache, blocks_for
from mrlhf.inference.sizes import CacheShape, gpu_room

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
LIMITS = EngineLimits(
    max_num_seqs=4, max_length=100, max_prefill_tokens=64
)  # 7 blocks of 16 a sequence


# Prints the MiB of resident memory that a cache of 64 MiB takes: untouched, with one block written,
# full, and after its end. The process has taken and freed as much before, as a trainer does.
MEMORY = """
import ctypes, torch
from mrlhf.inference.sizes import CacheShape, gpu_room
from mrlhf.inference.native.kv_cache import KVCache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
libc = ctypes.CDLL(None)
libc.mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
libc.mallopt(M_TRIM_THRESHOLD, 2**30)


def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024


torch.arange(8)
tensors = [torch.ones(2**22) for _ in range(8)]
del tensors
before = resident()

shape = CacheShape(heads=((2, 32),) * 4, itemsize=4, block_size=16)
cache = KVCache(shape, 2048, torch.float32, torch.device("cpu"))
print(resident() - before)
for keys, values in cache.layers:
    keys[7] = values[7] = 1
print(resident() - before)
for keys, values in cache.layers:
    keys.fill_(1), values.fill_(1)
print(resident() - before)
del cache, keys, values
print(resident() - before)
"""


def limits(**changes):
    return EngineLimits(**{**vars(LIMITS), **changes})


def test_the_cache_is_as_large_as_could_be_used_or_as_there_is_room_for():
    assert blocks_for(limits(cache_bytes=10**9), 16, 1000, CPU, spare=0) == 28
    assert blocks_for(limits(cache_bytes=10**9), 16, 1000, CPU, spare=1) == 29
    assert blocks_for(limits(cache_bytes=12_999), 16, 1000, CPU, spare=0) == 12
    with pytest.raises(
        EngineError, match=r"room for 96 tokens .* may have 100 tokens .* raise rollout.kv_cache_mb"
    ):
        blocks_for(limits(cache_bytes=6_999), 16, 1000, CPU, spare=0)


def test_a_gpu_gives_what_leaves_the_rest_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (25_000, 100_000))
    assert (
        blocks_for(limits(gpu_memory_utilization=0.9), 16, 1000, CUDA, spare=1) == 15
    )  # 75 % are in use already
    # as in vLLM, the share is the engine's alone, whatever training holds
    assert blocks_for(limits(gpu_memory_utilization=0.6), 16, 1000, CUDA, spare=1) == 15
    assert blocks_for(limits(gpu_memory_utilization=0.95), 16, 1000, CUDA, spare=1) == 20
    share = limits(gpu_memory_utilization=0.6)
    assert blocks_for(share, 16, 1000, CUDA, spare=1, weight_bytes=50_000) == 10
    with pytest.raises(EngineError, match=r"raise rollout\.gpu_memory_utilization"):
        blocks_for(share, 16, 1000, CUDA, spare=1, weight_bytes=55_000)


def test_room_on_a_gpu_by_default_is_all_but_a_tenth():
    for weights, free in ((0, 40_000), (30_000, 12_000), (30_000, 9_000)):
        assert gpu_room(0.9, weights, free, 100_000) == max(0, free - int(100_000 * (1 - 0.9)))


def test_memory_that_torch_holds_for_training_counts_as_kept_free_for_it():
    assert gpu_room(0.75, 0, 40_000, 100_000, idle=4_000) == 40_000 - 6_000
    assert gpu_room(0.75, 0, 40_000, 100_000, idle=50_000) == 40_000  # the cache cannot use more


def test_a_host_gives_half_of_what_its_ranks_may_have(monkeypatch, tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 90 kB\nMemAvailable: 64 kB\n")
    assert kv_cache._free_host_bytes(tmp_path) == 64 * 1024
    groups = tmp_path / "sys/fs/cgroup"
    groups.mkdir(parents=True)
    (groups / "memory.current").write_text("1000\n")
    (groups / "memory.max").write_text("max\n")
    assert kv_cache._free_host_bytes(tmp_path) == 64 * 1024
    (groups / "memory.max").write_text("9000\n")
    assert kv_cache._free_host_bytes(tmp_path) == 8000
    monkeypatch.setattr(kv_cache, "_free_host_bytes", lambda: 80_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert blocks_for(LIMITS, 16, 1000, CPU, spare=0) == 10


def test_no_memory_is_an_error_with_the_size_and_the_key(monkeypatch):
    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr(kv_cache, "_zeros", refuse)
    shape = CacheShape(heads=((2, 32),) * 2, itemsize=4, block_size=16)
    with pytest.raises(EngineError, match=r"1024 blocks = 16.78 MB: lower rollout.kv_cache_mb"):
        KVCache(shape, 1024, torch.float32, CPU)


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_blocks_take_memory_when_they_are_first_written_to_and_give_all_of_it_back():
    output = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    ).stdout
    untouched, one_block, full, freed = map(int, output.split())
    assert untouched < 4
    assert one_block < 4 + 16  # at most a huge page of 2 MiB for keys and values of 4 layers
    assert full > 60  # of 64
    assert freed < 4


def test_copied_blocks_are_whole():
    shape = CacheShape(heads=((1, 3),) * 2, itemsize=4, block_size=2)
    cache = KVCache(shape, 4, torch.float32, CPU)
    for keys, values in cache.layers:
        keys.copy_(torch.arange(24.0).view(4, 2, 1, 3))
        values.copy_(-keys)
    cache.copy([(0, 2), (0, 3)])
    for keys, values in cache.layers:
        assert torch.equal(keys[2], keys[0]) and torch.equal(values[3], values[0])
        assert torch.equal(keys[1], torch.arange(6.0, 12.0).view(2, 1, 3))


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (6, [1, 2, 4, 6]), (70, [1, 2, 4, *range(8, 65, 8), 70])]
)
def test_graphs_are_captured_for_a_few_sizes_of_batch(most, sizes):
    assert bucket_sizes(most) == sizes


def test_every_batch_has_a_graph_that_is_not_much_larger():
    sizes = bucket_sizes(256)
    for batch in range(1, 257):
        size = next(size for size in sizes if size >= batch)
        assert size <= max(2 * batch, 4) and size - batch < 32
