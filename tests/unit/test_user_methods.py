"""A policy loss and an advantage estimator from a user's file: what they get, what is refused."""

import re
import sys

import pytest
import torch

from mrlhf.config.methods import find_method
from mrlhf.errors import ConfigError, MethodError, UserTraceback
from mrlhf.preflight import dry_run
from mrlhf.rl.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageInputs,
    AdvantageOptions,
    estimate_advantages,
)
from mrlhf.rl.policy_losses import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossOptions,
    policy_loss,
    surrogate,
)
from tests.unit.configurations import ppo

LOSS = "actor.policy_loss.loss_mode"
ESTIMATOR = "algorithm.adv_estimator"
FILE = """
import neighbour_of_methods
from mrlhf.rl.policy_losses import make_policy_loss, vanilla

imports = []
imports.append(neighbour_of_methods.NUMBER)

def doubled(inputs, options):
    return make_policy_loss(inputs, -2 * inputs.advantages * inputs.log_ratio.exp())

def score_per_token(batch, numbers):
    advantages = numbers.gamma * batch.rewards.cumsum(1)
    return advantages, advantages + 1

def tensor(inputs, options):
    return inputs.advantages

def misshapen(inputs, options):
    return make_policy_loss(inputs, inputs.advantages.sum())

def one_tensor(inputs, options):
    return inputs.rewards

def of_one(inputs):
    return inputs

def fails_in_torch(inputs, options):
    import torch
    return torch.vmap(lambda row: row.no_such_thing)(inputs.mask)

def fails_of_a_cause(inputs, options):
    try:
        vanilla(None, options)
    except AttributeError as error:
        raise ValueError("two\\nlines") from error

def leaves(inputs, options):
    raise SystemExit(3)
"""
# Each function that raises, what is said of it, and the functions that its traceback names.
FAILING = [
    (
        "fails_in_torch",
        "AttributeError: 'Tensor' object has no attribute 'no_such_thing'",
        ["fails_in_torch", "<lambda>"],
    ),
    ("fails_of_a_cause", "ValueError: two lines", ["fails_of_a_cause", "fails_of_a_cause"]),
    ("leaves", "SystemExit: 3", ["leaves"]),
]
STOPS = """
class Stop(BaseException):
    def __str__(self):
        return {}["text"]

raise Stop
"""
KINDS = """
import functools

f = max

async def later(inputs, options):
    return inputs

def pieces(inputs, options):
    yield inputs

async def stream(inputs, options):
    yield inputs

bound = functools.partial(later, options=None)

class Pieces:
    def __call__(self, inputs, options):
        yield inputs

of_class = Pieces()
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "neighbour_of_methods.py").write_text("NUMBER = 7\n")
    path = tmp_path / "methods_of_mine.py"
    path.write_text(FILE)
    yield path
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]
    sys.modules.pop("neighbour_of_methods", None)


def inputs_of_two_tokens():
    return PolicyLossInputs(
        logprob=torch.tensor([[-1.0, torch.nan]]),
        old_logprob=torch.tensor([[-1.5, 0.0]]),
        advantages=torch.tensor([[2.0, 5.0]]),
        mask=torch.tensor([[True, False]]),
    )


def batch_of_two_tokens():
    return AdvantageInputs(
        rewards=torch.tensor([[1.0, 2.0]]),
        mask=torch.tensor([[True, False]]),
        prompt_groups=torch.tensor([0]),
    )


def test_our_own_names_come_first():
    assert find_method(LOSS, "surrogate", POLICY_LOSSES) is surrogate


def test_a_file_is_imported_once(file):
    first = find_method(LOSS, f"{file}:doubled", POLICY_LOSSES)
    again = find_method(ESTIMATOR, f"{file}:doubled", {})
    assert first.__wrapped__ is again.__wrapped__
    assert first.__wrapped__.__globals__["imports"] == [7]


def test_a_users_loss_is_given_clean_inputs(file):
    function = find_method(LOSS, f"{file}:doubled", POLICY_LOSSES)
    result = policy_loss(function, inputs_of_two_tokens(), PolicyLossOptions())
    torch.testing.assert_close(result.per_token, torch.tensor([[-4 * 1.6487213, 0.0]]))
    torch.testing.assert_close(result.approx_kl, torch.tensor([[-0.5, 0.0]]))
    assert not result.clipped.any() and not result.clipped_lower.any()


def test_a_users_estimator_counts_inside_the_mask_alone(file):
    function = find_method(ESTIMATOR, f"{file}:score_per_token", ADVANTAGE_ESTIMATORS)
    advantages, returns = estimate_advantages(
        function, batch_of_two_tokens(), AdvantageOptions(gamma=0.5)
    )
    assert advantages.tolist() == [[0.5, 0.0]] and returns.tolist() == [[1.5, 0.0]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensor", "returned a Tensor, not a PolicyLoss; end the function with"),
        ("misshapen", r"per_token of shape \(\); it must have the shape of its inputs, \(1, 2\)"),
    ],
)
def test_a_loss_of_another_kind_is_refused(file, name, message):
    function = find_method(LOSS, f"{file}:{name}", POLICY_LOSSES)
    with pytest.raises(ConfigError, match=message):
        policy_loss(function, inputs_of_two_tokens(), PolicyLossOptions())


def test_an_estimator_that_returns_one_tensor_is_refused(file):
    function = find_method(ESTIMATOR, f"{file}:one_tensor", ADVANTAGE_ESTIMATORS)
    with pytest.raises(ConfigError, match=r"must return \(advantages, returns\), .* \(1, 2\)"):
        estimate_advantages(function, batch_of_two_tokens(), AdvantageOptions())


@pytest.mark.parametrize(("name", "summary", "functions"), FAILING)
@pytest.mark.parametrize("key", [LOSS, ESTIMATOR])
def test_what_a_users_function_raises_is_one_line_and_the_users_frames(
    file, key, name, summary, functions
):
    function = find_method(key, f"{file}:{name}", {})
    with pytest.raises(MethodError) as caught:
        if key == LOSS:
            policy_loss(function, inputs_of_two_tokens(), PolicyLossOptions())
        else:
            estimate_advantages(function, batch_of_two_tokens(), AdvantageOptions())

    message = str(caught.value)
    assert message.startswith(f"{key}: {name} of {file} raised {summary} (line ")
    assert "\n" not in message
    trace = str(caught.value.__cause__)
    assert isinstance(caught.value.__cause__, UserTraceback)
    assert trace.count('File "') == trace.count(f'File "{file}"') == len(functions)
    assert re.findall(r", line \d+, in (\S+)", trace) == functions


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("methods_of_mine.py:doubbled", "has no function 'doubbled'; did you mean 'doubled'?"),
        ("methods_of_mine.py:of_one", "of_one in {file} must accept inputs, options: too many"),
        (
            "broken.py:f",
            "broken.py cannot be imported: ZeroDivisionError: division by zero (line 2)",
        ),
        ("leaves.py:f", "leaves.py cannot be imported: SystemExit: 3 (line 1)"),
        ("unfinished.py:f", "unfinished.py cannot be imported: SyntaxError: "),
        ("stops.py:f", "stops.py cannot be imported: Stop: its text cannot be read, which raised "),
        ("kinds.py:f", "f in {directory}/kinds.py does not say which parameters it has (no "),
        ("kinds.py:later", "later in {directory}/kinds.py is an async function, which a call does"),
        ("kinds.py:pieces", "pieces in {directory}/kinds.py is a generator function (it has "),
        ("kinds.py:stream", "stream in {directory}/kinds.py is an async generator function (it "),
        ("kinds.py:bound", "bound in {directory}/kinds.py is an async function, which a call "),
        ("kinds.py:of_class", "of_class in {directory}/kinds.py is a generator function (it has "),
    ],
)
def test_what_cannot_be_loaded_is_one_line_of_the_dry_run(tmp_path, file, name, message):
    (tmp_path / "broken.py").write_text("x = 0\ny = 1 / x\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "unfinished.py").write_text("def f(inputs, options\n")
    (tmp_path / "stops.py").write_text(STOPS)
    (tmp_path / "kinds.py").write_text(KINDS)
    reference = f"{tmp_path}/{name}"
    config = ppo(actor__policy_loss__loss_mode=reference)
    for _ in range(2):  # a file that failed is not taken for imported
        with pytest.raises(ConfigError) as caught:
            dry_run(config, 8)
        (line,) = str(caught.value).splitlines()
        assert line.startswith(f"bad value '{reference}' for '{LOSS}': ")
        assert message.format(file=file, directory=tmp_path) in line


def test_every_function_that_cannot_be_loaded_has_a_line(file):
    config = ppo(
        actor__policy_loss__loss_mode=f"{file}:f", algorithm__adv_estimator=f"{file}:of_one"
    )
    with pytest.raises(ConfigError) as caught:
        dry_run(config, 8)
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"bad value '{file}:f' for '{LOSS}': {file} has no function 'f'; ")
    assert second.startswith(f"bad value '{file}:of_one' for '{ESTIMATOR}': of_one in {file} must")


def test_a_users_estimator_has_a_critic_where_the_configuration_says_so():
    assert not ppo(algorithm__adv_estimator="mine.py:f").needs_critic
    config = ppo(algorithm={"adv_estimator": "mine.py:f", "use_critic": True})
    assert config.needs_critic and "critic" in config.roles()
