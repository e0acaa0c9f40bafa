"""Compiled attention against torch's operators, forward and backward."""

import pytest
import torch

from mrlhf.models import attention
from tests.compilers import both_ways, without_compiler
from tests.models.attention import core_attention, packed

LENGTHS = [1, 5, 48, 49, 96, 97, 7, 203]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def heads_of(mixed):
    """q, k and v of a projection [tokens, kv_heads, heads per KV head + 2, head_dim]."""
    query, key, value = mixed.split([mixed.shape[2] - 2, 1, 1], dim=2)
    return query, key.squeeze(2), value.squeeze(2)


def gradients(output, tensors, slopes):
    return torch.autograd.grad((output.float() * slopes).sum(), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "window"),
    [(4, 2, 24, 24, None), (6, 2, 32, 16, 20), (2, 2, 10, 10, 100), (3, 1, 128, 0, None)],
)
def test_compiled_attention_equals_torch(dtype, heads, kv_heads, dim, rotary, window):
    generator = torch.Generator().manual_seed(dim)
    pack = packed(LENGTHS)
    tokens = sum(LENGTHS)
    layer = core_attention(heads, kv_heads, dim, window)

    rotation = None
    if rotary:
        frequencies = 1.0 / 100 ** (torch.arange(0, rotary, 2) / rotary)
        rotation = pack.rotation(frequencies, 1.25)
        assert pack.rotation(frequencies, 1.25) is rotation
    shape = (tokens, kv_heads, heads // kv_heads + 2, dim)
    mixed = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    slopes = torch.randn(tokens, heads * dim, generator=generator)

    results = []
    for way in both_ways(dtype):
        with way:
            output = layer(*heads_of(mixed), rotation, pack)
            results.append((output, *gradients(output, [mixed], slopes)))
    (output, gradient), (expected, expected_gradient) = results
    copies = [heads.contiguous() for heads in heads_of(mixed)]
    from_three = layer(*copies, rotation, pack)
    (gradient_from_three,) = gradients(from_three, [mixed], slopes)

    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(gradient, expected_gradient, atol=4 * tolerance, rtol=4 * tolerance)
    assert torch.equal(from_three, output)
    assert torch.equal(gradient_from_three, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "window"), [(24, None), (32, 20), (10, 100)])
def test_the_last_tokens_of_sequences_get_what_they_get_in_whole_ones(dtype, dim, window):
    """As with context parallelism: fewer queries than keys, and keys that stand there twice."""
    generator = torch.Generator().manual_seed(dim)
    layer = core_attention(4, 2, dim, window)
    queries = [1, 40, 49, 7, 100]
    seen = [5, 200, 49, 150, 203]
    rows = [torch.randn(3, length, 4, dim, generator=generator).to(dtype) for length in seen]
    pack = packed(seen, queries)
    lasts = [row[0, -count:] for row, count in zip(rows, queries, strict=True)]
    query = torch.cat(lasts).unflatten(1, (2, 2)).requires_grad_()
    key = torch.cat([row[1, :, :2] for row in rows]).requires_grad_()
    value = torch.cat([row[2, :, :2] for row in rows]).requires_grad_()
    tensors = (query, key, value)
    slopes = torch.randn(sum(queries), 4 * dim, generator=generator)

    output = layer(*tensors, None, pack)
    with without_compiler():
        by_torch = layer(*tensors, None, pack)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(output, by_torch, atol=tolerance, rtol=tolerance)
    found = gradients(output, tensors, slopes)
    for gradient, wanted in zip(found, gradients(by_torch, tensors, slopes), strict=True):
        torch.testing.assert_close(gradient, wanted, atol=4 * tolerance, rtol=4 * tolerance)

    parts = output.split(queries)
    for row, part in zip(rows, parts, strict=True):
        query = row[0].unflatten(1, (2, 2))
        whole = layer(query, row[1, :, :2], row[2, :, :2], None, packed([row.shape[1]]))
        assert torch.equal(part, whole[-len(part) :])


def attend_with_sinks_by_hand(query, keys, values, sinks, window):
    """One sequence, whose queries are its last tokens, by the formula: a sink has no value."""
    outputs = []
    for number, heads in enumerate(query):
        position = len(keys) - len(query) + number
        first = 0 if window is None else max(0, position - window + 1)
        of_heads = []
        for head, one in enumerate(heads.flatten(0, 1)):
            kv_head = head // heads.shape[1]
            scores = 24**-0.5 * keys[first : position + 1, kv_head] @ one
            total = scores.exp().sum() + sinks[head].exp()
            of_heads.append(scores.exp() @ values[first : position + 1, kv_head] / total)
        outputs.append(torch.cat(of_heads))
    return torch.stack(outputs)


