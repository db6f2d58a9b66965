"""TRL's environments in our rollouts, our rewards and environments in TRL's form, and the table of settings.

`tests/parity/test_trl_training.py` runs TRL's trainer itself.
"""

import asyncio
import inspect
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.chat_template_utils import get_json_schema

import grpo
from adapters.agents import AgentPolicy, Branching, Conversation, EnvironmentReward
from adapters.agents.bridges.trl import trl_environments
from adapters.agents.trl import SETTINGS, settings_table, train_with_trl, trl_environment, trl_reward_functions
from adapters.agents.trl.settings import Sizes, trl_arguments
from adapters.agents.trl.training import _optimizer
from adapters.llm import HFOptions, HFPolicy, SamplingConfig
from adapters.tools import Tool, ToolCatalogue, ToolExecutor
from grpo import AdvantageConfig, GRPOConfig, ObjectiveConfig, RewardConfig, WeightedRewards
from grpo.errors import ConfigError, ContractError, RewardError
from grpo.surrogates import Cispo, Clip, Reinforce, Sapo
from tests.support.agent_parts import changed, tool_call, user
from tests.support.agents import Echo, Scripted, Tools, chat_tokenizer, converse, language_model, lookup, says_call
from tests.support.llm_models import character_tokenizer
from tests.support.trl_environments import Counter, price

ROW = {"prompt": [user("Count. ")], "goal": 3}
ADD = says_call("add", '{"number": 2}')


# TRL's environments in our rollouts


def test_a_class_of_trl_is_played_as_it_is() -> None:
    agent = Scripted([ADD, "two"], max_new_tokens=120)
    (found,) = converse(agent.policy, trl_environments(Counter, price), ROW)
    heard = [message["content"] for message in found.messages if message["role"] != "assistant"]
    assert heard == ["Count. The goal is 3.", "The total is 2."]
    tools = agent.policy.tokenizer.decode(agent.contexts[0]).partition("user")[0]
    assert '"name": "add"' in tools
    assert all(word not in tools for word in ("reset", "get_reward", "_shown"))
    assert (found.reward, found.ended_by) == (-1 - 0.5 * 3, "environment")


def test_the_reward_of_a_class_of_trl_is_asked_for_at_a_limit_too_and_calls_that_fail_are_counted() -> None:
    agent = Scripted([says_call("add", "{}"), ADD], max_new_tokens=120)
    sampled = AgentPolicy(agent.policy, trl_environments(Counter), max_turns=2).sample_actions([ROW], 1)
    [[found]] = sampled.actions
    assert (found.reward, found.ended_by, sampled.metrics["agents/failed_calls"]) == (-1.0, "max_turns", 1)


def test_a_reward_of_none_does_not_count_and_without_any_reward_there_is_none(subtests: pytest.Subtests) -> None:
    class Silent:
        total, goal = -1, 3

        def reset(self, **row: Any) -> None:
            """Show nothing."""

    less = says_call("add", '{"number": -2}')
    for factory, turns, columns, shown, expected in (
        (Silent, ["two"], {"prompt": [user("Hi")]}, "Hi", "nan"),
        (lambda: Counter(), [less, "two"], {}, "The goal is 3.", "-5.0"),
    ):
        with subtests.test(expected=expected):
            play = trl_environments(factory, lambda **batch: [None])
            (found,) = converse(Scripted(turns, max_new_tokens=120).policy, play, {"goal": 3} | columns)
            assert (str(found.reward), found.messages[0]["content"]) == (expected, shown)


# Our rewards in TRL's form


def given(*texts: str, **columns: Any) -> dict[str, Any]:
    """What TRL passes to a reward function. Texts end with the end token, unless they end with three dots."""
    tokenizer = character_tokenizer()
    ids = [tokenizer(text.removesuffix("..."))["input_ids"] + [1] * (not text.endswith("...")) for text in texts]
    of_trl = {"trainer_state": None, "log_extra": None, "log_metric": None}
    return {"prompts": ["p"] * len(texts), "completions": list(texts), "completion_ids": ids, **columns, **of_trl}


def test_a_reward_model_gets_rows_and_completions_in_evaluation_mode_and_without_gradient() -> None:
    seen: list[Any] = []

    class Network(torch.nn.Linear):
        def compute_rewards(self, states: Any, actions: Any) -> torch.Tensor:
            seen.append((states, actions))
            return torch.tensor([float(self.training), float(torch.is_grad_enabled())])

    (function,), weights = trl_reward_functions(Network(1, 1), character_tokenizer())
    assert function(**given("ab", "cde...", answer=["x", "y"])) == [0.0, 0.0]
    ((states, actions),) = seen
    assert (function.__name__, weights) == ("Network.compute_rewards", [1.0])
    assert states == [{"prompt": "p", "answer": "x"}, {"prompt": "p", "answer": "y"}]
    found = [(action.text, action.finish_reason, len(action)) for action in actions]
    assert found == [("ab", "end", 3), ("cde", "length", 3)]
    assert actions[0].token_ids[-1] == 1


