"""The tokens that could be drawn: what the native engine records of them, and what is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from benchmarks.engine_loop import generate, requests_for
from mrlhf.batch import Rollout
from mrlhf.inference.base import MaskWords, Sample, SamplingParams
from mrlhf.records import SamplingMasks, as_bits, as_words
from tests.models.engines import PROMPTS, UIDS, hf_model, make_engine
from tests.oracle.plain_experience import make_rollout
from tests.rollouts import masks_of

TEMPERATURE = 0.8
NEVER = (3, 20, *range(100, 131))


def _random_sets(rows: int, vocab_size: int) -> Tensor:
    """Of one token, of nearly all, and of sizes between; bool [rows, vocab]."""
    generator = torch.Generator().manual_seed(vocab_size)
    shares = torch.linspace(0, 1, rows)[:, None]
    could = torch.rand(rows, vocab_size, generator=generator) < shares
    could[:, vocab_size // 2] = True
    return could


@pytest.mark.parametrize("vocab_size", [1, 5, 31, 32, 33, 64, 131, 1000])
def test_sets_come_back_in_the_fewest_words(vocab_size: int) -> None:
    could = _random_sets(12, vocab_size)
    words = as_words(as_bits(could).numpy())
    counts = [len(own) for own in words]
    assert counts == could.sum(dim=1).clamp(max=-(-vocab_size // 32)).tolist()

    masks = masks_of(could[:, None])
    for columns in (range(vocab_size), range(vocab_size // 3, vocab_size - 1), range(0)):
        wanted = ~could[:, columns.start : columns.stop]
        found = masks.excluded(columns, vocab_size, torch.device("cpu"))
        assert torch.equal(found, wanted), columns


def test_ids_and_bits_in_words() -> None:
    """Two tokens take two words, and a bit each in the three words of 70 tokens."""
    could = torch.zeros(2, 70, dtype=torch.bool)
    could[0, [1, 69]] = True
    could[1, [0, 2, 33, 64]] = True
    assert [own.tolist() for own in as_words(as_bits(could).numpy())] == [[1, 69], [5, 2, 1]]
    assert as_words(as_bits(could[:0]).numpy()) == []


def test_rows_are_chosen_and_joined() -> None:
    could = _random_sets(12, 40).view(3, 4, 40)
    drawn = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1]]).bool()
    masks = masks_of(could, drawn)
    chosen = masks.of_rows([2, 0])
    joined = SamplingMasks.join([chosen, masks], torch.cat([chosen.counts, masks.counts]))

    wanted = ~torch.cat([could[[2, 0]], could]) & torch.cat([drawn[[2, 0]], drawn])[:, :, None]
    excluded = joined.by_place().excluded(range(40), 40, torch.device("cpu"))
    assert torch.equal(excluded.view_as(wanted), wanted)
    some = joined.by_place().of_rows(torch.tensor([5, 0]))
    assert torch.equal(
        some.excluded(range(8, 40), 40, torch.device("cpu")), wanted.view(-1, 40)[[5, 0], 8:]
    )


def test_a_rollout_selects_and_joins_its_masks() -> None:
    rollout = make_rollout()
    could = _random_sets(rollout.response_ids.numel(), 64).view(*rollout.shape, 64)
    whole = Rollout(**{**vars(rollout), "masks": masks_of(could, rollout.response_mask)})
    short = whole.select([1])  # one token
    joined = Rollout.join([short, whole.select([7, 4]), rollout.select([2])])
    assert joined.masks is not None

    excluded = joined.masks.by_place().excluded(range(64), 64, torch.device("cpu"))
    rows = excluded.view(4, -1, 64)[joined.response_mask]
    order = [1, 7, 4, 2]
    could[2] = True  # the last part has no masks
    assert torch.equal(rows, ~could[order][rollout.response_mask[order]])
    assert len(short.masks.words) == int(short.masks.counts.sum())  # nothing of other rows


def _warped(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Logits as transformers warps them."""
    logits = logits / sampling.temperature
    if sampling.top_k > 0:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(None, logits)
    return logits


def _could(sample: Sample, vocab_size: int) -> Tensor:
    assert isinstance(sample.masks, MaskWords)
    counts = torch.tensor(sample.masks.counts, dtype=torch.int32)[None]
    words = torch.tensor(sample.masks.words, dtype=torch.int32)
    masks = SamplingMasks(words, torch.zeros(1, dtype=torch.int64), counts).by_place()
    return ~masks.excluded(range(vocab_size), vocab_size, torch.device("cpu"))


@pytest.mark.parametrize("never", [(), NEVER], ids=["all", "never some"])
@pytest.mark.parametrize("keys", [{"top_k": 3}, {"top_p": 0.7}, {"top_k": 40, "top_p": 0.9}])
def test_the_engine_records_what_transformers_keeps(
    keys: dict[str, float], never: tuple[int, ...]
) -> None:
    model = hf_model("qwen3")
    sampling = SamplingParams(
        n=2, temperature=TEMPERATURE, max_tokens=8, seed=4, record_masks=True, **keys
    )
    requests = requests_for(PROMPTS, UIDS, sampling)
    samples = generate(make_engine(model, never=never), requests).samples
    vocab_size = model.config.vocab_size

    sizes = set()
    for sample in samples:
        prompt = PROMPTS[sample.request_id]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + sample.token_ids])).logits[
                0, len(prompt) - 1 : -1
            ]
        logits[:, list(never)] = -torch.inf
        warped = _warped(logits, sampling)
        could = _could(sample, vocab_size)
        assert torch.equal(could, warped > -torch.inf)
        sizes |= set(could.sum(dim=1).tolist())

        tokens = torch.tensor(sample.token_ids)[:, None]
        wanted = warped.log_softmax(dim=-1).gather(1, tokens)[:, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs), wanted, rtol=0, atol=1e-5)

    plain = SamplingParams(n=2, temperature=TEMPERATURE, max_tokens=8, seed=4, **keys)
    without = generate(make_engine(model, never=never), requests_for(PROMPTS, UIDS, plain)).samples
    assert [sample.token_ids for sample in without] == [sample.token_ids for sample in samples]
    assert all(sample.masks is None for sample in without)
    assert len(sizes) > 1 or keys == {"top_k": 3}
