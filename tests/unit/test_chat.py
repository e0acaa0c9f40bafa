"""Talking to a policy: its turns against transformers, and the program on a real terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from mrlhf.commands.chat import main
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.episodes.talk import Talk
from mrlhf.errors import DataError
from mrlhf.inference.base import SamplingParams
from tests.models.chat import CHATS, chat_tokenizer, end_ids
from tests.models.engines import SIZES, make_engine, random_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, seed=1)
BLOCK = 16
SELECTS = {"x86_64": {23, 270}, "aarch64": {72}}[os.uname().machine]  # numbers of system calls
SAID = "N\u00e9 \U0001f642\u6f22!"
MOST = 400


def talk_of(model: Any, name: str, template: str | None = None, **limits: Any) -> Talk:
    tokenizer = chat_tokenizer(name, template)
    ends = end_ids(name, tokenizer)
    limits = {"max_num_seqs": 1, "max_length": MOST, "block_size": BLOCK, **limits}
    engine = make_engine(model, decode=tokenizer.decode, **limits)
    return Talk(engine, tokenizer.ending_with(ends), ends, limits["max_length"])


def tiny_model(tokenizer: Tokenizer, seed: int = 0) -> Any:
    sizes = {**SIZES, "vocab_size": tokenizer.highest_id + 1, "max_position_embeddings": 2 * MOST}
    return random_model(LlamaConfig(**sizes, tie_word_embeddings=False), seed)


def hear(pieces: list[str], most: int, piece: str) -> bool:
    """Keep what is heard, and end an answer that is to have ten tokens."""
    pieces.append(piece)
    return not most == len(pieces) == 10


def tokens_of(talk: Talk, text: str, sampling: SamplingParams, number: int = 0) -> list[int]:
    talk.answer(text, sampling, number, lambda piece: True)
    assert talk.last is not None
    return talk.last


def by_transformers(model: Any, prompt: list[int], ends: list[int], most: int) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": most, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    with torch.no_grad():
        said = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    drawn: list[int] = said[0, len(prompt) :].tolist()
    return drawn


@pytest.mark.parametrize("name", sorted(CHATS))
def test_turns_are_those_of_transformers_and_compute_no_turn_again(name: str) -> None:
    tokenizer = chat_tokenizer(name)
    model = tiny_model(tokenizer)
    talk = talk_of(model, name)

    computed = 0
    for text, most in (("What is 1 + 2?", 24), ("Are you sure?", 10), ("I think so.", 24)):
        pieces: list[str] = []
        talk.answer(text, GREEDY, 0, partial(hear, pieces, most))
        assert talk.last is not None
        context = talk.tokens[: -len(talk.last)]
        assert talk.last == by_transformers(model, context, list(talk.end_ids), most)
        assert "".join(pieces) == talk.tokenizer.decode(talk.last)
        if not computed:
            messages = [{"role": "user", "content": text}]
            assert context == tokenizer.encode(tokenizer.apply_chat_template(messages))

        # The last token of an answer is not computed, nor a block of the cache that is not full.
        assert talk.stats.computed_prompt_tokens == len(context) - computed // BLOCK * BLOCK
        computed = len(context) + len(talk.last) - 1


def test_a_text_goes_on_until_the_model_ends_it() -> None:
    talk = talk_of(tiny_model(chat_tokenizer("chatml")), "chatml", template="")
    tokenizer = talk.tokenizer
    with pytest.raises(DataError, match="leaves out a system message"):
        talk.begin("Be brief.")
    first = tokens_of(talk, "I think", GREEDY)
    assert talk.renderer is None and not talk.stopped
    tokens_of(talk, " so", GREEDY)
    begun = [*tokenizer.encode("I think"), *first, *tokenizer.encode(" so")]
    assert talk.tokens[: len(begun)] == begun

    talk.end_ids = range(tokenizer.highest_id + 1)
    tokens_of(talk, "a", GREEDY)
    assert talk.stopped
    tokens_of(talk, "I think", GREEDY)
    assert talk.tokens == [*tokenizer.encode("I think"), first[0]]


def test_a_system_message_a_long_conversation_and_seeds() -> None:
    model = tiny_model(chat_tokenizer("chatml"))
    talk = talk_of(model, "chatml", max_length=100)
    talk.begin(" Be brief. ")
    hot = SamplingParams(temperature=1.0, max_tokens=12, seed=1)
    first = tokens_of(talk, "What is 1 + 2?", hot)
    before = list(talk.tokens)
    with pytest.raises(DataError, match=r"has \d{3} tokens.* room for 100.*/new"):
        tokens_of(talk, "I think so. " * 40, hot)
    tokens_of(talk, "Sure?", replace(hot, max_tokens=99))
    assert talk.tokens[: len(before)] == before
    assert len(talk.tokens) == 100 and not talk.stopped

    answers = []
    for number, seed in ((0, 1), (1, 1), (0, 2)):
        talk.begin(" Be brief. ")
        answers.append(tokens_of(talk, "What is 1 + 2?", replace(hot, seed=seed), number))
    assert answers[0] == first and len(set(map(tuple, answers))) == 3
    assert "Be brief." in talk.tokenizer.decode(talk.tokens)
    talk.begin("")
    tokens_of(talk, "What is 1 + 2?", hot)
    assert "Be brief." not in talk.tokenizer.decode(talk.tokens)

    users_alone = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role + '\\n' + m.content }}"
        "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    with pytest.raises(DataError, match="leaves out a system message"):
        talk_of(model, "chatml", users_alone).begin("Be brief.")


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that say the same after every message: "Né 🙂漢!", or letters without an end; one of
    the first kind without a chat template.
    """
    root = tmp_path_factory.mktemp("policies")
    write_speaker(root / "ends", "Né 🙂漢!", "<|im_end|>")
    write_speaker(root / "plain", "Né 🙂漢!", "<|im_end|>", template="")
    write_speaker(root / "goes_on", "abcdefgh", "a")
    return root