def test_weighted_rewards_become_several_functions_that_are_computed_once() -> None:
    calls: list[list[str]] = []

    def right(states: list[str], actions: Any) -> list[float]:
        calls.append(states)
        return [1.0, float("nan")]

    both = WeightedRewards({"right": right, "short": lambda s, a: [0.5, 0.25]}, {"right": 2, "short": 4})
    recorded: list[Any] = []
    options: Any = {"states": ["one", "two"], "record": lambda *batch: recorded.append(batch)}
    functions, weights = trl_reward_functions(both, character_tokenizer(), **options)
    batch = given("a", "b", state_index=[1, 0])
    assert [function(**batch) for function in functions] == [[1.0, None], [0.5, 0.25]]
    assert [function.__name__ for function in functions] == ["right", "short"]
    assert (weights, calls) == ([2.0, 4.0], [["two", "one"]])
    ((total, parts),) = recorded
    assert (total.tolist(), {*parts}) == ([4.0, 1.0], {"right", "short"})


def test_rewards_that_trl_cannot_use_are_refused(subtests: pytest.Subtests) -> None:
    nan = [1.0, float("nan")]
    with subtests.test("not finite"), pytest.raises(RewardError, match="must return finite rewards; got"):
        trl_reward_functions(lambda s, a: nan, character_tokenizer())[0][0](**given("a", "b"))
    with subtests.test("counts as 0"):
        totals: list[list[float]] = []
        options: Any = {"zero_non_finite": True, "record": lambda total, _: totals.append(total.tolist())}
        (function,), _ = trl_reward_functions(lambda s, a: nan, character_tokenizer(), **options)
        assert [function(**given("a", "b")), *totals] == [[1.0, 0.0], [1.0, 0.0]]
    with subtests.test("per step"), pytest.raises(ContractError, match="TRL has no rewards per step"):
        trl_reward_functions(lambda s, a: [nan, nan], character_tokenizer())[0][0](**given("a", "b"))


# Our environments in TRL's form


class Asked(Tools):
    """Has a tool, a system message, and a question that depends on the state and the seed."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return [{"role": "system", "content": "Be kind."}, user(f"What of {self.state}, {seed}?")], {}

    def step(self, action: Any) -> Any:
        return "bye", float(len(action["content"])), True, False, {"heard": action["content"]}


FINE: list[Any] = [{"role": "assistant", "content": "fine"}]


def begun(kind: Any, states: tuple[str, ...] = ("rain",)) -> Any:
    """TRL's environment of the first state, after its reset."""
    made, rows = trl_environment(kind, list(states), group_size=2)
    environment = made()
    environment.reset(**rows[0])
    return environment


def test_an_environment_becomes_a_class_with_its_tools() -> None:
    Asked.closed.clear()
    made, rows = trl_environment(Asked, ["rain", "snow"], group_size=2)
    assert rows[1] == {"state_index": 1, "prompt": [{"role": "system", "content": "Be kind."}, user("")]}
    first, second, third = made(), made(), made()
    shown = [environment.reset(**rows[1]) for environment in (first, second, third)]
    assert shown[0].startswith("What of snow, ")
    assert shown[0] == shown[1] != shown[2]  # a group shares the seed
    public = {name for name, _ in inspect.getmembers(made, inspect.isfunction) if name[0] != "_"}
    assert public == {"reset", "lookup"}  # as TRL finds tools
    assert get_json_schema(first.lookup) == get_json_schema(lookup)  # type: ignore[attr-defined]
    assert first.lookup("hail") == "hail is fine"  # type: ignore[attr-defined]
    assert len(Asked.closed) == 2
    first.reset(**rows[0])
    assert len(Asked.closed) == 3


