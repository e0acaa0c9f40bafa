"""The section `rollout`: how responses are generated. It does not know the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mrlhf.config.fields import MOST, Count, CountOrZero, Ranks, Section, Texts, Tokens
from mrlhf.config.reads import read_if

_IF_DUMPED = read_if(
    "dump_freq", bool, "is 0", "set that to the steps between two rollouts that are written down"
)
_IF_PARQUET = read_if(
    "dump_format", lambda name: name != "jsonl", "is jsonl", "set that to parquet"
)
_IF_ADAPTED = read_if("actor.lora", lambda lora: lora.is_on, "has rank 0", "set actor.lora.rank")
_UNLESS_SIZED = read_if(
    "kv_cache_mb", lambda size: size is None, "sizes the KV cache", "set that to null"
)


class RolloutSection(Section):
    """Generation."""

    engine: Literal["native", "vllm"] = "native"
    """inference engine; vllm needs its package"""
    tp: Ranks = 1
    """ranks of one engine replica; divides actor.tp x actor.cp x actor.pp, or the ranks of the job
    where the experts of a layer lie on more ranks than actor.tp x actor.cp"""
    ep: Ranks | None = None
    """over how many parts of a replica the experts of a mixture are shared out; the ranks of a part
    split each of theirs; null: as in training where that fits"""
    lora: Annotated[Literal["apart", "merged"], _IF_ADAPTED] = "apart"
    """with actor.lora: apart: the engine adds the adapters to what the base gives, as training
    does; merged: it gets the sums of the weights, rounded to dtype. vllm needs merged"""
    n: Count = 1
    """samples of each prompt"""
    temperature: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """divisor of the logits, in the engine and in training"""
    top_k: Annotated[int, Field(ge=-1, le=MOST)] = -1
    """sample from the k most probable tokens; -1: off"""
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = 1.0
    """sample from the most probable tokens that together have this probability; 1: off"""
    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] = 256
    """most sequences decoded at once in one replica"""
    max_prefill_tokens: Tokens = 8192
    """most prompt tokens computed in one step of one replica; longer prompts are computed in
    chunks"""
    stop: Texts = Field(default_factory=list)
    """texts: a response ends where its text contains one of them; a special token in the list ends
    it too"""
    stop_token_ids: list[CountOrZero] = Field(default_factory=list)
    """token ids: a response ends after any of them, as after the end tokens of tokenizer and
    model"""
    block_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """tokens in one block of the KV cache; null: 16 on a CPU, what the kernels need on a GPU"""
    kv_cache_mb: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """KV cache of one rank, MiB; null: up to half of the free memory on a CPU, what
    gpu_memory_utilization leaves on a GPU"""
    gpu_memory_utilization: Annotated[float, Field(ge=0.01, le=1), _UNLESS_SIZED] = 0.9
    """fraction of a GPU's memory for the engine's weights and KV cache, as in vLLM and verl; less
    if training leaves less: a tenth of the GPU stays free, or 1 - this"""
    enforce_eager: bool = False
    """do not capture CUDA graphs"""
    verify_reshard: bool = False
    """compare checksums of every moved weight slice"""
    reshard_bucket_mb: Annotated[int, Field(ge=1, le=65536)] = 64
    """size of all transfer buffers of one rank while weights move, MiB"""
    dump_freq: CountOrZero = 0
    """training steps between rollouts that are written down, as parquet with the numbers of each
    token, or as jsonl; 0: none"""
    dump_format: Annotated[Literal["parquet", "jsonl"], _IF_DUMPED] = "parquet"
    """parquet: texts, scores, and the numbers of each token, as the report needs them; jsonl: texts
    and scores"""
    dump_samples: Annotated[Count | None, _IF_DUMPED] = 256
    """most samples that are written down in one step, by whole prompts; the same prompts are chosen
    whenever they come; null: all"""
    dump_ratios: Annotated[bool, _IF_DUMPED, _IF_PARQUET] = True
    """for parquet, compute log-probabilities once more after the update, which shows how it changed
    each token"""

    @model_validator(mode="after")
    def _top_k_is_off_or_a_count(self) -> RolloutSection:
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} is neither -1 (off) nor at least 1")
        return self

    def dump_is_due(self, step: int) -> bool:
        """Whether the responses of training step `step` are written down."""
        return bool(self.dump_freq and step % self.dump_freq == 0)

    @property
    def records_experts(self) -> bool:
        """Whether the engine records to which experts a mixture sends tokens."""
        return self.engine == "native"

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled from only a part of the distribution."""
        return self.top_k != -1 or self.top_p < 1.0
