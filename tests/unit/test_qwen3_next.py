"""Qwen3-Next: the gated delta rule, the states of the engine, and the published sizes.

That training computes what transformers does, and that its files go to any layout and back, is
tested with the other families.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from benchmarks.engine_loop import generate, requests_for
from mrlhf.config import PPOConfig, load_config
from mrlhf.errors import ConfigError
from mrlhf.inference.base import SamplingParams
from mrlhf.inference.checks import missing_feature
from mrlhf.inference.sizes import CacheShape
from mrlhf.models.attention_sizes import attention_layers
from mrlhf.models.delta_rule import (
    Chunks,
    Gates,
    chunked,
    chunked_parts,
    convolve,
    gated_norm,
    gates_of,
    heads_of,
    one_token,
)
from mrlhf.models.families import family_of, load_spec
from mrlhf.models.flops import forward_flops
from mrlhf.models.parallel_sizes import tp_problem
from mrlhf.models.spec import DeltaNet
from mrlhf.preflight.footprint import footprint
from mrlhf.preflight.model_checks import cache_needs, check_models
from tests.models.engines import (
    PROMPTS,
    UIDS,
    adapted_model,
    answer,
    assert_same,
    hf_model,
    make_engine,
)
from tests.models.engines import spec_of as spec_of_model
from tests.shards import tiny_spec

ROOT = Path(__file__).parents[2]
NAME = "qwen3-next"
FILE = str(ROOT / "configs/gpu/qwen3_30b_a3b_grpo_16_gpus.yaml")
# The norm after a state divides by numbers that may be small, and so enlarges what is rounded.
ROUNDING = 3e-4


def _inputs(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Gates]:
    generator = torch.Generator().manual_seed(1)
    tokens = sum(lengths)
    q, k = torch.nn.functional.normalize(torch.randn(2, tokens, 3, 5, generator=generator), dim=-1)
    v = torch.randn(tokens, 3, 7, generator=generator)
    log_decay, rate = torch.rand(2, tokens, 3, generator=generator)
    return q, k, v, Gates(-0.3 * log_decay, rate)


def test_chunks_of_packed_sequences_are_the_rule_of_each_token() -> None:
    """Outputs and states are those of transformers' loop, and sequences go on where they ended."""
    lengths = [1, 150, 64, 70, 128]
    q, k, v, gates = _inputs(lengths)
    chunks = Chunks.of_lengths(tuple(lengths), torch.device("cpu"))
    outputs, states = chunked(q, k, v, gates, chunks, torch.zeros(5, 3, 5, 7))
    again, _ = chunked(q, k, v, gates, chunks, states)

    parts = [x.split(lengths) for x in (q, k, v, gates.log_decay, gates.rate)]
    begin = 0
    for number, own in enumerate(zip(*parts, strict=True)):
        for given, wanted in ((None, outputs), (states[number : number + 1], again)):
            output, state = torch_recurrent_gated_delta_rule(
                own[0][None] * 5**0.5,  # which it divides by
                *(x[None] for x in own[1:]),
                initial_state=given,
                output_final_state=True,
            )
            torch.testing.assert_close(
                wanted[begin : begin + lengths[number]], output[0], rtol=1e-4, atol=1e-5
            )
            if given is None:
                torch.testing.assert_close(states[number], state[0], rtol=1e-4, atol=1e-5)
        begin += lengths[number]


def test_parts_go_on_where_others_end() -> None:
    """Outputs and gradients are those of whole sequences, each from empty states."""
    lengths = [70, 3, 150, 20, 9, 65, 1]
    before = [-1, 0, 0, -1, -1, 4, 4]
    q, k, v, gates = _inputs(lengths)
    inputs = [x.requires_grad_() for x in (q, k, v, gates.log_decay, gates.rate)]
    weights = torch.randn(sum(lengths), 3, 7, generator=torch.Generator().manual_seed(3))
    outputs = chunked_parts(*inputs[:3], Gates(*inputs[3:]), lengths, before)
    gradients = torch.autograd.grad((outputs * weights).sum(), inputs)

    parts = [torch.arange(len(q)).split(lengths)[number] for number in range(len(lengths))]
    rows = [[part] if other < 0 else [other, part] for part, other in enumerate(before)]
    apart = torch.zeros(())
    for row in rows:
        places = torch.cat([parts[part] for part in row])
        own = [x[places] for x in inputs]
        chunks = Chunks.of_lengths((len(places),), q.device)
        wanted, _ = chunked(*own[:3], Gates(*own[3:]), chunks, torch.zeros(1, 3, 5, 7))
        last = len(parts[row[-1]])
        torch.testing.assert_close(outputs[parts[row[-1]]], wanted[-last:], rtol=1e-4, atol=1e-5)
        # A prompt's own output counts once, though all that follows begins with it.
        apart = apart + (wanted[-last:] * weights[parts[row[-1]]]).sum()
    for mine, true in zip(gradients, torch.autograd.grad(apart, inputs), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-4)


