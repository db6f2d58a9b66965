"""The places of `bad_inputs`: trainers, policies, rewards, states, batches, settings, checkpoints, data classes, functions."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo import (
    ActionScores,
    AdvantageConfig,
    AdvantageEstimator,
    EntropyControl,
    ExperienceBatch,
    GRPOConfig,
    GRPOTrainer,
    KLControl,
    Mask,
    ObjectiveConfig,
    ObjectiveInputs,
    ObjectiveOutput,
    RewardConfig,
    Rewards,
    SampledActions,
    Truncate,
    WeightedRewards,
    group_relative_advantages,
    group_relative_returns,
    grpo_objective,
    load_weights,
    presets,
    step_weights,
)
from grpo.advantage_estimator import (
    decoupled_advantages,
    discounted_returns,
    generalized_advantages,
    process_supervised_advantages,
    state_group_advantages,
)
from grpo.checkpoint import best_checkpoint, read_checkpoint
from grpo.divergence import kl_k2, kl_k3, kl_k3_weighted, score_function_entropy
from grpo.surrogates import SURROGATES
from tests.support.bad_inputs import Place

NUM_STATES, GROUP = 2, 4
NUM_ROWS, WIDTH = NUM_STATES * GROUP, 3
STATES = ["a", "b"]
MASK = torch.tensor([[True, True, True], [True, True, False]] * GROUP)
GROUP_IDS = torch.arange(NUM_STATES).repeat_interleave(GROUP)
REWARDS = torch.arange(float(NUM_ROWS)) % 3
STEP_REWARDS = torch.arange(float(NUM_ROWS * WIDTH)).reshape(NUM_ROWS, WIDTH) % 5
LARGE = frozenset({"huge int", "numpy scalar", "True"})


OVERFLOWS = frozenset({"huge int", "huge float"})
"""Finite, and legal, where a result may be infinite."""


# Policies: right in everything but what they are told to do wrong


class Plain(nn.Module):
    """One log-prob per row. `wrong` maps the name of a method to what it returns; `only_in_updates` spares the collection."""

    def __init__(self, *, only_in_updates: bool = False, **wrong: Any) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(2))
        self.wrong, self.only_in_updates = wrong, only_in_updates

    def answer(self, method: str, good: Any) -> Any:
        if method not in self.wrong or (self.only_in_updates and not torch.is_grad_enabled()):
            return good
        value = self.wrong[method]
        is_plain = isinstance(value, Tensor) and value.is_floating_point() and value.layout == torch.strided
        if is_plain and not (value.is_nested or value.is_meta or value.is_quantized) and value.element_size() > 1:
            return value + 0 * self.logits.sum()  # with a gradient, as a policy's log-probs have
        return value

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        return self.answer(
            "generate_actions", [[n % 2 for n in range(num_actions_per_state)] for _ in range(len(states))]
        )

    def get_log_probabilities(self, states: Any, actions: Any) -> Any:
        return self.answer("get_log_probabilities", self.log_probs(len(actions)))

    def get_parameters(self) -> Any:
        return self.wrong.get("get_parameters", {"logits": self.logits})

    def log_probs(self, num_rows: int) -> Tensor:
        return self.logits.log_softmax(0)[torch.arange(num_rows) % 2]

    def scores(self, num_rows: int) -> dict[str, Any]:
        per_step = self.log_probs(num_rows).unsqueeze(1).expand(num_rows, WIDTH) * 1.0
        mask = MASK[torch.arange(num_rows) % NUM_ROWS]
        good = {
            "log_probs": per_step,
            "mask": mask,
            "entropy": per_step.detach() * 0 + 0.5,
            "values": per_step * 0.1,
            "final_values": per_step[:, 0] * 0.1,
            "kl": per_step.square() * 0.1,
        }
        return {name: self.answer(name, value) for name, value in good.items()}


def having(name: str, method: str, good: Callable[[Any, Any], Any], base: type[Plain] = Plain) -> Any:
    """A kind of policy with one more method, which returns `good(policy, actions)` unless it is wrong."""
    return type(name, (base,), {method: lambda self, states, actions: self.answer(method, good(self, actions))})


Scoring: Any = having("Scoring", "score_actions", lambda p, actions: ActionScores(**p.scores(len(actions))))
Grouping = having("Grouping", "score_groups", lambda p, actions: ActionScores(**p.scores(sum(map(len, actions)))))
Referring = having("Referring", "reference_log_probabilities", lambda p, actions: torch.full((len(actions),), -0.5))
Planning = having("Planning", "plan_micro_batches", lambda p, actions: [[*range(len(actions))]])
Keying = having("Keying", "state_keys", lambda p, actions: torch.zeros(len(actions), WIDTH, dtype=torch.int64), Scoring)


class Sampling(Scoring):
    """`SamplesWithScores`."""

    def sample_actions(self, states: Any, num_actions_per_state: int) -> Any:
        num_rows = len(states) * num_actions_per_state
        good = {
            "actions": [[0] * num_actions_per_state for _ in range(len(states))],
            "mask": MASK[torch.arange(num_rows) % NUM_ROWS],
            "behaviour_log_probs": torch.full((num_rows, WIDTH), -0.7),
            "scores": None,
            "metrics": {"tokens": 3.0},
        }
        sampled = {name: self.wrong.get(f"sampled {name}", value) for name, value in good.items()}
        return self.answer("sample_actions", SampledActions(**sampled))


class Splitting(Scoring):
    """`SplitsSteps`: `split states` and `split actions` are the two things it returns."""

    def scores(self, num_rows: int) -> dict[str, Any]:
        if num_rows == NUM_ROWS:
            return super().scores(num_rows)
        return {"log_probs": self.log_probs(num_rows)[:, None], "mask": torch.ones(num_rows, 1, dtype=torch.bool)}

    def split_steps(self, states: Any, actions: Any) -> Any:
        steps = torch.zeros(int(MASK.sum()))
        good = self.wrong.get("split states", steps), self.wrong.get("split actions", steps)
        return self.wrong.get("split_steps", good)


class Remembering(Plain):
    """`HasState`."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrong.get("state_dict", {"count": 1})

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> None:
        return None


