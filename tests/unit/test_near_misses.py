"""A method that is one letter off an optional method is named at construction, because nothing would ever call it."""

import importlib
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import pytest
from torch import nn

import grpo
from grpo import ComparesActions, HasState, PolicyModel, ProtocolError, policy_base
from grpo._common.protocols import refuse_near_misses
from grpo.policy_base import CAPABILITIES, POLICY_METHODS
from tests.support.policies import DuckPolicy, RowScoring, TablePolicy
from tests.support.trainers import by_hand, trainer_of


def method(self: Any, *arguments: Any) -> Any:
    """Any method: construction calls none of them."""


def policy_with(*names: str, base: type = TablePolicy) -> Any:
    return type("Typo", (base,), dict.fromkeys(names, method))()


class Judge:
    def compute_rewards(self, states: Any, actions: Any) -> Any: ...

    train = eval = to = compute_rewards


@pytest.mark.parametrize(("name", "right", "capability"), [
    ("score_actons", "score_actions", "ScoresActions"),  # one letter less
    ("scores_groups", "score_groups", "ScoresGroups"),  # one more
    ("score_group", "score_groups", "ScoresGroups"),
    ("sample_action", "sample_actions", "SamplesWithScores"),
    ("reference_log_probabilites", "reference_log_probabilities", "ScoresReference"),
    ("sync_samplers", "sync_sampler", "SyncsSampler"),
    ("sync_samplre", "sync_sampler", "SyncsSampler"),  # two neighbours swapped
    ("begin_samplin", "begin_sampling", "BeginsSampling"),
    ("plan_microbatches", "plan_micro_batches", "PlansMicroBatches"),
    ("split_stebs", "split_steps", "SplitsSteps"),  # another letter
    ("xplit_steps", "split_steps", "SplitsSteps"),  # the first
    ("state_key", "state_keys", "KeysStates"),
    ("shard_unit", "shard_units", "HasShardUnits"),
    ("penality", "penalty", "HasPenalty"),
])  # fmt: skip
def test_a_method_one_letter_off_is_named_with_what_it_would_buy(name: str, right: str, capability: str) -> None:
    text = rf"^policy: Typo has {name}\(\), which .* lacks {right}\(\) of {capability}: .*Rename {name} to {right},"
    with pytest.raises(ProtocolError, match=text):
        trainer_of(policy_with(name))


def test_the_error_names_the_class_that_has_the_method_or_whose_object_holds_it() -> None:
    child = type("Child", (type(policy_with("score_actons")),), {})()
    with pytest.raises(ProtocolError, match=r"policy: Typo has score_actons\(\).*Scores rows with different numbers"):
        trainer_of(child)
    policy = TablePolicy()
    policy.split_step = lambda states, actions: (states, actions)
    with pytest.raises(ProtocolError, match=r"TablePolicy has split_step\(\)"):
        trainer_of(policy)


@pytest.mark.parametrize("policy", [
    policy_with("score_action", base=RowScoring),  # the right name is present
    type("Off", (TablePolicy,), {"score_groups": None, "score_group": method})(),  # and switched off
    *map(policy_with, ("plan_micro_batch", "skore_aktions", "slpit_stpes")),  # two letters less, two others, two swaps
    policy_with("_score_actions"),
    type("Value", (TablePolicy,), {"state_key": "board"})(),  # no method
])  # fmt: skip
def test_other_names_are_not_named(policy: Any) -> None:
    assert trainer_of(policy).policy is policy


def test_the_reference_and_the_reward_model_are_checked_too() -> None:
    with pytest.raises(ProtocolError, match=r"^reference_policy: Typo has score_actons\(\)"):
        by_hand(reference_policy=policy_with("score_actons"))
    for name, right in [("in_group", "in_groups"), ("state_dcit", "state_dict"), ("load_statedict", "load_state_dict")]:
        judge = type("Typo", (Judge,), {name: method})()
        with pytest.raises(ProtocolError, match=rf"^reward_model: Typo has {name}\(\).* lacks {right}\(\)"):
            trainer_of(TablePolicy(), judge)
    helped = type("Helped", (Judge,), {"score_actons": method})()  # no reward model is asked for scores
    trainer_of(TablePolicy(), helped)


def test_optional_methods_below_seven_letters_have_no_near_misses() -> None:
    class Six(Protocol):
        def settle(self) -> None: ...

    class Seven(Protocol):
        def settles(self) -> None: ...

    refuse_near_misses(policy_with("setle"), "policy", (Six,))
    with pytest.raises(ProtocolError, match=r"lacks settles\(\) of Seven"):
        refuse_near_misses(policy_with("settle"), "policy", (Seven,))


def test_a_policy_that_is_no_module_is_told_of_a_misspelt_state() -> None:
    six = {name: getattr(DuckPolicy, name) for name in (*POLICY_METHODS, "__init__")}
    stateless = type("Stateless", (), {**six, "state_dit": method})()
    with pytest.raises(ProtocolError, match=r"Stateless has state_dit\(\).* lacks state_dict\(\) of HasState"):
        trainer_of(stateless)


def test_every_optional_protocol_is_looked_for_public_and_in_the_readme_with_its_methods() -> None:
    protocols = {value for value in vars(policy_base).values() if getattr(value, "_is_protocol", False)}
    assert set(CAPABILITIES) == protocols - {PolicyModel, policy_base.Protocol}
    readme = (Path(policy_base.__file__).parent / "README.md").read_text(encoding="utf-8")
    for capability in CAPABILITIES:
        assert capability.__name__ in grpo.__all__
        for name in vars(capability):
            assert name.startswith("_") or f"`{name}(" in readme, f"{capability.__name__}.{name}"


@pytest.mark.parametrize("package", ["agents", "bandits", "control", "llm", "tools"])
def test_no_policy_and_no_reward_of_the_adapters_is_hit(package: str) -> None:
    module = importlib.import_module(f"adapters.{package}")
    kinds = [value for value in map(module.__dict__.get, module.__all__) if isinstance(value, type)]
    found = [kind for kind in kinds if hasattr(kind, "generate_actions") or hasattr(kind, "compute_rewards")]
    assert found
    for kind in found:
        refuse_near_misses(object.__new__(kind), package, CAPABILITIES)
        refuse_near_misses(object.__new__(kind), package, (ComparesActions, HasState))


def test_no_name_of_torch_or_gymnasium_is_hit() -> None:
    for value in (nn.Module(), object.__new__(gymnasium.Env)):
        refuse_near_misses(value, "policy", CAPABILITIES)
