"""Counts the forms in which Triton would compile the kernels of a rollout and of updates.

A form is what Triton finds out about the arguments of a launch: types, alignment, constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import create_function_from_signature

from benchmarks.engine_loop import requests_for
from mrlhf.gpu import launch
from mrlhf.inference.base import SamplingParams
from mrlhf.models.spec import ModelSpec
from tests.device import measures
from tests.simulated_device import tensors

Forms = set[str]
PROMPTS = (1, 8, 70, 3, 20, 270, 11, 2, 9, 530)  # chunks, pages, more than run at once
H100 = {"multiprocessor_count": 132, "max_shared_mem": 227 * 1024}


class Kernel:
    """Stands for a kernel: a launch notes its form, and computes nothing."""

    def __init__(self, kernel: JITFunction | InterpretedFunction, forms: Forms) -> None:
        if isinstance(kernel, InterpretedFunction):
            kernel = JITFunction(kernel.fn, **kernel.kwargs)
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self._name = kernel.__name__
        self._forms = forms

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """What launches it."""
        assert min(grid) > 0

        def run(*arguments: Any, **options: Any) -> None:
            _, form, rest = self._bind(*arguments, **options)
            self._forms.add(f"{self._name} {form} {rest}")

        return run


@contextmanager
def noted() -> Iterator[Forms]:
    """Gives the forms of all kernels that the body launches."""
    forms: Forms = set()
    stands_for = {
        module: SimpleNamespace(
            **{
                name: Kernel(value, forms)
                for name, value in vars(getattr(launch, module)).items()
                if isinstance(value, JITFunction | InterpretedFunction)
            }
        )
        for module in ("kernels", "attention_kernels", "delta_kernels")
    }

    def listener(func: Any, arguments: Any) -> None:
        name = func.name().removeprefix("mrlhf::").removesuffix(".default")
        getattr(launch, name)(*arguments)

    tensors.OURS.append(listener)
    with (
        mock.patch.multiple(launch, **stands_for),
        mock.patch.object(launch, "_properties", lambda device: H100),
    ):
        yield forms
    tensors.OURS.clear()


def rollout() -> dict[str, dict[str, list[str]]]:
    """Forms before a rollout and those that it adds, by whether steps are captured."""
    return {name: _rollout(eager) for name, eager in (("graphs", False), ("eager", True))}


def delta_nets() -> dict[str, dict[str, list[str]]]:
    """The same of a model with delta nets."""
    return {"delta nets": _rollout(eager=False, spec=measures.delta_spec(2))}


def latents() -> dict[str, dict[str, list[str]]]:
    """The same of a model with latent attention."""
    return {"latents": _rollout(eager=False, spec=measures.latent_spec(2))}


def _rollout(eager: bool, spec: ModelSpec | None = None) -> dict[str, list[str]]:
    engine = measures.engine_of(2, eager=eager, spec=spec)
    generator = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(0, measures.VOCABULARY, (length,), generator=generator).tolist()
        for length in PROMPTS
    ]
    first: Forms = set()
    with noted() as forms:
        for temperature in (1.0, 0.0):
            sampling = SamplingParams(max_tokens=20, seed=5, temperature=temperature)
            engine.submit(requests_for(prompts, list(range(len(prompts))), sampling, None))
            first = first or set(forms)
            while engine.in_flight:
                engine.step()
                engine.collect()
    return {"first": sorted(first), "added": sorted(forms - first)}


def updates() -> dict[str, dict[str, list[str]]]:
    """Forms of an evaluation and an update, and what those of other lengths add."""
    measures.join()
    engine, actor = measures.actor_of(packs=2, layers=2)
    engine.attach_optimizer(measures.OPTIM, total_updates=100)
    first: Forms = set()
    with noted() as forms:
        for sequences, length in ((8, 32), (6, 31), (1, 20), (7, 29)):
            experience = measures.example(sequences, length, prompt=length // 2)
            cut = engine.cut(experience.rollout.sequences(), "response")
            actor.evaluate(experience.rollout, cut)
            actor.update(experience, cut)
            first = first or set(forms)
    return {"updates": {"first": sorted(first), "added": sorted(forms - first)}}
