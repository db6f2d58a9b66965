"""Distillation through the trainer: teachers of every kind, hints, and several teachers."""

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import ActionScores, GRPOConfig, GRPOTrainer, GRPOWarning, presets
from grpo.distillation import Hinted, Teachers, exact_kl, no_reward
from grpo.errors import ConfigError, ContractError, ProtocolError
from tests.support.policies import RowScoring, TablePolicy

pytestmark = pytest.mark.usefixtures("without_type_checks")

KNOWS = [[3.0, -3.0], [-3.0, 3.0]]
"""Logits of a teacher: action 0 in the first state, action 1 in the second, each with probability .9975."""


def recipe(**changes: Any) -> GRPOConfig:
    config = presets.on_policy_distillation()
    objective = replace(config.objective, **changes.pop("objective", {}))
    return replace(config, **{"learning_rate": 0.3, "seed": 0, "objective": objective, **changes})


def train(student: Any, teacher: Any, states: Any = "ab", num_iterations: int = 40, **changes: Any) -> GRPOTrainer:
    trainer = GRPOTrainer(config=recipe(**changes), policy=student, reference_policy=teacher, reward_model=no_reward)
    trainer.train(list(states) * 4, num_iterations=num_iterations, progress=False)
    return trainer


def rights(policy: TablePolicy, states: str = "ab", actions: tuple[int, ...] = (0, 1)) -> list[float]:
    """The probability of the right action in each state."""
    return policy.get_log_probabilities(list(states), list(actions)).exp().tolist()


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_weighted"])
def test_a_student_becomes_its_teacher_without_a_reward_or_a_complaint(
    estimator: str, caplog: pytest.LogCaptureFixture
) -> None:
    student = TablePolicy()
    with caplog.at_level(logging.INFO, logger="grpo"):
        trainer = train(student, TablePolicy(logits=KNOWS), objective={"kl_estimator": estimator})
    assert min(rights(student)) > 0.98
    assert caplog.messages == []
    assert trainer.evaluate(["a", "b"])["eval/avg_reward"] == 0.0


def test_k1_has_no_expected_gradient_and_the_trainer_says_so() -> None:
    """The mean of its gradient over the actions is 0, so all that moves the student is noise."""
    with pytest.warns(GRPOWarning, match=r"kl_estimator='k1' as a loss has a gradient of zero in expectation"):
        GRPOTrainer(
            config=recipe(objective={"kl_estimator": "k1"}),
            policy=TablePolicy(),
            reference_policy=TablePolicy(logits=KNOWS),
            reward_model=no_reward,
        )


class KnowsTeacher(TablePolicy):
    """Returns the exact KL to a teacher with its scores."""

    def __init__(self, teacher: TablePolicy) -> None:
        super().__init__()
        self.teacher = [teacher]  # in a list, because its weights are not the student's

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        log_probs = self.get_log_probabilities(states, actions).unsqueeze(1)
        own, its = (policy._logits_of(states).log_softmax(1) for policy in (self, *self.teacher))
        kl = exact_kl(own, its).unsqueeze(1)
        return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool), kl=kl)


def test_an_exact_kl_needs_no_luck_in_the_sampled_actions() -> None:
    """A script samples only action 0. The sampled k2 then lowers or raises action 0 alone; the exact KL knows both."""
    student = KnowsTeacher(TablePolicy(logits=KNOWS))
    student.script = [[0] * 4] * 8
    trainer = train(student, None, objective={"kl_estimator": "exact"})
    assert min(rights(student)) > 0.99
    assert trainer.config.objective.kl_coef == 1.0


def test_a_hint_teaches_the_policy_to_do_without_it() -> None:
    """States A and B are a and b with a hint, and the policy knows the answers there. It keeps what it knows there."""
    policy = TablePolicy("abAB", logits=[[0.0, 0.0], [0.0, 0.0], *KNOWS])
    before = rights(policy, "AB")
    train(policy, Hinted(policy, lambda states, actions: [state.upper() for state in states]))
    assert min(rights(policy)) > 0.98
    assert rights(policy, "AB") == before


def test_a_hint_may_be_a_comment_on_the_action() -> None:
    """An error text: the state `wrong` follows the wrong actions, and there the policy avoids action 1."""
    policy = TablePolicy(["a", "wrong", "fine"], logits=[[0.0, 0.0], [2.0, -2.0], [0.0, 0.0]])
    seen: list[tuple[str, int, str]] = []

    def comment(states: list[str], actions: list[int]) -> list[str]:
        comments = ["wrong" if action == 1 else "fine" for action in actions]
        seen.extend(zip(states, actions, comments, strict=True))
        return comments

    train(policy, Hinted(policy, comment), "a", num_iterations=1)
    assert {row[0] for row in seen} == {"a"}
    assert {row[1:] for row in seen} == {(0, "fine"), (1, "wrong")}
    scores = Hinted(policy, comment).score_actions(["a", "a"], [0, 1])
    assert scores.log_probs.exp().squeeze(1).tolist() == pytest.approx([0.5, 0.018], abs=1e-3)


def test_the_teacher_has_the_weights_that_the_policy_has_when_it_samples() -> None:
    """Its states are those of the policy, so it is the policy itself: the KL is 0 at every iteration."""
    policy = TablePolicy()
    trainer = GRPOTrainer(
        config=recipe(learning_rate=0.5),
        policy=policy,
        reference_policy=Hinted(policy, lambda states, actions: states),
        reward_model=lambda states, actions: [float(action) for action in actions],
    )
    before = rights(policy)
    history = [trainer.step(["a", "b"] * 4) for _ in range(3)]
    assert rights(policy) != before
    assert [metrics["train/kl_mean"] for metrics in history] == [0.0, 0.0, 0.0]
    assert trainer.state_dict()["reference"] == {}


