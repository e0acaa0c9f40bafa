"""What must hold between keys and models, as their `config.json` says it, and the dry run.

The checks that need no file are rows of `refusals.txt`.
"""

import itertools
import json
import math
import re
from dataclasses import replace

import pytest
import torch

from mrlhf.config import RewardModelConfig, SFTConfig
from mrlhf.device import cores
from mrlhf.errors import ConfigError
from mrlhf.inference import sizes
from mrlhf.models import transformer_engine
from mrlhf.models.families import family_of, load_spec
from mrlhf.models.spec import Lora
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.preflight import check_models, dry_run, model_checks
from mrlhf.preflight.model_bytes import merged_bytes
from mrlhf.preflight.model_checks import cache_needs
from tests.models.engines import hf_model
from tests.shards import tiny_config
from tests.unit.config_files import read_cases
from tests.unit.configurations import holds, ppo, problems, read_changes, supervised

FACTS = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
}


def model_dir(tmp_path, **changes):
    facts = {**FACTS, **changes}
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in facts.items() if value != "absent"})
    )
    return str(tmp_path)


def test_transformer_engine_is_refused_where_it_cannot_be(models, monkeypatch, caplog):
    def refusal(path="dense", **changes):
        config = supervised(
            SFTConfig, model__path=str(models / path), model__transformer_engine="on", **changes
        )
        with pytest.raises(ConfigError, match=r"^model\.transformer_engine is on, but") as caught:
            check_models(config)
        return str(caught.value)

    assert "torch sees no GPU" in refusal()
    monkeypatch.setattr(model_checks, "device_kind", lambda setting: "cuda")
    assert "transformer_engine cannot be imported" in refusal()
    monkeypatch.setattr(transformer_engine, "HAVE_TE", True)
    assert "model.cp is 2" in refusal(model__cp=2)
    assert "model.share_prompts is true" in refusal(model__share_prompts=True)
    assert "lack what the model has" in refusal(model__lora__rank=4)
    caplog.set_level("INFO")
    assert transformer_engine.uses_transformer_engine("on")
    assert not transformer_engine.uses_transformer_engine("off")
    assert not caplog.messages
    for _ in range(2):
        assert not transformer_engine.uses_transformer_engine("auto")
    (line,) = caplog.messages
    assert "auto is off until a GPU has run" in line


