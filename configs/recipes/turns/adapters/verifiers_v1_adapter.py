"""Makes an environment of the library verifiers, version 0.4, one for `rollout.environment`.

Since version 0.4 an environment of the library lets agents run in a harness. Here the trainer is
its one agent, without a harness: prompts, tools, stop conditions, rewards and what the environment
says between turns are the library's; tools run in the process of the episode. A file of yours
beside this one names the environment:

    import verifiers.v1 as vf
    from verifiers_v1_adapter import adapt, write_rows

    environment = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "gsm8k-v1"}}))
    Gsm8k = adapt(environment)

    if __name__ == "__main__":
        write_rows(environment.taskset, "runs/gsm8k/train.jsonl")
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from tool_methods import tool_method
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.graph import prepare_turn
from verifiers.v1.runtimes import provision_runtime
from verifiers.v1.session import RolloutLimits, call_hook, hook_boundary
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import discover_decorated, invoke

COLUMN = "verifiers"  # of a row of the data: the data of the library's task
Message = dict[str, str]


def adapt(environment: vf.Env) -> type:
    """A class for `rollout.environment`; ValueError if the environment cannot be one."""
    agents = list(agent_config_fields(environment.config))
    if len(agents) != 1:
        raise ValueError(f"it has the agents {', '.join(agents)}; one policy can play one alone")
    taskset = environment.taskset
    task = type(taskset).task_type()
    if task.NEEDS_CONTAINER:
        raise ValueError(f"{task.__name__} needs a container; only tasks without one can run here")
    toolsets = [*taskset.toolsets(taskset.config), *task.toolsets(taskset.config.task)]
    members: dict[str, Any] = {"_env": environment, "_toolsets": toolsets, "_tools": {}}
    for toolset in toolsets:
        server = MCPServer(toolset.server_name or "tools")
        toolset.register(server)
        for tool in asyncio.run(server.list_tools()):
            name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
            members["_tools"][name] = (server, tool.name)
            about = tool.description or ""
            members[name] = tool_method(name, about, tool.input_schema, _VerifiersEpisode._run)
    return type(type(taskset).__name__, (_VerifiersEpisode,), members)


def write_rows(tasks: Iterable[vf.Task], path: str | Path) -> None:
    """Write tasks as data for `data.train_files`; `taskset.take(1000)` bounds an infinite one."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("w", encoding="utf-8") as file:
        for task in tasks:
            line = {"prompt": _plain(_prompt(task)), COLUMN: task.data.model_dump(mode="json")}
            file.write(json.dumps(line) + "\n")


class _VerifiersEpisode:
    """An episode of the library, from one question for a turn to the next."""

    _env: vf.Env
    _toolsets: list[vf.Toolset]
    _tools: dict[str, tuple[MCPServer, str]]  # the server of a tool, and its name there

    def reset(self, row: dict[str, Any]) -> list[Message] | None:
        """Begin the episode; what the environment adds to the prompt is its first word."""
        if COLUMN not in row:
            raise ValueError(f"the row has no column {COLUMN}; write the data with write_rows")
        taskset = self._env.taskset
        kind = type(taskset).task_type()
        task = kind(kind.data_type().model_validate(row[COLUMN]), taskset.config.task)
        self._known = len(_prompt(task))  # messages that the policy has seen
        self._loop = asyncio.new_event_loop()
        self._asked: asyncio.Future[vf.Messages] = self._loop.create_future()
        self._episode = self._loop.create_task(self._play(task))
        return self._go_on() or None

    def reply(self, text: str) -> list[Message] | None:
        """Give the library a turn without calls; None once the episode has ended."""
        told = self._say(vf.AssistantMessage(content=text))
        if not self.done and not told:
            raise ValueError("the environment goes on after a turn, but says nothing to go on with")
        return None if self.done else told

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""
        return self._episode.done()

    def reward(self) -> dict[str, float]:
        """The sum of the library's rewards; each of them and its metrics stand beside."""
        if not self.done:
            self._answer.set_result(None)  # the episode has no room for another turn
            self._go_on()
        trace = self._episode.result()
        parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {**metrics, **parts, "score": trace.reward}

    def _run(self, name: str, arguments: dict[str, Any]) -> str:
        """Give the library a turn with one call, and return what its tool says."""
        if self.done:
            return "The episode is over."
        call = vf.ToolCall(id=uuid.uuid4().hex, name=name, arguments=json.dumps(arguments))
        told = self._say(vf.AssistantMessage(content="", tool_calls=[call]))
        return "\n\n".join(message["content"] for message in told)

    def _say(self, message: vf.AssistantMessage) -> list[Message]:
        self._known += 1
        self._answer.set_result(message)
        return self._go_on()

    def _go_on(self) -> list[Message]:
        """Run the library until it asks for a turn or ends; the messages that are new since."""
        self._asked = self._loop.create_future()
        self._answer: asyncio.Future[vf.AssistantMessage | None] = self._loop.create_future()
        waiting = asyncio.wait({self._episode, self._asked}, return_when=asyncio.FIRST_COMPLETED)
        self._loop.run_until_complete(waiting)
        if self.done:
            self._episode.result()  # raises what the library has raised
            return []
        messages = self._asked.result()
        new = _plain(messages[self._known :])
        self._known = len(messages)
        return new

    async def _play(self, task: vf.Task) -> vf.Trace:
        """One episode as `Env.run_episode` leads it, with this policy as the agent."""
        (name,) = agent_config_fields(self._env.config)
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode = vf.Episode(env=vf.EnvInfo(id=self._env.config.env_id), task=about)
        agents: Any = SimpleNamespace(**{name: _Agent(self, name, episode)})
        await self._env.start()
        try:
            await self._env.setup(agents)
            await self._env.run(task, agents)
            if len(episode.traces) != 1:
                raise ValueError(f"it ran its agent {len(episode.traces)} times; one can train")
            await self._env.finalize(task, episode)
        finally:
            await self._env.stop()
        return episode.traces[0]

    async def _ask(self, messages: vf.Messages) -> vf.AssistantMessage | None:
        """The next turn of the policy; None if there is no room for it."""
        self._asked.set_result(messages)
        return await self._answer


