"""Each field of each config, surrogate and sampler correction, changed alone, changes what a small run does.

So there is no setting that nothing reads.
"""

import asyncio
import dataclasses
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from grpo import (
    ActionScores,
    AdvantageConfig,
    EntropyControl,
    ExperienceBatch,
    GRPOConfig,
    GRPOTrainer,
    KLControl,
    KPop,
    Mask,
    ObjectiveConfig,
    RewardConfig,
    SampledActions,
    Truncate,
    WeightedRewards,
)
from grpo.arguments import Settings
from grpo.config import CORRECTIONS, SURROGATES
from grpo.errors import GRPOError
from grpo.surrogates import Cispo, Clip, ClipCov, Dppo, Dro, Gmpo, KlCov, Reinforce, Sapo, Vespo
from tests.support.policies import ExactSampling, digest, weights_of

pytestmark = pytest.mark.usefixtures("without_type_checks")


class Sampler(ExactSampling):
    """Sequences from a sampler that is a little off, and tells so."""

    def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
        sampled = super().sample_actions(states, num_actions_per_state)
        assert sampled.behaviour_log_probs is not None
        shifts = torch.linspace(-1.5, 1.5, sampled.mask.numel(), dtype=torch.float64).view(sampled.mask.shape)
        return dataclasses.replace(sampled, behaviour_log_probs=sampled.behaviour_log_probs + shifts)

    def to(self, *arguments: Any, **keywords: Any) -> Any:
        self.calls["to"] += 1
        return super().to(*arguments, **keywords)


class Critic(Sampler):
    """The policy above, with a value for each position in a sequence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.value = nn.Parameter(torch.zeros(self.max_steps, dtype=self.head.weight.dtype))

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        scores = super().score_actions(states, actions)
        return dataclasses.replace(scores, values=self.value[: scores.mask.shape[1]].repeat(len(actions), 1))


class Observing(Sampler):
    """The policy above, which foresees one answer of the environment after each row."""

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        observed = self._logits(list(states), torch.zeros(len(actions), 1, dtype=torch.int64))[:, :, 0]
        mask = torch.ones_like(observed, dtype=torch.bool)
        scores = super().score_actions(states, actions)
        return dataclasses.replace(scores, observed_log_probs=observed, observed_mask=mask)


class Keyed(Sampler):
    """The policy above, with state keys that depend on the last action."""

    def state_keys(self, states: Any, actions: Any) -> Tensor:
        keys = torch.zeros(len(actions), self.max_steps, dtype=torch.int64)
        for row, action in enumerate(actions):
            keys[row, 1 : len(action)] = torch.tensor(action[:-1], dtype=torch.int64)
        return keys


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The conditions of a run other than the setting under test."""

    policy: type[Sampler] = Sampler
    float32: bool = False
    """Autocast leaves float64 alone."""
    nan_gradients: bool = False
    per_step: bool = False
    """Rewards per step."""
    one_part: bool = False
    """The reward is a sum of a single part."""
    several_rewards: bool = False
    dead_group: bool = False
    """All rewards in state 0 are equal."""
    first_is_nan: bool = False
    calls_that_raise: int = 0
    """This many calls of the rewards raise, and the later ones do not."""
    awaited: bool = False
    """The reward has two parts that are awaited for a while, and tell how many are awaited at the same time."""
    demonstrations: bool = False
    """There are demonstrations, too."""
    credit: Literal["gae"] | None = None
    """`gae` trains a critic."""