def test_what_autograd_keeps_of_the_inner_steps_is_in_plans() -> None:
    """Within 7 %, by the tensors that torch saves."""
    for heads in ((4, 8, 128, 128), (4, 4, 128, 64)):
        net = DeltaNet((True,), *heads, taps=4)
        channels = torch.randn(2048, net.channels, dtype=torch.bfloat16, requires_grad=True)
        numbers = torch.randn(2048, net.value_heads, 2, requires_grad=True)
        saved: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: Tensor, saved: dict[int, torch.UntypedStorage] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            gates = gates_of(numbers, *torch.zeros(2, net.value_heads))
            weight = torch.randn(net.channels, 1, 4, dtype=torch.bfloat16, requires_grad=True)
            rows = convolve(channels, weight, [channels.new_zeros(3, net.channels)], [2048])
            states = torch.zeros(1, net.value_heads, net.key_dim, net.value_dim)
            cut = Chunks.of_lengths((2048,), rows.device)
            outputs, _ = chunked(*heads_of(net, rows), gates, cut, states)
            z = channels.new_empty(outputs.shape)
            gain = torch.ones(net.value_dim, dtype=z.dtype, requires_grad=True)
            gated_norm(outputs, z, gain, 1e-6)

        spec = replace(tiny_spec("qwen3_next"), delta=replace(net, layers=(True,) * 4))
        foreseen = attention_layers(spec)[0].inner_bytes * 2048
        counted = sum(storage.nbytes() for storage in saved.values())
        assert counted == pytest.approx(foreseen, rel=0.07)


def test_one_token_goes_on_as_a_chunk_of_one() -> None:
    q, k, v, gates = _inputs([1, 1])
    states = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(2))
    chunks = Chunks.of_lengths((1, 1), torch.device("cpu"))
    for mine, wanted in zip(
        one_token(q, k, v, gates, states), chunked(q, k, v, gates, chunks, states), strict=True
    ):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


