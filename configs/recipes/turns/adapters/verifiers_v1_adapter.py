"""Makes an environment of the library verifiers, version 0.4, a rollout function.

The library runs the episode: agents in their harnesses, tools, stop conditions and rewards. Its
harnesses ask a server of the library for each turn, and here the policy answers in the place of the
model behind it. A file of yours beside this one names the environment:

    import verifiers.v1 as vf
    from verifiers_v1_adapter import adapt, write_rows

    agent = {"harness": {"id": "verifiers_v1_adapter"}, "runtime": {"type": "subprocess"}}
    config = vf.resolve_env_config({"taskset": {"id": "gsm8k-v1"}, "agent": agent})
    environment = vf.load_environment(config)
    gsm8k = adapt(environment)

    if __name__ == "__main__":
        write_rows(environment.taskset, "runs/gsm8k/train.jsonl")

As a harness, this file is the library's `null`, without a process for each agent.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
import verifiers.v1.rollout as agent_runs
from chats import Chats, plain
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.interception import server
from verifiers.v1.mcp import serve_tools

__all__ = ["InProcess", "adapt", "write_rows"]

COLUMN = "verifiers"  # of a row of the data: the data of the library's task
# Stands for the policy. The library streams no turns of clients of this kind, but asks for them.
_POLICY = vf.TrainClientConfig(base_url="http://policy", api_key_var="NONE")
_NO_ROOM = "the maximum context length is reached"  # words by which harnesses know it
_PROGRAM: dict[str, Any] = {"__name__": "chat"}
exec(CHAT_PROGRAM_SOURCE, _PROGRAM)


def adapt(environment: vf.Env) -> Callable[..., Any]:
    """A function for `rollout.environment`."""

    async def rollout(engine: Any, row: dict[str, Any], sampling: Any) -> list[Any]:
        if COLUMN not in row:
            raise ValueError(f"the row has no column {COLUMN}; write the data with write_rows")
        taskset = environment.taskset
        kind = type(taskset).task_type()
        task = kind(kind.data_type().model_validate(row[COLUMN]), taskset.config.task)
        policy = _Policy(engine)
        # An episode has a process of its own, so these functions are nobody else's.
        server.resolve_client = lambda config: (
            policy if config == _POLICY else vf.resolve_client(config)
        )
        agent_runs.serve_tools = _serve_tools
        async with environment.serving():
            episode = await environment.run_episode(task, vf.ModelContext("policy", _POLICY))
        if not environment.complete(episode):
            errors = [*episode.errors, *(one for trace in episode.traces for one in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))

        traces = [trace for trace in episode.traces if trace.agent.trainable]
        is_alone = len(environment.config.agent_harnesses()) == len(episode.traces) == 1
        return [one for trace in traces for one in policy.rewarded(trace, is_alone)]

    return rollout


def write_rows(tasks: Iterable[vf.Task], path: str | Path) -> None:
    """Write tasks as data for `data.train_files`; `taskset.take(1000)` bounds an infinite one."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("w", encoding="utf-8") as file:
        for task in tasks:
            # The library makes the prompt of an episode; this one is shown beside it.
            prompt = task.data.prompt or task.data.name or "no prompt"
            shown = prompt if isinstance(prompt, str) else plain(prompt)
            line = {"prompt": shown, COLUMN: task.data.model_dump(mode="json")}
            file.write(json.dumps(line) + "\n")


class _Policy(vf.Client):
    """Stands where the library expects the client of a model."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._chats: dict[str | None, Chats] = {}  # by trace

    async def get_response(
        self, dialect: Any, body: Any, sampling: Any, session_id: str | None = None, **given: Any
    ) -> vf.Response:
        """What the library calls for a turn."""
        if not isinstance(dialect, ChatDialect):
            raise vf.ProviderError("only chat completions can be trained here", status_code=400)
        request = dialect.parse_request(body)
        chats = self._chats.setdefault(session_id, Chats(self._engine))
        try:
            said, reason = await chats.answer(request.messages, request.tools)
        except self._engine.NoRoom as error:
            raise vf.ProviderError(f"{_NO_ROOM}: {error}", status_code=400) from None
        except ValueError as error:
            raise vf.ProviderError(str(error), status_code=400) from None
        message = vf.AssistantMessage(**said)
        response = vf.Response(
            id=uuid.uuid4().hex, created=0, model="policy", message=message, finish_reason=reason
        )
        response.raw = serialize_completion(response, "policy")
        return response

    def rewarded(self, trace: vf.Trace, is_alone: bool) -> list[Any]:
        """The trajectories of a trace; none if another model has answered.

        One that is alone says all its rewards and metrics; others are compared by their agent.
        """
        if trace.id not in self._chats:
            return []
        trajectories = self._chats[trace.id].trajectories
        if is_alone:
            parts = {name: one.score for name, one in trace.rewards.items() if one is not None}
            metrics = {name: value for name, value in trace.metrics.items() if value is not None}
            trajectories[-1].reward = {**metrics, **parts, "score": trace.reward}
        else:
            for one in trajectories:
                one.role, one.reward = trace.agent.name, trace.reward
        return trajectories


@asynccontextmanager
async def _serve_tools(
    toolsets: list[Any], runtime: vf.Runtime, *shared: Any, **given: Any
) -> AsyncIterator[dict[str, str]]:
    """Serve the tools of a task from threads, if they need no other machine than the agent's.

    The library starts a process for each toolset, which takes seconds of a processor.
    """
    urls = {}
    others = []
    for toolset in toolsets:
        kinds = {runtime.type, toolset.config.runtime.type}
        if kinds != {"subprocess"} or toolset.config.url:
            others.append(toolset)
            continue
        channel = (f"{given['state_base']}/state", given["state_secret"], None)
        toolset._state_channel = lambda channel=channel: channel
        file = Path(runtime.workdir, f"port-{toolset.server_name}")
        os.environ["MCP_PORT_FILE"] = str(file)
        threading.Thread(target=toolset._serve, daemon=True).start()  # ends with this process
        while not file.exists() or not file.read_text():
            time.sleep(0.005)
        urls[toolset.server_name] = f"http://127.0.0.1:{file.read_text()}/mcp"
    async with serve_tools(others, runtime, *shared, **given) as further:
        yield {**urls, **further}


class InProcess(NullHarness):
    """The program of the harness `null`, run in this process."""

    async def setup(self, runtime: vf.Runtime) -> None:
        """Install nothing."""

    async def launch(
        self, ctx: vf.ModelContext, trace: vf.Trace, runtime: vf.Runtime, *given: Any, **named: Any
    ) -> vf.ProgramResult:
        """What the library calls for a segment."""

        async def prepare(*_: Any, **__: Any) -> list[str]:
            return ["chat"]

        async def run(argv: list[str], env: dict[str, str]) -> vf.ProgramResult:
            file = "--initial-messages-file="  # is relative to the directory of the runtime
            sys.argv = [one.replace(file, f"{file}{runtime.workdir}/") for one in argv]
            try:
                await _PROGRAM["main"]()
            except Exception as error:
                return vf.ProgramResult(1, "", f"{type(error).__name__}: {error}")
            return vf.ProgramResult(0, "", "")

        inside: Any = copy.copy(runtime)
        inside.prepare_uv_script, inside.run_program = prepare, run
        return await super().launch(ctx, trace, inside, *given, **named)
