"""Draws the tokens of vLLM's requests with the numbers and the code of the native engine.

vLLM itself has a random generator for each request with a seed, and draws row by row. This file
does not know what ends a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrlhf.device import send
from mrlhf.inference.base import MaskWords, Request, SamplingParams
from mrlhf.inference.native.sampler import TokenSampler, sample_keys, uniforms
from mrlhf.inference.native.tensor_parallel import TensorParallel
from mrlhf.records import as_words


def draw_arguments(request: Request) -> list[dict[str, Any]]:
    """Return the `extra_args` of each sample's vLLM request, which `Draws` reads.

    The caller adds `name`, since vLLM gives requests other names than theirs.
    """
    keys = sample_keys([request.sampling.seed], [request.uid], [request.samples])
    return [{"key": key, "drawn": request.drawn} for key in keys.tolist()]


class Draws:
    """Stands in for the sampler of vLLM's model runner.

    The number that picks a token depends on the sample's key and the token's place alone: not on
    other samples, on where a prompt is cut (vLLM drops what is drawn there), or on preemption.
    """

    def __init__(self, requests: Mapping[str, Any], batch: Any, never: Sequence[int]) -> None:
        """Draw for the runner's `requests` and `input_batch`, but no token id in `never`."""
        self._requests = requests
        self._batch = batch
        self._sampler = TokenSampler(TensorParallel(None), never)  # all ranks have all columns
        self.sampling: SamplingParams | None = None
        """That of all requests in flight; set before the first of them is submitted."""
        # Which tokens could be drawn, by the name of a request and the place in its response.
        self._masks: dict[str, dict[int, NDArray[np.int32]]] = {}

    def __call__(self, logits: Tensor, sampling_metadata: Any) -> Any:
        """Return vLLM's `SamplerOutput`: a token and its log-prob for each row, [batch, 1].

        Args:
            logits: [batch, vocab], one row for each request of the runner's batch.
            sampling_metadata: vLLM's, which says nothing here.
        """
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        assert self.sampling is not None
        batch = self._batch
        given = [self._requests[name].sampling_params.extra_args for name in batch.req_ids]
        keys = np.array([arguments["key"] for arguments in given], dtype=np.uint64)
        places = np.array([arguments["drawn"] for arguments in given], dtype=np.int64)
        rows = slice(len(logits))
        own_places = batch.num_tokens_no_spec[rows] - batch.num_prompt_tokens[rows]
        places += own_places

        uniform = send(torch.from_numpy(uniforms(keys, places)), logits.device)
        # vLLM has cut off the padding of the vocabulary, which leaves gaps between the rows.
        drawn = self._sampler.draw(logits.contiguous(), 0, uniform, self.sampling)
        tokens, logprobs, *record = drawn
        for octets in record:
            listed = as_words(octets.cpu().numpy(), self.sampling.record_head)
            for arguments, place, own in zip(given, own_places.tolist(), listed, strict=True):
                # A place may be drawn again.
                self._masks.setdefault(arguments["name"], {})[place] = own
        column = tokens.int()[:, None]
        ranks = torch.zeros_like(tokens)  # among the logits, which nobody reads
        return SamplerOutput(column, LogprobsTensors(column, logprobs[:, None], ranks))

    def take_masks(self, name: str, tokens: int) -> MaskWords | None:
        """Forget what could be drawn in a response, and return it for so many tokens, if known."""
        places = self._masks.pop(name, None)
        if places is None:
            return None
        masks = MaskWords.none(0)
        for place in range(tokens):
            masks.words.frombytes(places[place].tobytes())
            masks.counts.append(len(places[place]))
        return masks