def test_the_last_message_is_given_to_step_and_conversations_are_rewarded(subtests: pytest.Subtests) -> None:
    call = {"role": "assistant", "tool_calls": [tool_call("lookup")]}
    cases: dict[str, tuple[list[Any], str, float, str]] = {
        "ends": ([call, {"role": "tool", "content": "x"}, *FINE], "x", 4.0, "environment"),
        "has no turn left": ([call], "x", 0.0, "max_turns"),
        "is cut": (FINE, "x...", 0.0, "length"),
    }
    for name, (completion, text, expected, ended_by) in cases.items():
        with subtests.test(name):
            seen: list[Conversation] = []

            def keep(states: Any, actions: Any, seen: list[Any] = seen) -> list[float]:
                seen.extend(actions)
                return [0.0]

            reward = WeightedRewards({"environment": EnvironmentReward(), "other": keep})
            functions, _ = trl_reward_functions(reward, character_tokenizer(), states=["rain"])
            batch = given(text, state_index=[0], environments=[begun(Asked)]) | {"completions": [completion]}
            assert [functions[0](**batch), functions[0](**batch)] == [[expected], [expected]]
            assert seen[0] is seen[1]  # `step` is called once
            assert [seen[0].ended_by, seen[0].reward, len(seen[0].turns)] == [
                ended_by, expected, sum(message["role"] == "assistant" for message in completion),
            ]  # fmt: skip
            assert seen[0].messages[0]["content"] == "Be kind."
            assert seen[0].info == ({"heard": "fine"} if name == "ends" else {})
            assert seen[0].messages[-1]["content"] == ("bye" if name == "ends" else completion[-1].get("content", ""))


def test_async_environments_and_tools_are_handed_over() -> None:
    async def look(topic: str) -> str:
        """Looks.

        Args:
            topic: What.
        """
        return topic

    async def step(self: Any, action: Any) -> Any:
        return Asked.step(self, action)

    environment = begun(changed(Asked, tools=lambda self: [look], step=step))
    assert inspect.iscoroutinefunction(environment.look)
    assert asyncio.run(environment.look("hail")) == "hail"
    assert environment._end(FINE, is_cut=False).reward == 4.0


def test_environments_that_trl_cannot_run_are_refused(subtests: pytest.Subtests) -> None:
    def reset(topic: str) -> str:
        """A name that TRL uses."""
        return topic

    def seeded(self: Any, *, seed: Any = None, options: Any = None) -> Any:
        return [{"role": "system", "content": f"Rules {seed}"}, user("What of it?")], {}

    for tools in (None, [get_json_schema(lookup)], [reset]):
        kind = Echo if tools is None else changed(Asked, tools=lambda self, tools=tools: tools)
        with subtests.test(tools=tools), pytest.raises(ConfigError, match=rf"{kind.__name__}.tools\(\) must .* list"):
            trl_environment(kind, ["rain"], group_size=2)
    environment = begun(changed(Asked, step=lambda self, action: ("and?", 0.0, False, False, {})))
    with subtests.test("goes on"), pytest.raises(ContractError, match="must end the conversation at the first message"):
        environment._end(FINE, is_cut=False)
    changes = changed(Asked, tools=lambda self: [lookup] if self.state == "rain" else [lookup, price])
    message = r"same tools for all states.*\['lookup', 'price'\]"
    with subtests.test("changes"), pytest.raises(ContractError, match=message):
        begun(changes, ("snow", "rain"))
    with subtests.test("seeded"), pytest.raises(ContractError, match="the same messages before the last one"):
        begun(changed(Asked, reset=seeded))


# Settings


def test_the_table_has_every_setting_and_the_docs_have_the_table() -> None:
    sections = {"": GRPOConfig, "advantage.": AdvantageConfig, "objective.": ObjectiveConfig, "reward.": RewardConfig}
    names = {
        section + field.name
        for section, kind in (sections | {"sampling.": SamplingConfig}).items()
        for field in fields(kind)
    } - {"advantage", "objective", "reward"}
    arguments = {"policy.": HFPolicy, "agent.": AgentPolicy}
    names |= {section + name for section, kind in arguments.items() for name in inspect.signature(kind).parameters}
    names |= {f"policy.options.{field.name}" for field in fields(HFOptions)}
    own = {"model", "tokenizer", "sampling", "options", "misplaced"}
    assert names - {"agent.policy", *(f"policy.{name}" for name in own)} == set(SETTINGS)
    page = Path(__file__).parents[4] / "docs" / "agents.md"
    assert settings_table() in page.read_text(encoding="utf-8")


DEFAULTS = GRPOConfig(group_size=4)
SAMPLING = SamplingConfig(max_new_tokens=6)


def mapped(config: GRPOConfig = DEFAULTS, sampling: SamplingConfig = SAMPLING, num_states: int = 2) -> dict[str, Any]:
    sizes = Sizes.of(config, num_states)
    return trl_arguments(config, sampling, sizes, kl_coef=config.objective.kl_coef or 0.0, max_length=6)