class Parts:
    """Returns `Rewards`."""

    def __init__(self, **wrong: Any) -> None:
        self.wrong = wrong

    def compute_rewards(self, states: Any, actions: Any) -> Any:
        good = {"one": self.wrong.get("component", rewards_of(states, actions))}
        return Rewards(
            values=self.wrong.get("values", torch.arange(float(NUM_ROWS))),
            components=self.wrong.get("components", good),
            weights=self.wrong.get("weights", {}),
            lost=self.wrong.get("lost", {}),
            metrics=self.wrong.get("metrics", {}),
        )

    def train(self) -> None: ...

    def eval(self) -> None: ...

    def to(self, device: Any) -> None: ...


def rewards_of(states: Any, actions: Any) -> Tensor:
    return torch.arange(float(len(actions))) % 3


# What is done with them


def trainer_of(policy: Any = None, reward_model: Any = rewards_of, **settings: Any) -> GRPOTrainer:
    return GRPOTrainer(
        config=GRPOConfig(**{"group_size": GROUP, **settings}), policy=policy or Plain(), reward_model=reward_model
    )


def after(trainer: GRPOTrainer, metrics: Any) -> Any:
    """What must be finite after an iteration: metrics and weights."""
    parameters = trainer.policy.get_parameters()
    return metrics, dict(parameters)


def stepped(trainer: GRPOTrainer, states: Any = STATES) -> Any:
    return after(trainer, trainer.step(states))


def updated(batch: Any, policy: Any = None, **settings: Any) -> Any:
    trainer = trainer_of(policy or Scoring(), **settings)
    return after(trainer, trainer.update(batch))


def good_batch(**changes: Any) -> dict[str, Any]:
    """The fields of an `ExperienceBatch`."""
    per_step = torch.full((NUM_ROWS, WIDTH), -0.7)
    return {
        "states": [0] * NUM_ROWS,
        "actions": [0] * NUM_ROWS,
        "group_ids": GROUP_IDS,
        "rewards": REWARDS,
        "reward_components": {"one": REWARDS},
        "mask": MASK,
        "old_log_probs": per_step,
        "behaviour_log_probs": per_step,
        "ref_log_probs": per_step,
        "entropy": per_step * 0 + 0.5,
        "values": per_step,
        "final_values": per_step[:, 0],
        "state_keys": torch.zeros(NUM_ROWS, WIDTH, dtype=torch.int64),
        "reward_weights": {"one": 1.0},
        "metrics": {"cost": 1.0},
        **changes,
    }