class _Agent:
    """Stands where an environment of the library expects its agent."""

    def __init__(self, owner: _VerifiersEpisode, name: str, episode: vf.Episode) -> None:
        self.owner = owner
        self.name = name
        self.episode = episode
        self.config = agent_config_fields(owner._env.config)[name]
        self.trainable = True

    async def run(self, task: vf.Task) -> vf.Trace:
        """Let the policy have its turns until one has no calls."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: vf.Task) -> AsyncIterator[_Interaction]:
        """Prepare the task, and score what has been said."""
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        info = vf.AgentInfo(config=self.config, name=self.name)
        trace = vf.Trace(task=about, agent=info, state=state_cls(type(task))())
        at_hand = {"trace": trace}
        async with provision_runtime(vf.SubprocessConfig(), env=task.runtime_env()) as runtime:
            at_hand["runtime"] = runtime
            await invoke(task.setup, at_hand)
            for toolset in self.owner._toolsets:
                await toolset.setup()
                await toolset.setup_task(task.data)
                toolset._pull_state = lambda: _value(trace.state)  # it is in the same process
            yield _Interaction(self, task, trace)
            trace.stop("agent_completed")
            await invoke(task.finalize, at_hand)
            await task.score(trace, runtime)
        trace.ok = True
        self.episode.traces.append(trace)


class _Interaction:
    """The turns of one agent, which an environment may speak between."""

    def __init__(self, agent: _Agent, task: vf.Task, trace: vf.Trace) -> None:
        if discover_decorated(task, "intercept"):
            raise ValueError(f"{type(task).__name__} rewrites messages; what was said must train")
        self.trace = trace
        self._owner = agent.owner
        self._messages = _prompt(task)
        self._limits = RolloutLimits(max_turns=agent.config.max_turns)
        self._stops = task.hooks("stop")
        if any(hook_boundary(stop, allow_trace=True) is not vf.Trace for stop in self._stops):
            raise ValueError(f"{type(task).__name__} stops within a turn; use @stop of a Trace")

    async def turn(self, message: str | vf.Messages | None = None) -> vf.Segment:
        """Turns of the policy until one has no calls."""
        if isinstance(message, str):
            message = [vf.UserMessage(content=message)]
        self._messages = [*self._messages, *(message or [])]
        begin = len(self._messages)
        while True:
            said = None if await self._is_over() else await self._owner._ask(self._messages)
            if said is None:
                self.trace.stop("max_output_tokens")  # unless something else has stopped it
                return vf.Segment(messages=[], terminated=True)
            reason = "tool_calls" if said.tool_calls else "stop"
            response = vf.Response(
                id=uuid.uuid4().hex, created=0, model="policy", message=said, finish_reason=reason
            )
            prepare_turn(self.trace, self._messages).commit(response)
            self._messages = [*self._messages, said]
            if not said.tool_calls:
                return vf.Segment(messages=self._messages[begin:])
            for call in said.tool_calls:
                self._messages.append(await self._result(call))

    async def _is_over(self) -> bool:
        """Whether a limit or a stop condition ends the episode before its next turn."""
        reached = self._limits.reached(self.trace)
        for stop in self._stops:
            if reached is None and await call_hook(stop, {vf.Trace: self.trace}):
                reached = stop.__name__
        if reached is not None:
            self.trace.stop(reached)
        return reached is not None

    async def _result(self, call: vf.ToolCall) -> vf.ToolMessage:
        server, name = self._owner._tools[call.name]
        try:
            told = await server.call_tool(name, json.loads(call.arguments))
            content = "\n".join(part.text for part in getattr(told, "content", told))
        except Exception as error:  # is told to the policy, as the library's harness does
            content = str(error)
        return vf.ToolMessage(tool_call_id=call.id, content=content, name=call.name)


async def _value(state: vf.State) -> vf.State:
    return state


def _prompt(task: vf.Task) -> vf.Messages:
    """The messages with which a task begins."""
    if task.data.prompt is None:
        raise ValueError("a task has no prompt, so there is nothing to begin with")
    prompt = task.data.prompt
    messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
    system = task.data.system_prompt
    return messages if system is None else [vf.SystemMessage(content=system), *messages]


def _plain(messages: vf.Messages) -> list[Message]:
    """Messages as chat messages of text; ValueError if they are more than text."""
    if any(not isinstance(message.content or "", str) for message in messages):
        raise ValueError("a message has parts, such as images; only text can be trained here")
    return [{"role": message.role, "content": message.content or ""} for message in messages]