class Rewards:
    """Rewards the number of ones, per row or per step, and can fail in the ways that `RewardConfig` handles."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.calls_that_raise = scene, scene.calls_that_raise

    def __call__(self, states: Any, actions: Any) -> Any:
        if self.calls_that_raise:
            self.calls_that_raise -= 1
            raise ConnectionError("not yet")
        width = max(len(action) for action in actions)
        rewards = torch.zeros(len(actions), width, dtype=torch.float64)
        for row, action in enumerate(actions):
            for place, token in enumerate(action):
                rewards[row, place] = float(token == 1) + 0.1 * place + 0.01 * (row % 3)
        if self.scene.dead_group:
            rewards[torch.tensor([state == 0 for state in states])] = 0.5
        if self.scene.first_is_nan:
            rewards[0] = math.nan
        return rewards if self.scene.per_step else rewards.sum(1)


class Awaited:
    """Rewards each row for its number, times the largest number of calls at the same time."""

    now = most = 0

    async def __call__(self, states: Any, actions: Any) -> list[float]:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.2)
        self.now -= 1
        return [float(self.most * row) for row in range(len(actions))]


def lengths(states: Any, actions: Any) -> list[float]:
    return [float(len(action)) for action in actions]


def outcome(config: GRPOConfig, scene: Scene) -> str:
    """A hash of everything that a run of two iterations leaves behind.

    That is weights, calls of the policy, functions compiled, seconds slept, and the error.
    """
    slept: list[float] = []
    compiled: list[str] = []

    def compile_nothing(function: Any) -> Any:
        compiled.append("objective")
        return function

    torch.manual_seed(0)
    options: dict[str, Any] = {"max_steps": 3, "dtype": torch.float32 if scene.float32 else torch.float64}
    policy, reference = scene.policy(**options), scene.policy(**options)
    if scene.nan_gradients:
        policy.head.weight.register_hook(lambda gradient: gradient * math.nan)
    rewards: Any = Rewards(scene)
    if scene.one_part:
        rewards = WeightedRewards({"ones": rewards})
    if scene.several_rewards:
        rewards = WeightedRewards({"ones": rewards, "lengths": lengths})
    if scene.awaited:
        awaited = Awaited()
        rewards = WeightedRewards({"one": awaited, "two": awaited})
    error = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compile_nothing)
        try:
            trainer = GRPOTrainer(config=config, policy=policy, reward_model=rewards, reference_policy=reference)
            trainer.collector.ask_for_rewards.sleep = slept.append
            given = ExperienceBatch.from_demonstrations([0, 1], [(1, 2), (2,)]) if scene.demonstrations else None
            trainer.train([0, 1, 2, 3], demonstrations=given, num_iterations=2, progress=False)
        except GRPOError as raised:
            error = f"{type(raised).__name__}: {raised}"
    calls = sorted(policy.calls.items())
    return digest(weights_of(policy), policy.rows_scored, calls, compiled, [round(seconds) for seconds in slept], error)


outcome_before = cache(outcome)
"""Runs before the change, which several cases share."""


BASE: dict[str, Any] = {"group_size": 4, "batch_size": 6, "num_epochs_per_update": 2, "learning_rate": 0.05, "seed": 0}
PLAIN, STEPS, SEVERAL, DEAD = Scene(), Scene(per_step=True), Scene(several_rewards=True), Scene(dead_group=True)
NAN, RAISES, AWAITED = Scene(first_is_nan=True), Scene(calls_that_raise=1), Scene(awaited=True)
OUTAGE = Scene(calls_that_raise=20)  # of 16 rows: a call for all rows, one for each row, and three more
CRITIC, KEYED = Scene(policy=Critic), Scene(policy=Keyed)
GIVEN = Scene(demonstrations=True)
TRAINED_CRITIC = Scene(policy=Critic, credit="gae")

Case = tuple[dict[str, Any], dict[str, Any], Scene]
"""Settings that are the same in both runs, the one that is changed in the second, and what both runs meet."""


CASES: dict[type[Settings], dict[str, Case]] = {
    GRPOConfig: {
        "group_size": ({}, {"group_size": 3}, PLAIN),
        "num_states_per_iteration": ({}, {"num_states_per_iteration": 2}, PLAIN),
        "num_demonstrations_per_iteration": ({}, {"num_demonstrations_per_iteration": 1}, GIVEN),
        "batch_size": ({}, {"batch_size": 5}, PLAIN),
        "micro_batch_size": ({}, {"micro_batch_size": 2}, PLAIN),
        "num_epochs_per_update": ({}, {"num_epochs_per_update": 3}, PLAIN),
        "learning_rate": ({}, {"learning_rate": 0.01}, PLAIN),
        "lr_schedule": ({}, {"lr_schedule": "linear"}, PLAIN),
        "warmup_ratio": ({}, {"warmup_ratio": 0.9}, PLAIN),
        "max_grad_norm": ({}, {"max_grad_norm": 1e-9}, PLAIN),
        "max_skipped_updates": ({}, {"max_skipped_updates": 2}, Scene(nan_gradients=True)),
        "autocast_dtype": ({}, {"autocast_dtype": "bfloat16"}, Scene(float32=True)),
        "compile_objective": ({}, {"compile_objective": True}, PLAIN),
        "device": ({}, {"device": "cpu"}, PLAIN),
        "seed": ({}, {"seed": 1}, PLAIN),
        "kl_control": ({}, {"kl_control": KLControl()}, PLAIN),
        "entropy_control": ({}, {"entropy_control": EntropyControl(target=2.0)}, PLAIN),
        "reference_sync_every": ({}, {"reference_sync_every": 1}, PLAIN),
        "reference_mix": ({"reference_sync_every": 1}, {"reference_mix": 0.5}, PLAIN),
        "dynamic_sampling_rounds": ({}, {"dynamic_sampling_rounds": 1}, DEAD),
        "replay_iterations": ({}, {"replay_iterations": 1}, PLAIN),
        "iterations_ahead": ({}, {"iterations_ahead": 1}, PLAIN),
    },
    AdvantageConfig: {
        "credit": ({}, {"credit": "row"}, STEPS),
        "baseline": ({}, {"baseline": "none"}, PLAIN),
        "scale": ({}, {"scale": "batch"}, PLAIN),
        "std_ddof": ({"scale": "group"}, {"std_ddof": 0}, PLAIN),
        "std_eps": ({"scale": "group"}, {"std_eps": 0.5}, PLAIN),
        "k": ({"baseline": "max_at_k", "k": 2}, {"k": 3}, PLAIN),
        "several_rewards": ({}, {"several_rewards": "normalize_each"}, SEVERAL),
        "gamma": ({}, {"gamma": 0.5}, STEPS),
        "gae_lambda": ({"credit": "gae"}, {"gae_lambda": 0.5}, CRITIC),
        "gigpo_weight": ({"credit": "gigpo"}, {"gigpo_weight": 2.0}, KEYED),
        "upweight_live_groups": ({}, {"upweight_live_groups": True}, DEAD),
        "positive_weight": ({}, {"positive_weight": 0.5}, PLAIN),
        "negative_only": ({}, {"negative_only": True}, PLAIN),
        "clip": ({}, {"clip": 0.05}, PLAIN),
        "reward_clip": ({}, {"reward_clip": 0.5}, PLAIN),
        "normalize_rewards": ({}, {"normalize_rewards": True}, PLAIN),
    },
    ObjectiveConfig: {
        "surrogate": ({}, {"surrogate": "reinforce"}, PLAIN),
        "top_entropy_fraction": ({}, {"top_entropy_fraction": 0.5}, PLAIN),
        "off_policy_threshold": ({}, {"off_policy_threshold": 0.1}, PLAIN),
        "sampler_correction": ({}, {"sampler_correction": "mask"}, PLAIN),
        "kl_coef": ({}, {"kl_coef": 0.5}, PLAIN),
        "kl_estimator": ({}, {"kl_estimator": "k2"}, PLAIN),
        "entropy_coef": ({}, {"entropy_coef": 0.5}, PLAIN),
        "entropy_estimator": ({"entropy_coef": 0.5}, {"entropy_estimator": "score_function"}, PLAIN),
        "entropy_aggregation": ({"entropy_coef": 0.5}, {"entropy_aggregation": "step_mean"}, PLAIN),
        "value_coef": ({}, {"value_coef": 1.0}, TRAINED_CRITIC),
        "value_clip": ({}, {"value_clip": 1e-6}, TRAINED_CRITIC),
        "demonstration_coef": ({}, {"demonstration_coef": 0.5}, GIVEN),
        "observation_coef": ({}, {"observation_coef": 0.5}, Scene(policy=Observing)),
        "aggregation": ({}, {"aggregation": "step_mean"}, PLAIN),
        "fixed_length": ({"aggregation": "fixed_length", "fixed_length": 3}, {"fixed_length": 9}, PLAIN),
    },
    RewardConfig: {
        "non_finite": ({"non_finite": "drop"}, {"non_finite": "zero"}, NAN),
        "not_applicable": ({"non_finite": "drop"}, {"not_applicable": "zero"}, Scene(first_is_nan=True, one_part=True)),
        "on_failure": ({}, {"on_failure": "drop"}, RAISES),
        "num_retries": ({}, {"num_retries": 1}, RAISES),
        "timeout": ({}, {"timeout": 0.01}, AWAITED),
        "max_concurrent": ({}, {"max_concurrent": 1}, AWAITED),
        "retry_delay": ({"num_retries": 1}, {"retry_delay": 5.0}, RAISES),
        "max_retry_seconds": ({"num_retries": 30, "breaker_failures": 40}, {"max_retry_seconds": 200.0}, OUTAGE),
        "breaker_failures": ({"on_failure": "drop"}, {"breaker_failures": 18}, OUTAGE),
        "breaker_seconds": ({"on_failure": "drop"}, {"breaker_seconds": 5.0}, OUTAGE),
    },
    KLControl: {  # the divergence is about 0.3, the coefficient begins at 0.04
        "rule": ({}, {"rule": "proportional"}, PLAIN),
        "target": ({}, {"target": 100.0}, PLAIN),
        "coef_min": ({"target": 100.0}, {"coef_min": 0.035}, PLAIN),
        "coef_max": ({}, {"coef_max": 0.05}, PLAIN),
        "gain": ({"rule": "proportional"}, {"gain": 0.5}, PLAIN),
    },
    EntropyControl: {  # the entropy is about 1, the coefficient begins at 0
        "target": ({}, {"target": 2.0}, PLAIN),
        "delta": ({"target": 2.0}, {"delta": 0.1}, PLAIN),
        "coef_min": ({"target": 2.0}, {"coef_min": 0.5}, PLAIN),
        "coef_max": ({"target": 2.0}, {"coef_max": 0.002}, PLAIN),
    },
    Clip: {
        "level": ({}, {"level": "row"}, PLAIN),
        "low": ({}, {"low": 0.01}, PLAIN),
        "high": ({}, {"high": 0.01}, PLAIN),
        "delta": ({"high": 0.01}, {"delta": 1.02}, PLAIN),
        "dual": ({}, {"dual": 1.02}, PLAIN),
    },
    Reinforce: {},
    Cispo: {
        "level": ({}, {"level": "row"}, PLAIN),
        "low": ({}, {"low": 0.01}, PLAIN),
        "high": ({}, {"high": 0.01}, PLAIN),
    },
    Sapo: {
        "level": ({}, {"level": "row"}, PLAIN),
        "temperature_pos": ({}, {"temperature_pos": 3.0}, PLAIN),
        "temperature_neg": ({}, {"temperature_neg": 3.0}, PLAIN),
    },
    Gmpo: {
        "low": ({}, {"low": 0.01}, PLAIN),
        "high": ({}, {"high": 0.01}, PLAIN),
    },
    Vespo: {
        "k_pos": ({}, {"k_pos": 0.5}, PLAIN),
        "lambda_pos": ({}, {"lambda_pos": 0.5}, PLAIN),
        "k_neg": ({}, {"k_neg": 0.5}, PLAIN),
        "lambda_neg": ({}, {"lambda_neg": 0.5}, PLAIN),
    },
    Dro: {
        "level": ({}, {"level": "row"}, PLAIN),
        "beta": ({}, {"beta": 0.5}, PLAIN),
    },
    Dppo: {
        "level": ({}, {"level": "row"}, PLAIN),
        "tv_limit": ({}, {"tv_limit": 0.01}, PLAIN),
    },
    KlCov: {
        "level": ({}, {"level": "row"}, PLAIN),
        "fraction": ({}, {"fraction": 0.5}, PLAIN),
        "coef": ({"fraction": 0.5}, {"coef": 0.1}, PLAIN),
    },
    ClipCov: {
        "level": ({}, {"level": "row"}, PLAIN),
        "low": ({}, {"low": 0.01}, PLAIN),
        "high": ({}, {"high": 0.01}, PLAIN),
        "fraction": ({"cov_low": -9.0}, {"fraction": 0.5}, PLAIN),
        "cov_low": ({"fraction": 0.5, "cov_low": -9.0}, {"cov_low": 0.0}, PLAIN),
        "cov_high": ({"fraction": 0.5, "cov_low": -9.0}, {"cov_high": 0.0}, PLAIN),
    },
    Truncate: {
        "low": ({}, {"low": 0.9}, PLAIN),
        "high": ({}, {"high": 1.1}, PLAIN),
        "level": ({}, {"level": "row"}, PLAIN),
    },
    Mask: {
        "low": ({}, {"low": 0.9}, PLAIN),
        "high": ({}, {"high": 1.1}, PLAIN),
        "level": ({}, {"level": "row"}, PLAIN),
    },
    KPop: {"threshold": ({}, {"threshold": 1e-4}, PLAIN)},
}
PARTS: dict[type[Settings], str] = {
    AdvantageConfig: "advantage",
    ObjectiveConfig: "objective",
    RewardConfig: "reward",
    KLControl: "kl_control",
    EntropyControl: "entropy_control",
}


def test_every_field_of_the_config_has_a_case(subtests: pytest.Subtests) -> None:
    """A field that is always another config has that config's fields among the cases."""
    for kind, cases in CASES.items():
        with subtests.test(kind=kind.__name__):
            hints = get_type_hints(kind)
            fields = {field.name for field in dataclasses.fields(kind) if hints[field.name] not in PARTS}
            assert fields == set(cases)


