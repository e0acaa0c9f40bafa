"""Pieces and slots against parameters that are put together by hand, as megatron-core lays them
out.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrlhf.errors import WeightError
from mrlhf.models.families import Chunk, family_of
from mrlhf.models.parameters import engine_pieces, role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.weights.shard import Piece, Rule, Slot, local_shape, pieces_of
from tests.shards import MODELS, full_tensors, tensor_shapes, tiny_config, tiny_spec


def _read(parameter: torch.Tensor, piece: Piece, start: int, stop: int) -> torch.Tensor:
    return Slot(piece, parameter).view(start, stop).reshape(piece.shape(start, stop))


def _rule_of(spec: ModelSpec, parameter: str, first_layer: int = 0) -> Rule:
    chunk = Chunk(range(first_layer, spec.num_layers), is_first=first_layer == 0, is_last=True)
    return family_of(spec).rules_of(spec, chunk)[parameter]


def _megatron_qkv(
    tensors: dict, prefix: str, kind: str, kv_heads: int, tp_rank: int, tp: int
) -> torch.Tensor:
    """Rows of one rank: for each KV head its query heads, its key head, its value head."""
    heads_per_rank = kv_heads // tp
    rows = []
    for kv_head in range(heads_per_rank * tp_rank, heads_per_rank * (tp_rank + 1)):
        for name in "qkv":
            full = tensors[f"{prefix}.{name}_proj.{kind}"]
            size = full.shape[0] // kv_heads
            rows.append(full[kv_head * size : (kv_head + 1) * size])
    return torch.cat(rows)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_qkv_is_interleaved_by_kv_head(tp: int, kind: str) -> None:
    spec = tiny_spec("qwen2")
    tensors = full_tensors(spec)
    prefix = "model.layers.3.self_attn"
    name = f"self_attention.linear_qkv.{kind}"
    rule = _rule_of(spec, f"decoder.layers.1.{name}", first_layer=2)

    for tp_rank in range(tp):
        parameter = _megatron_qkv(tensors, prefix, kind, spec.num_kv_heads, tp_rank, tp)
        pieces = pieces_of(name, rule, tensor_shapes(spec), tp_rank, tp)
        assert [piece.name for piece in pieces] == [
            f"{prefix}.{letter}_proj.{kind}" for letter in "qkv"
        ]
        for piece in pieces:
            assert torch.equal(
                _read(parameter, piece, piece.start, piece.stop),
                tensors[piece.name][piece.start : piece.stop],
            )


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gate_and_up_follow_each_other_on_every_rank(tp: int) -> None:
    spec = tiny_spec("llama")
    tensors = full_tensors(spec)
    gate, up = (tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    rule = _rule_of(spec, "decoder.layers.0.mlp.linear_fc1.weight")
    for tp_rank in range(tp):
        parameter = torch.cat([gate.chunk(tp)[tp_rank], up.chunk(tp)[tp_rank]])
        for piece in pieces_of("fc1", rule, tensor_shapes(spec), tp_rank, tp):
            for start, stop in [(piece.start, piece.stop), (piece.start + 1, piece.start + 3)]:
                assert torch.equal(
                    _read(parameter, piece, start, stop), tensors[piece.name][start:stop]
                )


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_vocabulary_padding_belongs_to_no_piece(tp: int) -> None:
    spec = tiny_spec("llama")
    full = full_tensors(spec)["model.embed_tokens.weight"]
    rule = _rule_of(spec, "embedding.word_embeddings.weight")
    rows = spec.padded_vocab(tp) // tp
    padding = torch.full((rows * tp - spec.vocab_size, spec.hidden_size), float("nan"))
    padded = torch.cat([full, padding])

    seen = []
    for tp_rank in range(tp):
        (piece,) = pieces_of("embedding", rule, tensor_shapes(spec), tp_rank, tp)
        seen.append(_read(padded.chunk(tp)[tp_rank], piece, piece.start, piece.stop))
    assert torch.equal(torch.cat(seen), full)


def test_a_rank_of_padding_alone_holds_nothing() -> None:
    rule = Rule(("e",), dim=0)
    shapes = {"e": (5, 2)}
    held = [pieces_of("e", rule, shapes, tp_rank, 4) for tp_rank in range(4)]
    assert [[(piece.start, piece.stop) for piece in pieces] for pieces in held] == [
        [(0, 2)],
        [(2, 4)],
        [(4, 5)],
        [],
    ]


def test_columns_and_replicated_tensors() -> None:
    spec = tiny_spec("llama")
    tensors = full_tensors(spec)
    column = _rule_of(spec, "decoder.layers.0.mlp.linear_fc2.weight")
    full = tensors["model.layers.0.mlp.down_proj.weight"]
    (piece,) = pieces_of("fc2", column, tensor_shapes(spec), 1, 2)
    assert torch.equal(_read(full.chunk(2, dim=1)[1].contiguous(), piece, 12, 24), full[:, 12:24])
    norm = _rule_of(spec, "decoder.layers.0.input_layernorm.weight")
    (piece,) = pieces_of("norm", norm, tensor_shapes(spec), 1, 2)
    assert (piece.start, piece.stop) == (0, 32)


def test_views_write_through() -> None:
    spec = tiny_spec("qwen2")
    rule = _rule_of(spec, "decoder.layers.0.self_attention.linear_qkv.bias")
    pieces = pieces_of("bias", rule, tensor_shapes(spec), 1, 2)
    parameter = torch.zeros(32, requires_grad=True)
    k = pieces[1]
    Slot(k, parameter).view(k.start, k.stop).fill_(1.0)
    # Two KV heads, each with 8 query rows, 4 key rows and 4 value rows.
    assert parameter.tolist() == 2 * ([0.0] * 8 + [1.0] * 4 + [0.0] * 4)


QKV = {"q": (24, 2), "k": (4, 2), "v": (4, 2)}  # two KV heads of 2 rows


@pytest.mark.parametrize(
    ("periods", "tp", "expected"),
    [
        # (name, start, stop, offset, block, period) on each rank.
        (2, 4, [[("q", 0, 6, 0, 6, 10), ("k", 0, 2, 6, 2, 10), ("v", 0, 2, 8, 2, 10)],
                [("q", 6, 12, 0, 6, 10), ("k", 0, 2, 6, 2, 10), ("v", 0, 2, 8, 2, 10)],
                [("q", 12, 18, 0, 6, 10), ("k", 2, 4, 6, 2, 10), ("v", 2, 4, 8, 2, 10)],
                [("q", 18, 24, 0, 6, 10), ("k", 2, 4, 6, 2, 10), ("v", 2, 4, 8, 2, 10)]]),
        (2, 1, [[("q", 0, 24, 0, 12, 16), ("k", 0, 4, 12, 2, 16), ("v", 0, 4, 14, 2, 16)]]),
        (None, 1, [[("q", 0, 24, 0, 24, 32), ("k", 0, 4, 24, 4, 32), ("v", 0, 4, 28, 4, 32)]]),
        (None, 2, [[("q", 0, 12, 0, 12, 16), ("k", 0, 2, 12, 2, 16), ("v", 0, 2, 14, 2, 16)],
                   [("q", 12, 24, 0, 12, 16), ("k", 2, 4, 12, 2, 16), ("v", 2, 4, 14, 2, 16)]]),
    ],
)  # fmt: skip
def test_kv_heads_are_shared_by_neighbouring_ranks(
    periods: int | None, tp: int, expected: list
) -> None:
    rule = Rule(("q", "k", "v"), 0, periods, shared_kv_heads=2)
    for tp_rank in range(tp):
        pieces = pieces_of("qkv", rule, QKV, tp_rank, tp)
        assert [(p.name, p.start, p.stop, p.offset, p.block, p.period) for p in pieces] == expected[
            tp_rank
        ]
        assert local_shape(rule, QKV, tp) == ((32 if tp == 1 else {2: 16, 4: 10}[tp]), 2)


def test_only_an_engine_holds_a_kv_head_twice() -> None:
    spec = replace(tiny_spec("qwen2"), num_kv_heads=2)
    training = ParallelLayout(tp=4, pp=1, dp=1)
    engine = EngineLayout.inside(training, 4)
    held: dict[str, list[tuple[int, int]]] = {"engine": [], "training": []}

    for rank in range(4):
        pieces = {
            "engine": engine_pieces(spec, engine, rank),
            "training": role_pieces(spec, training, rank),
        }
        for side, own in pieces.items():
            name = "model.layers.0.self_attn.v_proj.bias"
            held[side] += [(piece.start, piece.stop) for piece in own if piece.name == name]

    assert held == {
        "engine": [(0, 4), (0, 4), (4, 8), (4, 8)],
        "training": [(0, 2), (2, 4), (4, 6), (6, 8)],
    }


@pytest.mark.parametrize(("kv_heads", "tp"), [(2, 4), (1, 2), (1, 4), (2, 8)])
def test_ranks_of_one_kv_head_hold_shares_of_it(kv_heads: int, tp: int) -> None:
    spec = replace(tiny_spec("qwen2"), num_kv_heads=kv_heads)
    tensors = full_tensors(spec)
    prefix = "model.layers.0.self_attn"
    for kind in ("weight", "bias"):
        rule = _rule_of(spec, f"decoder.layers.0.self_attention.linear_qkv.{kind}")
        for tp_rank in range(tp):
            shares = [tensors[f"{prefix}.{name}_proj.{kind}"].chunk(tp)[tp_rank] for name in "qkv"]
            parameter = torch.cat(shares)
            assert local_shape(rule, tensor_shapes(spec), tp) == parameter.shape
            for piece in pieces_of("qkv", rule, tensor_shapes(spec), tp_rank, tp):
                assert torch.equal(
                    _read(parameter, piece, piece.start, piece.stop),
                    tensors[piece.name][piece.start : piece.stop],
                )


def test_what_does_not_divide_is_refused() -> None:
    spec = tiny_spec("llama")
    qkv = _rule_of(spec, "decoder.layers.0.self_attention.linear_qkv.weight")
    remedy = "use a tp that divides 4, or a multiple of 4 that divides the rows"

    for rule in (qkv, qkv._replace(shared_kv_heads=4)):
        for tp in (6, 3, 64):
            with pytest.raises(
                WeightError,
                match=rf"k_proj.weight \(16 rows\), .* 4 blocks do not divide .* {tp}; {remedy}",
            ):
                pieces_of("qkv", rule, tensor_shapes(spec), 0, tp)
            with pytest.raises(WeightError, match=f"size {tp}; {remedy}"):
                local_shape(rule, tensor_shapes(spec), tp)

    fc1 = _rule_of(spec, "decoder.layers.0.mlp.linear_fc1.weight")
    with pytest.raises(WeightError, match="tensor-parallel size 16; use a smaller tp"):
        pieces_of("fc1", fc1, tensor_shapes(spec), 0, 16)


@pytest.mark.parametrize("model", MODELS)
def test_shapes_are_those_of_transformers(model: str) -> None:
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(tiny_config(model)).state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    if tiny_spec(model).tied_embeddings:
        expected.pop("lm_head.weight")
    assert tensor_shapes(tiny_spec(model)) == expected
