"""TRL's own GRPO code without a model: `GRPOTrainer`'s methods, unbound, on a stand-in with the settings and the tensors.

Nothing of TRL is transcribed here. The stand-in has what the methods read from `self`: settings, an accelerator of one
process, and, where the trainer would run a model, the log-probs and entropies of the test.
"""

import importlib
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import MethodType, SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
RatioLevel = Literal["token", "sequence"]
SamplerMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

PAD = 0


@cache
def imported(module: str, name: str) -> Any:
    """Something of TRL, imported when a test first needs it: collecting the tests does not wait for it."""
    pytest.importorskip("trl", minversion="1.16", reason='needs TRL: pip install -e ".[bench]"')
    with warnings.catch_warnings():  # what its dependencies deprecate is not ours to fix
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(f"trl.{module}"), name)


def their_class() -> Any:
    return imported("trainer.grpo_trainer", "GRPOTrainer")


@dataclass(frozen=True, kw_only=True)
class TRLSettings:
    """What `GRPOTrainer` reads from `self` and `self.args`, by TRL's names."""

    loss_type: LossType = "grpo"
    importance_sampling_level: RatioLevel = "token"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = False
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    max_completion_length: int = 16
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_target: float = 0.2
    entropy_coef_delta: float = 0.005
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    use_vllm: bool = False
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: SamplerMode = "sequence_mask"
    vllm_importance_sampling_clip_min: float | None = None
    vllm_importance_sampling_clip_max: float | None = 3.0
    scale_rewards: Literal["group", "batch", "none"] = "group"
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    num_generations: int = 1
    current_gradient_accumulation_steps: int = 1
    steps_per_generation: int = 1


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """What generation and the forward passes of one generation batch would have given."""

    mask: Tensor
    """[N, T] bool."""
    old_log_probs: Tensor | None
    """[N, T]; None: the trainer finds generation and optimisation in step and does not compute them."""
    ref_log_probs: Tensor
    """[N, T]."""
    behaviour_log_probs: Tensor | None
    """[N, T], of the sampler; NaN: unscored."""
    rewards: Tensor
    """[N, K], one column per reward function; NaN: it returned None."""
    reward_weights: Tensor
    """[K]."""


def advantages_and_ratios(rollouts: Rollouts, settings: TRLSettings) -> dict[str, Tensor]:
    """`_generate_and_score_completions`: the inputs of the loss, advantages and sampler ratios among them.

    A row's completion ends with its last valid step; holes before that are what TRL takes for steps of a tool.
    """
    mask = rollouts.mask
    lengths = [1 + max([t for t, valid in enumerate(row) if valid], default=0) for row in mask.tolist()]
    width = max(lengths)
    num_rows = len(lengths)
    behaviour = rollouts.behaviour_log_probs
    generated = (
        [[PAD]] * num_rows,  # prompts
        [[PAD + 1] * length for length in lengths],  # completions
        [row[:length] for row, length in zip(mask.long().tolist(), lengths, strict=True)],
        [""] * num_rows,
        None if behaviour is None else [_scored(row, n) for row, n in zip(behaviour, lengths, strict=True)],
        {},
        None,
        None,
    )
    passes = {"policy": rollouts.old_log_probs, "reference": rollouts.ref_log_probs}
    names = [f"reward_{k}" for k in range(rollouts.rewards.shape[1])]
    policy = _model("policy")
    self = trainer(
        settings,
        model=policy,
        ref_model=_model("reference"),
        num_iterations=1 if rollouts.old_log_probs is None else 2,
        gradient_accumulation_steps=settings.steps_per_generation,
        per_device_train_batch_size=num_rows,
        gradient_checkpointing_kwargs=None,
        environment_factories=None,
        environments=None,
        tools=None,
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        log_multimodal=False,
        _tokenizer=SimpleNamespace(pad_token_id=PAD),
        _generate=lambda prompts: generated,
        _get_per_token_logps_and_entropies=lambda model, *_, **__: (passes[model.name][:, :width], None, None),
        _calculate_rewards=lambda *_: rollouts.rewards,
        reward_funcs=names,
        reward_func_names=names,
        reward_weights=rollouts.reward_weights,
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
    )
    with _default_dtype(rollouts.rewards.dtype):  # TRL builds the sampler's log-probs from lists
        return their_class()._generate_and_score_completions(self, [{"prompt": ""} for _ in lengths])


def loss_inputs(mask: Tensor, advantages: Tensor, old_log_probs: Tensor | None, **others: Tensor) -> dict[str, Tensor]:
    """Inputs of the loss made by hand, for what the trainer's own advantages cannot be: any number, or one per step."""
    completion = {"completion_ids": torch.ones_like(mask, dtype=torch.long), "completion_mask": mask.long()}
    prompt = {"prompt_ids": torch.ones(len(mask), 1, dtype=torch.long)}
    prompt["prompt_mask"] = prompt["prompt_ids"]
    old = {} if old_log_probs is None else {"old_per_token_logps": old_log_probs}
    return {**prompt, **completion, **old, "advantages": advantages, "num_items_in_batch": mask.sum(), **others}


def loss(inputs: dict[str, Tensor], log_probs: Tensor, entropy: Tensor, settings: TRLSettings) -> Tensor:
    """`_compute_loss` on log-probs [N, T] and entropies [N, T], which may be longer than the inputs' completions."""
    return next_loss(updating_trainer(settings), inputs, log_probs, entropy)


def updating_trainer(settings: TRLSettings) -> Any:
    """A stand-in that has what `_compute_loss` reads, and remembers what that writes: the adaptive entropy coefficient."""
    return trainer(
        settings,
        model=_model("policy"),
        aux_loss_enabled=False,
        _entropy_bonus_enabled=settings.entropy_coef != 0.0 or settings.use_adaptive_entropy,
        _last_world_entropy=math.inf,
        _entropy_window_stats=None,
    )


def next_loss(trainer: Any, inputs: dict[str, Tensor], log_probs: Tensor, entropy: Tensor) -> Tensor:
    """`_compute_loss` of an `updating_trainer`, as its next update."""
    width = inputs["completion_ids"].shape[1]
    outputs = (log_probs[:, :width], entropy[:, :width], None)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: outputs
    return their_class()._compute_loss(trainer, trainer.model, inputs)


class _OneProcess:
    """The accelerator of a run on one CPU."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0
    sync_gradients = True

    def gather(self, values: Tensor) -> Tensor:
        return values

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        return values

    def pad_across_processes(self, values: Tensor, dim: int, pad_index: float) -> Tensor:
        return values


def trainer(settings: TRLSettings, **others: Any) -> Any:
    """Takes the place of `self`, and of `self.args`: TRL reads a setting from the one or the other."""
    self = SimpleNamespace(**vars(settings), **others, accelerator=_OneProcess())
    self.args = self
    self._metrics = {"train": defaultdict(list)}
    self.get_high_entropy_mask = MethodType(their_class().get_high_entropy_mask, self)
    self.get_off_policy_mask = their_class().get_off_policy_mask
    self.get_gamma_weights = their_class().get_gamma_weights
    return self


def _model(name: str) -> Any:
    return SimpleNamespace(name=name, training=True, is_gradient_checkpointing=False)


def _scored(row: Tensor, length: int) -> list[float | None]:
    """One row as vLLM gives it: None where a token has no log-prob."""
    return [None if value != value else value for value in row[:length].tolist()]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
