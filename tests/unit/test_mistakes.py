"""Typical mistakes get a message that says what to type next: names of other libraries, places, types, and letters."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import pytest
from torch import nn

import adapters.control
import adapters.llm
import grpo
import grpo.presets
import grpo.surrogates
from adapters.bandits import MLPPolicy, SoftmaxPolicy
from adapters.control import mlp_torso
from grpo import ComparesActions, HasState, PolicyModel, ProtocolError, policy_base
from grpo._common.protocols import refuse_near_misses
from grpo.errors import GRPOError
from grpo.policy_base import CAPABILITIES, POLICY_METHODS
from tests.support.objective_inputs import as_users_run_it
from tests.support.policies import DuckPolicy, RowScoring, TablePolicy
from tests.support.trainers import by_hand, trainer_of

ROOT = Path(__file__).resolve().parents[2]
TABLE = files("grpo._common").joinpath("names_elsewhere.txt").read_text(encoding="utf-8").splitlines()[1:]
DOCS = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")


def reward(states: Any, actions: Any) -> list[float]:
    return [0.0] * len(actions)


def trainer(policy: Any = None, rewards: Any = reward, **settings: Any) -> grpo.GRPOTrainer:
    return grpo.GRPOTrainer(config=grpo.GRPOConfig(**settings), policy=policy or SoftmaxPolicy(3), reward_model=rewards)


KNOWN = {
    **{name: getattr(grpo, name) for name in grpo.__all__},
    **{name: getattr(adapters.control, name) for name in adapters.control.__all__},
    **{name: getattr(adapters.llm, name) for name in adapters.llm.__all__ if not name.startswith("VLLM")},
    **{name: getattr(grpo.surrogates, name) for name in ("Clip", "Cispo")},
    **{each.__name__: each for each in (SoftmaxPolicy, MLPPolicy, mlp_torso, trainer, reward)},
    "presets": grpo.presets,
    "nn": nn,
}

CLIP = "ObjectiveConfig(surrogate=Clip(low=..., high=...)) here"
KL = "GRPOConfig(objective=ObjectiveConfig(kl_coef=...))"
BETA = f"TRL's beta is {KL} here."
MISTAKES = [  # what is typed, what the message says, what is typed next
    ("GRPOConfig(num_generations=8)", "TRL's num_generations is group_size here.", "GRPOConfig(group_size=8)"),
    ("GRPOConfig(epsilon=0.2)", f"TRL's epsilon is {CLIP}.", "ObjectiveConfig(surrogate=Clip(low=0.2, high=0.2))"),
    ("GRPOConfig(kl_coef=0.1)", f"Did you mean {KL}?", "GRPOConfig(objective=ObjectiveConfig(kl_coef=0.1))"),
    ("GRPOConfig(groupsize=8)", "Did you mean GRPOConfig(group_size=...)?", "GRPOConfig(group_size=8)"),
    ("GRPOConfig(num_generations=8, beta=0.1)",
     f"GRPOConfig has no settings 'num_generations', 'beta'. TRL's num_generations is group_size here. {BETA}",
     "GRPOConfig(group_size=8, objective=ObjectiveConfig(kl_coef=0.1))"),
    ("GRPOConfig(8)", "too many positional arguments. Write GRPOConfig(group_size=...,", "GRPOConfig(group_size=8)"),
    ("GRPOConfig.from_dict({'num_generations': 8})", "is group_size here", "GRPOConfig.from_dict({'group_size': 8})"),
    ("GRPOConfig.from_dict({8: 1})", "GRPOConfig has no setting '8'. There are ", "GRPOConfig.from_dict({})"),
    ("with_settings(GRPOConfig(), {'num_generations': 8})", "TRL's num_generations is group_size here.",
     "with_settings(GRPOConfig(), {'group_size': 8})"),
    ("ObjectiveConfig(ent_coef=0.1)", "SB3's ent_coef is entropy_coef here.", "ObjectiveConfig(entropy_coef=0.1)"),
    ("Clip(0.2)", "Clip: too many positional arguments. Write Clip(level=..., low=...", "Clip(low=0.2)"),
    ("Clip(epsilon=0.2)", f"TRL's epsilon is {CLIP}.", "Clip(low=0.2, high=0.2)"),
    ("GRPOTrainer(model=1, reward_funcs=2)",
     "GRPOTrainer has no arguments 'model', 'reward_funcs'. TRL's model is policy=HFPolicy.from_pretrained(...) here.",
     "GRPOTrainer(config=GRPOConfig(), policy=SoftmaxPolicy(3), reward_model=reward)"),
    ("GRPOTrainer(GRPOConfig(), SoftmaxPolicy(3), reward)",
     "GRPOTrainer: too many positional arguments. Write GRPOTrainer(config=..., policy=..., reward_model=...).",
     "GRPOTrainer(config=GRPOConfig(), policy=SoftmaxPolicy(3), reward_model=reward)"),
    ("GRPOTrainer(policy=SoftmaxPolicy(3), reward_model=reward)",
     "GRPOTrainer: missing a required argument: 'config'. Write GRPOTrainer(config=..., ",
     "GRPOTrainer(config=GRPOConfig(), policy=SoftmaxPolicy(3), reward_model=reward)"),
    ("Learner(args=1)", "TRL's args is config=GRPOConfig(...) here.", "trainer()"),
    ("trainer(rewards=lambda prompts, completions, **kw: 0)", "CompletionRewards(function)", "trainer(rewards=reward)"),
    ("trainer().train()", "GRPOTrainer.train: missing a required argument: 'states'", "trainer().train([0], num_iterations=1)"),
    ("trainer().train([0], 3)", "Write GRPOTrainer.train(states).", "trainer().train([0], num_iterations=3)"),
    ("trainer().train([0], report_to='x')", "TRL's report_to is sinks here.", "trainer().train([0], num_epochs=1, sinks=[])"),
    ("EpisodePolicy('CartPole-v1', n_envs=4)", "SB3's n_envs is num_members here.", "make_pool('CartPole-v1', 4)"),
    ("EpisodePolicy('MlpPolicy', 'CartPole-v1')",
     "EpisodePolicy: too many positional arguments. Write EpisodePolicy(environment).", "EpisodePolicy('CartPole-v1')"),
    ("EpisodePolicy('CartPole-v1', hidden=(32,))", "Pass options=EpisodeOptions(hidden=...)", "EpisodeOptions(hidden=(32,))"),
    ("EpisodePolicy('CartPole-v1', num_member=4)", "Did you mean 'num_members'?", "make_pool('CartPole-v1', 4)"),
    ("EpisodeOptions(n_steps=64)", "SB3's n_steps is num_steps here.", "EpisodeOptions(num_steps=64)"),
    ("preset_for('Acrobot-v1', total_timesteps=9)", "is total_steps here.", "preset_for('Acrobot-v1', total_steps=10**6)"),
    ("evaluate_policy(1, n_eval_episodes=9)", "Did you mean 'num_episodes'?", "episode_starts(4)"),
    ("check_environment('Acrobot-v1', steps=3)", "Did you mean 'num_steps'?", "check_environment('Acrobot-v1', num_steps=3)"),
    ("episode_starts(groups=4)", "Did you mean 'num_groups'?", "episode_starts(num_groups=4)"),
    ("FittedAdvantages(1, gamma=1, gae_lamda=0)", "Did you mean 'gae_lambda'?", "episode_starts(4)"),
    ("EpisodeOptions(activation=nn.Tanh)", "must be one of 'tanh', 'relu'", "EpisodeOptions(activation='tanh')"),
    ("mlp_torso(4, activation=nn.Tanh)", "one of 'tanh', 'relu'", "mlp_torso(4, activation='tanh')"),
    ("MLPPolicy(4, 3, activation=nn.Tanh)", "must be one of 'tanh', 'relu'", "MLPPolicy(4, 3, activation='tanh')"),
    ("train_control(trainer(), None, total_timesteps=9)",
     "train_control has no argument 'total_timesteps'. SB3's total_timesteps is total_steps here.", "episode_starts(4)"),
]  # fmt: skip


def test_a_typical_mistake_says_what_to_type_next(subtests: pytest.Subtests) -> None:
    for typed, says, next_typed in MISTAKES:
        with subtests.test(typed=typed):
            with as_users_run_it(), pytest.raises(GRPOError) as caught:
                eval(typed, KNOWN)
            assert says in str(caught.value)
            assert "GRPOConfig.__init__" not in str(caught.value)
            eval(next_typed, KNOWN)


def rows_of_the_page() -> list[tuple[set[str], str, str]]:
    """The names of each row of docs/names.md, without their owners, where they come from, and what they are here."""
    found = []
    for line in DOCS.splitlines():
        if line.startswith("| `"):
            names, where, here, _ = (cell.strip() for cell in line.strip("|").split(" | ", 3))
            last = {each.rpartition(".")[2] for each in re.findall(r"[\w.]+(?=[`=(])", names)}
            found.append((last, where, here))
    return found


def test_the_table_in_the_package_says_what_the_page_says(subtests: pytest.Subtests) -> None:
    rows = rows_of_the_page()
    assert [row.split(" | ")[0].lower() for row in TABLE] == sorted(row.split(" | ")[0].lower() for row in TABLE)
    for name, where, here in (row.split(" | ") for row in TABLE):
        with subtests.test(name=name):
            cells = [cell for names, theirs, cell in rows if name in names and where.removeprefix("the ") in theirs]
            assert cells, "docs/names.md has no such row"
            words = set(re.findall(r"\w+", here))
            assert any(set(re.findall(r"\w+", cell)) & words - set(KNOWN) for cell in cells), (here, cells)


NOT_TYPED = re.compile(r"metric|in the loss|in an update")
"""Rows of names that nobody passes as an argument."""


def test_every_argument_on_the_page_is_in_the_table() -> None:
    arguments = {
        name
        for names, where, here in rows_of_the_page()
        for name in names
        if not name[0].isupper() and not NOT_TYPED.search(where) and "no counterpart" not in here
    }
    assert arguments - NAMES_OF_METHODS <= {row.split(" | ")[0] for row in TABLE}


NAMES_OF_METHODS = {
    "compute_relative_advantages", "process_groups", "learn", "sample_log_prob", "from_profile", "for_tool_use",
    "exploration", "stable", "grpo_size", "n", "kl_ctrl", "adaptive_kl", "kl_min", "kl_max", "use_kl_loss", "use_wandb",
    "wandb_project", "lora_r", "lora_alpha",
}  # fmt: skip
"""Methods and keys of theirs, and switches for which there is no single setting here."""


def test_what_the_table_says_to_write_has_these_arguments(subtests: pytest.Subtests) -> None:
    known = {**KNOWN, "CompletionRewards": adapters.llm.CompletionRewards}
    calls = [call for row in TABLE for call in re.findall(r"\w+(?:\.\w+)?\(.*\)", row.split(" | ")[2])]
    for node in (node for call in calls for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Call)):
        with subtests.test(call=ast.unparse(node)):
            named = {keyword.arg for keyword in node.keywords}
            assert named <= set(inspect.signature(eval(ast.unparse(node.func), known)).parameters)


# A method that is one letter off an optional method is named at construction, because nothing would ever call it


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


# What mypy says of a policy that is passed to a trainer: the method that is missing, and nothing of a right policy


POLICIES = """# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=empty-body
import torch
from torch import Tensor, nn
from adapters.bandits import SoftmaxPolicy
from grpo import GRPOConfig, GRPOTrainer, PolicyModel
class WithoutTypes(nn.Module):  # as in README
    def generate_actions(self, states, num_actions_per_state):
        return torch.zeros(len(states), num_actions_per_state)
    def get_log_probabilities(self, states, actions):
        return torch.zeros(len(states))
    def get_parameters(self):
        return dict(self.named_parameters())
