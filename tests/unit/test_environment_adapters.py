"""Environments of other libraries in episodes: verifiers where it is installed, and servers that
follow the protocol of NeMo-Gym.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mrlhf.environments.host import EnvironmentHost, ToolLimits, describe
from mrlhf.environments.interface import EnvironmentReference, Outcome, Program, ToolCall
from mrlhf.errors import EnvironmentFault
from tests.pages import ROOT

ADAPTERS = ROOT / "configs/recipes/turns/adapters"
Turn = str | list[ToolCall]


class Folder:
    """A user's folder: the adapters, and a file with environments beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for file in ADAPTERS.glob("*.py"):
            shutil.copy(file, path)

    def write(self, text: str) -> None:
        (self.path / "mine.py").write_text(text)

    def reference(self, name: str) -> dict[str, EnvironmentReference]:
        return {"e": EnvironmentReference(f"{self.path}/mine.py:{name}")}

    def program(self, name: str) -> Program:
        return describe(self.reference(name), ToolLimits())["e"]

    def refusal(self, name: str) -> str:
        with pytest.raises(EnvironmentFault) as caught:
            self.program(name)
        return str(caught.value)

    def play(self, name: str, row: dict[str, Any], turns: list[Turn]) -> list[Outcome]:
        """The outcomes of reset, of each turn that was reached, and of the reward."""
        host = EnvironmentHost(self.reference(name), ToolLimits(timeout_s=60.0))
        try:
            host.begin(0, "e", {"uid": 7, "data_source": "mine", "answer": None, **row}, seed=1)
            outcomes = [_outcome(host)]
            for turn in turns:
                if outcomes[-1].failure or outcomes[-1].ended:
                    break
                calls = [] if isinstance(turn, str) else turn
                host.turn(0, turn if isinstance(turn, str) else "", calls)
                outcomes.append(_outcome(host))
            if not outcomes[-1].failure:
                host.ask_reward(0)
                outcomes.append(_outcome(host))
            return outcomes
        finally:
            host.close()


def _outcome(host: EnvironmentHost) -> Outcome:
    outcomes: list[Outcome] = []
    while not outcomes:
        outcomes = host.poll(10.0)
    (outcome,) = outcomes
    return outcome


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


# ---- NeMo-Gym

Answer = tuple[int, Any]
Handler = Callable[[str, str, Any], Answer]  # of session, path and body


@pytest.fixture
def serve() -> Iterator[Callable[[Handler], str]]:
    """Starts servers that tell sessions apart by a cookie, as those of NeMo-Gym do."""
    servers = []
    sessions = count()

    def start(handler: Handler) -> str:
        class Requests(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                cookie = self.headers.get("Cookie") or f"session=s{next(sessions)}"
                status, answer = handler(cookie, self.path, body)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Set-Cookie", f"{cookie}; Path=/")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


INCREMENT = {
    "type": "function",
    "name": "increment",
    "description": "Add to the counter.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {
            "by": {"type": "integer", "description": "how much"},
            "kind": {"anyOf": [{"enum": ["up", "down"], "type": "string"}, {"type": "null"}]},
        },
        "required": ["by"],
    },
}
PARAMS = {
    "input": [
        {"role": "developer", "content": "Count."},
        {"role": "user", "content": [{"type": "input_text", "text": "Add 2 to 3."}]},
    ],
    "tools": [INCREMENT],
}
ROW = {"responses_create_params": PARAMS, "initial_count": 3, "expected_count": 5}


class Counters:
    """A resources server with a counter for each session, which records what it is asked."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.asked: list[tuple[str, Any]] = []
        self.further: dict[str, Any] = {"steps": 1, "judge": "none", "passed": True}

    def __call__(self, session: str, path: str, body: Any) -> Answer:
        self.asked.append((path, body))
        if path == "/seed_session":
            self.counts[session] = body["initial_count"]
            return 200, {}
        if path == "/increment":
            if body["by"] > 100:
                return 422, {"detail": "too much"}
            self.counts[session] += body["by"]
            return 200, {"count": self.counts[session]}
        if path == "/verify":
            reward = float(self.counts[session] == body["expected_count"])
            return 200, {**body, "reward": reward, **self.further}
        return 404, {"detail": "Not Found"}


def nemo(url: str, *rows: dict[str, Any], folder: Folder, arguments: str = "") -> dict[str, Any]:
    """Write a user's file and data; the first row for the trainer."""
    data = folder.path / "gym.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.write(
        "from nemo_gym_adapter import adapt, write_rows\n"
        f"Mine = adapt({url!r}, {str(data)!r}{arguments})\n"
        f"write_rows({str(data)!r}, {str(folder.path / 'out/train.jsonl')!r})\n"
    )
    folder.program("Mine")
    return json.loads((folder.path / "out/train.jsonl").read_text().splitlines()[0])


