"""Tokens per second of the native engine against transformers' generate: same weights, prompts and lengths.

One process; the two alternate in one run, and the table gives medians and their ratio. Greedy and without a stop token,
so that both produce the same number of tokens; the tokens are compared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mrlhf.inference.base import SamplingParams
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.models.families import load_spec, tensor_shapes
from mrlhf.weights.hf import read_weights


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=None,
        pad_token_id=0,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    reference = LlamaForCausalLM(config).to(device, dtype).eval()
    engine = _engine(reference, arguments, device, dtype)
    prompts = torch.randint(1, arguments.vocabulary, (arguments.prompts, arguments.prompt_length))
    sampling = SamplingParams(temperature=0.0, max_tokens=arguments.new_tokens, seed=0)
    rows, uids = prompts.tolist(), list(range(arguments.prompts))

    def ours() -> list[list[int]]:
        return [sample.token_ids for sample in engine.generate(rows, uids, sampling)]

    @torch.no_grad()
    def theirs() -> list[list[int]]:
        output = reference.generate(
            prompts.to(device),
            attention_mask=torch.ones_like(prompts).to(device),
            max_new_tokens=arguments.new_tokens,
            do_sample=False,
        )
        return output[:, arguments.prompt_length :].tolist()

    same = statistics.fmean(a == b for a, b in zip(ours(), theirs(), strict=True))
    seconds: dict[str, list[float]] = {"transformers": [], "mrlhf native": []}
    for _ in range(arguments.repeats):
        for name, generate in (("transformers", theirs), ("mrlhf native", ours)):
            began = time.perf_counter()
            generate()
            seconds[name].append(time.perf_counter() - began)
    tokens = arguments.prompts * arguments.new_tokens
    print(f"{device.type}, {dtype}, {torch.get_num_threads()} threads, {tokens} tokens; equal responses: {same:.0%}")
    for name, measured in seconds.items():
        print(f"{name:14s} {tokens / statistics.median(measured):10.0f} tokens/s")
    ratio = statistics.median(seconds["transformers"]) / statistics.median(seconds["mrlhf native"])
    print(f"{'ratio':14s} {ratio:10.2f}")


def _engine(
    reference: LlamaForCausalLM, arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> NativeEngine:
    with tempfile.TemporaryDirectory() as directory:
        reference.save_pretrained(directory)
        spec = load_spec(directory, "lm")
        length = arguments.prompt_length + arguments.new_tokens
        engine = NativeEngine(spec, None, device, dtype, arguments.prompts, length, arguments.prompts * length)
        read_weights(directory, engine.weight_slots(), tensor_shapes(spec))
    engine.commit(0)
    return engine


if __name__ == "__main__":
    main()