def good_rows(**changes: Any) -> dict[str, Any]:
    """The arguments of `ExperienceBatch.from_rows`."""
    names = ("states", "actions", "rewards", "group_ids", "behaviour_log_probs", "mask", "state_keys")
    return {name: value for name, value in good_batch().items() if name in names} | changes


def good_inputs(**changes: Any) -> dict[str, Any]:
    """The fields of an `ObjectiveInputs`."""
    per_step = torch.full((NUM_ROWS, WIDTH), -0.7)
    return {
        "log_probs": per_step.clone().requires_grad_(),
        "old_log_probs": per_step,
        "advantages": REWARDS - 1,
        "mask": MASK,
        "weights": step_weights(MASK, "row_mean"),
        "entropy": per_step * 0 + 0.5,
        "entropy_weights": step_weights(MASK, "step_mean"),
        "ref_log_probs": per_step,
        "behaviour_log_probs": per_step,
        "kl": per_step.square(),
        "keep": MASK,
        "selected": MASK,
        "kl_coef": 0.1,
        "entropy_coef": 0.1,
        "values": per_step,
        "old_values": per_step,
        "returns": per_step,
        **changes,
    }


def loss_of(name: str, value: Any) -> Any:
    inputs = ObjectiveInputs(**good_inputs(**{name: value}))
    results = []
    for config in (ObjectiveConfig(), ObjectiveConfig(kl_estimator="exact", value_clip=0.2, sampler_correction="mask")):
        output = grpo_objective(inputs, config)
        results.append([output.loss, dict(output.metrics)])
    return results


@cache
def saved() -> Path:
    """A checkpoint of a `Plain` policy."""
    trainer = trainer_of()
    trainer.step(STATES)
    return trainer.save_checkpoint(Path(tempfile.mkdtemp()) / "checkpoint")


def trained(**arguments: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "states": STATES,
            "num_iterations": 2,
            "progress": False,
            "checkpoint_dir": str(Path(folder) / "run"),
            **arguments,
        }
        trainer = trainer_of()
        return after(trainer, trainer.train(given.pop("states"), **given))


def giving(value: Any) -> Callable[[], Any]:
    """A `like` that gives this value."""
    return lambda: value


def places() -> list[Place]:
    """Every place where a value enters."""
    return [
        *of_the_trainer(),
        *of_policies(),
        *of_rewards(),
        *of_iterations(),
        *of_rows(),
        *of_settings(),
        *of_checkpoints(),
        *of_data(),
        *of_functions(),
    ]


def of_the_trainer() -> Iterator[Place]:
    def built(name: str, value: Any) -> Any:
        policy = Plain()
        good = {"config": GRPOConfig(group_size=GROUP), "policy": policy, "reward_model": rewards_of, name: value}
        return stepped(GRPOTrainer(**good))

    for name in (
        *("config", "policy", "reward_model", "reference_policy", "optimizer", "lr_scheduler"),
        *("objective", "advantages", "engine"),
    ):
        yield Place("GRPOTrainer", name, partial(built, name))

    def with_function(name: str, value: Any) -> Any:
        policy = Plain()
        trainer = GRPOTrainer(
            config=GRPOConfig(group_size=GROUP), policy=policy, reward_model=rewards_of, **{name: lambda *_: value}
        )
        return stepped(trainer)

    yield Place("GRPOTrainer", "advantages() returns", partial(with_function, "advantages"), REWARDS.clone)
    yield Place("GRPOTrainer", "objective() returns", partial(with_function, "objective"))