def _logprobs(model: Any, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    """Of the response, as transformers computes them in one pass."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(-1, torch.tensor(response)[:, None])[:, 0]


def test_the_engine_equals_transformers_where_states_are_forked_and_lost() -> None:
    """Prompts in parts, samples that begin with the state of a prompt, rows that begin again."""
    model = hf_model(NAME)
    sampling = SamplingParams(n=3, temperature=0.8, max_tokens=10, seed=5, stop_token_ids=(7, 20))
    prompts = PROMPTS[:4]
    once = generate(make_engine(model), requests_for(prompts, UIDS[:4], sampling))
    assert once.stats.computed_prompt_tokens == sum(map(len, prompts))
    whole = once.samples
    for sample in whole:
        wanted = _logprobs(model, prompts[sample.request_id], list(sample.token_ids), 0.8)
        assert sample.logprobs == pytest.approx(wanted.tolist(), abs=ROUNDING)

    spec = spec_of_model(model)
    shape = CacheShape.on_rank(spec, 1, 4, 4, spec.experts)
    assert len(shape.heads) == 1
    assert shape.state_bytes == 3 * 4 * (3 * (2 * 12 + 40) + 4 * 6 * 10)
    engine = make_engine(
        model,
        block_size=4,
        cache_bytes=6 * shape.state_bytes + 11 * shape.block_bytes,
        max_num_seqs=6,
        max_prefill_tokens=7,
        max_length=36,
    )
    for _ in range(2):  # nothing is kept of prompts
        found = generate(engine, requests_for(prompts, UIDS[:4], sampling))
        assert_same(found.samples, whole, ROUNDING)
        assert found.stats.preemptions > 0
        assert found.stats.computed_prompt_tokens >= sum(map(len, prompts))
        assert found.stats.cache_bytes == 6 * shape.state_bytes + 11 * shape.block_bytes


@pytest.mark.full
@pytest.mark.parametrize("name", [NAME, "qwen3-5", "qwen3-5-moe"])
@pytest.mark.parametrize("targets", [(), None, ("in_proj_z", "in_proj_a", "q_proj")])
def test_greedy_equals_transformers_generate(
    name: str, targets: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """Without adapters, with all, and with those of some tensors that lie in one parameter."""
    model = hf_model(name)
    if targets != ():
        model = adapted_model(name, tmp_path / "adapter", targets)
    sampling = SamplingParams(temperature=0.0, max_tokens=10, seed=0)
    for prompt, sample in zip(
        PROMPTS[:5], answer(make_engine(model), PROMPTS[:5], UIDS[:5], sampling), strict=True
    ):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        options = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": None}
        output = model.generate(ids, attention_mask=mask, pad_token_id=0, **options)
        assert list(sample.token_ids) == output[0, len(prompt) :].tolist()
        wanted = _logprobs(model, prompt, list(sample.token_ids), 1.0)
        assert sample.logprobs == pytest.approx(wanted.tolist(), abs=ROUNDING)


def test_the_published_sizes(published: Path) -> None:
    spec = load_spec(published / "Qwen3-Next-80B-A3B", "lm")
    shapes = family_of(spec).tensor_shapes(spec)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(published / "Qwen3-Next-80B-A3B")
        )
    assert sum(map(math.prod, shapes.values())) == 79_674_391_296
    assert sum(parameter.numel() for parameter in model.parameters()) == 79_674_391_296
    assert family_of(spec).ignored_prefixes(spec) == ("mtp.",)

    # 12 layers with 2 KV heads of 256; 36 with 3 rows of 8192 channels and 32 states of 128 x 128.
    whole = CacheShape.on_rank(spec, 1, 2, 64)
    assert whole.token_bytes == 12 * 2 * 2 * 256 * 2 == 24_576
    assert whole.state_bytes == 36 * (3 * 8192 * 2 + 4 * 32 * 128 * 128) == 77_266_944
    split = CacheShape.on_rank(spec, 4, 2, 64)
    assert (split.token_bytes, split.state_bytes) == (12_288, 77_266_944 // 4)

    # A token through a delta net: its matrices, and its states and convolution.
    net = attention_layers(spec)[0]
    matrices = 2048 * (2 * 2048 + 2 * 4096 + 2 * 32) + 4096 * 2048
    assert sum(product.inputs * product.outputs for product in net.products) == matrices
    assert net.token_products == 3 * 32 * 128 * 128 + 4 * 8192
    gated = 2048 * (2 * 4096 + 2 * 512) + 4096 * 2048
    mlp = 2048 * (3 * 11 * 512 + 512 + 1)
    of_token = 36 * (matrices + net.token_products) + 12 * gated + 48 * mlp
    assert forward_flops(spec, 3, 0) == 2 * (3 * of_token + 12 * 2 * 4096 * 6)


@pytest.mark.full
def test_training_on_8_machines_of_8_gpus(published: Path) -> None:
    layout = ["tp=4", "pp=2", "ep=16", "etp=1", f"path={published / 'Qwen3-Next-80B-A3B'}"]
    keys = ["distributed.device=cuda", "rollout.tp=4", *(f"actor.{key}" for key in layout)]
    config = load_config(PPOConfig, FILE, keys)
    specs = {name: spec for name, spec in check_models(config).items() if spec is not None}
    sizes = footprint(config, specs, 64)
    experts = 48 * 512 * 3 * 2048 * 512
    weights = (experts / 16 + (79_674_391_296 - experts) / 4) / 2
    assert sizes.held["actor/params"] == pytest.approx(2 * weights, rel=0.05)

    needs = cache_needs(config, specs["actor"])
    assert sizes.sample_bytes == needs.bytes == needs.tokens * (12_288 + 48 * 10 * 2) + 19_316_736
    # Those of `max_num_seqs` sequences, and of padding.
    assert needs.least == needs.bytes + config.rollout.max_num_seqs * 19_316_736
    assert f"bytes of states x {config.rollout.max_num_seqs + 1} sequences" in str(needs)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("actor.cp=8", "actor.cp 8 does not divide the 4 key heads that .*; use one of 1, 2, 4"),
        ("rollout.engine=vllm", "rollout.engine is vllm, which is not supported for a model with"),
        ("rollout.kv_cache_mb=1000", "19316736 bytes of states x 257 sequences"),
    ],
)
def test_keys_that_do_not_fit_states_are_refused(published: Path, key: str, said: str) -> None:
    layout = ["tp=4", "pp=2", "ep=16", "etp=1", f"path={published / 'Qwen3-Next-80B-A3B'}"]
    keys = ["distributed.device=cuda", "rollout.tp=4", *(f"actor.{item}" for item in layout), key]
    with pytest.raises(ConfigError, match=said):
        check_models(load_config(PPOConfig, FILE, keys))


def test_layouts_and_engines_are_refused_by_name() -> None:
    spec = tiny_spec("qwen3_next")
    assert "4 key heads of its delta nets" in str(tp_problem("tp", 8, spec))
    assert missing_feature("vllm", spec, "cuda", 1) == "the family qwen3_next"
    assert spec.needs_own_layers
