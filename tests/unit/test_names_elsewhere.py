"""Typical mistakes get a message that says what to type next: names of other libraries, places, types and containers."""

import ast
import inspect
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import adapters.control
import adapters.llm
import grpo
import grpo.presets
import grpo.surrogates
from adapters.bandits import MLPPolicy, SoftmaxPolicy
from adapters.control import mlp_torso
from grpo.errors import ArgumentError, GRPOError
from tests.support.objective_inputs import as_users_run_it

ROOT = Path(__file__).resolve().parents[2]
TABLE = files("grpo._common").joinpath("names_elsewhere.txt").read_text(encoding="utf-8").splitlines()[1:]
DOCS = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")


def reward(states: Any, actions: Any) -> list[float]:
    return [0.0] * len(actions)


class NumpyPolicy(SoftmaxPolicy):
    sample_actions = score_actions = None

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        return [[0] * num_actions_per_state for _ in states]

    def get_log_probabilities(self, states: Any, actions: Any) -> Any:
        return np.zeros(len(actions), dtype=np.float32)


def trainer(policy: Any = None, rewards: Any = reward, **settings: Any) -> grpo.GRPOTrainer:
    return grpo.GRPOTrainer(config=grpo.GRPOConfig(**settings), policy=policy or SoftmaxPolicy(3), reward_model=rewards)


KNOWN = {
    **{name: getattr(grpo, name) for name in grpo.__all__},
    **{name: getattr(adapters.control, name) for name in adapters.control.__all__},
    **{name: getattr(adapters.llm, name) for name in adapters.llm.__all__ if not name.startswith("VLLM")},
    **{name: getattr(grpo.surrogates, name) for name in ("Clip", "Cispo")},
    **{each.__name__: each for each in (SoftmaxPolicy, MLPPolicy, NumpyPolicy, mlp_torso, trainer, reward)},
    "presets": grpo.presets,
    "nn": nn,
}

