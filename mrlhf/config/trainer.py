"""The sections for the run and its processes: how long to train, and what to leave behind.

A section checks its own fields, and knows no other sections.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from mrlhf.config.fields import Count, CountOrZero, Minutes, Name, PathText, Positive, Rows, Section
from mrlhf.config.reads import ESTIMATOR, KeyPlace, NotRead, ReadIf, listed, read_if

Tracker = Literal["tensorboard", "wandb", "trackio"]

_UNLESS_STEPS = read_if("total_steps", lambda steps: steps is None, "is set", "set that to null")
_IF_TRACKED = read_if(
    "trackers",
    lambda names: "wandb" in names or "trackio" in names,
    "names neither wandb nor trackio",
    "name one of them there",
)


def _no_adapters(place: KeyPlace) -> NotRead | None:
    """The merging of adapters that do not exist."""
    role = next(iter(place.config.roles()))
    if place.value(f"{role}.lora").is_on:
        return None
    decider = f"{role}.lora.rank"
    return NotRead(f", since {decider} is 0", "set a rank", (decider, f"{role}.lora.path"))


def _is_named(metric: str | None) -> bool:
    return metric is not None


def _nothing_held_out(place: KeyPlace) -> NotRead | None:
    """A setting of validations without data."""
    keys = ("data.val_files", "data.test_files")
    why = f", since {' and '.join(keys)} are empty"
    return None if any(map(place.value, keys)) else NotRead(why, "give files", keys)


def _no_critic(place: KeyPlace) -> NotRead | None:
    """A key of a critic that does not exist."""
    if place.config.needs_critic:
        return None
    why = f" with {ESTIMATOR} {place.value(ESTIMATOR)}, which has no critic"
    return NotRead(why, "use gae", (ESTIMATOR, "algorithm.use_critic"))


_IF_HELD_OUT = ReadIf(_nothing_held_out)
_IF_TRACED = read_if("ranks", bool, "names no rank", "name the ranks there")
_IF_PROFILED = read_if("steps", bool, "names no step", "name the steps there")


class ProfileSection(Section):
    """Traces of torch's profiler, a file for each of the steps on each of the ranks."""

    steps: Annotated[list[Count], _IF_TRACED] = Field(default_factory=list)
    """training steps that are traced; empty: none"""
    ranks: Annotated[list[CountOrZero], _IF_PROFILED] = Field(default_factory=lambda: [0])
    """ranks that trace them"""
    stacks: Annotated[bool, _IF_PROFILED] = False
    """also write down from which lines of Python each operator was called; slows the step down"""

    refused: ClassVar[Rows] = {
        "trainer.profile.steps names step {last}, after {trainer.total_steps}; name earlier "
        "steps": lambda self, trainer: (
            (last := max(self.steps, default=0)) > (trainer.total_steps or last) and {"last": last}
        ),
    }


def _late_warmups(self: Any, optims: Any) -> dict[str, str] | None:
    """The warm-ups that would not end within the run."""
    if self.total_steps is None:
        return None
    late = []
    if isinstance(self, PPOTrainerSection) and self.critic_warmup > self.total_steps:
        late.append(f"trainer.critic_warmup {self.critic_warmup}")
    for name, optim in optims().items():
        if optim.lr_warmup_steps >= self.total_steps:
            late.append(f"{name}.lr_warmup_steps {optim.lr_warmup_steps}")
    return {"late": listed(late)} if late else None


