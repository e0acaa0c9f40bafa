"""What two ranks draw for the tests of episodes: as one engine, and as two."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mrlhf.batch import Prompts, Rollout
from mrlhf.config.rollout import PartialSection
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.episodes.environments.host import EnvironmentHost, ToolLimits, describe
from mrlhf.episodes.environments.protocol import EnvironmentReference
from mrlhf.episodes.limits import TurnLimits
from mrlhf.episodes.read import EnvironmentInputs
from mrlhf.episodes.replica import ReplicaEpisodes
from mrlhf.episodes.runner import EpisodeSampler
from mrlhf.episodes.template import TurnRenderer
from mrlhf.errors import EnvironmentFault, Interrupted
from mrlhf.inference.base import EngineLimits, SamplingParams
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.parallel.agreed_stop import AgreedStop
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.reshard.execute import ReshardStats
from mrlhf.rollout.drawn_sample import DrawnSample
from mrlhf.rollout.generator import Generator
from mrlhf.rollout.partial import PartialSampler
from mrlhf.rollout.response import Response
from mrlhf.trainers.ppo.resume import drawn_state, load_drawn_state
from tests.dist.talk import (
    FORGETS,
    SILENT,
    make_tokenizer,
    parse,
    parse_some,
    prompts_of,
)
from tests.dist.test_stop_points import Looking
from tests.fake_engine import FakeResharder
from tests.models.engines import fill, hf_model, spec_of
from tests.saved_state import saved

UIDS = [4, 7, 3, 12, 5, 9]
TALKATIVE = [15, 7, 3, 11, 19, 23, 27, 31]  # all but the third, which fails, talk longer
FAILING = (3, 5, 9)
N = 2
ENDS = (0, *range(40, 52))  # some characters end a turn as well, since a random model ends none
MOST_TOKENS, MOST_TURNS, MOST_TOLD = 60, 4, 3
LIMITS = EngineLimits(max_num_seqs=6, max_length=96, max_prefill_tokens=24, cache_bytes=2**22)
LAYOUTS = {"tp 2": 2, "two replicas": 1}


def _engine(model: Any, groups: Any, tokenizer: Tokenizer) -> NativeEngine:
    engine = NativeEngine(
        spec_of(model),
        groups.tp,
        torch.device("cpu"),
        torch.float32,
        LIMITS,
        decode=tokenizer.decode,
        never=torch.arange(100, 131),
    )
    fill(engine.weight_slots(), model)
    engine.wake()
    engine.commit(5)
    return engine


def _as_lists(rollout: Rollout) -> dict[str, Any]:
    rewards = rollout.turn_rewards()
    return {
        "prompts": rollout.prompts.token_ids,
        "responses": [
            row[mask].tolist()
            for row, mask in zip(rollout.response_ids, rollout.response_mask, strict=True)
        ],
        "drawn": [
            mask[there].tolist()
            for mask, there in zip(rollout.loss_mask, rollout.response_mask, strict=True)
        ],
        "logprobs": rollout.rollout_logprobs.numpy().copy(),
        "versions": sorted({int(x) for x in rollout.versions.unique()}),
        "stopped": rollout.stopped.tolist(),
        "episodes": rollout.episodes,
        "turn rewards": None if rewards is None else rewards.numpy(),
    }


def draw_in_ranks(rank: int, world_size: int, file: str) -> dict[str, Any]:
    """What this rank draws in each way, by its name; `file` has the environment."""
    model = hf_model("llama")
    tokenizer = make_tokenizer()
    references = {"": EnvironmentReference(f"{file}:Talk")}
    limits = ToolLimits(timeout_s=60.0, workers=2)
    programs = describe(references, limits)
    renderer = TurnRenderer(tokenizer, programs[""].tools, ENDS)
    prompts = prompts_of(tokenizer, programs[""].tools, UIDS)
    factory = GroupFactory(timeout_s=600.0)
    found: dict[str, Any] = {}

    def build(tp: int) -> tuple[Generator, EnvironmentHost | None]:
        groups = factory.engine_groups(EngineLayout.inside(ParallelLayout(tp=2, pp=1, dp=1), tp))
        host = None if groups.tp_rank else EnvironmentHost(references, limits)
        replica = ReplicaEpisodes(
            groups=groups,
            host=host,
            environments=EnvironmentInputs(references, programs, {"": renderer}, limits, parse),
            tokenizer=tokenizer,
            limits=TurnLimits(MOST_TURNS, None, MOST_TOLD, 32, MOST_TOKENS, "tell", "tell"),
        )
        resharder: Any = FakeResharder(None, ReshardStats(0, 0, 0, 0.0))  # type: ignore[arg-type]
        engine = _engine(model, groups, tokenizer)
        sampler = EpisodeSampler(replica, is_stopping=lambda: False)
        return Generator(engine, groups, resharder, 11, sampler=sampler), host

    for name, tp in LAYOUTS.items():
        generator, host = build(tp)
        for kind, temperature, n in (("greedy", 0.0, 1), ("sampled", 1.0, N)):
            sampling = SamplingParams(
                n=n, temperature=temperature, max_tokens=MOST_TOKENS, stop_token_ids=ENDS, seed=0
            )
            heard: list[DrawnSample] = []
            generator.ended = lambda sample, *_, heard=heard: heard.append(sample)
            drawn = generator.generate(prompts, sampling, "train", step=2)
            generator.ended = None
            generator.end_step()
            found[f"{name}, {kind}"] = _as_lists(drawn.rollout) | {
                "metrics": drawn.engine_metrics[0],
                "heard": [sample.row for sample in heard],
            }
            for sample in heard:
                if not sample.has_failed:
                    length = drawn.rollout.response_lengths[sample.row]
                    response = Response.of_sample(sample, prompts, sample.row // n)
                    assert response == Response.of_row(drawn.rollout, sample.row, length)
        if host is not None:
            assert not host._episodes
            host.close()
    found["function"] = _led_by_a_function(build(2), prompts, file)
    found["stopped"] = _stopped(build(1), tokenizer, programs[""].tools)
    found["partial"] = _partial_steps(
        [build(tp) for tp in LAYOUTS.values()], prompts.select(range(4))
    )
    splitting = [build(tp) for tp in LAYOUTS.values()]
    for generator, _ in splitting:
        replica = _replica(generator)
        forgets = TurnRenderer(make_tokenizer(FORGETS), programs[""].tools, ENDS)
        replica.environments = EnvironmentInputs(
            references, programs, {"": forgets}, limits, parse_some
        )
        replica.limits = replace(replica.limits, max_turns=2 * MOST_TURNS, on_rewrite="split")
    talkative = prompts_of(tokenizer, programs[""].tools, TALKATIVE)
    found["partial split"] = _partial_steps(splitting, talkative)
    return found


def _led_by_a_function(
    built: tuple[Generator, EnvironmentHost | None], prompts: Prompts, file: str
) -> dict[str, Any]:
    """What a function draws that does what the environment does, where that does not fail."""
    generator, host = built
    replica = _replica(generator)
    references = {"": EnvironmentReference(f"{file}:lead")}
    limits = ToolLimits(timeout_s=60.0, workers=2)

    if host is not None:
        host.close()
        replica.host = EnvironmentHost(references, limits)
    renderer = TurnRenderer(replica.tokenizer, (), ENDS)
    replica.environments = EnvironmentInputs(
        references, describe(references, limits), {"": renderer}, limits, parse
    )

    sampling = SamplingParams(
        n=1, temperature=0.0, max_tokens=MOST_TOKENS, stop_token_ids=ENDS, seed=0
    )
    alive = [row for row, uid in enumerate(UIDS) if uid not in FAILING]
    drawn = generator.generate(prompts.select(alive), sampling, "train", step=2)

    if replica.host is not None:
        replica.host.close()
    return _as_lists(drawn.rollout)


def _stopped(
    built: tuple[Generator, EnvironmentHost | None], tokenizer: Tokenizer, tools: Any
) -> tuple[str, list[int]]:
    """Why the ranks stop while one of them waits for its tools, and the samples that had ended."""
    generator, host = built
    stops = AgreedStop(dist.distributed_c10d._get_default_store().clone(), dist.get_rank(), 2)
    generator.phases.stops = stops
    replica = _replica(generator)
    replica.limits = replace(replica.limits, max_response_tokens=9)
    generator.sampler = EpisodeSampler(replica, is_stopping=lambda: stops.asked)
    asks = threading.Timer(2.0, stops.ask, ["the time is over"])

    generator.ended = lambda *_: asks.start()  # by then this rank waits for the other
    sampling = SamplingParams(n=1, temperature=0.0, max_tokens=9, stop_token_ids=ENDS, seed=0)
    reason = ""
    with Looking(stops, lambda: 0.01):
        try:
            generator.generate(prompts_of(tokenizer, tools, [4, SILENT]), sampling, "train", step=1)
        except Interrupted as interrupted:
            reason = str(interrupted)

    if host is not None:
        assert not host._episodes
        host.close()
    return reason, generator.drawn["train 1"].headers.rows.tolist()


def _partial_steps(
    built: list[tuple[Generator, EnvironmentHost | None]], prompts: Prompts
) -> list[dict[str, Any]]:
    """The batches of steps, and the same episodes drawn at once; the layout changes on the way."""
    uids = prompts.uid
    supply = _Supply(prompts)
    section = PartialSection(over=2.0, max_versions=3, turn_cost=4)
    most = _replica(built[0][0]).limits.max_turns
    samplers = [PartialSampler(generator, supply, 2, section, most) for generator, _ in built]
    sampling = SamplingParams(
        n=N, temperature=1.0, max_tokens=MOST_TOKENS, stop_token_ids=ENDS, seed=0
    )

    at_once: dict[int, Rollout] = {}  # by the version with which they begin
    steps = []
    for step in range(1, 8):
        generator, host = built[step > 3]
        generator.engine.commit(step - 1)  # the same weights, so that all can be drawn at once
        if step == 4:
            samplers[1].load_state_dict(
                saved(samplers[0].state_dict()),
                lambda some: prompts.select([uids.index(uid) for uid in some]),
            )
            if built[0][1] is not None:
                built[0][1].close()
        sampler = samplers[step > 3]
        since = {} if sampler._groups is None else _since(sampler)
        if step in (3, 6):  # interrupted after the drawing, which is done again without drawing
            before, place = sampler.state_dict(), supply.place
            sampler.draw(step, sampling)
            wanted = saved(sampler.state_dict())
            kept = saved(drawn_state(generator))
            generator.end_step()
            load_drawn_state(generator, kept)
            sampler.load_state_dict(
                saved(before), lambda some: prompts.select([uids.index(uid) for uid in some])
            )
            supply.place = place
        if step in (2, 3, 5):
            _replica(generator).end_waiting()  # as after a resume
        drawn = sampler.draw(step, sampling)
        if step in (3, 6):
            again = saved(sampler.state_dict())
            for key in ("rows", "lengths", "ended", "tokens"):
                assert torch.equal(again["samples"][key], wanted["samples"][key]), key
            assert again["uids"] == wanted["uids"] and again["last_limit"] == wanted["last_limit"]
        generator.end_step()
        open_episodes = host and len(host._episodes)
        whole = []
        for first in range(0, len(drawn.rollout), N):
            uid = drawn.rollout.prompts.uid[first]
            begun = since.get(uid, step - 1)
            if begun not in at_once:
                every = generator.generate(prompts, sampling, "train", step=begun + 1)
                at_once[begun] = every.rollout
                generator.end_step()
            place = N * uids.index(uid)
            whole.append(at_once[begun].select(range(place, place + N)))
        steps.append(
            {
                "partial": _as_lists(drawn.rollout),
                "whole": _as_lists(Rollout.join(whole)),
                "mixed": drawn.metrics["staleness/mixed"],
                "failed": drawn.engine_metrics[0]["episodes/failed"],
                "left": drawn.metrics["partial/open_groups"],  # of four, of which two are taken
                "open episodes": open_episodes,
            }
        )

    failing = itertools.repeat(prompts.select([uids.index(3)] * 2))
    sampler = PartialSampler(built[1][0], failing, 2, section, most)
    with pytest.raises(EnvironmentFault, match=r"every episode of the step failed.*nothing to say"):
        sampler.draw(8, sampling)

    built[1][0].end_step()
    if built[1][1] is not None:
        built[1][1].close()
    return steps


def _replica(generator: Generator) -> ReplicaEpisodes:
    assert isinstance(generator.sampler, EpisodeSampler)
    return generator.sampler.replica


class _Supply:
    """Two prompts at a time, from a place that can be set."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self.place = 0

    def __iter__(self) -> _Supply:
        return self

    def __next__(self) -> Prompts:
        size = len(self._prompts)
        first, self.place = self.place, self.place + 2
        return self._prompts.select([first % size, (first + 1) % size])


def _since(sampler: PartialSampler) -> dict[int, int]:
    """The version with which each prompt began."""
    groups = sampler._groups
    assert groups is not None
    return {uid: group.since for uid, group in zip(groups.prompts.uid, groups.begun, strict=False)}
