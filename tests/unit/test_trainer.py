"""The learner and the trainer: a hand-worked update, a seeded run, what needs a run, and parts that a user replaces."""

import copy
import json
import math
import os
import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo import ConfigError, ExperienceBatch, GRPOConfig, GRPOTrainer, ObjectiveInputs, ObjectiveOutput, RewardConfig
from grpo.errors import GRPOWarning
from grpo.learner import Learner
from tests.support.imitated_ranks import Twin
from tests.support.launches import printed_by
from tests.support.objective_inputs import as_users_run_it
from tests.support.policies import (
    DuckPolicy,
    ExactSampling,
    RecordingSGD,
    TablePolicy,
    VectorPolicy,
    digest,
    weights_of,
)
from tests.support.trainers import REWARDS, SCRIPT, by_hand, trainer_of, without_time

IMPORTS = """
import json, sys
import torch, numpy  # what these import on their own is not the learner's
import tests.support.light_packages  # the names that `grpo` exports are not the learner's either
before = {*sys.modules}
import grpo.learner
print(json.dumps(sorted({*sys.modules} - before)))
"""

OF_A_RUN = (
    "_storage", "_running", "_ranks", "_sharding", "_processes", "trainer", "checkpoint", "callbacks", "sinks", "distributed",
    "logs", "evaluation", "checks",
)  # fmt: skip


def test_a_learner_imports_nothing_of_a_run() -> None:
    """No storage, signals, ranks or progress bar, directly or through others."""
    imported = json.loads(printed_by("-c", IMPORTS))
    assert "grpo.learner" in imported
    rooms = {name.split(".")[1] for name in imported if name.startswith("grpo.")}
    assert rooms & {*OF_A_RUN} == set()
    assert {name.split(".")[0] for name in imported} & {"tqdm", "safetensors"} == set()


def test_a_learner_starts_no_process_for_a_reward() -> None:
    """A function that is not async needs one for its deadline, which a run starts."""

    def judge(states: Any, actions: Any) -> list[float]:
        return [float(os.getpid() != own_id)] * len(states)

    async def awaited(states: Any, actions: Any) -> list[float]:
        return judge(states, actions)

    own_id = os.getpid()
    config = GRPOConfig(group_size=4, reward=RewardConfig(timeout=60.0))
    with pytest.raises(ConfigError, match=r"only GRPOTrainer starts processes\. Use GRPOTrainer\."):
        Learner(config=config, policy=TablePolicy(), reward_model=judge)
    for kind, reward, is_elsewhere in ((Learner, awaited, 0.0), (GRPOTrainer, judge, 1.0), (GRPOTrainer, awaited, 0.0)):
        learner = kind(config=config, policy=TablePolicy(), reward_model=reward)
        assert learner.collect(["a"]).rewards.tolist() == [is_elsewhere] * 4


def learner_of(kind: type[Learner] = Learner, **settings: Any) -> Learner:
    torch.manual_seed(settings.get("seed", 0))
    return kind(
        config=GRPOConfig(**{"group_size": 4, "seed": 0, "learning_rate": 0.1, **settings}),
        policy=ExactSampling(),
        reward_model=lambda states, actions: [float(sum(action)) for action in actions],
    )


@pytest.mark.parametrize("settings", [{}, {"num_epochs_per_update": 2, "batch_size": 5}, {"replay_iterations": 1}])
def test_a_learner_makes_the_iterations_of_a_trainer(settings: dict[str, Any]) -> None:
    ends = []
    for kind in (Learner, GRPOTrainer):
        learner = learner_of(kind, **settings)
        metrics = [without_time(learner.step([0, 1, 2, 3])) for _ in range(3)]
        assert learner.iteration == 3
        ends.append(digest(weights_of(learner.policy), learner.optimizer.state_dict(), metrics, torch.get_rng_state()))
    assert ends[0] == ends[1]


def test_the_state_of_a_learner_continues_in_another_one() -> None:
    first, second = learner_of(num_epochs_per_update=2), learner_of(num_epochs_per_update=2, seed=7)
    first.step([0, 1])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.iteration == 1
    ends = []
    for learner in (second, first):
        torch.manual_seed(3)
        learner.step([0, 1])
        ends.append(digest(weights_of(learner.policy), learner.parts.by_name["updates"].state_dict()))
    assert ends[0] == ends[1]