def write_speaker(directory: Path, text: str, then: str, template: str | None = None) -> None:
    """A directory with a `speaker` and its tokenizer."""
    tokenizer = chat_tokenizer("chatml", template)
    speaker(tokenizer, text, then).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def speaker(tokenizer: Tokenizer, text: str, then: str) -> Any:
    """A model whose next token depends on the last one alone, as in `text` and then `then`."""
    size = tokenizer.highest_id + 1
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=128,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=30_000,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_id,
    )
    model = random_model(config)
    ids = [tokenizer.encode(letter) for letter in text]
    chain = [*(token for some in ids for token in some), *tokenizer.encode(then)]
    starts = tokenizer.encode("\n") + tokenizer.encode("=")

    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        embedding = torch.nn.functional.normalize(model.model.embed_tokens.weight)
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.zero_()
        for before, after in [*((start, chain[0]) for start in starts), *pairwise(chain)]:
            model.lm_head.weight[after] += 100 * embedding[before]

    return model


def test_a_character_is_shown_when_it_is_whole() -> None:
    tokenizer = chat_tokenizer("chatml")
    pieces: list[str] = []
    ended = talk_of(speaker(tokenizer, SAID, "<|im_end|>"), "chatml")
    ended.answer("a", GREEDY, 0, partial(hear, pieces, 0))
    assert list(filter(None, pieces)) == list(SAID) and ended.stopped

    # An answer that is cut amid a character shows what there is of it.
    cut = talk_of(speaker(tokenizer, SAID, "<|im_end|>"), "chatml")
    pieces.clear()
    cut.answer("a", replace(GREEDY, max_tokens=6), 0, partial(hear, pieces, 0))
    assert "".join(pieces) == "N\u00e9 \ufffd" and pieces[:-1].count("\ufffd") == 0