def test_a_server_of_tools_has_a_session_of_each_episode_and_verifies_its_response(folder, serve):
    server = Counters()
    row = nemo(serve(server), ROW, folder=folder)
    assert row["prompt"] == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "Add 2 to 3."},
    ]
    (tool,) = folder.program("Mine").tools
    assert tool["function"]["description"] == "Add to the counter."
    parameters = tool["function"]["parameters"]
    assert parameters["required"] == ["by"]
    assert parameters["properties"] == INCREMENT["parameters"]["properties"]

    calls = [ToolCall("increment", {"by": 101}), ToolCall("increment", {"by": 2, "kind": "up"})]
    begun, called, said, paid = folder.play("Mine", row, [calls, "It is 5."])
    assert (begun.failure, begun.observation) == (None, None)
    assert [result.content for result in called.results] == ['{"detail": "too much"}', '{"count": 5}']
    assert said.ended
    assert paid.reward == {"score": 1.0, "steps": 1.0, "passed": 1.0}

    asked = [(path, body) for path, body in server.asked if path != "/verify"]
    assert asked == [
        ("/seed_session", ROW),
        ("/increment", {"by": 101}),
        ("/increment", {"by": 2, "kind": "up"}),
    ]
    path, body = server.asked[-1]
    assert path == "/verify" and {key: body[key] for key in ROW} == ROW
    response = body["response"]
    assert response["object"] == "response" and response["tools"] == [INCREMENT]
    first, told, second, told_too, message = response["output"]
    assert [first["type"], told["type"]] == ["function_call", "function_call_output"]
    assert (first["name"], json.loads(first["arguments"])) == ("increment", {"by": 101})
    assert first["call_id"] == told["call_id"] != second["call_id"] == told_too["call_id"]
    assert told_too["output"] == '{"count": 5}'
    assert message["role"] == "assistant" and message["content"][0]["text"] == "It is 5."

    # Another episode has another session, and is verified without a last turn too.
    outcomes = folder.play("Mine", row, [[ToolCall("increment", {"by": 1})]])
    assert outcomes[1].results[0].content == '{"count": 4}'
    assert outcomes[-1].reward == {"score": 0.0, "steps": 1.0, "passed": 1.0}
    assert len(server.counts) == 2


def test_what_a_server_cannot_score_fails_the_episode(folder, serve):
    server = Counters()
    row = nemo(serve(server), ROW, folder=folder)
    server.further = {"mask_sample": True, "failure_reason": "the judge is away"}
    assert "the judge is away" in str(folder.play("Mine", row, ["5"])[-1].failure)

    (begun,) = folder.play("Mine", {"prompt": "?"}, ["5"])
    assert "column nemo_gym" in str(begun.failure) and "write_rows" in str(begun.failure)

    def offers_mcp(session: str, path: str, body: Any) -> Answer:
        return 200, {"mcp": {"url_path": "/mcp"}}

    bare = {"responses_create_params": {"input": "Hello"}}
    row = nemo(serve(offers_mcp), bare, folder=folder)
    assert row["prompt"] == [{"role": "user", "content": "Hello"}]
    assert "MCP alone" in str(folder.play("Mine", row, [])[0].failure)

    row = nemo("http://127.0.0.1:9", bare, folder=folder)
    assert "no server answers at http://127.0.0.1:9" in str(folder.play("Mine", row, [])[0].failure)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"input": "1", "tools": []}, "row 2 of"),
        ({"input": [{"type": "function_call", "name": "x"}], "tools": [INCREMENT]}, "of text"),
        (
            {
                "input": [{"role": "user", "content": [{"type": "input_image"}]}],
                "tools": [INCREMENT],
            },
            "only messages of text",
        ),
    ],
)
def test_rows_of_a_server_that_cannot_train_are_refused(folder, second, words):
    with pytest.raises(EnvironmentFault, match=words):
        nemo("http://127.0.0.1:9", ROW, {"responses_create_params": second}, folder=folder)