def config(section: str, **changes: Any) -> GRPOConfig:
    """The defaults with other settings in one section."""
    if not section:
        return replace(DEFAULTS, **changes)
    return replace(DEFAULTS, **{section: replace(getattr(DEFAULTS, section), **changes)})


of_run, objective, advantage = (partial(config, section) for section in ("", "objective", "advantage"))


OTHER: dict[str, Any] = {
    "kl_control": grpo.KLControl(), "entropy_control": grpo.EntropyControl(), "advantage.credit": "gae",
    "advantage.baseline": "leave_one_out", "advantage.scale": "beta", "advantage.std_ddof": 0, "advantage.positive_weight": 0.5,
    "advantage.clip": 1.0, "advantage.reward_clip": 1.0, "objective.sampler_correction": grpo.Mask(),
    "objective.aggregation": "group_mean", "reward.non_finite": "drop", "reward.on_failure": "drop",
    "reward.not_applicable": "zero", "sampling.stop": ("x",), "sampling.xtc_probability": 0.5,
}  # fmt: skip
"""A value that TRL cannot have, for each setting whose values are limited. True or 1 for the others."""


def test_every_value_without_a_counterpart_is_refused_by_its_name(subtests: pytest.Subtests) -> None:
    limited = {name: setting for name, setting in SETTINGS.items() if setting.only is not None}
    assert len(limited) > 20
    for name, setting in limited.items():
        section, _, field = name.rpartition(".")
        value = OTHER[name] if name in OTHER else type(setting.only[0])(1)  # type: ignore[index]
        is_of_sampling = section == "sampling"
        sampling = replace(SAMPLING, **{field: value}) if is_of_sampling else SAMPLING
        settings = DEFAULTS if is_of_sampling else config(section, **{field: value})
        with subtests.test(name), pytest.raises(ConfigError, match=rf"train_with_trl: {name}=.*{setting.note}"):
            mapped(settings, sampling)


def test_settings_that_depend_on_others_are_refused(subtests: pytest.Subtests) -> None:
    mean: Any = {"aggregation": "step_mean"}
    entropy, top = mean | {"entropy_coef": 0.1}, objective(top_entropy_fraction=0.5)
    cases: dict[str, tuple[GRPOConfig, str]] = {
        "a group of one": (of_run(group_size=1), "group_size=1"),
        "more states": (of_run(num_states_per_iteration=3), "num_states_per_iteration=3"),
        "uneven updates": (of_run(batch_size=3), "batch_size=3 .*: it must divide the 8 rows"),
        "uneven passes": (of_run(batch_size=4, micro_batch_size=3), "micro_batch_size=3 .*: it must divide the 4 rows"),
        "seed": (of_run(seed=2**32), "seed=4294967296"),
        "std_eps": (advantage(scale="group"), r"advantage.std_eps=0\.0"),
        "std_eps of GDPO": (advantage(several_rewards="normalize_each"), r"advantage.std_eps=0\.0"),
        "k2": (objective(kl_estimator="k2", kl_coef=0.1), "objective.kl_estimator='k2'"),
        "dual": (objective(surrogate=Clip(dual=3.0)), "objective.surrogate=Clip"),
        "reinforce": (objective(surrogate=Reinforce()), "objective.surrogate=Reinforce"),
        "level": (objective(surrogate=Clip(level="row_sum")), "objective.surrogate=Clip"),
        "cispo's low": (objective(surrogate=Cispo(), **mean), "objective.surrogate=Cispo"),
        "sapo's mean": (objective(surrogate=Sapo(), **mean), "here it is 'step_mean'"),
        "length": (objective(aggregation="fixed_length", fixed_length=5), "length=5 .* max_completion_length = 6"),
        "entropy by row": (objective(entropy_coef=0.1), "objective.entropy_aggregation=None"),
        "estimator": (objective(entropy_estimator="score_function", **entropy), "objective.entropy_estimator='score_f"),
        "entropy of some steps": (objective(top_entropy_fraction=0.5, **entropy), r"objective.entropy_coef=0\.1"),
        "in several passes": (replace(objective(**entropy), micro_batch_size=2), r"objective.entropy_coef=0\.1"),
        "in several updates": (replace(top, num_epochs_per_update=2), r"objective.top_entropy_fraction=0\.5"),
        "both": (replace(objective(**mean), batch_size=4, micro_batch_size=2), "objective.aggregation='step_mean'"),
    }
    for name, (settings, message) in cases.items():
        with subtests.test(name), pytest.raises(ConfigError, match=message):
            mapped(settings)
    with subtests.test("off-policy"), pytest.raises(ConfigError, match=r"objective.off_policy_threshold=0\.5"):
        mapped(objective(off_policy_threshold=0.5), replace(SAMPLING, top_p=0.9))