class OfTensors(nn.Module):
    def generate_actions(self, states: Tensor, num_actions_per_state: int) -> Tensor: ...
    def get_log_probabilities(self, states: Tensor, actions: Tensor) -> Tensor: ...
    def get_parameters(self) -> dict[str, nn.Parameter]: ...
class OfLists:
    def generate_actions(self, states: list[str], num_actions_per_state: int, **kwargs: object) -> list[list[int]]: ...
    def get_log_probabilities(self, states: list[str], actions: list[int]) -> Tensor: ...
    def get_parameters(self) -> dict[str, Tensor]: ...
    def train(self) -> None: ...
    def eval(self) -> None: ...
    def to(self, device: str) -> None: ...
    def knows(self) -> bool: ...
class Unfinished:
    def generate_actions(self, states: list[str], num_actions_per_state: int) -> list[list[int]]: ...
    def get_parameters(self) -> dict[str, Tensor]: ...
    def train(self) -> None: ...
    def eval(self) -> None: ...
    def to(self, device: str) -> None: ...
class UnfinishedModule(nn.Module):
    def generate_actions(self, states: Tensor, num_actions_per_state: int) -> Tensor: ...
    def get_parameters(self) -> dict[str, nn.Parameter]: ...
def reward(states: list[str], actions: list[int]) -> list[float]: ...
def generic(policy: PolicyModel[str, int]) -> None:
    GRPOTrainer(config=GRPOConfig(), policy=policy, reward_model=reward)
