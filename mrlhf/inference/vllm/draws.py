"""Draws the tokens of vLLM's requests, by the numbers and the code of the native engine.

vLLM has a random generator for each request with a seed, and draws row by row. This file does not
know what ends a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrlhf.device import send
from mrlhf.inference.base import Request, SamplingParams
from mrlhf.inference.native.sampler import TokenSampler, sample_keys, uniforms
from mrlhf.inference.native.tensor_parallel import TensorParallel


def draw_arguments(request: Request) -> list[dict[str, int]]:
    """Return, for each sample of `request`, what `Draws` reads in the parameters of vLLM's."""
    keys = sample_keys([request.sampling.seed], [request.uid], [request.samples])
    return [{"key": key, "drawn": request.drawn} for key in keys.tolist()]


class Draws:
    """Stands in for the sampler of vLLM's model runner.

    A number depends on a sample's key and place alone. So it does not matter which rows are beside
    it, that vLLM drops what is drawn after a chunk of a prompt, or that it computes a sample again.
    """

    def __init__(self, requests: Mapping[str, Any], rows: Any, never: Sequence[int]) -> None:
        """Draw for the runner's `requests` and `rows`, but never the token ids in `never`."""
        self._requests = requests
        self._rows = rows
        self._sampler = TokenSampler(TensorParallel(None), never)  # all ranks have all columns
        self.sampling: SamplingParams | None = None
        """That of all requests in flight; set before the first of them is submitted."""

    def __call__(self, logits: Tensor, sampling_metadata: Any) -> Any:
        """Draw a token for each of the runner's rows of logits [batch, vocab]."""
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        assert self.sampling is not None
        count = len(logits)
        given = [self._requests[name].sampling_params.extra_args for name in self._rows.req_ids]
        keys = np.array([arguments["key"] for arguments in given], dtype=np.uint64)
        drawn = np.array([arguments["drawn"] for arguments in given], dtype=np.int64)
        places = drawn + self._rows.num_tokens_no_spec[:count] - self._rows.num_prompt_tokens[:count]

        uniform = send(torch.from_numpy(uniforms(keys, places)), logits.device)
        # vLLM has cut the padding of the vocabulary off.
        tokens, logprobs = self._sampler.draw(logits.contiguous(), 0, uniform, self.sampling)
        column = tokens.int()[:, None]
        ranks = torch.zeros_like(tokens)  # which nobody reads
        return SamplerOutput(column, LogprobsTensors(column, logprobs[:, None], ranks))