def test_settings_have_the_names_and_conventions_of_trl() -> None:
    sampling = replace(SAMPLING, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
    settings = replace(
        objective(surrogate=Cispo(low=1.0, high=4.0), aggregation="step_mean"),
        num_epochs_per_update=2, micro_batch_size=2, max_grad_norm=None, autocast_dtype="bfloat16",
        num_states_per_iteration=2, reference_sync_every=3, reference_mix=0.25,
    )  # fmt: skip
    found = mapped(settings, sampling, num_states=5)
    expected = {
        "loss_type": "cispo", "epsilon_high": 5.0, "importance_sampling_level": "token", "num_generations": 4,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 4, "num_iterations": 2,
        "max_grad_norm": 0.0, "bf16": True, "fp16": False, "shuffle_dataset": True, "sync_ref_model": True,
        "ref_model_sync_steps": 6, "ref_model_mixup_alpha": 0.25, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1,
        "repetition_penalty": 1.1, "max_completion_length": 6, "generation_kwargs": {"max_new_tokens": 6},
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert (mapped()["top_k"], mapped()["min_p"], mapped()["shuffle_dataset"]) == (0, None, False)
    assert mapped(objective(aggregation="step_mean"))["loss_type"] == "bnpo"


def test_the_learning_rate_follows_our_schedule() -> None:
    def rates(config: GRPOConfig, num_iterations: int, updates: int) -> list[float]:
        _, scheduler = _optimizer(language_model(), config, num_iterations, updates)
        [factor] = scheduler.lr_lambdas
        return [round(factor(update), 4) for update in range(num_iterations * updates)]

    found = rates(replace(DEFAULTS, lr_schedule="cosine", warmup_ratio=0.25), 8, 2)
    assert found[::2] == found[1::2] == [0.5, 1.0, 1.0, 0.933, 0.75, 0.5, 0.25, 0.067]
    assert rates(replace(DEFAULTS, lr_schedule="linear"), 4, 1)[3] == 0.25
    assert rates(DEFAULTS, 4, 1)[3] == 1.0


async def shout(text: str) -> str:
    """Say it louder."""
    return text.upper()


def test_policies_that_trl_cannot_run_are_refused(subtests: pytest.Subtests) -> None:
    async def play(chat: Any, state: Any) -> float:
        return 0.0

    tokenizer = chat_tokenizer()
    model = language_model(tokenizer=tokenizer)
    other_ends = language_model(tokenizer=tokenizer, end_token_ids=[5])
    executor = ToolExecutor(ToolCatalogue([Tool.from_function(shout, remote=True)]))
    with_kl, moving = objective(kl_coef=0.1), of_run(reference_sync_every=2)
    branching = AgentPolicy(model, Tools, branch=Branching(at=(1,), width=(2,)))
    cases: dict[str, tuple[Any, GRPOConfig, dict[str, Any], str]] = {
        "sampler": (Scripted([]).policy, DEFAULTS, {}, "policy.sampler='another engine'"),
        "ends": (other_ends, DEFAULTS, {}, r"policy.options.end_token_ids=\[5\]"),
        "no reference": (model, with_kl, {}, r"objective.kl_coef=0\.1"),
        "no KL": (model, moving, {}, "reference_sync_every=2"),
        "program": (AgentPolicy(model, play), DEFAULTS, {}, "agent.make="),
        "max_tokens": (AgentPolicy(model, Tools, max_tokens=99), DEFAULTS, {}, "agent.max_tokens=99"),
        "branch": (branching, DEFAULTS, {}, r"agent.branch=Branching\(at=\(1,\)"),
        "executor": (AgentPolicy(model, Tools, executor=executor), DEFAULTS, {}, "agent.executor=<"),
        "arguments": (model, DEFAULTS, {"arguments": {"beta": 1.0}}, r"arguments must not set \['beta'\]"),
    }
    for name, (policy, settings, options, message) in cases.items():
        with subtests.test(name), pytest.raises(ConfigError, match=message):
            train_with_trl(policy, EnvironmentReward(), settings, states=["hi"], num_iterations=1, **options)
    for prompts in (["hi", [user("hi")]], [[3, 4]]):
        with subtests.test(prompts=prompts), pytest.raises(ContractError, match="must be all texts or all chats"):
            train_with_trl(model, EnvironmentReward(), DEFAULTS, states=prompts, num_iterations=1)