def test_a_tool_that_the_policy_cannot_be_shown_is_refused(folder):
    for tool, words in (
        ({"type": "web_search"}, "web_search"),
        ({**INCREMENT, "name": "reset"}, "'reset'"),
        ({**INCREMENT, "parameters": {"$defs": {}, "properties": {}}}, r"\$defs"),
    ):
        row = {"responses_create_params": {"input": "1", "tools": [tool]}}
        with pytest.raises(EnvironmentFault, match=words):
            nemo("http://127.0.0.1:9", row, folder=folder)


class Steps:
    """A server in the style of Gymnasium, which counts down with each step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}

    def __call__(self, session: str, path: str, body: Any) -> Answer:
        if path == "/reset":
            self.left[session] = body["steps"]
            return 200, {"observation": f"{body['steps']} left", "info": {}}
        if path != "/step":
            return 404, {"detail": "Not Found"}
        (item,) = body["response"]["output"]
        self.left[session] -= 1
        left = self.left[session]
        answer = {"reward": 0.25, "terminated": left == 0, "truncated": False, "info": {}}
        if item["type"] == "function_call":
            answer["info"] = {"tool_outputs": [{"call_id": item["call_id"], "output": "counted"}]}
            return 200, answer
        return 200, {**answer, "observation": f"{item['content'][0]['text']}: {left} left"}


def test_a_server_in_the_style_of_gymnasium_pays_each_turn(folder, serve):
    row = {"responses_create_params": PARAMS, "steps": 4}
    url = serve(Steps())
    row = nemo(url, row, folder=folder, arguments=", gymnasium=True")
    call = ToolCall("increment", {"by": 1})
    begun, said, called, ended, paid = folder.play("Mine", row, ["a", [call, call], "b", "c"])
    assert begun.observation == "4 left"
    assert (said.observation, said.turn_reward) == ("a: 3 left", 0.25)
    assert [result.content for result in called.results] == ["counted"] * 2
    assert called.turn_reward == 0.5 and not called.ended
    assert (ended.ended, ended.turn_reward, paid.reward) == (True, 0.25, 0.0)

    row = nemo(url, row["nemo_gym"], folder=folder)
    failure = str(folder.play("Mine", row, [])[0].failure)
    assert "status 404" in failure and "gymnasium=True" in failure


# ---- verifiers

CLASSIC = """
import verifiers as vf
from datasets import Dataset
from verifiers_adapter import adapt, write_rows

ROWS = [{"question": "What is 3 plus 2?", "answer": "5", "info": {"parts": [3, 2]}}]


def right(completion, answer, info, **_):
    assert info == {"parts": [3, 2]}
    return float(bool(completion) and completion[-1]["content"] == answer)


def length(completion):
    return len(completion)


def add(a: int, b: int = 2) -> int:
    '''Add two numbers.

    Args:
        a: the first
    '''
    if a > 100:
        raise ValueError("too large")
    return a + b