def of_policies() -> Iterator[Place]:
    def place(kind: Callable[..., Any], method: str, like: Callable[[], Any], **settings: Any) -> Iterator[Place]:
        def called(value: Any, only_in_updates: bool = False) -> Any:
            policy = kind(only_in_updates=only_in_updates, **{method: value})
            return stepped(trainer_of(policy, **settings))

        yield Place("what policies return", f"{kind.__name__}.{method}", called, like)
        if method not in ("get_parameters", "generate_actions", "sample_actions") and "sampled" not in method:
            name = f"{kind.__name__}.{method} in updates"
            yield Place("what policies return", name, partial(called, only_in_updates=True), like)

    def per_row() -> Tensor:
        return torch.full((NUM_ROWS,), -0.7)

    def per_step() -> Tensor:
        return torch.full((NUM_ROWS, WIDTH), -0.7)

    critic = {"advantage": AdvantageConfig(credit="gae")}
    entropy = {"objective": ObjectiveConfig(entropy_coef=0.1, top_entropy_fraction=0.5)}
    exact_kl = {"objective": ObjectiveConfig(kl_coef=0.1, kl_estimator="exact")}
    yield from place(Plain, "get_parameters", lambda: {"logits": torch.zeros(2, requires_grad=True)})
    yield from place(Plain, "generate_actions", lambda: [[0] * GROUP] * NUM_STATES)
    yield from place(Plain, "get_log_probabilities", per_row)
    yield from place(Plain, "get_log_probabilities", per_step)
    yield from place(Plain, "get_log_probabilities", per_row, num_epochs_per_update=2)
    yield from place(Scoring, "score_actions", lambda: ActionScores(log_probs=per_step(), mask=MASK))
    yield from place(Grouping, "score_groups", lambda: ActionScores(log_probs=per_step(), mask=MASK))
    yield from place(Scoring, "log_probs", per_step, num_epochs_per_update=2)
    yield from place(Scoring, "mask", MASK.clone)
    yield from place(Scoring, "entropy", per_step)
    yield from place(Scoring, "entropy", per_step, **entropy)
    yield from place(Scoring, "values", per_step, **critic)
    yield from place(Scoring, "final_values", per_row, **critic)
    yield from place(Scoring, "kl", per_step, **exact_kl)
    yield from place(Sampling, "sample_actions", lambda: SampledActions(actions=[[0] * GROUP] * 2, mask=MASK))
    for name, value in {"actions": [[0] * GROUP] * 2, "mask": MASK, "behaviour_log_probs": per_step()}.items():
        yield from place(Sampling, f"sampled {name}", giving(value))
    yield from place(Sampling, "sampled scores", lambda: ActionScores(log_probs=per_step(), mask=MASK))
    yield from place(Sampling, "sampled metrics", lambda: {"tokens": 1.0})
    with_kl = {"objective": ObjectiveConfig(kl_coef=0.1)}
    yield from place(Referring, "reference_log_probabilities", per_row, **with_kl)
    yield from place(Planning, "plan_micro_batches", lambda: [[*range(NUM_ROWS)]])
    yield from place(Splitting, "split_steps", lambda: (torch.zeros(20), torch.zeros(20)))
    yield from place(Splitting, "split states", lambda: torch.zeros(20))
    yield from place(Splitting, "split actions", lambda: torch.zeros(20))
    gigpo = {"advantage": AdvantageConfig(credit="gigpo")}
    yield from place(Keying, "state_keys", lambda: torch.zeros(NUM_ROWS, WIDTH, dtype=torch.int64), **gigpo)

    def reference(value: Any) -> Any:
        trainer = GRPOTrainer(
            config=GRPOConfig(group_size=GROUP, reference_sync_every=1),
            policy=Plain(),
            reward_model=rewards_of,
            reference_policy=Plain(get_parameters=value),
        )
        return stepped(trainer)

    parameters = partial(dict, logits=torch.zeros(2))
    yield Place("what policies return", "reference get_parameters", reference, parameters)


def of_rewards() -> Iterator[Place]:
    def place(name: str, make: Callable[[Any], Any], **settings: Any) -> Place:
        def call(value: Any) -> Any:
            return stepped(trainer_of(Scoring(), make(value), **settings))

        return Place("what rewards return", name, call, REWARDS.clone)

    yield place("a function", lambda value: lambda states, actions: value)
    yield place("a function, dropped", lambda value: lambda *_: value, reward=RewardConfig(non_finite="drop"))
    yield place("a function, zeroed", lambda value: lambda *_: value, reward=RewardConfig(non_finite="zero"))
    for field in ("values", "components", "weights", "lost", "metrics"):
        yield place(f"Rewards.{field}", lambda value, field=field: Parts(**{field: value}))
    yield place("a component", lambda value: Parts(component=value))
    yield place("a mask of lost rows", lambda value: Parts(lost={"gone": value}))
    yield place("a metric of its own", lambda value: Parts(metrics={"seconds": value}))
    yield place("a weighted part", lambda value: WeightedRewards({"a": lambda *_: value, "b": rewards_of}))
    yield place("weighted rewards", lambda value: WeightedRewards(value))
    yield place("weights", lambda value: WeightedRewards({"a": rewards_of}, value))
    yield place("a weight", lambda value: WeightedRewards({"a": rewards_of}, {"a": value}))
    gdpo = {"advantage": AdvantageConfig(several_rewards="normalize_each")}
    yield place("a component in GDPO", lambda value: Parts(component=value), **gdpo)
    gae = {"advantage": AdvantageConfig(credit="gae")}
    yield dataclasses.replace(place("per step", lambda value: lambda *_: value, **gae), like=STEP_REWARDS.clone)


