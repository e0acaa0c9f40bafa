"""The section `rollout`: how responses are generated. It does not know the engines."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from mrlhf.config.fields import (
    MOST,
    Count,
    CountOrZero,
    FunctionReference,
    Ranks,
    Rows,
    Seconds,
    Section,
    Texts,
    Tokens,
    known_or_own,
)
from mrlhf.config.reads import KeyPlace, NotRead, ReadIf, read_if
from mrlhf.config.user_code import is_reference

_IF_DUMPED = read_if(
    "dump_freq", bool, "is 0", "set that to the steps between two rollouts that are written down"
)
_IF_PARQUET = read_if(
    "dump_format", lambda name: name != "jsonl", "is jsonl", "set that to parquet"
)
_IF_CENTRED = read_if("algorithm.rollout_correction.score_centering")
_IF_ADAPTED = read_if("actor.lora", lambda lora: lora.is_on, "has rank 0", "set actor.lora.rank")
_UNLESS_SIZED = read_if(
    "kv_cache_mb", lambda size: size is None, "sizes the KV cache", "set that to null"
)


BuiltInTool = Literal["calculator", "python"]
ToolParser = Literal["auto", "hermes", "llama3", "mistral", "deepseek", "json"]


def _environments(value: object) -> object:
    """Several environments from one, or from a mapping that names one for each data source."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"name": value}]
    if isinstance(value, dict) and "name" not in value:
        return [{"name": name, "data_source": source} for source, name in value.items()]
    return value


class EnvironmentSection(Section):
    """The environment that leads the episodes of some rows."""

    name: Annotated[
        FunctionReference, known_or_own((), "path/to/file.py:Class or path/to/file.py:function")
    ]
    """path/to/file.py:Class, or path/to/file.py:function for an async function that leads the
    episode by itself"""
    data_source: str | None = None
    """the rows of this data source alone; null: all that no other environment names"""


def _has_turns(place: KeyPlace) -> NotRead | None:
    """Why a key of episodes has no effect, if there are none."""
    if place.config.rollout.has_turns:
        return None
    return NotRead(
        ", since there are neither rollout.environment nor rollout.tools",
        "name one of them",
        ("rollout.environment", "rollout.tools"),
    )


def _nothing_early(place: KeyPlace) -> NotRead | None:
    """Terms that no rank scores alone, as a function or a server does."""
    names = [term.name for term in place.value("reward.terms")]
    if any(map(is_reference, names)) or ("judge" in names and place.value("judge.address")):
        return None
    why = ", since reward.terms holds no function of your own and no judge with an address"
    return NotRead(why, "name one there", ("reward.terms", "judge.address"))


_IF_TURNS = ReadIf(_has_turns)
_IF_PARTIAL = read_if("over", lambda over: over > 1, "is 1", "raise that above 1")


class PartialSection(Section):
    """Rollouts that are not drawn to their end in one step.

    More prompts are begun than a step needs. The step trains on those whose samples all end first;
    the others keep what they have, and go on with the weights of the next step.
    """

    over: Annotated[float, Field(ge=1, le=64)] = 1.0
    """prompts that are begun, over data.train_batch_size; 1: every sample is drawn to its end"""
    max_versions: Annotated[Annotated[int, Field(ge=2, le=64)], _IF_PARTIAL] = 2
    """most versions of the policy that draw the samples of one prompt: the last of the steps waits
    for them; at least over"""
    turn_cost: Annotated[CountOrZero, _IF_PARTIAL, _IF_TURNS] = 64
    """in a step all samples draw equally many tokens, and the end of a turn counts for this many:
    about as many as the engine draws of a sample while a tool works"""

    @model_validator(mode="after")
    def _all_can_be_taken_in_time(self) -> PartialSection:
        if self.over > self.max_versions:
            raise ValueError(
                f"over {self.over:g} is above max_versions {self.max_versions}, so some prompts "
                "would be too old before a step takes them; lower over or raise max_versions"
            )
        return self

    @property
    def is_on(self) -> bool:
        """Whether samples may be drawn in several steps."""
        return self.over > 1

    def begun_of(self, batch: int) -> int:
        """How many prompts are begun where a step takes `batch`; a part counts as one."""
        # As it is written: the float 1.1 is a little more than 1.1, so 10 times as much is not 11.
        return math.ceil(Fraction(str(self.over)) * batch)