def test_every_part_of_the_config_has_its_own_cases() -> None:
    kinds = {kind for hint in get_type_hints(GRPOConfig).values() for kind in (hint, *get_args(hint))}
    parts = {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Settings)}
    assert parts == set(PARTS)
    assert set(CASES) == {GRPOConfig, *PARTS, *SURROGATES.values(), *CORRECTIONS.values()}


def config_with(kind: type[Settings], values: dict[str, Any], scene: Scene) -> GRPOConfig:
    """The settings of a run, with these values of one config, surrogate or correction."""
    if kind is GRPOConfig:
        chosen = values
    elif kind in SURROGATES.values():
        chosen = {"objective": ObjectiveConfig(surrogate=kind(**values))}
    elif kind in CORRECTIONS.values():
        chosen = {"objective": ObjectiveConfig(sampler_correction=kind(**values))}
    else:
        chosen = {PARTS[kind]: kind(**values)}
    return GRPOConfig(**BASE | {"advantage": AdvantageConfig(credit=scene.credit)} | chosen)


@pytest.mark.slow
def test_a_repeated_run_has_the_same_outcome(subtests: pytest.Subtests) -> None:
    """This shows that a difference between two runs is due to the setting."""
    shared_by_scene = {case[2]: (kind, case[0]) for kind, cases in CASES.items() for case in cases.values()}
    for scene, (kind, shared) in shared_by_scene.items():
        with subtests.test(scene=scene):
            config = config_with(kind, shared, scene)
            assert outcome_before(config, scene) == outcome(config, scene)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind, cases in CASES.items() if cases])
@pytest.mark.filterwarnings("ignore::grpo.errors.GRPOWarning")  # bfloat16 moves log-probs, and that is said
def test_changing_any_single_field_changes_the_outcome_of_a_run(
    kind: type[Settings], subtests: pytest.Subtests
) -> None:
    for name, (shared, changed, scene) in CASES[kind].items():
        with subtests.test(name=name):
            assert list(changed) == [name]
            before, after = config_with(kind, shared, scene), config_with(kind, shared | changed, scene)
            assert outcome_before(before, scene) != outcome(after, scene)


def test_each_update_calls_the_compiled_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def compile_nothing(function: Any) -> Any:
        def compiled(*arguments: Any, **keywords: Any) -> Any:
            calls.append("compiled")
            return function(*arguments, **keywords)

        return compiled

    monkeypatch.setattr(torch, "compile", compile_nothing)
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=4, num_epochs_per_update=2, seed=0, compile_objective=True),
        policy=Sampler(),
        reward_model=Rewards(PLAIN),
    )
    trainer.step([0, 1])
    assert len(calls) == 2