def of_iterations() -> Iterator[Place]:
    def states_like() -> Any:
        return ["a", "b"]

    yield Place("collect", "states", lambda value: trainer_of().collect(value).rewards, states_like)
    yield Place("step", "states", lambda value: stepped(trainer_of(), value), states_like)
    yield Place(
        "step",
        "states of a policy with score_groups",
        lambda value: stepped(trainer_of(Grouping(), micro_batch_size=3, num_epochs_per_update=2), value),
        lambda: torch.zeros(2, 3),
    )

    def with_more(value: Any, **settings: Any) -> Any:
        trainer = trainer_of(reward_model=lambda s, a: [0.0] * len(a), dynamic_sampling_rounds=1)
        return after(trainer, trainer.step(STATES, more_states=value))

    yield Place("step", "more_states", with_more)
    yield Place("step", "more_states()", lambda value: with_more(lambda: value), states_like)
    yield Place("evaluate", "states", lambda value: trainer_of().evaluate(value), states_like)
    yield Place(
        "evaluate",
        "num_actions_per_state",
        lambda value: trainer_of().evaluate(STATES, num_actions_per_state=value),
        without=LARGE,
    )

    def updated_after_step(value: Any) -> Any:
        trainer = trainer_of()
        trainer.step(STATES)
        return after(trainer, trainer.update(value))

    yield Place("update", "batch", updated_after_step)
    named = (
        "states num_iterations eval_states eval_every sinks callbacks checkpoint_dir checkpoint_every keep_last resume"
    )
    for name in (*named.split(), "checkpoint_async"):  # `progress` may be anything: it is true or false
        without = LARGE if name == "num_iterations" else frozenset()
        like = states_like if "states" in name else (lambda: None)
        yield Place("train", name, lambda value, name=name: trained(**{name: value}), like, without=without)

    def drawn(value: Any) -> Any:
        trainer = trainer_of(num_states_per_iteration=2)
        return after(trainer, trainer.train(value, num_iterations=2, progress=False))

    yield Place("train", "states, 2 per iteration", drawn, states_like)
    yield Place("train", "iteration -> states", lambda value: drawn(lambda n: value), states_like)


def of_rows() -> Iterator[Place]:
    for name, good in good_rows().items():

        def rows(value: Any, name: str = name) -> Any:
            batch = ExperienceBatch.from_rows(**good_rows(**{name: value}))
            gigpo = {"advantage": AdvantageConfig(credit="gigpo")} if name == "state_keys" else {}
            return batch.rewards, updated(batch, batch_size=3, num_epochs_per_update=2, **gigpo)

        def few_rows(value: Any, name: str = name) -> Any:
            few = {"states": [0] * 4, "actions": [0] * 4, "rewards": [0.0, 1.0, 0.0, 2.0], "group_ids": [0, 0, 1, 1]}
            return updated(ExperienceBatch.from_rows(**{**few, name: value}), Plain())

        yield Place("from_rows", name, rows, giving(good))
        yield Place("from_rows", f"{name} of lists", few_rows, lambda: [0, 1, 0, 2])


