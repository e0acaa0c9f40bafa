"""The KV cache against a dictionary of lists."""

import random

import torch

from mrlhf.inference.native.kv_cache import KVCache

LAYERS, HEADS, DIM = 2, 3, 4


def make() -> KVCache:
    return KVCache(LAYERS, HEADS, DIM, torch.device("cpu"), torch.float32)


def test_cache_equals_a_dictionary_of_lists():
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    cache, slow = make(), {}
    for _ in range(60):
        action = rng.choice(["fill", "append", "append", "move"]) if slow else "fill"
        if action == "fill":
            seq_len = rng.randint(1, 200)
            keys, values = torch.randn(2, LAYERS, 2, HEADS, seq_len, DIM, generator=generator)
            slots, rows = rng.sample(range(5), 3), [0, 1, 1]
            cache.reserve(5, seq_len)
            for layer in range(LAYERS):
                cache.fill(layer, keys[layer], values[layer], torch.tensor(rows), torch.tensor(slots))
            for row, slot in zip(rows, slots, strict=True):
                slow[slot] = [(keys[:, row, :, t], values[:, row, :, t]) for t in range(seq_len)]
        elif action == "append":
            batch = next((i for i in range(5) if i not in slow), 5)
            if batch:
                keys, values = torch.randn(2, LAYERS, batch, HEADS, DIM, generator=generator)
                positions = [len(slow[i]) for i in range(batch)]
                cache.reserve(5, max(positions) + 1)
                for layer in range(LAYERS):
                    cache.append(layer, keys[layer], values[layer], torch.tensor(positions))
                for i in range(batch):
                    slow[i] = [*slow[i], (keys[:, i], values[:, i])]
        else:
            source, target = rng.choice(sorted(slow)), rng.randrange(5)
            if source != target:
                cache.move(torch.tensor([source]), torch.tensor([target]))
                slow[target] = slow[source]
        for slot, tokens in slow.items():
            for layer in range(LAYERS):
                got = cache.view(layer, 5, len(tokens))
                wanted = [torch.stack([token[kind][layer] for token in tokens], dim=1) for kind in (0, 1)]
                assert torch.equal(got[0][slot], wanted[0]) and torch.equal(got[1][slot], wanted[1])
    assert cache.length > 128


def test_memory_is_what_was_reserved_and_views_copy_nothing():
    cache = make()
    assert cache.nbytes == 0
    cache.reserve(3, 1)
    assert (cache.slots, cache.length) == (3, 128)
    assert cache.nbytes == LAYERS * 2 * 3 * HEADS * 128 * DIM * 4
    cache.reserve(2, 100)
    assert (cache.slots, cache.length) == (3, 128)
    keys, values = cache.view(1, 2, 50)
    keys.fill_(7.0)
    assert float(cache.view(1, 3, 128)[0].sum()) == 7.0 * 2 * HEADS * 50 * DIM
    assert float(values.abs().sum()) == 0