OF_TRAIN = r"config\.{}: only GRPOTrainer\.train honours this, because a Learner"
ASKS = r"reward\.num_retries=.* only GRPOTrainer asks again for rewards\. Use GRPOTrainer"


@pytest.mark.parametrize(("settings", "message"), [
    ({"lr_schedule": "cosine"}, OF_TRAIN.format("lr_schedule='cosine'")),
    ({"warmup_ratio": 0.1}, OF_TRAIN.format("warmup_ratio=0.1")),
    ({"iterations_ahead": 1}, OF_TRAIN.format("iterations_ahead=1")),
    ({"reward": RewardConfig(num_retries=1)}, ASKS),
    ({"reward": RewardConfig(on_failure="drop")}, ASKS),
])  # fmt: skip
def test_a_setting_that_needs_a_run_is_refused_by_a_learner_alone(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        learner_of(**settings)
    learner_of(GRPOTrainer, **settings)


def test_dynamic_sampling_needs_more_states_in_a_learner_alone() -> None:
    learner = learner_of(dynamic_sampling_rounds=2)
    with pytest.raises(ConfigError, match=r"dynamic_sampling_rounds=2 draws further states: only GRPOTrainer\.train"):
        learner.step([0, 1])
    assert learner.step([0, 1], more_states=lambda: [2, 3])["group_stats/num_drawn"] >= 2


def test_a_trainer_says_once_what_step_does_not_honour() -> None:
    trainer = learner_of(GRPOTrainer, lr_schedule="linear", dynamic_sampling_rounds=1)
    with pytest.warns(GRPOWarning, match=r"step\(\) does not honour config\.lr_schedule='linear', .*dynamic_sampling"):
        trainer.step([0, 1])
    trainer.step([0, 1])  # a second warning would be an error
    told = learner_of(GRPOTrainer, dynamic_sampling_rounds=1)
    told.step([0, 1], more_states=lambda: [2, 3])
    assert isinstance(told, GRPOTrainer)
    told.train([0, 1], num_iterations=2, progress=False)


class Counted(Twin):
    """Counts how often the ranks meet."""

    num_meetings = 0

    def met(self, value: Any) -> Any:
        self.num_meetings += 1
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        return self.met(super().gather_objects(value))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return self.met(super().sum(values))

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        return super().sum(values)  # after a meeting, which has told all ranks what comes

    def gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.met(super().gather(rows))

    def agree(self, error: BaseException | None = None) -> None:
        super().agree(self.met(error))


@pytest.mark.parametrize("num_updates", [1, 4])
def test_ranks_meet_at_most_five_times_per_iteration_and_twice_per_update(num_updates: int) -> None:
    """Once for rewards, once for the plan, once for the report, and once before the next iteration."""
    engine, seen = Counted(), []
    config = {"group_size": 4, "seed": 0, "num_epochs_per_update": num_updates}
    rewards = lambda states, actions: [float(n) for n in range(len(actions))]  # noqa: E731
    trainer, _ = by_hand(policy=TablePolicy(), rewards=rewards, config=config, engine=engine)
    watch = SimpleNamespace(on_iteration=lambda trainer, metrics: seen.append(engine.num_meetings))
    trainer.train(["a", "b"], num_iterations=3, callbacks=[watch], progress=False)
    per_iteration = {after - before for before, after in pairwise(seen)}
    assert per_iteration == {5 + 2 * num_updates}, "four meetings of the trainer, and one that asks the callbacks"


# A hand-worked update, a seeded run, and user-supplied replacements of the trainer's parts


def test_one_step_equals_the_hand_worked_update() -> None:
    """d loss / d logits[a] = -(1/4)(1/2)(e0 - p) + (1/4)(1/2)(e1 - p) = (-1/8, 1/8), and the same for b."""
    trainer, policy = by_hand()
    metrics = trainer.step(["a", "b"])
    assert torch.equal(policy.logits.detach(), torch.tensor([[0.125, -0.125], [0.125, -0.125]], dtype=torch.float64))
    assert "train/penalty" not in metrics


def test_a_duck_typed_policy_is_trained_like_a_module() -> None:
    duck, table = DuckPolicy(num_actions=2), TablePolicy(states=(0, 1), script=SCRIPT)
    duck.generate_actions = lambda states, count, **_: [list(group) for group in SCRIPT]  # type: ignore[method-assign]
    for policy in (duck, table):
        by_hand(policy=policy)[0].step([0, 1])
    assert torch.equal(weights_of(duck), weights_of(table))
    assert duck.mode == "train"


class Watched(TablePolicy):
    """Draws from the generators of Python and numpy, and remembers in which mode it samples and scores."""

    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        self.frozen, self.modes = torch.nn.Dropout(), list[tuple[str, bool]]()

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        random.random()
        np.random.random()  # noqa: NPY002
        self.modes.append(("generate", self.training))
        return super().generate_actions(states, num_actions_per_state)

    def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        self.modes.append(("gradient" if torch.is_grad_enabled() else "score", self.training))
        return super().get_log_probabilities(states, actions)


def test_evaluate_reports_the_reward_and_leaves_every_generator_untouched() -> None:
    rewards = [1.0, 2.0, 4.0]
    trainer, policy = by_hand(policy=Watched(), rewards=lambda states, actions: rewards)
    before = weights_of(policy), random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    report = trainer.evaluate(["a"], num_actions_per_state=3)
    after = weights_of(policy), random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    assert digest(*before) == digest(*after)
    mean = 7 / 3
    assert report == {
        "eval/avg_reward": pytest.approx(mean),
        "eval/avg_reward_std": pytest.approx(math.sqrt(sum((r - mean) ** 2 for r in rewards) / 3)),
    }


@pytest.mark.parametrize("mode", [True, False])
def test_evaluate_restores_the_mode_of_the_policy_and_of_its_modules(mode: bool) -> None:
    policy = Watched().train(mode)
    policy.frozen.eval()
    by_hand(policy=policy)[0].evaluate(["a", "b"])
    assert (policy.modes, policy.training, policy.frozen.training) == ([("generate", False)], mode, False)


def test_the_policy_is_in_eval_mode_while_collecting_and_in_train_mode_for_gradients() -> None:
    trainer, policy = by_hand(policy=Watched(script=SCRIPT), config={"num_epochs_per_update": 2})
    trainer.step(["a", "b"])
    assert policy.modes == [("generate", False), ("score", False), ("gradient", True), ("gradient", True)]


def runs(seed: int | None) -> tuple[str, list[dict[str, float]]]:
    torch.manual_seed(11)
    policy = VectorPolicy()
    reward = lambda states, actions: [float(action == 1) + random.random() for action in actions]  # noqa: E731
    trainer = trainer_of(policy, reward, batch_size=5, num_states_per_iteration=2, seed=seed)
    history = trainer.train(torch.randn(5, 3), num_iterations=3, progress=False)
    return digest(weights_of(policy)), [without_time(metrics) for metrics in history]


def test_a_seed_repeats_a_run_exactly_and_another_does_not() -> None:
    with as_users_run_it():  # the type checks draw from the generator of Python
        first = runs(1)
        random.random()
        assert runs(1) == first
        assert runs(2)[0] != first[0]


def test_time_update_spans_the_update_and_time_iteration_the_whole_step() -> None:
    """By a clock that a reward moves 4 seconds on, and an optimizer step 2 seconds."""
    seconds: list[float] = []

    def reward(states: Any, actions: Any) -> list[float]:
        seconds.append(4.0)
        return REWARDS

    trainer, _ = by_hand(rewards=reward)
    trainer.optimizer.register_step_post_hook(lambda *_: seconds.append(2.0))
    trainer.meter.clock = lambda: sum(seconds)
    batch = trainer.collect(["a", "b"])
    for metrics, outside in [
        (trainer.step(["a", "b"]), 4.0),
        (trainer.update(batch), 0.0),
        (trainer.train(["a", "b"], num_iterations=3, progress=False)[0], 4.0),
    ]:
        assert (metrics["time/update"], metrics["time/iteration"]) == (2.0, 2.0 + outside)


def test_external_rollouts_are_trained_on_like_collected_ones() -> None:
    """The rows of the hand-worked step, interleaved, with any numbers as group ids; nothing is sampled."""
    trainer, policy = by_hand(policy=TablePolicy())
    batch = ExperienceBatch.from_rows(["b", "a", "b", "a"], [1, 0, 0, 1], [3.0, 1.0, 4.0, 0.0], [-5, 99, -5, 99])
    metrics = trainer.update(batch)
    assert policy.logits.tolist() == [[0.125, -0.125]] * 2
    assert policy.calls["generate"] == 0
    assert metrics["group_stats/num_groups"] == 2.0


def test_a_reward_may_be_a_function_or_a_reward_model() -> None:
    modes: list[str] = []

    def compute_rewards(states: Any, actions: Any) -> Tensor:
        modes.append("compute")
        assert not torch.is_grad_enabled()
        return torch.tensor(REWARDS)

    model = SimpleNamespace(
        compute_rewards=compute_rewards,
        train=lambda: modes.append("train"),
        eval=lambda: modes.append("eval"),
        to=lambda device: modes.append(f"to {device}"),
    )
    policy = TablePolicy(script=SCRIPT)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    config = GRPOConfig(group_size=2, max_grad_norm=None, device="cpu")
    GRPOTrainer(config=config, policy=policy, reward_model=model, optimizer=optimizer).step(["a", "b"])
    assert policy.logits[0].tolist() == [0.125, -0.125]
    assert modes == ["to cpu", "eval", "compute"]


def test_a_custom_objective_replaces_the_loss() -> None:
    """loss = sum of log-probs over all rows, whatever the rewards: its gradient is sum over rows of (e - p)."""
    seen: list[ObjectiveInputs] = []

    def total(inputs: ObjectiveInputs) -> ObjectiveOutput:
        seen.append(inputs)
        one = torch.tensor([1.0, 42.0, 42.0**2], dtype=torch.float64)
        return ObjectiveOutput(loss=inputs.log_probs.sum(), metrics={"answer": one})

    trainer, policy = by_hand(policy=TablePolicy(script=[[0, 0], [1, 0]]), rewards=[5.0] * 4, objective=total)
    metrics = trainer.step(["a", "b"])
    assert policy.logits.tolist() == [[-1.0, 1.0], [0.0, 0.0]]
    assert metrics["train/answer"] == 42.0
    (inputs,) = seen
    assert inputs.advantages.tolist() == [0.0] * 4
    assert inputs.weights.tolist() == [[0.25]] * 4
    assert inputs.mask.tolist() == [[True]] * 4


def test_custom_advantages_replace_the_estimator_and_carry_no_gradient_into_the_loss() -> None:
    """Advantages 8, 0, 0, 0: only row (a, 0) counts, with weight 1/4: logits[a] moves by 2 (e0 - p) = (1, -1).

    A critic gives advantages with a graph, which gets no gradient. The second pass, at a ratio of 1.76, is clipped.
    """
    values = torch.tensor([8.0, 0.0, 0.0, 0.0], requires_grad=True)
    for given, num_epochs in [(values.detach(), 1), (values.detach().unsqueeze(1), 1), (1.0 * values, 2)]:
        config = {"num_epochs_per_update": num_epochs}
        trainer, policy = by_hand(advantages=lambda batch, given=given: given, config=config)
        metrics = trainer.step(["a", "b"])
        assert policy.logits.tolist() == [[1.0, -1.0], [0.0, 0.0]]
        assert num_epochs == 2 or metrics["rows/skipped_zero_advantage"] == 3.0
    assert values.grad is None


def test_bfloat16_autocast_computes_in_it_and_trains_in_float32() -> None:
    gradients = []
    for dtype in (None, "bfloat16"):
        torch.manual_seed(4)
        policy = VectorPolicy(hidden=32)
        optimizer = RecordingSGD(policy, lr=1e-3)
        states, actions = torch.randn(8, 3).repeat_interleave(4, 0), torch.randint(4, (32,))
        groups, mask = torch.arange(8).repeat_interleave(4), torch.ones(32, 1).bool()
        trainer, _ = by_hand(
            policy=policy, optimizer=optimizer, rewards=[0.0, 1.0] * 2, config={"autocast_dtype": dtype}
        )
        trainer.update(ExperienceBatch.from_rows(states, actions, torch.rand(32), groups, mask=mask))
        assert policy.computed_in == [torch.float32 if dtype is None else torch.bfloat16]
        assert {tensor.dtype for tensor in policy.parameters()} == {torch.float32}
        gradients.append(optimizer.gradients[0])
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert 0 < error < 0.03  # bfloat16 has 8 bits: 2^-8 = 0.004 per operation
    trainer.step(torch.randn(2, 3))  # sampling and scoring run under autocast too
    assert set(policy.computed_in) == {torch.bfloat16}
