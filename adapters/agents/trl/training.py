"""Training by TRL's `GRPOTrainer`, with our policy, rewards and settings, and our report."""

import copy
import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback

from adapters.agents.policy import AgentPolicy
from adapters.llm import HFPolicy
from grpo import GRPOConfig
from grpo.arguments import describe
from grpo.errors import ConfigError, ContractError, NonFiniteGradientError
from grpo.metrics import reward_statistics
from grpo.rewards import is_async

from .handover import COLUMN, trl_environment, trl_reward_functions
from .settings import Sizes, refuse, trl_arguments

METRICS = {
    "loss": "train/total_loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "kl": "train/kl_mean",
    "step_time": "time/iteration",
}
"""TRL's metrics that are the same as one of ours. The others keep their names, after `trl/`. Metrics of rewards are our own."""


def train_with_trl(
    policy: HFPolicy | AgentPolicy,
    reward: Any,
    config: GRPOConfig,
    *,
    states: Sequence[Any],
    num_iterations: int,
    reference_policy: HFPolicy | AgentPolicy | None = None,
    output_dir: str | Path | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> list[dict[str, float]]:
    """Train a policy as `GRPOTrainer.train` would, but by TRL's trainer. `pip install "trl==1.16.*"` installs TRL.

    `SETTINGS` lists the counterpart of each setting. Settings without a counterpart are refused. TRL draws other random
    numbers, so two runs are equal only in distribution.

    Args:
        policy: The policy. Its model is trained in place. An `AgentPolicy` needs environments whose tools are functions.
        reward: A reward model, or a function `(states, actions) -> rewards`.
        config: The settings.
        states: A list of states.
        num_iterations: Number of iterations.
        reference_policy: A policy with the reference of the KL term, as in `GRPOTrainer(reference_policy=...)`.
        output_dir: Folder for TRL's files. None: a temporary one.
        arguments: Further arguments of TRL's `GRPOConfig`, for example `{"gradient_checkpointing": True}`.

    Returns:
        The metrics of each iteration, by our names.

    Raises:
        ConfigError: TRL is not installed, or a setting has no counterpart in TRL.
        NonFiniteGradientError: A gradient is NaN or infinite. TRL has applied it to the weights.
    """
    language = _language_model(policy)
    if config.device is not None:
        language.to(config.device)
    sizes = Sizes.of(config, len(states))
    reference = language.reference_model if reference_policy is None else _language_model(reference_policy).model
    kl_coef = config.objective.kl_coef_with(has_reference=reference_policy is not None)
    _require_counterpart(policy, language, config, kl_coef, reference)
    max_length = language.sampling.max_new_tokens
    if isinstance(policy, AgentPolicy):
        max_length = (language.max_positions or 2**20) - 1
    given = trl_arguments(config, language.sampling, sizes, kl_coef=kl_coef, max_length=max_length)
    if taken := sorted({*given} & {*(arguments or {})}):
        raise ConfigError(f"train_with_trl: arguments must not set {taken}; config sets them. Change config instead.")

    environment = None
    if isinstance(policy, AgentPolicy):
        given["max_tool_calling_iterations"] = policy.max_turns - 1
        environment, rows = trl_environment(policy.make, states, group_size=config.group_size)
    else:
        rows = [{"prompt": prompt, COLUMN: i} for i, prompt in enumerate(map(language.prompt_of, states))]
        _require_one_kind([row["prompt"] for row in rows])
    try:
        trl, datasets = import_module("trl"), import_module("datasets")
    except ImportError as error:
        raise ConfigError('train_with_trl needs TRL. Install it with pip install "trl==1.16.*".') from error
    tokenizer = copy.deepcopy(language.tokenizer)  # TRL changes it
    batches: list[tuple[Tensor, Mapping[str, Tensor]]] = []
    functions, weights = trl_reward_functions(
        reward,
        tokenizer,
        states=states,
        end_token_ids=language.end_token_ids,
        zero_non_finite=config.reward.non_finite == "zero",
        timeout=config.reward.timeout,
        max_concurrent=config.reward.max_concurrent,
        record=lambda total, parts: batches.append((total, parts)),
    )
    with tempfile.TemporaryDirectory() as folder, _lent_to_trl(language.model, reference, f"{folder}/reference"):
        args = trl.GRPOConfig(
            **given,
            output_dir=str(output_dir or folder),
            max_steps=num_iterations * sizes.updates,
            seed=int(torch.randint(2**32, ())) if config.seed is None else config.seed,
            reward_weights=weights,
            mask_truncated_completions=language.options.mask_truncated,
            chat_template_kwargs=dict(language.options.chat_template_options),
            use_cpu=language.model.device.type == "cpu",
            **{**QUIET, **(arguments or {})},
        )
        trainer = trl.GRPOTrainer(
            model=language.model,
            reward_funcs=functions,
            args=args,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            optimizers=_optimizer(language, config, num_iterations, sizes.updates),
            callbacks=[StopsAtNaN()],
            **({} if environment is None else {"environment_factory": environment}),
        )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        finally:
            for instance in environment._instances if environment is not None else ():
                instance._close()
    updates = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [
        _metrics(updates[i * sizes.updates : (i + 1) * sizes.updates], *batch, kl_coef, config)
        for i, batch in enumerate(batches)
    ]


QUIET = {
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""Arguments that `arguments` may change."""


CHANGED = ("forward", "_name_or_path", "pad_token_id", "bos_token_id", "eos_token_id")
"""Attributes of a model and of its configurations that TRL changes."""


class StopsAtNaN(TrainerCallback):
    """Ends the run at the first gradient that is not finite."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Raise a `NonFiniteGradientError` if the norm of the gradient is not finite."""
        norm = float((logs or {}).get("grad_norm") or 0.0)
        if not math.isfinite(norm):
            raise NonFiniteGradientError(
                f"train_with_trl: the gradient's norm must be finite; at update {state.global_step} it is {norm}, and TRL has "
                "applied it. Lower learning_rate, or train with grpo.GRPOTrainer, which skips such updates."
            )


def _optimizer(
    language: HFPolicy, config: GRPOConfig, num_iterations: int, updates: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The optimizer of `grpo.GRPOTrainer`, and its schedule, in `updates` equal steps per iteration."""

    def factor(update: int) -> float:
        return config.learning_rate_factor(update // updates, num_iterations)

    parameters = [value for value in language.get_parameters().values() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=0.0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _language_model(policy: HFPolicy | AgentPolicy) -> HFPolicy:
    return policy.policy if isinstance(policy, AgentPolicy) else policy


def _metrics(
    updates: Sequence[Mapping[str, Any]],
    rewards: Tensor,
    parts: Mapping[str, Tensor],
    kl_coef: float,
    config: GRPOConfig,
) -> dict[str, float]:
    """The metrics of one iteration: means over its updates, and statistics of its rewards."""
    metrics = {"train/kl_mean": 0.0, "train/kl_coef": kl_coef, "train/entropy_coef": config.objective.entropy_coef}
    for theirs in {name: None for entry in updates for name in entry}:
        values = [entry[theirs] for entry in updates if entry.get(theirs) is not None]
        if values:
            metrics[METRICS.get(theirs, f"trl/{theirs}")] = fmean(values)
    for name, part in parts.items() if len(parts) > 1 else ():
        applicable = part[~part.isnan()].double()
        metrics[f"rewards/{name}/applies"] = len(applicable) / len(part)
        if len(applicable):
            statistics = reward_statistics(applicable)
            metrics |= {f"rewards/{name}/{which}": statistics[f"rewards/{which}"] for which in ("mean", "std")}
    metrics |= {"train/num_updates": float(len(updates)), "time/iteration": metrics["time/iteration"] * len(updates)}
    return metrics | reward_statistics(rewards)


def _require_counterpart(policy: Any, language: HFPolicy, config: GRPOConfig, kl_coef: float, reference: Any) -> None:
    """Refuse what TRL cannot do with this policy."""
    if not language.samples_itself:
        refuse("policy.sampler", "another engine")
    configured = language.model.generation_config.eos_token_id
    ends = {language.tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])} - {None}
    if {*language.end_token_ids} != ends:
        refuse("policy.options.end_token_ids", list(language.end_token_ids))
    # TRL copies an adapter as the reference; ours is the model without it, so the KL would differ
    if kl_coef > 0 and (reference is None or hasattr(language.model, "peft_config")):
        refuse("objective.kl_coef", kl_coef)
    if config.reference_sync_every is not None and kl_coef == 0:
        refuse("reference_sync_every", config.reference_sync_every, "there is no KL")
    if isinstance(policy, AgentPolicy):
        if is_async(policy.make):
            refuse("agent.make", policy.make, "an agent program owns its loop. Pass an environment")
        if policy.max_tokens is not None:
            refuse("agent.max_tokens", policy.max_tokens)
        if policy.branch is not None:
            refuse("agent.branch", policy.branch)
        if policy.executor is not None:
            refuse("agent.executor", policy.executor)


def _require_one_kind(prompts: Sequence[Any]) -> None:
    is_text = isinstance(prompts[0], str)
    for prompt in prompts:
        if isinstance(prompt, str) != is_text or (not is_text and not isinstance(prompt[0], Mapping)):
            raise ContractError(
                "train_with_trl: prompts must be all texts or all chats, because TRL knows one kind per data set; got "
                f"{describe(prompts[0])} and {describe(prompt)}. Decode token ids."
            )


@contextmanager
def _lent_to_trl(model: Any, reference: Any, folder: str) -> Iterator[None]:
    """Context in which TRL may change the model's `forward` and its special tokens, finds the reference by its name, and does
    not warn of what is not ours to change."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    owners = [vars(owner) for owner in (model, plain, model.config, model.generation_config)]
    kept = [{name: owner[name] for name in CHANGED if name in owner} for owner in owners]
    if reference is not None:
        reference.save_pretrained(folder)
        model.config._name_or_path = folder
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers
            warnings.filterwarnings("ignore", "You are using 'environment_factory'")
            yield
    finally:
        for owner, values in zip(owners, kept, strict=True):
            for name in CHANGED:
                owner.pop(name, None)
            owner.update(values)