def of_settings() -> Iterator[Place]:
    kinds: list[Any] = [GRPOConfig, AdvantageConfig, ObjectiveConfig, RewardConfig, KLControl, EntropyControl]
    kinds += [Truncate, Mask, *SURROGATES.values()]
    for kind in kinds:
        for one in dataclasses.fields(kind):
            yield Place(
                "settings",
                f"{kind.__name__}.{one.name}",
                lambda value, kind=kind, name=one.name: kind(**{name: value}).to_dict() and None,
            )
    for kind in (GRPOConfig, ObjectiveConfig, RewardConfig):
        yield Place("settings", f"{kind.__name__}.from_dict", lambda v, k=kind: k.from_dict(v).to_dict() and None)

    def from_dict(name: str, value: Any) -> None:
        GRPOConfig.from_dict({name: value})

    for name in ("group_size", "objective", "advantage", "reward", "kl_control", "seed"):
        yield Place("settings", f"from_dict({name}=...)", partial(from_dict, name))
    surrogate = lambda value: GRPOConfig.from_dict({"objective": {"surrogate": value}})  # noqa: E731
    yield Place("settings", "from_dict(surrogate)", lambda v: surrogate(v) and None)
    kind_of = lambda value: surrogate({"kind": value})  # noqa: E731
    yield Place("settings", "from_dict(surrogate kind)", lambda v: kind_of(v) and None)
    yield Place("settings", "presets.dr_grpo", lambda v: presets.dr_grpo(v) and None)
    for name in ("surrogate", "sampler_correction"):

        def used(value: Any, name: str = name) -> Any:
            batch = ExperienceBatch.from_rows(**good_rows())
            return updated(batch, objective=ObjectiveConfig(**{name: lambda *_: value}), num_epochs_per_update=2)

        yield Place("settings", f"{name} returns", used, lambda: torch.full((NUM_ROWS, WIDTH), 0.5))