@pytest.mark.parametrize("window", [None, 6])
def test_a_sink_joins_every_softmax_once(window):
    """Of whole sequences, and of last tokens of some, as with shared prompts; gradients too."""
    generator = torch.Generator().manual_seed(2)
    layer = core_attention(4, 2, 24, window)
    queries, seen = [1, 9, 4], [1, 9, 13]
    shapes = [(sum(queries), 2, 2, 24), (sum(seen), 2, 24), (sum(seen), 2, 24), (4,)]
    tensors = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]
    query, key, value, sinks = tensors
    slopes = torch.randn(sum(queries), 4 * 24, generator=generator)
    pack = packed(seen, queries)
    parts = zip(query.split(queries), key.split(seen), value.split(seen), strict=True)
    wanted = torch.cat([attend_with_sinks_by_hand(*part, sinks, window) for part in parts])
    slopes_wanted = gradients(wanted, tensors, slopes)
    for way in both_ways():
        with way:
            output = layer(query, key, value, None, pack, sinks)
            found = gradients(output, tensors, slopes)
        torch.testing.assert_close(output, wanted, atol=1e-5, rtol=1e-5)
        for gradient, other in zip(found, slopes_wanted, strict=True):
            torch.testing.assert_close(gradient, other, atol=4e-5, rtol=4e-5)


def attend_capped_by_hand(query, keys, values, cap, window):
    """One sequence in float64, whose queries are its last tokens."""
    positions = torch.arange(len(keys))
    wide = query.shape[2]
    keys, values = (x.double().repeat_interleave(wide, dim=1) for x in (keys, values))
    scores = torch.einsum("nhd,mhd->hnm", query.double().flatten(1, 2), keys) * 24**-0.5
    scores = cap * torch.tanh(scores / cap)
    ages = positions[len(keys) - len(query) :, None] - positions
    scores[:, (ages < 0) | (ages >= (window or len(keys)))] = -torch.inf
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores", [1, 4 * 2 * 30, 1 << 24])
@pytest.mark.parametrize("window", [None, 6])
def test_scores_are_capped(window, scores, dtype, monkeypatch):
    """Of whole sequences, and of last tokens; gradients too, whatever torch does at once."""
    monkeypatch.setattr(attention, "_SCORES", scores)
    generator = torch.Generator().manual_seed(2)
    layer = core_attention(4, 2, 24, window)
    queries, seen = [1, 9, 40, 30], [1, 30, 107, 30]
    shapes = [(sum(queries), 2, 2, 24), (sum(seen), 2, 24), (sum(seen), 2, 24)]
    tensors = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    query, key, value = tensors
    slopes = torch.randn(sum(queries), 4 * 24, generator=generator)
    pack = packed(seen, queries)
    parts = list(zip(query.split(queries), key.split(seen), value.split(seen), strict=True))
    wanted = torch.cat([attend_capped_by_hand(*part, 0.8, window) for part in parts])
    slopes_wanted = gradients(wanted, tensors, slopes)
    tolerance = TOLERANCES[dtype]
    for way in both_ways(dtype):
        with way:
            output = layer(query, key, value, None, pack, None, 0.8)
            found = gradients(output, tensors, slopes)
        torch.testing.assert_close(output.double(), wanted, atol=tolerance, rtol=tolerance)
        for gradient, other in zip(found, slopes_wanted, strict=True):
            torch.testing.assert_close(gradient, other, atol=4 * tolerance, rtol=4 * tolerance)


def test_a_sequence_does_not_depend_on_its_pack_or_the_threads():
    generator = torch.Generator().manual_seed(0)
    layer = core_attention(4, 2, 24, None)
    mixed = torch.randn(sum(LENGTHS), 2, 4, 24, generator=generator)

    whole = layer(*heads_of(mixed), None, packed(LENGTHS)).split(LENGTHS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = [layer(*heads_of(part), None, packed([len(part)])) for part in mixed.split(LENGTHS)]
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(whole, alone, strict=True))


def test_what_would_be_misread_is_refused():
    layer = core_attention(4, 2, 24, None)
    query = torch.randn(6, 2, 2, 24)
    key = torch.randn(6, 2, 24)

    with pytest.raises(AssertionError, match="q, k and v differ in dtype"):
        layer(query, key, key.bfloat16(), None, packed([6]))
    with pytest.raises(AssertionError, match="must cover all tokens"):
        layer(query, key, key, None, packed([7]))