def _hear_interrupts() -> None:
    """Make ^C on this process's terminal a signal, also if the tests run in the background."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mrlhf", "chat", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
            start_new_session=True,
            preexec_fn=_hear_interrupts,
        )
        os.close(theirs)
        self._written = b""
        self._read = 0  # characters of it that have been waited for

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt_prompt(self) -> None:
        """Type ^C once the program waits for a key: Python misses a signal just before that."""
        call = Path(f"/proc/{self.process.pid}/syscall")
        while (number := call.read_text().split()[0]) == "running" or int(number) not in SELECTS:
            time.sleep(0.01)
        self.type("\x03")

    def wait_for(self, text: str) -> str:
        """Read until the program has written `text`; returns all that it has written before."""
        while text not in self._shown()[self._read :]:
            self._written += os.read(self._ours, 65536)
        before = self._shown()[self._read :].partition(text)[0]
        self._read += len(before) + len(text)
        return before

    def end(self) -> tuple[str, int]:
        """Wait for the end; returns the rest of what is written, and the exit code."""
        with suppress(OSError):  # as Linux says that nobody has the other end
            while part := os.read(self._ours, 65536):
                self._written += part
        return self._shown()[self._read :], self.process.wait()

    def _shown(self) -> str:
        """What is written so far, without escape sequences."""
        text = self._written.decode(errors="ignore").replace("\r", "")
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)

    def close(self) -> None:
        os.close(self._ours)
        self.process.kill()
        self.process.wait()


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    opened = Terminal(*arguments)
    try:
        yield opened
    finally:
        opened.close()


def test_two_policies_on_a_terminal(policies: Path) -> None:
    ends = str(policies / "ends")
    goes_on = str(policies / "goes_on")
    with terminal(ends, "--beside", goes_on) as screen:
        start = screen.wait_for("\n> ")
        assert f"{ends}: chats" in start and f"{goes_on}: chats" in start
        for _ in range(2):
            screen.type("What is 1 + 2?\n")
            screen.wait_for(f"[{ends}]\n{SAID}\n[{goes_on}]\nabcdefghabcdefgh")
            screen.type("\x03")
            rest = screen.wait_for("\n> ")
            assert "^C" in rest and "cut" not in rest

        screen.type("/set max-response-length 5\n/set temperature x\n/nonsense\n/help\n")
        screen.wait_for("error: /set temperature takes a number, not 'x'\n")
        screen.wait_for("error: there is no command '/nonsense'; /help lists them\n")
        screen.wait_for("/quit")
        assert re.search(r"max-response-length +5 ", screen.wait_for("seed"))
        screen.type("/system Be brief.\nSure?\n")
        screen.wait_for(f"[{goes_on}]\nabcde\n[cut after 5 tokens]\n> ")
        screen.type("\x04")
        assert screen.end() == ("\n", 0)


@pytest.mark.recipes
def test_a_text_on_a_terminal_and_leaving(policies: Path) -> None:
    with terminal(str(policies / "plain")) as screen:
        assert "plain: no chat template: it continues your text" in screen.wait_for("\n> ")
        screen.type("1 + 2 =\n")
        screen.wait_for(f"\n{SAID}\n> ")
        screen.type("/system Be brief.\n")
        screen.wait_for("leaves out a system message\n> ")
        screen.interrupt_prompt()
        screen.wait_for("\n^C again or ^D leaves\n> ")
        screen.type("1 + 2 =\n")
        screen.wait_for(f"\n{SAID}\n> ")
        screen.interrupt_prompt()
        screen.wait_for("\n^C again or ^D leaves\n> ")
        screen.interrupt_prompt()
        assert screen.end()[1] == 0


@pytest.mark.recipes
def test_one_answer_through_a_pipe(policies: Path) -> None:
    command = [sys.executable, "-m", "mrlhf", "chat", str(policies / "ends"), "--prompt", "Sure?"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (f"{SAID}\n", 0)


@pytest.mark.recipes
def test_a_real_model_answers_as_in_transformers(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    messages: list[dict[str, str]] = []

    with terminal(str(smollm2), "--temperature", "0", "--max-response-length", "24") as screen:
        screen.wait_for("\n> ")
        for text in ("What is the capital of France?", "Name a river that flows through it."):
            messages.append({"role": "user", "content": text})
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            prompt = prompt if isinstance(prompt, list) else prompt["input_ids"]
            said = by_transformers(model, prompt, [tokenizer.eos_token_id], 24)
            messages.append(
                {"role": "assistant", "content": tokenizer.decode(said, skip_special_tokens=True)}
            )
            screen.type(f"{text}\n")
            screen.wait_for(f"{text}\n{messages[-1]['content']}\n")


def test_bad_input_is_told_in_a_line(
    policies: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = str(policies / "ends")
    reward_model = tmp_path / "reward_model"
    reward_model.mkdir()
    config = json.loads((policies / "ends" / "config.json").read_text(encoding="utf-8"))
    scalar = {**config, "architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (reward_model / "config.json").write_text(json.dumps(scalar), encoding="utf-8")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    stated = {"base_model_name_or_path": "gone", "task_type": "CAUSAL_LM", "peft_type": "LORA"}
    (adapter / "adapter_config.json").write_text(json.dumps(stated), encoding="utf-8")

    for arguments, words in (
        ([ends], "no terminal; --prompt TEXT .* mrlhf generate"),
        (["nothing", "--prompt", "a"], "nothing does not exist"),
        ([ends, "--beside", "nothing", "--prompt", "a"], "nothing does not exist"),
        ([str(reward_model), "--prompt", "a"], "is a reward model"),
        ([str(adapter), "--prompt", "a"], "base of the adapter, gone, is no directory"),
        ([ends, "--prompt", "a", "--temperature", "-1"], "temperature -1.0 must be"),
        ([ends, "--prompt", "a", "--max-response-length", "0"], "must each be at least 1"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and re.search(words, error)

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert main([ends, "--prompt", "a"]) == 2
    assert "without torchrun" in capsys.readouterr().err