class TrainerSection(Section):
    """How long to train, and what to leave behind."""

    total_steps: Count | None = None
    """training steps; null: as many as total_epochs and min_steps make"""
    total_epochs: Annotated[Count, _UNLESS_STEPS] = 1
    """passes over train_files; refused beside total_steps"""
    min_steps: Annotated[CountOrZero, _UNLESS_STEPS] = 0
    """fewest training steps: passes over train_files beyond total_epochs are made until then, so
    that little data still makes enough steps; refused beside total_steps"""
    test_freq: CountOrZero = 0
    """training steps between validations; 0: only at the end, and with PPO at the start"""
    output_dir: PathText
    """directory for metrics, logs and the final Hugging Face checkpoint"""
    log_freq: Count = 1
    """training steps from one line on the console to the next; metrics.jsonl has every step"""
    timeline_freq: CountOrZero = 1
    """training steps between records of when each rank was in which phase; 0: none"""
    profile: ProfileSection
    """traces of single steps"""
    console: Literal["auto", "view", "plain", "quiet"] = "auto"
    """auto: a view of the run below the log lines if standard error is a terminal; view: there the
    view, warnings, alarms and errors alone; plain: log lines alone; quiet: warnings, alarms and
    errors alone, as --quiet"""
    trackers: list[Tracker] = Field([])
    """what gets the metrics beside metrics.jsonl: tensorboard, wandb, trackio"""
    project_name: Annotated[Name, _IF_TRACKED] = "mrlhf"
    """project of the run in wandb and trackio"""
    experiment_name: Annotated[Name | None, _IF_TRACKED] = None
    """name of the run in wandb and trackio; null: that of output_dir"""
    export_merged: Annotated[bool, ReadIf(_no_adapters)] = False
    """low-rank adapters: also write the final model with its adapters merged into the base, as a
    whole Hugging Face checkpoint, into actor_merged or model_merged"""
    max_shard_size_mb: Count = 5000
    """largest safetensors file of the exported model, MB"""
    resume: PathText = "auto"
    """auto: go on from the newest whole checkpoint in output_dir, if there is one; a directory: go
    on from that checkpoint; never: begin anew"""
    overwrite: bool = False
    """delete the run that output_dir holds, and begin anew"""
    save_freq: CountOrZero = 0
    """training steps between checkpoints; the last step has one too; 0: none"""
    save_every_minutes: Minutes | None = 30.0
    """a step that ends so long after the last checkpoint saves one; null: none"""
    max_to_keep: Count | None = 2
    """newest checkpoints that are kept, beside the best one; null: all"""
    keep_best: Name | None = None
    """metric by which the best checkpoint is kept as well, such as val/<data source>/acc@1; null:
    none"""
    keep_best_mode: Annotated[
        Literal["max", "min"], read_if("keep_best", _is_named, "is null", "name a metric there")
    ] = "max"
    """whether a high or a low value of keep_best is best"""
    export_best: Name | None = None
    """metric by which the best model is exported as well, beside the last one, such as val/<data
    source>/acc@1; null: the last one only"""
    export_best_mode: Annotated[
        Literal["max", "min"], read_if("export_best", _is_named, "is null", "name a metric there")
    ] = "max"
    """whether a high or a low value of export_best is best"""
    save_hf: bool = False
    """write the trained policy as a Hugging Face checkpoint beside each one"""
    async_save: bool = False
    """copy the state and write it while training goes on; needs as much host memory again as the
    state"""
    save_by_minutes: Minutes | None = None
    """minutes after the start of the job when it saves and ends with exit code 75; null: before the
    end that Slurm tells, if it does, as early as the saves so far need"""

    refused: ClassVar[Rows] = {
        "{test_freq} needs data to validate on, but data.val_files is empty; give files, or "
        "leave it out": lambda self, data: self.test_freq > 0 and not data.validates,
        "{late} would not end before {total_steps}; lower the first or raise the "
        "second": _late_warmups,
    }

    @field_validator("trackers", mode="before")
    @classmethod
    def _console_is_none(cls, trackers: object) -> object:
        if isinstance(trackers, list) and "console" in trackers:
            raise ValueError("the console is always on and is no tracker; leave it out")
        return trackers

    @field_validator("trackers")
    @classmethod
    def _each_once(cls, trackers: list[Tracker]) -> list[Tracker]:
        twice = [name for name in trackers if trackers.count(name) > 1]
        if twice:
            raise ValueError(f"names {twice[0]} twice; name it once")
        return trackers

    def steps(self, num_rows: int, batch_size: int) -> int:
        """Training steps on `num_rows` rows; the incomplete last batch of an epoch is left out."""
        if self.total_steps is not None:
            return self.total_steps
        return max(self.total_epochs * (num_rows // batch_size), self.min_steps)

    def test_is_due(self, step: int, last: int) -> bool:
        """Whether `step` ends with a validation: every `test_freq` steps, and the `last` one."""
        return step == last or bool(self.test_freq and step % self.test_freq == 0)


class PPOTrainerSection(TrainerSection):
    """How long to train, and what to leave behind."""

    critic_warmup: Annotated[CountOrZero, ReadIf(_no_critic)] = 0
    """first training step that trains the actor; only the critic is trained before; 0: no
    warm-up"""
    export_critic: Annotated[bool, ReadIf(_no_critic)] = False
    """also write the final critic as a Hugging Face checkpoint, a sequence classifier with one
    label, into critic in output_dir; critic.path takes it, and reward_model.path does"""
    val_before_train: Annotated[bool, _IF_HELD_OUT] = True
    """validate before the first training step"""
    val_sampled: Annotated[bool, _IF_HELD_OUT] = False
    """validate with samples at rollout.temperature as well as with greedy answers"""
    val_n: Annotated[Count, read_if("val_sampled")] = 1
    """samples of each prompt in the validation with samples"""
    log_samples: CountOrZero = 1
    """responses shown on the console at each validation, or without held-out prompts in the first
    and every tenth training step"""
    val_samples: Annotated[CountOrZero, _IF_HELD_OUT] = 12
    """prompts of the validation whose greedy answers are written down each time, in
    validation/step_N.jsonl; the report shows the first and the last ones beside each other"""
    peak_tflops: Positive | None = None
    """peak of one device at the training dtype without sparsity, TFLOP/s, for perf/mfu; null: known
    for common NVIDIA GPUs"""


class DistributedSection(Section):
    """The processes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to compute; auto: cuda if there is an NVIDIA GPU, which a torch for CUDA must see, and
    beside which a torch for CPUs warns"""
    timeout_s: Annotated[float, Field(ge=1, le=604800)] = 600.0
    """longest wait in one collective, seconds; a slow replica, scorer, reader or writer of files is
    waited for without end, and reported"""
    device_memory_mb: Positive | None = None
    """most MiB on the device of a rank for models and engine, without activations and buffers;
    a phase that needs more ends the run and says what it holds; null: no bound"""