def of_checkpoints() -> Iterator[Place]:
    def save(value: Any) -> None:
        trainer_of().save_checkpoint(value)

    def load(value: Any) -> Any:
        trainer = trainer_of()
        trainer.load_checkpoint(value)
        return trainer.policy.get_parameters()

    def altered(part: str, value: Any) -> None:
        trainer = trainer_of()
        trainer.load_state_dict({**trainer.state_dict(), part: value})

    def altered_part(name: str, value: Any) -> None:
        parts = trainer_of().state_dict()["parts"]
        assert name in parts
        altered("parts", {**parts, name: value})

    yield Place("checkpoints", "save_checkpoint", save)
    yield Place("checkpoints", "load_checkpoint", load)
    yield Place("checkpoints", "load_weights(path)", lambda value: load_weights(value, Plain()))
    yield Place("checkpoints", "load_weights(policy)", lambda value: load_weights(saved(), value))
    yield Place("checkpoints", "read_checkpoint", lambda value: read_checkpoint(value) and None)
    yield Place("checkpoints", "best_checkpoint", lambda value: best_checkpoint(value) and None)
    for part in ("parameters", "reference", "config", "kinds", "parts", "random"):
        yield Place("checkpoints", f"a state's {part}", partial(altered, part))
    learner = ("policy", "counters", "collector", "updates", "optimizer_step", "optimizer")
    for part in (*learner, "progress", "in_progress", "ahead"):
        yield Place("checkpoints", f"a state of {part}", partial(altered_part, part))
    yield Place(
        "checkpoints", "a saved parameter", lambda v: altered("parameters", {"logits": v}), lambda: torch.zeros(2)
    )

    def saved_state(value: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            trainer_of(Remembering(state_dict=value)).save_checkpoint(Path(folder) / "checkpoint")

    yield Place("checkpoints", "a policy's state_dict", saved_state)

    def loaded_weights(value: Any) -> None:
        load_weights(saved(), Plain(get_parameters=value))

    yield Place("checkpoints", "load_weights into get_parameters", loaded_weights, lambda: {"logits": torch.zeros(2)})


def of_data() -> Iterator[Place]:
    per_step = torch.full((NUM_ROWS, WIDTH), -0.7)
    scores = {"log_probs": per_step, "mask": MASK, "entropy": per_step, "values": per_step, "kl": per_step}
    sampled = {
        "actions": [[0] * GROUP] * 2,
        "mask": MASK,
        "behaviour_log_probs": per_step,
        "scores": None,
        "metrics": {},
    }
    goods: dict[Any, dict[str, Any]] = {
        ActionScores: {**scores, "final_values": per_step[:, 0]},
        SampledActions: sampled,
        ObjectiveInputs: good_inputs(),
        ObjectiveOutput: {"loss": torch.tensor(1.0), "metrics": {"a": torch.zeros(3)}},
    }

    def built(kind: Any, good: dict[str, Any], name: str, value: Any) -> None:
        kind(**{**good, name: value})

    for kind, good in goods.items():
        for name, like in good.items():
            call = partial(built, kind, good, name)
            yield Place("data classes", f"{kind.__name__}.{name}", call, giving(like))

    for name, like in good_batch().items():

        def used(value: Any, name: str = name) -> Any:
            credit = {"state_keys": "gigpo", "values": "gae", "final_values": "gae"}.get(name)
            settings = {"advantage": AdvantageConfig(credit=credit)}  # type: ignore[arg-type]
            return updated(ExperienceBatch(**good_batch(**{name: value})), **settings)

        yield Place("data classes", f"ExperienceBatch.{name}, used", used, giving(like))


def of_functions() -> Iterator[Place]:
    per_step = torch.full((NUM_ROWS, WIDTH), -0.7)
    arguments: dict[str, Any] = {
        "rewards": STEP_REWARDS,
        "mask": MASK,
        "group_ids": GROUP_IDS,
        "lengths": MASK.sum(1),
        "components": {"a": REWARDS},
        "weights": {"a": 1.0},
        "values": per_step,
        "final_values": per_step[:, 0],
        "state_keys": torch.zeros(NUM_ROWS, WIDTH, dtype=torch.int64),
        "relative": partial(group_relative_advantages, scale="group"),
        "gamma": 0.9,
        "gae_lambda": 0.9,
        "weight": 1.0,
    }
    functions: list[tuple[Any, dict[str, Any], str]] = [
        (group_relative_advantages, {"rewards": REWARDS}, "rewards group_ids lengths"),
        (group_relative_returns, {}, "rewards mask group_ids"),
        (decoupled_advantages, {}, "components weights group_ids"),
        (discounted_returns, {}, "rewards mask gamma"),
        (generalized_advantages, {}, "rewards values mask final_values gamma gae_lambda"),
        (process_supervised_advantages, {}, "rewards mask group_ids relative gamma"),
        (state_group_advantages, {"rewards": REWARDS}, "rewards mask group_ids relative gamma state_keys weight"),
        (step_weights, {"aggregation": "group_mean"}, "mask aggregation group_ids"),
        (step_weights, {"aggregation": "fixed_length", "fixed_length": 3}, "mask aggregation fixed_length"),
    ]
    for function, own, names in functions:
        good = {name: (arguments | own)[name] for name in names.split()}
        settings = [{}, {"baseline": "length_weighted"}, {"scale": "group"}, {"scale": "beta"}]
        for name, like in good.items():
            for others in settings if function is group_relative_advantages else [{}]:
                yield Place(
                    function.__name__,
                    " ".join([name, *map(str, others.values())]),
                    lambda value, f=function, g=good, n=name, o=others: f(**{**g, **o, n: value}),
                    giving(like),
                    is_free=True,
                    without=OVERFLOWS if isinstance(like, float) else frozenset(),
                )
    for name, like in good_inputs().items():
        yield Place(
            "grpo_objective",
            name,
            partial(loss_of, name),
            giving(like),
            is_free=True,
            without=OVERFLOWS if isinstance(like, float) else frozenset(),
        )

    def estimated(value: Any) -> Any:
        return AdvantageEstimator(AdvantageConfig(scale="group"))(ExperienceBatch(**good_batch(rewards=value)))

    yield Place("AdvantageEstimator", "rewards", estimated, REWARDS.clone, is_free=True)
    ratio = torch.ones(NUM_ROWS, WIDTH)
    for kl, others in ((kl_k2, ()), (kl_k3, ()), (kl_k3_weighted, (ratio,)), (score_function_entropy, (ratio,))):
        yield Place(
            "divergences", kl.__name__, lambda v, f=kl, o=others: f(v, *o) is None, per_step.clone, is_free=True
        )
    for correction in (Truncate(), Mask(level="row")):
        for place in range(3):

            def corrected(value: Any, correction: Any = correction, place: int = place) -> Any:
                arguments = [per_step, per_step, MASK]
                arguments[place] = value
                return correction(*arguments)

            yield Place(
                "sampler corrections",
                f"{type(correction).__name__} {place}",
                corrected,
                (MASK if place == 2 else per_step).clone,
                is_free=True,
            )