class Asking(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["asked"] = 0
        state["prompt"] = [*state["prompt"], {"role": "user", "content": "Ready?"}]
        return state

    @vf.stop
    async def has_asked_twice(self, state):
        return state["asked"] == 2

    async def env_response(self, messages, state, **_):
        state["asked"] += 1
        return [{"role": "user", "content": f"Sure? {messages[-1]['content']}"}]


class Forgetting(Asking):
    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages[-1:] if state["trajectory"] else messages


class Failing(Asking):
    async def env_response(self, messages, state, **_):
        raise vf.ToolError("the sandbox is gone")


def made(kind, function=right, **further):
    rubric = vf.Rubric(funcs=[function, length], weights=[0.5, 0.0])
    return kind(dataset=Dataset.from_list(ROWS), rubric=rubric, **further)


def together(completions):
    return [0.0 for _ in completions]


tools = made(vf.ToolEnv, tools=[add], max_turns=3, system_prompt="Calculate.", timeout_seconds=0.01)
Tools = adapt(tools)
Single = adapt(made(vf.SingleTurnEnv))
Several = adapt(made(Asking))
Rewriting = adapt(made(Forgetting))
Broken = adapt(made(Failing))
write_rows(tools.get_dataset(), "FOLDER/rows.jsonl")
write_rows(made(Asking).get_dataset(), "FOLDER/plain.jsonl")
"""
COMPARING = CLASSIC + "\nComparing = adapt(made(Asking, together))\n"
GROUP = CLASSIC + '\nGroup = adapt(vf.EnvGroup([tools], env_names=["sums"]))\n'
COMPLETING = CLASSIC + '\nwrite_rows([{"prompt": "3+2="}], "FOLDER/text.jsonl")\n'


def verifiers(folder: Folder, text: str, at_least: tuple[int, ...], below: tuple[int, ...]) -> None:
    """Write a user's file; skip the test where no such version of the library is installed."""
    version = pytest.importorskip("verifiers").__version__
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not at_least <= numbers < below:
        pytest.skip(f"verifiers {version} is another library")
    folder.write(text.replace("FOLDER", str(folder.path)))


def rows_of(folder: Folder, name: str) -> dict[str, Any]:
    return json.loads((folder.path / f"{name}.jsonl").read_text().splitlines()[0])


def test_the_loop_of_verifiers_leads_tools_turns_and_scores(folder):
    verifiers(folder, CLASSIC, (0, 1), (0, 4))
    (tool,) = folder.program("Tools").tools
    assert tool["function"]["name"] == "add"
    assert tool["function"]["description"] == "Add two numbers."
    assert tool["function"]["parameters"]["required"] == ["a"]
    properties = tool["function"]["parameters"]["properties"]
    assert properties["a"] == {"type": "integer", "description": "the first"}
    assert properties["b"] == {"type": "integer", "default": 2}

    row = rows_of(folder, "rows")
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    turns: list[Turn] = [[ToolCall("add", {"a": 3})], "5"]
    begun, called, said, paid = folder.play("Tools", row, turns)
    assert (begun.failure, begun.observation) == (None, None)
    assert called.results[0].content == "5" and not called.ended
    assert said.ended
    assert paid.reward is not None
    expected = {"right": 1.0, "length": 3.0, "num_turns": 2.0, "add_calls": 1.0, "score": 0.5}
    assert {key: paid.reward[key] for key in expected} == expected

    # Each call is a turn of the library, of which there may be three.
    calls = [ToolCall("add", {"a": a}) for a in (101, 3, 4, 5)]
    outcomes = folder.play("Tools", row, [calls])
    told = [result.content for result in outcomes[1].results]
    assert told == ["too large", "5", "", "The episode is over."]
    assert outcomes[1].ended and outcomes[2].reward["num_turns"] == 3.0

    begun, said, paid = folder.play("Single", rows_of(folder, "plain"), ["5"])
    assert said.ended and paid.reward["score"] == 0.5


def test_an_environment_of_verifiers_speaks_first_and_between_turns(folder):
    verifiers(folder, CLASSIC, (0, 1), (0, 4))
    row = rows_of(folder, "plain")
    begun, first, second, third, paid = folder.play("Several", row, ["5", "6", "5"])
    assert begun.observation == [{"role": "user", "content": "Ready?"}]
    assert first.observation == [{"role": "user", "content": "Sure? 5"}]
    assert second.observation == [{"role": "user", "content": "Sure? 6"}]
    assert third.ended and paid.reward["score"] == 0.5 and paid.reward["length"] == 5.0

    # The trainer has no room for the answer to the first question.
    outcomes = folder.play("Several", row, ["5"])
    assert outcomes[-1].reward["length"] == 1.0 and outcomes[-1].reward["score"] == 0.5


def test_what_verifiers_cannot_be_trained_on_is_refused_in_a_line(folder):
    verifiers(folder, CLASSIC, (0, 1), (0, 4))
    folder.program("Tools")
    row = rows_of(folder, "plain")
    assert "rewrites earlier messages" in str(folder.play("Rewriting", row, ["5"])[1].failure)
    assert "the sandbox is gone" in str(folder.play("Broken", row, ["5", "5"])[-1].failure)
    assert "column verifiers" in str(folder.play("Single", {"prompt": "?"}, [])[0].failure)
    tools = [{"name": "cut", "description": "", "parameters": {}}]
    info = {"parts": [3, 2], "tool_defs": tools}
    other = {**row, "verifiers": {**row["verifiers"], "info": info}}
    assert "other tools" in str(folder.play("Single", other, [])[0].failure)

    for text, name, words in (
        (COMPARING, "Comparing", "compares the rollouts"),
        (GROUP, "Group", "EnvGroup is no MultiTurnEnv"),
        (COMPLETING, "Tools", "to be completed"),
    ):
        folder.write(text.replace("FOLDER", str(folder.path)))
        assert words in folder.refusal(name)


NEWER = """
import verifiers.v1 as vf
from verifiers_v1_adapter import adapt, write_rows


def load(taskset, **further):
    return vf.load_environment(vf.resolve_env_config({"taskset": {"id": taskset}, **further}))


sums = load("sums_tasks", agent={"max_turns": 3})
talk = load("talk_tasks")
Sums = adapt(sums)
Talk = adapt(talk)
write_rows(sums.taskset, "FOLDER/sums.jsonl")
write_rows(talk.taskset.take(1), "FOLDER/talk.jsonl")
"""
SUMS_TASKS = '''
import verifiers.v1 as vf

__all__ = ["Sums"]


class Sum(vf.TaskData):
    answer: str


class Calls(vf.State):
    calls: int = 0


class Calculator(vf.Toolset[vf.ToolsetConfig, Calls]):
    @vf.tool
    def add(self, a: int, b: int = 2) -> str:
        """Add two numbers."""
        self.state.calls += 1
        if a > 100:
            raise ValueError("too large")
        return str(a + b)


class SumTask(vf.Task[Sum, Calls, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def calls(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        printed = await runtime.run(["echo", str(trace.state.calls)], {})
        return float(printed.stdout)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        task = Sum(prompt="What is 3 plus 2?", system_prompt="Calculate.", answer="5")
        yield SumTask(task, self.config.task)
'''
TALK_TASKS = """
import itertools

import verifiers.v1 as vf

__all__ = ["Talk", "TalkEnv"]


class TalkTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.stop
    async def says_bye(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "bye"


class TalkConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class TalkEnv(vf.Env[TalkConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                segment = await interaction.turn(f"You say {segment.last_reply}?")
        interaction.trace.record_reward("turns", interaction.trace.num_turns)


class Talk(vf.Taskset[TalkTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield TalkTask(vf.TaskData(prompt=f"Hello {number}"), self.config.task)
"""
TWO_AGENTS = NEWER + '\nTwo = adapt(load("talk_tasks", id="user-sim"))\n'
CONTAINER = NEWER + "\nsums.taskset.task_type().NEEDS_CONTAINER = True\nBox = adapt(sums)\n"


def newer(folder: Folder, text: str) -> None:
    verifiers(folder, text, (0, 4), (0, 5))
    (folder.path / "sums_tasks.py").write_text(SUMS_TASKS)
    (folder.path / "talk_tasks.py").write_text(TALK_TASKS)


def test_the_policy_plays_the_agent_of_the_newer_verifiers(folder):
    newer(folder, NEWER)
    (tool,) = folder.program("Sums").tools
    assert tool["function"]["name"] == "calculator_add"
    assert tool["function"]["parameters"]["required"] == ["a"]
    row = rows_of(folder, "sums")
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    turns: list[Turn] = [[ToolCall("calculator_add", {"a": 3})], "5"]
    begun, called, said, paid = folder.play("Sums", row, turns)
    assert (begun.failure, begun.observation) == (None, None)
    assert called.results[0].content == "5" and not called.ended
    assert said.ended and paid.reward == {"calls": 1.0, "right": 1.0, "score": 0.5}

    calls = [ToolCall("calculator_add", {"a": a}) for a in (101, 3, 4, 5)]
    outcomes = folder.play("Sums", row, [calls])
    told = [result.content for result in outcomes[1].results]
    assert "too large" in told[0] and told[1] == "5" and told[3] == "The episode is over."
    assert outcomes[1].ended and outcomes[2].reward == {"calls": 3.0, "right": 0.0, "score": 0.0}

    row = rows_of(folder, "talk")
    begun, first, second, paid = folder.play("Talk", row, ["hi", "bye", "hi"])
    assert first.observation == [{"role": "user", "content": "You say hi?"}]
    assert second.ended and paid.reward == {"turns": 2.0, "score": 2.0}
    assert folder.play("Talk", row, ["hi"])[-1].reward == {"turns": 1.0, "score": 1.0}


def test_what_the_newer_verifiers_cannot_be_trained_on_is_refused_in_a_line(folder):
    newer(folder, TWO_AGENTS)
    assert "one policy can play one" in folder.refusal("Two")
    newer(folder, CONTAINER)
    assert "needs a container" in folder.refusal("Box")
