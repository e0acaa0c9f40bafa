"""Measures what this machine can do, for `mrlhf plan`: the rates of a run's own kernels and links.

All ranks measure at the same time, as they compute in a run. Products, attention, logits and AdamW
are the functions that runs call; fixed costs come from a model whose layers are tiny. Everything is
timed in several sweeps, and each figure is a mean over sweeps and ranks. This file does not know
what a step is made of.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mrlhf.batch import Sequences
from mrlhf.config.roots import TrainedModelSection
from mrlhf.config.sections import LoraSection, OptimSection
from mrlhf.device import Device, resolve_dtype
from mrlhf.inference.base import EngineLimits, SamplingParams, requests_for
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.inference.native.linear import linear
from mrlhf.metrics import Tally
from mrlhf.models.attention import attend
from mrlhf.models.families import FAMILIES
from mrlhf.models.flops import visible_pairs
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.collectives import all_gather_objects
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.job import processes_on_this_machine
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.parallel.links import all_reduce_seconds, median_seconds
from mrlhf.parallel.masks import Packed
from mrlhf.parallel.vocab import OutputLayer, TokenRange, Tokens, token_loss, token_numbers
from mrlhf.parallel.vocab_sums import NumbersToCompute, TokenNumbers
from mrlhf.planning.gpus import LATENCY_S, Gpu
from mrlhf.planning.kernels import Kernels, Product, ProductTable
from mrlhf.roles.token_logprobs import TokenLogprobs
from mrlhf.training.engine import ModelEngine
from mrlhf.training.results import PackResult


@dataclass(frozen=True)
class Effort:
    """How much is measured, and how often."""

    rows: Sequence[int]  # of products in training
    engine_rows: Sequence[int]  # of products in generation
    sizes: Sequence[int]  # of inner dimensions and columns
    length: int  # of each of eight sequences in attention, tokens
    logits: tuple[int, int]  # rows and columns
    streamed: int  # numbers of a tensor that does not fit a cache
    exchanged: int  # bytes
    sweeps: int = 3
    rounds: int = 5  # of which a sweep takes the median
    least_s: float = 0.01  # that are timed at once


EFFORTS = {
    "cpu": Effort((16, 128, 1024), (1, 8, 64), (64, 256, 1024), 256, (2**10, 2**12), 2**25, 2**22),
    "cuda": Effort(
        (64, 512, 4096, 16384), (1, 16, 256), (512, 2048, 8192), 2048, (2**13, 2**15), 2**28, 2**26
    ),
}
_SEQUENCES, _KV_HEADS, _PER_KV_HEAD, _HEAD_DIM = 8, 4, 2, 64  # of attention
_FEW, _MANY = 2, 6  # layers of the tiny models
_TOKENS = 32  # of each of their micro-batches
_MORE_PACKS = 4
_FEW_ROWS, _MANY_ROWS = 2, 34
_SHORT, _LONG = 2, 514  # tokens of a prompt
_LEAST_BYTES = 64
_MOST_COPIES = 16  # of a weight
_MANY_ROUNDS = 20  # of what is short, and varies
_SHORTEST_S = 1e-9
_TIMEOUT_S = 60.0


def measure(device: Device, effort: Effort) -> Gpu:
    """The rates of a rank of this machine; all ranks of the job call it together.

    The links between machines and to a host's memory are not measured: the first get the rate of
    the links between ranks, the second that of memory.
    """
    sweep = _Sweep(device, effort)
    own = [dict(sweep.timings()) for _ in range(effort.sweeps)]
    every = list(chain.from_iterable(all_gather_objects(own, None)))
    # A run takes a sum of seconds, so it is seconds that are averaged, not rates.
    seconds = {what: statistics.mean(timings[what] for timings in every) for what in every[0]}
    return _gpu(device, effort, seconds)


def _gpu(device: Device, effort: Effort, seconds: dict[Hashable, float]) -> Gpu:
    """The rates of a machine, from the seconds of what `_Sweep` times."""
    dtype = resolve_dtype("auto", device)
    numbers = 4 * effort.streamed / 1e9
    memory = 3 * numbers / seconds["streaming"]
    kernels = _kernels(effort, seconds, memory, dtype.itemsize)
    world = dist.get_world_size()
    link, latency = memory, LATENCY_S  # one rank exchanges nothing
    if world > 1:
        latency = seconds["latency"]
        moved = 2 * effort.exchanged * (world - 1) / world / 1e9
        link = moved / max(_SHORTEST_S, seconds["all-reduce"] - latency)
    return Gpu(
        name="measured",
        memory_gb=_memory_bytes(device) / 1e9,
        tflops=max(product.tflops for product in kernels.products.products),
        memory_gb_s=memory,
        link_gb_s=link,
        network_gb_s=link,
        host_gb_s=memory,
        per_machine=processes_on_this_machine(),
        latency_s=latency,
        device=device.kind,
        dtype="bfloat16" if dtype == torch.bfloat16 else "float32",
        measured=kernels,
    )


def _kernels(
    effort: Effort, seconds: dict[Hashable, float], memory: float, itemsize: int
) -> Kernels:
    pairs = _SEQUENCES * visible_pairs(effort.length, None)
    attention = 4 * _KV_HEADS * _PER_KV_HEAD * _HEAD_DIM * pairs / 1e12
    logits = effort.logits[0] * effort.logits[1] / 1e9
    backward = seconds["attention and back"] - seconds["attention"]

    layer = _difference(seconds, "forward, many layers", "forward", _MANY - _FEW)
    both = _difference(seconds, "update, many layers", "update", _MANY - _FEW)
    pack = _difference(seconds, "update, more packs", "update", _MORE_PACKS - 1)
    beside = seconds["forward"] - _FEW * layer
    engine_layer = _difference(seconds, "decoding, many layers", "decoding", _MANY - _FEW)
    row = _difference(seconds, "decoding, many rows", "decoding", _MANY_ROWS - _FEW_ROWS)
    seen = _FEW * _MANY_ROWS * (_LONG - _SHORT)
    key = _difference(seconds, "decoding, long prompts", "decoding, many rows", seen)
    return Kernels(
        products=_table("training", effort.rows, effort, seconds),
        engine_products=_table("engine", effort.engine_rows, effort, seconds),
        attention_tflops=attention / seconds["attention"],
        attention_backward_tflops=2 * attention / max(backward, seconds["attention"]),
        streamed_gb_s=memory,
        logits_g_s=logits / seconds["logits"],
        logits_backward_g_s=logits / seconds["logits and back"],
        update_gb_s=7 * effort.streamed / 1e9 / seconds["AdamW"],
        lay_out_gb_s=_laid_out(effort) / 1e9 / seconds["lay out"],
        layer_s=layer,
        layer_backward_s=_at_least(both - layer),
        pack_s=_at_least(beside),
        pack_backward_s=_at_least(pack - beside - _FEW * both),
        step_s=_at_least(seconds["update"] - pack),
        engine_keys_gb_s=2 * _KV_HEADS * _HEAD_DIM * itemsize / 1e9 / key,
        engine_layer_s=engine_layer,
        engine_pass_s=_at_least(seconds["decoding"] - _FEW * engine_layer - _FEW_ROWS * row),
        engine_row_s=row,
    )


def _difference(seconds: dict[Hashable, float], more: str, less: str, times: int) -> float:
    return _at_least((seconds[more] - seconds[less]) / times)


def _at_least(seconds: float) -> float:
    """A difference of two measurements, which noise may make negative."""
    return max(seconds, _SHORTEST_S)


def _table(
    name: str, rows: Sequence[int], effort: Effort, seconds: dict[Hashable, float]
) -> ProductTable:
    found = []
    for shape in product(rows, effort.sizes, effort.sizes):
        operations = 2 * shape[0] * shape[1] * shape[2]
        timed = (name, *shape)
        found.append(Product(*shape, operations / seconds[timed] / 1e12))
    return ProductTable(tuple(found))


def _laid_out(effort: Effort) -> int:
    """Numbers of the weight that is laid out for the engine."""
    return max(effort.sizes) ** 2


def _memory_bytes(device: Device) -> float:
    """Of the rank's GPU, or its share of the machine's memory."""
    if device.kind == "cuda":
        return float(torch.cuda.get_device_properties(device.torch_device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total / processes_on_this_machine()


class _Sweep:
    """Times everything once; all ranks do the same at the same time."""

    def __init__(self, device: Device, effort: Effort) -> None:
        self._device = device
        self._place = device.torch_device
        self._dtype = resolve_dtype("auto", device)
        self._effort = effort
        factory = GroupFactory(_TIMEOUT_S)
        self._few, self._many = (_TinyModel(size, device, factory) for size in (_FEW, _MANY))

    def timings(self) -> Iterator[tuple[Hashable, float]]:
        """Seconds of each kind of work, by its name or shape."""
        effort = self._effort
        yield from self._products("training", effort.rows, _plain_linear)
        yield from self._products("engine", effort.engine_rows, linear)
        yield from self._attention()
        yield from self._logits()
        yield from self._streams()
        yield from self._tiny_models()
        if dist.get_world_size() > 1:
            yield "all-reduce", all_reduce_seconds(self._device, effort.exchanged, _MANY_ROUNDS)
            yield "latency", all_reduce_seconds(self._device, _LEAST_BYTES, _MANY_ROUNDS)

    def _seconds(self, work: Callable[[], object], guess: float = 1.0) -> float:
        """Seconds of work; if it is guessed to be short, it is repeated, and they are of one."""
        times = max(1, round(self._effort.least_s / guess))

        def repeat() -> None:
            for _ in range(times):
                work()

        dist.barrier()
        return median_seconds(repeat, self._device, self._effort.rounds) / times

    def _ones(self, *shape: int, needs_gradient: bool = False) -> Tensor:
        return torch.ones(
            shape, dtype=self._dtype, device=self._place, requires_grad=needs_gradient
        )

    def _products(
        self, name: str, rows: Sequence[int], make: Callable[[Tensor], Callable[[Tensor], Tensor]]
    ) -> Iterator[tuple[Hashable, float]]:
        """Products by the function that `make` gives for a weight [columns, inner].

        Weights take turns, so that large ones come from memory, as those of a model do.
        """
        for inner, columns in product(self._effort.sizes, self._effort.sizes):
            copies = min(_MOST_COPIES, 1 + self._effort.streamed // (inner * columns))
            turns = cycle([make(self._ones(columns, inner)) for _ in range(copies)])
            for count in rows:
                x = self._ones(count, inner)
                work = partial(_multiply, turns, x)
                with torch.no_grad():
                    guess = median_seconds(work, self._device, rounds=1)
                    yield (name, count, inner, columns), self._seconds(work, guess)

    def _attention(self) -> Iterator[tuple[Hashable, float]]:
        """Attention within packed sequences."""
        length = self._effort.length
        edges = torch.arange(_SEQUENCES + 1, dtype=torch.int32, device=self._place) * length
        mask = Packed(edges, edges, length, length)
        tokens = _SEQUENCES * length
        query = self._ones(tokens, _KV_HEADS, _PER_KV_HEAD, _HEAD_DIM, needs_gradient=True)
        key, value = (
            self._ones(tokens, _KV_HEADS, _HEAD_DIM, needs_gradient=True) for _ in range(2)
        )

        def forward() -> Tensor:
            return attend(query, key, value, mask, scale=_HEAD_DIM**-0.5)

        gradient = self._ones(tokens, _KV_HEADS * _PER_KV_HEAD * _HEAD_DIM)
        with torch.no_grad():
            yield "attention", self._seconds(forward)
        yield (
            "attention and back",
            self._seconds(lambda: torch.autograd.grad(forward(), (query, key, value), gradient)),
        )

    def _logits(self) -> Iterator[tuple[Hashable, float]]:
        """Log-probabilities from logits, of hidden states so narrow that products take no time."""
        rows, vocab = self._effort.logits
        layer = OutputLayer(self._ones(vocab, 8, needs_gradient=True), None, vocab, 1.0)
        targets = torch.zeros(rows, dtype=torch.int64, device=self._place)
        tokens = Tokens(self._ones(rows, 8, needs_gradient=True), targets, [rows])
        wanted = NumbersToCompute()
        yield "logits", self._seconds(lambda: token_numbers(layer, tokens, wanted))
        yield (
            "logits and back",
            self._seconds(lambda: token_loss(layer, tokens, wanted, _negative, by_token=True)),
        )

    def _streams(self) -> Iterator[tuple[Hashable, float]]:
        """Passes over memory: two tensors read and one written, AdamW, an engine's weight."""
        x, y = (torch.ones(self._effort.streamed, device=self._place) for _ in range(2))
        out = torch.empty_like(x)
        yield "streaming", self._seconds(lambda: torch.add(x, y, out=out))

        weight = torch.ones(self._effort.streamed // 4, device=self._place, requires_grad=True)
        weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.AdamW([weight], fused=True)
        yield "AdamW", self._seconds(optimizer.step)

        size = max(self._effort.sizes)
        weight = self._ones(size, size)
        # The first few take new memory from the system.
        yield "lay out", median_seconds(lambda: linear(weight), self._device, _MANY_ROUNDS)

    def _tiny_models(self) -> Iterator[tuple[Hashable, float]]:
        """Passes whose kernels have next to nothing to do."""
        yield "forward", self._seconds(lambda: self._few.forward(1))
        yield "forward, many layers", self._seconds(lambda: self._many.forward(1))
        yield "update", self._seconds(lambda: self._few.update(1))
        yield "update, many layers", self._seconds(lambda: self._many.update(1))
        yield "update, more packs", self._seconds(lambda: self._few.update(_MORE_PACKS))
        yield "decoding", self._decoding(_FEW, _FEW_ROWS, _SHORT)
        yield "decoding, many layers", self._decoding(_MANY, _FEW_ROWS, _SHORT)
        yield "decoding, many rows", self._decoding(_FEW, _MANY_ROWS, _SHORT)
        yield "decoding, long prompts", self._decoding(_FEW, _MANY_ROWS, _LONG)

    def _decoding(self, layers: int, rows: int, length: int) -> float:
        """Seconds of a pass of the engine that draws a token of each row, after the prompts."""
        limits = EngineLimits(
            max_num_seqs=rows, max_length=length + _TOKENS, max_prefill_tokens=rows * length,
            cache_bytes=2**28,
        )  # fmt: skip
        engine = NativeEngine(_tiny_spec(layers), None, self._place, self._dtype, limits)
        engine.weight_slots()  # zeros
        engine.commit(0)
        sampling = SamplingParams(temperature=1.0, max_tokens=_TOKENS, seed=1)
        prompts = [[number % 64 for number in range(row, row + length)] for row in range(rows)]
        requests = requests_for(prompts, range(rows), sampling)

        seconds = []
        for _ in range(self._effort.rounds + 1):
            engine.submit(requests)
            engine.step()
            begin = time.perf_counter()
            while engine.in_flight:
                engine.step()
                engine.collect()
            seconds.append((time.perf_counter() - begin) / (_TOKENS - 1))
        return statistics.median(seconds[1:])


def _multiply(turns: Iterator[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    """The product of `x` by the function whose turn it is."""
    return next(turns)(x)


def _plain_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The function x -> x @ weight.T, as training computes it."""
    return lambda x: F.linear(x, weight)


def _negative(token_range: TokenRange, numbers: TokenNumbers) -> Tensor:
    """A loss: the negative log-likelihood."""
    return -numbers.logprobs.sum()


def _tiny_spec(layers: int) -> ModelSpec:
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2 * _KV_HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    }
    return FAMILIES["llama"].read_config(config, "lm")


class _TinyModel:
    """A model that is trained, each rank on micro-batches of its own."""

    def __init__(self, layers: int, device: Device, factory: GroupFactory) -> None:
        section = TrainedModelSection(path="tiny", lora=LoraSection(), micro_batch_tokens=_TOKENS)
        world = dist.get_world_size()
        layout = ParallelLayout.for_world("model", world, AxisSizes.of(section))
        groups = factory.role_groups(layout)
        self._engine = ModelEngine(section, _tiny_spec(layers), groups, device)
        self._engine.initialise(seed=1)
        self._engine.attach_optimizer(OptimSection(), total_updates=1)
        self._logprobs = TokenLogprobs(self._engine, temperature=1.0)
        rows = [list(range(_TOKENS))] * _MORE_PACKS * world
        self._packs = self._engine.cut(Sequences.of(rows, [1] * len(rows)), "response").packs

    def forward(self, packs: int) -> None:
        """Run so many micro-batches without gradients."""

        def evaluate(hidden: Tensor, number: int) -> Tensor:
            return self._logprobs.evaluate(hidden, self._packs[number], NumbersToCompute()).logprobs

        self._engine.forward(self._packs[:packs], evaluate)

    def update(self, packs: int) -> None:
        """Take an optimizer step on so many micro-batches."""

        def loss(hidden: Tensor, number: int) -> tuple[Tensor, PackResult]:
            pack = self._packs[number]
            wanted = NumbersToCompute()
            total = self._logprobs.loss(hidden, pack, wanted, _negative, by_token=True)
            return total, PackResult(Tally())

        self._engine.train_mini_batch(self._packs[:packs], loss, "sft")