def _named_twice(self: Any) -> list[dict[str, str]]:
    """The rows that have several environments."""
    sources = [section.data_source for section in self.environment]
    twice = {source for source in sources if sources.count(source) > 1}
    named = sorted(f"the data source {source}" for source in twice - {None})
    return [{"rows": rows} for rows in ["all rows"] * (None in twice) + named]


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
    """sample from the k most probable tokens; -1: off. Training then compares probabilities among
    the tokens that could be drawn"""
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = 1.0
    """sample from the most probable tokens that together have this probability; 1: off. As with
    top_k"""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """sample from the tokens with at least this share of the most probable one's probability; 0:
    off. As with top_k"""
    topk_log_probs: Annotated[Count, Field(le=16384), _IF_CENTRED] = 128
    """how many of the most probable tokens the engine records at each token, with their
    log-probs"""
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
    environment: Annotated[
        list[EnvironmentSection],
        BeforeValidator(
            _environments, json_schema_input_type=str | dict[str, str] | list[EnvironmentSection]
        ),
    ] = Field(default_factory=list)
    """path/to/file.py:Class that leads episodes of several turns, or :function for an async
    function that asks for each of them; or one for each data source, as {source:
    path/to/file.py:Class}; see docs/environments.md"""
    tools: list[Annotated[BuiltInTool | FunctionReference, known_or_own(get_args(BuiltInTool))]] = (
        Field(default_factory=list)
    )
    """functions that the policy may call in every episode: calculator, python, or
    path/to/file.py:function"""
    max_turns: Annotated[Count, _IF_TURNS] = 8
    """most turns of an episode; data.max_response_length is the most tokens of all of them, with
    what tools and environment say between. Where an episode has several contexts, one of them has
    at most data.max_prompt_length more"""
    max_turn_tokens: Annotated[Tokens | None, _IF_TURNS] = None
    """most tokens of one turn; null: what is left of the episode"""
    max_tool_tokens: Annotated[Tokens, _IF_TURNS] = 512
    """most tokens of one answer of a tool or of the environment; the rest is cut off"""
    tool_parser: Annotated[ToolParser, _IF_TURNS] = "auto"
    """the form in which the policy writes calls; auto: as the chat template shows them"""
    on_parse_error: Annotated[Literal["tell", "end"], _IF_TURNS] = "tell"
    """a call that cannot be read: tell the policy what is wrong, or end the episode"""
    on_tool_error: Annotated[Literal["tell", "end"], _IF_TURNS] = "tell"
    """a tool that fails: tell the policy its error, or end the episode"""
    on_rewrite: Annotated[Literal["keep", "split", "error"], _IF_TURNS] = "keep"
    """a chat template that would write earlier turns otherwise than they were drawn, as those do
    that drop thoughts: keep what was drawn, and say so; split: begin another context with what the
    template writes; or refuse to start"""
    tool_timeout_s: Annotated[Seconds, _IF_TURNS] = 30.0
    """longest time of one call of a tool or of a method of the environment, seconds; then it is
    stopped"""
    tool_memory_mb: Annotated[Annotated[int, Field(ge=64, le=MOST)] | None, _IF_TURNS] = 4096
    """most private memory of each process of an episode, MB; null: no limit"""
    tool_workers: Annotated[Count, _IF_TURNS] = 32
    """most episodes of a replica whose tools run at the same time; others wait. Fewer where tools
    compute, more where they wait"""
    overlap: Annotated[bool, ReadIf(_nothing_early)] = False
    """call functions of your own that are terms of the reward, and the server of a judge, while the
    engine draws other responses; the scores are the same"""
    partial: PartialSection
    """begin more prompts than a step needs, and go on later with those that are not done"""
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

    refused: ClassVar[Rows] = {
        "{lora} is given, but {engine} only takes whole weights; set rollout.lora to "
        "merged, which rounds them, or rollout.engine to native": lambda self: (
            self.engine == "vllm" and self.lora == "apart"
        ),
        "{ep} does not divide {tp}; use one of {sizes}": lambda self: (
            self.tp % (self.ep or 1) != 0
            and {"sizes": ", ".join(str(n) for n in range(1, self.tp + 1) if self.tp % n == 0)}
        ),
        "rollout.environment names several for {rows}; keep one": _named_twice,
    }

    @model_validator(mode="after")
    def _top_k_is_off_or_a_count(self) -> RolloutSection:
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} is neither -1 (off) nor at least 1")
        return self

    @property
    def has_turns(self) -> bool:
        """Whether a response may have several turns."""
        return bool(self.environment or self.tools)

    def dump_is_due(self, step: int) -> bool:
        """Whether the responses of training step `step` are written down."""
        return bool(self.dump_freq and step % self.dump_freq == 0)

    @property
    def records(self) -> bool:
        """Whether the engine records the experts of a mixture."""
        return self.engine == "native"

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled from only a part of the distribution."""
        return self.top_k != -1 or self.top_p < 1.0 or self.min_p > 0.0