CLIP = "ObjectiveConfig(surrogate=Clip(low=..., high=...)) here"
KL = "GRPOConfig(objective=ObjectiveConfig(kl_coef=...))"
MISTAKES = [  # what is typed, what the message says, what is typed next
    ("GRPOConfig(num_generations=8)", "TRL's num_generations is group_size here.", "GRPOConfig(group_size=8)"),
    ("GRPOConfig(epsilon=0.2)", f"TRL's epsilon is {CLIP}.", "ObjectiveConfig(surrogate=Clip(low=0.2, high=0.2))"),
    ("GRPOConfig(beta=0.1)", f"TRL's beta is {KL} here.", "GRPOConfig(objective=ObjectiveConfig(kl_coef=0.1))"),
    ("GRPOConfig(kl_coef=0.1)", f"Did you mean {KL}?", "GRPOConfig(objective=ObjectiveConfig(kl_coef=0.1))"),
    ("GRPOConfig(scale='group')", "Did you mean GRPOConfig(advantage=AdvantageConfig(scale=...))?",
     "GRPOConfig(advantage=AdvantageConfig(scale='group'))"),
    ("GRPOConfig(lr=1e-3)", "torch's lr is learning_rate here.", "GRPOConfig(learning_rate=1e-3)"),
    ("GRPOConfig(groupsize=8)", "Did you mean GRPOConfig(group_size=...)?", "GRPOConfig(group_size=8)"),
    ("GRPOConfig(n_epochs=4)", "SB3's n_epochs is num_epochs_per_update here.", "GRPOConfig(num_epochs_per_update=4)"),
    ("GRPOConfig(max_completion_length=64)", "TRL's max_completion_length is SamplingConfig(max_new_tokens=...) here.",
     "SamplingConfig(max_new_tokens=64)"),
    ("GRPOConfig(loss_type='dapo')", "ObjectiveConfig(surrogate=..., aggregation=...)", "presets.dapo()"),
    ("GRPOConfig(num_generations=8, beta=0.1)",
     "GRPOConfig has no settings 'num_generations', 'beta'. TRL's num_generations is group_size here. TRL's beta is",
     "GRPOConfig(group_size=8, objective=ObjectiveConfig(kl_coef=0.1))"),
    ("GRPOConfig(8)", "too many positional arguments. Write GRPOConfig(group_size=...,", "GRPOConfig(group_size=8)"),
    ("GRPOConfig.from_dict({'num_generations': 8})", "is group_size here", "GRPOConfig.from_dict({'group_size': 8})"),
    ("GRPOConfig.from_dict({8: 1})", "GRPOConfig has no setting '8'. There are ", "GRPOConfig.from_dict({})"),
    ("with_settings(GRPOConfig(), {'num_generations': 8})", "TRL's num_generations is group_size here.",
     "with_settings(GRPOConfig(), {'group_size': 8})"),
    ("GRPOConfig(group_size='8')", "GRPOConfig.group_size must be int; got '8'.", "GRPOConfig(group_size=8)"),
    ("GRPOConfig(objective={'kl_coef': 1})", "must be ObjectiveConfig", "GRPOConfig(objective=ObjectiveConfig(kl_coef=1))"),
    ("ObjectiveConfig(clip_range=0.2)", f"SB3's clip_range is {CLIP}.", "ObjectiveConfig(surrogate=Clip(low=0.2, high=0.2))"),
    ("ObjectiveConfig(ent_coef=0.1)", "SB3's ent_coef is entropy_coef here.", "ObjectiveConfig(entropy_coef=0.1)"),
    ("ObjectiveConfig(surrogate=Clip)", "got the class Clip. Pass Clip().", "ObjectiveConfig(surrogate=Clip())"),
    ("ObjectiveConfig(surrogate='ppo')", "must be one of 'clip',", "ObjectiveConfig(surrogate='clip')"),
    ("Clip(0.2)", "Clip: too many positional arguments. Write Clip(level=..., low=...", "Clip(low=0.2)"),
    ("Clip(epsilon=0.2)", f"TRL's epsilon is {CLIP}.", "Clip(low=0.2, high=0.2)"),
    ("SamplingConfig(max_tokens=64)", "Did you mean SamplingConfig(max_new_tokens=...)?", "SamplingConfig(max_new_tokens=64)"),
    ("GRPOTrainer(model=1, reward_funcs=2)",
     "GRPOTrainer has no arguments 'model', 'reward_funcs'. TRL's model is policy=HFPolicy.from_pretrained(...) here.",
     "GRPOTrainer(config=GRPOConfig(), policy=SoftmaxPolicy(3), reward_model=reward)"),
    ("GRPOTrainer(GRPOConfig(), SoftmaxPolicy(3), reward)",
     "GRPOTrainer: too many positional arguments. Write GRPOTrainer(config=..., policy=..., reward_model=...).",
     "GRPOTrainer(config=GRPOConfig(), policy=SoftmaxPolicy(3), reward_model=reward)"),
    ("GRPOTrainer(policy=SoftmaxPolicy(3), reward_model=reward)",
     "GRPOTrainer: missing a required argument: 'config'. Write GRPOTrainer(config=..., ",
     "GRPOTrainer(config=GRPOConfig(), policy=SoftmaxPolicy(3), reward_model=reward)"),
    ("GRPOTrainer(reward_funcs=2)", "TRL's reward_funcs is reward_model=CompletionRewards(functions) here.", "trainer()"),
    ("Learner(args=1)", "TRL's args is config=GRPOConfig(...) here.", "trainer()"),
    ("trainer(SoftmaxPolicy)", "policy must be an instance", "trainer(SoftmaxPolicy(3))"),
    ("trainer(nn.Linear(2, 2))", "Linear lacks generate_actions(), get_log_probabilities()", "trainer(SoftmaxPolicy(3))"),
    ("trainer(rewards=lambda prompts, completions, **kw: 0)", "CompletionRewards(function)", "trainer(rewards=reward)"),
    ("trainer().train()", "GRPOTrainer.train: missing a required argument: 'states'", "trainer().train([0], num_iterations=1)"),
    ("trainer().train([0], 3)", "Write GRPOTrainer.train(states).", "trainer().train([0], num_iterations=3)"),
    ("trainer().train([0], report_to='x')", "TRL's report_to is sinks here.", "trainer().train([0], num_epochs=1, sinks=[])"),
    ("trainer().step('left')", "must be a list with one entry per row", "trainer().step([0])"),
    ("trainer(NumpyPolicy(3), group_size=4).step([0])", "got a numpy array [4] float32", "trainer(group_size=4).step([0])"),
    ("trainer(rewards=lambda s, a: ['1'] * 8).step([0])", "got a list of 8 str", "trainer().step([0])"),
    ("EpisodePolicy('CartPole-v1', n_envs=4)", "SB3's n_envs is num_members here.", "make_pool('CartPole-v1', 4)"),
    ("EpisodePolicy('CartPole-v1', policy_kwargs={})",
     "SB3's policy_kwargs is EpisodePolicy(options=EpisodeOptions(hidden=..., activation=...)) here.",
     "EpisodePolicy('CartPole-v1', options=EpisodeOptions(hidden=(32,), activation='relu'))"),
    ("EpisodePolicy('MlpPolicy', 'CartPole-v1')",
     "EpisodePolicy: too many positional arguments. Write EpisodePolicy(environment).", "EpisodePolicy('CartPole-v1')"),
    ("EpisodePolicy('CartPole-v1', hidden=(32,))", "Pass options=EpisodeOptions(hidden=...)", "EpisodeOptions(hidden=(32,))"),
    ("EpisodePolicy('CartPole-v1', num_member=4)", "Did you mean 'num_members'?", "make_pool('CartPole-v1', 4)"),
    ("EpisodeOptions(net_arch=(64,))", "SB3's net_arch is hidden here.", "EpisodeOptions(hidden=(64,))"),
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
    assert len(MISTAKES) >= 40
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


def test_a_wrong_argument_is_a_type_error_and_a_config_error() -> None:
    assert issubclass(ArgumentError, TypeError)
    assert issubclass(ArgumentError, grpo.ConfigError)