def unchecked(specs):
    return [name for name, spec in specs.items() if spec is None]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A directory with tiny models; that of the base is written for each case."""
    root = tmp_path_factory.mktemp("models")
    for name, family in (("mixture", "mixtral"), ("dense", "llama")):
        tiny_config(family).save_pretrained(root / name)
    hf_model("phi3").config.save_pretrained(root / "phi3")
    classes = {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {0: "clear", 1: "kind"},
    }
    model_dir(root / "heads", **classes)
    (root / "configs").mkdir()
    return root


CASES = [case for case in read_cases("input_refusals.txt") if case[0] != "PPOConfig"]


@pytest.mark.parametrize(("kind", "_", "row", "said"), CASES, ids=[case[2] for case in CASES])
def test_what_does_not_fit_a_model_is_refused_in_one_line(models, monkeypatch, kind, _, row, said):
    monkeypatch.chdir(models)
    changes = read_changes(row)
    model_dir(models / "llama", **changes.pop("config__json", {}))
    if kind == "PPOModels":
        config = ppo(**{"actor__path": "llama", **changes})  # the critic's path too
    else:
        root = RewardModelConfig if kind == "RewardModels" else SFTConfig
        config = supervised(root, **changes)

    with pytest.raises(ConfigError) as caught:
        check_models(config)
    (line,) = str(caught.value).splitlines()
    (words,) = said
    assert holds(line, words), line
    if row.startswith("config.json="):  # it cannot be built
        with pytest.raises(ConfigError, match=re.escape(line)):
            dry_run(config, 8)


def test_check_models_reads_config_json(tmp_path):
    path = model_dir(tmp_path)
    specs = check_models(ppo(actor__path=path, critic__path="none"))
    assert unchecked(specs) == ["critic"]
    assert list(specs) == ["actor", "critic", "rollout"]

    assert unchecked(check_models(ppo(actor__path=path, rollout__tp=8))) == []


def test_a_dry_run_says_what_adapters_save(tmp_path):
    path = model_dir(tmp_path)
    report = dry_run(ppo(actor__path=path, actor__lora={"rank": 4}), 8).text
    (adapted,) = re.findall(r"memory of actor on a rank: (.*)", report)
    (whole,) = re.findall(r"  if all weights were trained: (.*)", report)
    assert re.findall(r"memory of critic on a rank: .* gradients", report)
    sizes = [_kilobytes(adapted), _kilobytes(whole)]
    assert sizes[0][0] >= sizes[1][0] and sizes[0][1] < sizes[1][1] / 4
    assert "merged for the engine" not in report
    merged = dry_run(ppo(actor__path=path, actor__lora={"rank": 4}, rollout__lora="merged"), 8).text
    (more,) = re.findall(r"merged for the engine \(rollout.lora\): ([\d.]+) kB more", merged)
    assert 0 < float(more) <= sizes[1][0]


def test_a_dry_run_says_what_is_frozen(tmp_path):
    path = model_dir(tmp_path)
    frozen = ["*.self_attn.*", "model.embed_tokens.weight"]
    report = dry_run(ppo(actor__path=path, critic__freeze=frozen), 8).text
    # Of 6 layers three matrices of 64 x 96 and two norms of 64, the last norm and the head; not q
    # and o, 64 x 64, nor k and v, 64 x 32, nor the embedding, 128 x 64.
    trained = 6 * (3 * 64 * 96 + 2 * 64) + 2 * 64
    every = trained + 6 * (2 * 64 * 64 + 2 * 64 * 32) + 128 * 64
    assert f"  {trained:,} of {every:,} parameters train" in report
    (whole,) = re.findall(r"  if all weights were trained: (.*)", report)
    (some,) = re.findall(r"memory of critic on a rank: (.*?) \(", report)
    sizes = [_kilobytes(some), _kilobytes(whole)]
    assert sizes[0][0] == sizes[1][0] and sizes[0][1] < sizes[1][1]


def _kilobytes(text):
    units = {"B": 1e-3, "kB": 1, "MB": 1e3, "GB": 1e6}
    return [float(size) * units[unit] for size, unit in re.findall(r"([\d.]+) (\wB|B)\b", text)]


def test_memory_is_that_of_gpus_for_a_run_that_is_too_large_for_this_machine(tmp_path):
    """No GPU is looked for: a machine without one says what it assumes."""
    if torch.cuda.is_available():
        pytest.skip("auto means the GPU of this machine")
    (tmp_path / "small").mkdir()
    path = model_dir(tmp_path / "small")
    many = 8 * 2 ** math.ceil(math.log2(cores()))
    changes = {"actor__path": path, "critic__path": path, "data__train_batch_size": many}
    changes |= {"actor__ppo_mini_batch_size": many, "critic__ppo_mini_batch_size": many}
    lines = _memory_lines(dry_run(ppo(**changes), many).text)
    assert len(lines) == 4
    for line in lines:
        assert "on a GPU, assumed; distributed.device=cpu changes that" in line
    assert "(bfloat16 on a GPU" in lines[0]
    # On the other device the same keys say so on the same lines, and no longer assume it.
    forced = _memory_lines(dry_run(ppo(**changes, distributed__device="cpu"), many).text)
    assert len(forced) == 4 and "(float32 on a CPU)" in forced[0]
    assert not any("assumed" in line for line in forced)
    assert _kilobytes(forced[0])[0] == pytest.approx(2 * _kilobytes(lines[0])[0], rel=0.01)

    one = ppo(**changes, actor__tp=1, actor__pp=1, critic__tp=1, rollout__tp=1)
    few = _memory_lines(dry_run(one, 1).text)
    assert "(float32 on a CPU, assumed; distributed.device=cuda changes that)" in few[0]
    # Few ranks, of models that no machine of theirs holds in float32.
    (tmp_path / "large").mkdir()
    sizes = {"hidden_size": 2**15, "intermediate_size": 2**17, "num_hidden_layers": 256}
    large = one.model_copy(
        update={
            "actor": one.actor.model_copy(update={"path": model_dir(tmp_path / "large", **sizes)})
        }
    )
    few = _memory_lines(dry_run(large, 1).text)
    assert "(bfloat16 on a GPU, assumed" in few[0]


def _memory_lines(report):
    return re.findall(r"^(?:memory of|the KV cache of) .*", report, re.MULTILINE)


def test_a_router_without_adapter_is_not_merged(tmp_path):
    tiny_config("mixtral").save_pretrained(tmp_path)
    spec = replace(load_spec(tmp_path, "lm"), lora=Lora(rank=4, alpha=8.0))
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3")
    ends = tuple(f".{layer}.weight" for layer in layers)
    shapes = family_of(spec).base_shapes(spec).items()
    adapted = [math.prod(shape) for name, shape in shapes if name.endswith(ends)]
    assert merged_bytes(spec, ParallelLayout(tp=1, pp=1, dp=1), itemsize=2) == 2 * sum(adapted)


def test_one_mistake_is_reported_once(tmp_path):
    """The reference inherits the actor's layout, and the engine runs the actor's model."""
    path = model_dir(tmp_path, hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    config = ppo(
        actor__path=path, actor__use_kl_loss=True, actor__tp=4, critic__tp=2, rollout__tp=2
    )
    with pytest.raises(ConfigError) as caught:
        check_models(config)
    of_kv_heads = "3 key and value heads (it must divide them or be a multiple of them)"
    assert str(caught.value).splitlines() == [
        "actor.tp 4 does not fit the model's 6 attention heads; use one of 1, 3, 6",
        f"critic.tp 2 does not fit the model's {of_kv_heads}; use one of 1, 3, 6",
        f"rollout.tp 2 does not fit the model's {of_kv_heads}; use one of 1, 3, 6",
    ]

    config = ppo(
        actor__path=path, actor__use_kl_loss=True, actor__tp=6, critic__tp=1, rollout__tp=2
    )
    with pytest.raises(ConfigError, match=r"^rollout\.tp 2 .*; use one of 1, 3, 6$"):
        check_models(config)

    fitting = {"actor__tp": 1, "critic__tp": 1, "rollout__tp": 1}
    long = ppo(actor__path=path, actor__use_kl_loss=True, data__max_response_length=217, **fitting)
    with pytest.raises(ConfigError) as caught:
        check_models(long)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("actor: the longest sequence, 257 tokens, is beyond")


def test_the_head_of_a_model_is_that_of_its_role(tmp_path):
    path = model_dir(tmp_path)
    config = ppo(
        actor__path=path,
        actor__use_kl_loss=True,
        reward_model={"path": path, "micro_batch_tokens": 512},
        reward__terms=[{"name": "reward_model"}],
    )

    assert {name: spec.head for name, spec in check_models(config).items()} == {
        "actor": "lm",
        "critic": "scalar",
        "reference": "lm",
        "reward_model": "scalar",
        "rollout": "lm",
    }

    assert check_models(supervised(SFTConfig, model__path=path))["model"].head == "lm"
    assert check_models(supervised(RewardModelConfig, model__path=path))["model"].head == "scalar"


def test_the_labels_of_a_classifier_are_read_and_those_of_columns_trained(models, monkeypatch):
    monkeypatch.chdir(models)
    scoring = ppo(
        actor__path="heads",
        algorithm__adv_estimator="grpo",
        reward_model={"path": "heads", "heads": {"kind": 0.5}},
        reward__terms=[{"name": "reward_model"}],
    )
    assert check_models(scoring)["reward_model"].labels == ("clear", "kind")
    for columns in (["b", "a"], "a"):  # of a language model
        config = supervised(
            RewardModelConfig,
            model={"path": "dense", "micro_batch_tokens": 32},
            data__max_length=32,
            rm={"rows": "targets", "target_column": columns},
        )
        spec = check_models(config)["model"]
        assert spec.labels == tuple(columns)
        assert family_of(spec).tensor_shapes(spec)["score.weight"] == (len(columns), 32)


def test_config_json_without_key_and_value_heads(tmp_path):
    path = model_dir(tmp_path, num_key_value_heads="absent")
    assert unchecked(check_models(supervised(SFTConfig, model__path=path, model__tp=8))) == []


def test_a_refused_model_does_not_hide_the_mistakes_of_others(tmp_path):
    good = tmp_path / "good"
    bad = tmp_path / "bad"
    good.mkdir()
    bad.mkdir()
    config = ppo(
        actor__path=model_dir(good), actor__pp=5, critic__path=model_dir(bad, model_type="gemma")
    )
    with pytest.raises(ConfigError) as caught:
        check_models(config)
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["critic:", "actor.pp"]


def test_the_kv_cache_holds_one_sequence_at_least(tmp_path):
    path = model_dir(tmp_path, num_hidden_layers=64, head_dim=256)
    changes = {"actor__path": path, "critic__path": "none", "rollout__block_size": 16}
    on_cpu = {"distributed__device": "cpu"}
    changes["distributed__device"] = "cuda"

    with pytest.raises(ConfigError) as caught:
        check_models(ppo(**changes, rollout__kv_cache_mb=13))
    # 100 tokens are 7 blocks of 16; of the 4 KV heads, a rank of 2 has 2; a GPU has bfloat16
    assert str(caught.value) == (
        "rollout.kv_cache_mb 13 = 13.63 MB is less than one sequence needs, 2 x 64 layers x "
        "2 KV heads x 256 x 2 bytes x 112 tokens = 14.68 MB; set rollout.kv_cache_mb to at "
        "least 14 or lower the data's maximum lengths"
    )
    check_models(ppo(**changes, rollout__kv_cache_mb=14))
    for float32 in ({"actor__dtype": "float32"}, on_cpu):
        with pytest.raises(
            ConfigError, match=r"= 29.36 MB; set rollout\.kv_cache_mb to at least 28 or"
        ):
            check_models(ppo(**{**changes, **float32}, rollout__kv_cache_mb=14))

    # with more ranks than heads, each rank holds one head
    with pytest.raises(ConfigError, match=r"x 1 KV heads x 256 x 2 bytes x 112 tokens = 7.34 MB"):
        check_models(ppo(**changes, rollout__tp=8, rollout__kv_cache_mb=6))


def test_dry_run_checks_first(tmp_path):
    paths = {
        "actor__path": model_dir(tmp_path),
        "critic__path": "none",
        "data__tokenizer": "tokenizer",
    }

    lines = dry_run(ppo(**paths), 8).text.splitlines()
    assert [line.partition("; ")[0] for line in lines[:4]] == [
        "not found: critic.path none does not exist",
        "not found: data.tokenizer tokenizer does not exist",
        "not found: data.train_files a.jsonl does not exist",
        "not checked: the weights of actor",
    ]
    assert lines[-1] == "what could be checked fits 8 ranks"
    assert (
        "the KV cache of a rank on a CPU\n"
        "  a sample at full length: 2 x 6 layers x 2 KV heads x 8 x 4 bytes x 112 tokens = 86.02 "
        "kB\n  rollout.kv_cache_mb 1 = 1.049 MB: 12 samples at full length\n"
    ) in dry_run(ppo(**paths, rollout__kv_cache_mb=1, distributed__device="cpu"), 8).text

    on_gpu = dry_run(ppo(**paths, distributed__device="cuda"), 8).text
    assert "the KV cache of a rank on a GPU\n" in on_gpu
    assert "2 KV heads x 8 x 2 bytes x 128 tokens = 49.15 kB\n" in on_gpu

    with pytest.raises(ConfigError):
        dry_run(ppo(), 6)


def test_a_critic_that_is_not_built_is_not_checked(tmp_path):
    wrong = {"critic__tp": 3, "critic__micro_batch_tokens": 1, "critic__ppo_mini_batch_size": 48}
    wrong["critic__optim"] = {"lr_warmup_steps": 10}
    assert len(problems(ppo(**wrong), 8)) == 4
    paths = {"actor__path": model_dir(tmp_path), "data__tokenizer": "tokenizer"}
    text = dry_run(ppo(**wrong, **paths, algorithm__adv_estimator="grpo"), 8).text
    assert "critic.path" not in text
    assert "\n  algorithm.adv_estimator grpo\n" in text and "critic.tp" not in text
    assert "  critic" not in text


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("float32_is_faster", [False, True])
def test_the_cache_is_what_the_engine_takes_on_this_machine(
    tmp_path, monkeypatch, has_gpu, float32_is_faster
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(sizes, "float32_is_faster", lambda: float32_is_faster)

    spec = load_spec(model_dir(tmp_path), "lm")
    widened = float32_is_faster and not has_gpu
    found = {}
    for dtype, engine in itertools.product(("auto", "bfloat16", "float32"), ("native", "vllm")):
        config = ppo(actor__dtype=dtype, rollout__engine=engine)
        found[dtype, engine] = cache_needs(config, spec).shape.itemsize

    assert found == {
        ("auto", "native"): 2 if has_gpu else 4,
        ("auto", "vllm"): 2 if has_gpu else 4,
        ("bfloat16", "native"): 4 if widened else 2,
        ("bfloat16", "vllm"): 2,
        ("float32", "native"): 4,
        ("float32", "vllm"): 4,
    }


def test_experts_are_replayed_where_there_are_experts(models):
    mixture = {"actor__path": str(models / "mixture")}
    mixture |= {"data__max_prompt_length": 16, "data__max_response_length": 16}
    for replay in ("none", "rollout", "old"):
        check_models(ppo(**mixture, actor__router_replay=replay))

    keys = {"model__path": str(models / "mixture"), "data__max_length": 32}
    check_models(supervised(SFTConfig, **keys, model__ep=2, model__router_z_coef=1e-3))