def test_a_copy_is_saved_and_follows_the_policy_where_the_settings_say_so() -> None:
    """A mean of half of the old weights and half of the new ones, after one iteration."""
    policy = TablePolicy("abAB", logits=[[0.0, 0.0], [0.0, 0.0], *KNOWS])
    start = policy.logits.detach().clone()
    teacher = Hinted(copy.deepcopy(policy), lambda states, actions: [s.upper() for s in states], is_copy=True)
    trainer = train(policy, teacher, num_iterations=1, reference_sync_every=1, reference_mix=0.5)
    assert not torch.equal(policy.logits, start)
    torch.testing.assert_close(teacher.policy.logits, (start + policy.logits) / 2)
    assert trainer.state_dict()["reference"]["logits"] is teacher.policy.logits


def test_the_policy_itself_is_no_copy() -> None:
    policy = TablePolicy()
    with pytest.raises(ConfigError, match="reference_policy shares parameters with policy"):
        train(policy, Hinted(policy, lambda states, actions: states, is_copy=True))
    with pytest.raises(ConfigError, match="reference_sync_every=1 needs a reference with the policy's parameters"):
        train(policy, Hinted(policy, lambda states, actions: states), reference_sync_every=1)


def test_rows_of_different_lengths_keep_their_steps_under_a_hint() -> None:
    policy = RowScoring(num_states=4)
    states, actions = [0, 1, 1], [(0, 1), (2,), (1, 0, 2)]
    hinted = Hinted(policy, lambda states, actions: [state + 2 for state in states]).score_actions(states, actions)
    direct = policy.score_actions([2, 3, 3], actions)
    assert torch.equal(hinted.mask, direct.mask)
    assert torch.equal(hinted.log_probs[hinted.mask], direct.log_probs[direct.mask])


class Steps:
    """A teacher whose rows have the length of their actions, and which is equally certain of each step."""

    def __init__(self, log_prob: float) -> None:
        self.log_prob = log_prob
        self.calls: list[tuple[list[Any], list[Any]]] = []

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        self.calls.append((list(states), list(actions)))
        lengths = torch.tensor([len(action) for action in actions])
        mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
        return ActionScores(log_probs=torch.where(mask, self.log_prob, torch.nan), mask=mask)

    def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        raise AssertionError("it has score_actions")

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        return [[f"{self.log_prob} in {state}"] * num_actions_per_state for state in states]

    def get_parameters(self) -> dict[str, Tensor]:
        return {}

    def train(self) -> None: ...

    def eval(self) -> None: ...

    def to(self, device: Any) -> None: ...


def test_each_state_has_its_teacher_and_each_teacher_one_pass() -> None:
    """Rows of 2, 1 and 3 steps. The row sums are 2 x -1, 1 x -4 and 3 x -1."""
    short, long = Steps(-1.0), Steps(-4.0)
    teachers = Teachers(lambda state: state[0], {"s": short, "l": long})
    states, actions = ["s1", "l1", "s2"], ["ab", "c", "def"]
    scores = teachers.score_actions(states, actions)
    assert scores.mask.tolist() == [[True, True, False], [True, False, False], [True, True, True]]
    assert scores.log_probs[scores.mask].tolist() == [-1.0, -1.0, -4.0, -1.0, -1.0, -1.0]
    assert teachers.get_log_probabilities(states, actions).tolist() == [-2.0, -4.0, -3.0]
    assert short.calls[0] == (["s1", "s2"], ["ab", "def"])
    assert long.calls[0] == (["l1"], ["c"])
    assert teachers.generate_actions(states, 2) == [["-1.0 in s1"] * 2, ["-4.0 in l1"] * 2, ["-1.0 in s2"] * 2]


def test_a_student_learns_from_several_teachers() -> None:
    """Each teacher knows one state, and would teach the wrong action in the other."""
    teachers = Teachers(
        lambda state: state,
        {"a": TablePolicy(logits=[[3.0, -3.0]] * 2), "b": TablePolicy(logits=[[-3.0, 3.0]] * 2)},
    )
    student = TablePolicy()
    trainer = train(student, teachers)
    assert min(rights(student)) > 0.98
    assert set(trainer.state_dict()["reference"]) == {"a.logits", "b.logits"}


def test_wrong_teachers_are_refused(subtests: pytest.Subtests) -> None:
    policy = TablePolicy()
    cases: list[tuple[type[Exception], str, Any]] = [
        (ProtocolError, "Hinted: policy", lambda: Hinted(object(), lambda states, actions: states)),
        (ConfigError, r"hint must be a function of \(states, actions\)", lambda: Hinted(policy, lambda state: state)),
        (ConfigError, "teachers must be a dict of policies by name", lambda: Teachers(lambda state: 0, {})),
        (ConfigError, "choose must be a function of a state", lambda: Teachers(lambda a, b: 0, {0: policy})),
        (ProtocolError, "Teachers: the teacher 'x'", lambda: Teachers(lambda state: "x", {"x": object()})),
        (
            ContractError,
            r"hint\(states, actions\): states must have one entry per row = 2",
            lambda: Hinted(policy, lambda states, actions: states[:1]).score_actions(["a", "b"], [0, 1]),
        ),
        (
            ContractError,
            "choose must return one of .*'x'.*; got 'y' for state 1",
            lambda: Teachers("xy".__getitem__, {"x": policy}).score_actions([0, 1], [0, 1]),
        ),
        (
            ContractError,
            "Hinted only scores actions",
            lambda: Hinted(policy, lambda states, actions: states).generate_actions(["a"], 1),
        ),
    ]
    for kind, words, make in cases:
        with subtests.test(words=words), pytest.raises(kind, match=words):
            make()