GRPOTrainer(config=GRPOConfig(), policy=WithoutTypes(), reward_model=reward)
GRPOTrainer(config=GRPOConfig(), policy=OfTensors(), reward_model=reward)
GRPOTrainer(config=GRPOConfig(), policy=SoftmaxPolicy(num_actions=4), reward_model=reward)
GRPOTrainer(config=GRPOConfig(), policy=OfLists(), reward_model=reward).policy.knows()
"""
WRONG = """GRPOTrainer(config=GRPOConfig(), policy=Unfinished(), reward_model=reward)
GRPOTrainer(config=GRPOConfig(), policy=UnfinishedModule(), reward_model=reward)
"""


def checked(folder: Path, text: str) -> str:
    """What mypy says of a file, with the settings and the cache of `make types`."""
    path = folder / "policies.py"
    path.write_text(text, encoding="utf-8")
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(path)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.mark.slow
def test_mypy_names_the_method_that_a_policy_lacks_and_accepts_right_ones(tmp_path: Path) -> None:
    assert checked(tmp_path, POLICIES) == "Success: no issues found in 1 source file\n"
    said = checked(tmp_path, POLICIES + WRONG)
    assert said.count(": error: ") == 2, said
    first, second = said.split(": error: ")[1:]
    wanted = 'Argument "policy" to "GRPOTrainer" has incompatible type "Unfinished"; expected "AnyPolicy"  [arg-type]'
    assert first.splitlines()[0] == wanted
    assert "get_log_probabilities" in first
    assert "get_log_probabilities" in second
