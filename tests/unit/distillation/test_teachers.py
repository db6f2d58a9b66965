"""Distillation through the trainer: teachers of every kind, hints, and several teachers."""

import copy
import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import ActionScores, GRPOConfig, GRPOTrainer, presets
from grpo.distillation import Hinted, Teacher, Teachers, exact_kl, no_reward
from grpo.divergence import kl_k2
from grpo.errors import ConfigError, ContractError, ProtocolError
from tests.support.objective_inputs import as_users_run_it
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
def test_a_student_becomes_its_teacher_without_a_reward_or_a_complaint(estimator: str, caplog) -> None:
    student = TablePolicy()
    with caplog.at_level(logging.INFO, logger="grpo"):
        trainer = train(student, TablePolicy(logits=KNOWS), objective={"kl_estimator": estimator})
    assert min(rights(student)) > 0.98
    assert (caplog.messages, trainer.evaluate(["a", "b"])["eval/avg_reward"]) == ([], 0.0)


class KnowsTeacher(TablePolicy):
    def __init__(self, teacher: TablePolicy) -> None:
        super().__init__()
        self.teacher = [teacher]  # in a list, because its weights are not the student's

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        log_probs = self.get_log_probabilities(states, actions).unsqueeze(1)
        own, its = (policy._logits_of(states).log_softmax(1) for policy in (self, *self.teacher))
        kl = exact_kl(own, its).unsqueeze(1)
        return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool), kl=kl)


def test_an_exact_kl_without_a_gradient_is_refused_where_it_is_to_teach() -> None:
    class Detached(KnowsTeacher):
        def score_actions(self, states: Any, actions: Any) -> ActionScores:
            scores = super().score_actions(states, actions)
            return replace(scores, kl=scores.kl.detach())

    policy = Detached(TablePolicy(logits=KNOWS))
    message = "Detached: kl must carry a gradient, as log_probs do, or it teaches nothing"
    with pytest.raises(ContractError, match=message):
        train(policy, None, objective={"kl_estimator": "exact"})
    train(policy, None, objective={"kl_estimator": "exact", "kl_coef": 0.0}, num_iterations=1)


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_a_teacher_that_excludes_an_action_is_named(bad: float) -> None:
    class Excludes(TablePolicy):
        def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
            log_probs = super().get_log_probabilities(states, actions)
            return torch.where(torch.tensor(actions) == 1, bad, log_probs)

    with pytest.raises(ContractError, match=r"reference Excludes: ref_log_probs .* must be finite; rows .* from below"):
        train(TablePolicy(), Excludes(), num_iterations=1)


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


class Joined(TablePolicy):
    """States o (the first task), and n and N (a second one, without and with a hint). o is row 0, and n is rows 0 and 1."""

    def _logits_of(self, states: Any) -> Tensor:
        features = {"o": [1.0, 0.0, 0.0], "n": [1.0, 1.0, 0.0], "N": [0.0, 0.0, 1.0]}
        return torch.tensor([features[state] for state in states], dtype=self.logits.dtype) @ self.logits


@pytest.mark.parametrize(("states", "keeps"), [("n", False), ("no", True)])
def test_states_of_the_first_task_without_a_hint_keep_it(states: str, keeps: bool) -> None:
    """The policy takes action 0 in o, and action 1 in N. What teaches it action 1 in n moves o, too, unless o is among the
    states, where its first weights are the teacher."""
    policy = Joined("onN", logits=[[3.0, -3.0], [0.0, 0.0], [-3.0, 3.0]])
    teacher = Hinted(copy.deepcopy(policy), lambda states, actions: [s.replace("n", "N") for s in states], is_copy=True)
    train(policy, teacher, states, num_iterations=80, objective={"kl_estimator": "k3"})
    assert rights(policy, "n", (1,))[0] > 0.98
    assert (rights(policy, "o", (0,))[0] > 0.98) is keeps


def test_a_hint_may_be_a_comment_on_the_action() -> None:
    """An error text: the state `wrong` follows the wrong actions, and there the policy avoids action 1."""
    policy = TablePolicy(["a", "wrong", "fine"], logits=[[0.0, 0.0], [2.0, -2.0], [0.0, 0.0]])
    seen: list[tuple[str, int, str]] = []

    def comment(states: list[str], actions: list[int]) -> list[str]:
        comments = ["wrong" if action == 1 else "fine" for action in actions]
        seen.extend(zip(states, actions, comments, strict=True))
        return comments

    train(policy, Hinted(policy, comment), "a", num_iterations=1)
    assert ({row[0] for row in seen}, {row[1:] for row in seen}) == ({"a"}, {(0, "fine"), (1, "wrong")})
    scores = Hinted(policy, comment).score_actions(["a", "a"], [0, 1])
    assert scores.log_probs.exp().squeeze(1).tolist() == pytest.approx([0.5, 0.018], abs=1e-3)


def test_the_teacher_has_the_weights_that_the_policy_has_when_it_samples() -> None:
    """Its states are those of the policy, so it is the policy itself: the KL is 0 at every iteration."""
    policy = TablePolicy()
    reward = lambda states, actions: [float(action) for action in actions]  # noqa: E731
    parts = {"reference_policy": Hinted(policy, lambda states, actions: states), "reward_model": reward}
    trainer = GRPOTrainer(config=recipe(learning_rate=0.5), policy=policy, **parts)
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


def test_a_hinted_policy_is_evaluated_without_dropout() -> None:
    policy = torch.nn.ModuleDict({"dropout": torch.nn.Dropout()})
    policy.get_log_probabilities = policy.generate_actions = lambda states, actions: torch.zeros(2)
    policy.get_parameters = dict
    hinted = Hinted(policy, lambda states, actions: states, is_copy=True)
    assert (policy.train()["dropout"].training, hinted.eval() is hinted) == (True, True)
    assert not policy["dropout"].training


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
    assert (short.calls[0], long.calls[0]) == ((["s1", "s2"], ["ab", "def"]), (["l1"], ["c"]))
    assert teachers.generate_actions(states, 2) == [["-1.0 in s1"] * 2, ["-4.0 in l1"] * 2, ["-1.0 in s2"] * 2]


def test_the_weights_of_several_teachers_begin_with_their_names() -> None:
    teachers = Teachers(lambda state: state, {"a": TablePolicy(), "b": TablePolicy()})
    assert set(teachers.get_parameters()) == {"a.logits", "b.logits"}


@pytest.mark.parametrize("form", ["a tensor [N]", "a list of numbers", "a list of tensors [T]"])
def test_a_function_teaches(form: str) -> None:
    """A teacher without weights: what is saved of it is nothing."""
    knows = torch.tensor(KNOWS).log_softmax(1)

    def log_probs(states: Any, actions: Any) -> Any:
        found = knows[["ab".index(state) for state in states], actions]
        return found if "N" in form else found.tolist() if "numbers" in form else found.unsqueeze(1).unbind()

    student = TablePolicy()
    trainer = train(student, Teacher(log_probs))
    assert min(rights(student)) > 0.98
    assert "reference" not in trainer.state_dict() or trainer.state_dict()["reference"] == {}


def test_a_function_scores_rows_of_different_lengths() -> None:
    def log_probs(states: Any, actions: Any) -> list[Tensor]:
        return [torch.full((len(action),), -state) for state, action in zip(states, actions, strict=True)]

    teacher = Teacher(log_probs)
    scores = teacher.score_actions([1.0, 2.0], ["abc", "d"])
    assert scores.mask.tolist() == [[True, True, True], [True, False, False]]
    assert scores.log_probs[scores.mask].tolist() == [-1.0, -1.0, -1.0, -2.0]
    assert teacher.get_log_probabilities([1.0, 2.0], ["abc", "d"]).tolist() == [-3.0, -2.0]


POLICY = TablePolicy()


def hinted(hint: Any) -> Hinted:
    return Hinted(POLICY, hint)


def scores_of(teacher: Any) -> ActionScores:
    """Of an action in each state."""
    return teacher.score_actions(["a", "b"], [0, 1])


@pytest.mark.parametrize(
    ("kind", "words", "make"),
    [
        (ProtocolError, "Hinted: policy", lambda: Hinted(object(), lambda states, actions: states)),
        (ConfigError, r"hint must be a function of \(states, actions\)", lambda: hinted(lambda state: state)),
        (ConfigError, "teachers must be a dict of policies by name", lambda: Teachers(lambda state: 0, {})),
        (ConfigError, "choose must be a function of a state", lambda: Teachers(lambda a, b: 0, {0: POLICY})),
        (ProtocolError, "Teachers: the teacher 'x'", lambda: Teachers(lambda state: "x", {"x": object()})),
        (ContractError, r"hint\(.*: states .* one entry per row = 2", lambda: scores_of(hinted(lambda s, a: s[:1]))),
        *(
            (ContractError, f"choose must return one of .*'x'.*; got {said} for state 1",
             lambda chosen=chosen: scores_of(Teachers({"a": "x", "b": chosen}.__getitem__, {"x": POLICY})))
            for chosen, said in (("y", "'y'"), (["x"], r"\['x'\]"))
        ),
        (ConfigError, r"log_probs must be a function of \(states, actions\)", lambda: Teacher(lambda state: state)),
        (ContractError, r"log_probs\(.*: log_probs .* per row = 2", lambda: scores_of(Teacher(lambda s, a: [0.0]))),
        *(
            (ContractError, r"must return a float or floats \[T\] per row; got",
             lambda wrong=wrong: scores_of(Teacher(lambda s, a: [wrong] * 2)))
            for wrong in (torch.zeros(2, 3), None, "x", 1, [[0.0], [0.0, 1.0]])
        ),
        (ContractError, "Teacher only scores actions", lambda: Teacher(lambda s, a: s).generate_actions(["a"], 1)),
        (ContractError, "Hinted only scores actions", lambda: hinted(lambda s, a: s).generate_actions(["a"], 1)),
    ],
)  # fmt: skip
def test_wrong_teachers_are_refused(kind, words, make) -> None:
    with pytest.raises(kind, match=words):
        make()


# The exact KL to a teacher: values and gradients worked out by hand, and what joining choices does to them


PI = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
TEACHER = torch.tensor([0.1, 0.8, 0.1], dtype=torch.float64)


def test_the_value_and_the_gradient_of_three_choices_worked_out_by_hand() -> None:
    """.5 log 5 + .25 log(5/16) + .25 log 2.5 = .8047 - .2908 + .2291 = .7430.

    dKL / dlogit_a = pi_a (log(pi_a / teacher_a) - KL): .5 (1.6094 - .7430) = .4332 for the first choice.
    """
    kl = 0.5 * math.log(5) + 0.25 * math.log(0.3125) + 0.25 * math.log(2.5)
    expected = [p * (math.log(p / q) - kl) for p, q in zip(PI.tolist(), TEACHER.tolist(), strict=True)]
    assert (kl, expected[0]) == (pytest.approx(0.7430, abs=1e-4), pytest.approx(0.4332, abs=1e-4))
    logits = PI.log().requires_grad_()
    value = exact_kl(logits.log_softmax(0), TEACHER.log())
    value.backward()
    assert (value.item(), logits.grad.tolist()) == (pytest.approx(kl), pytest.approx(expected))


def test_the_gradient_is_the_expected_gradient_of_k2() -> None:
    """The sum over the choices of pi(a) times the gradient of k2 at a."""
    logits = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    teacher = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).log_softmax(0)
    (exact,) = torch.autograd.grad(exact_kl(logits.log_softmax(0), teacher), logits)
    log_probs = logits.log_softmax(0)
    k2 = kl_k2((log_probs - teacher).unsqueeze(0)).squeeze(0)
    (sampled,) = torch.autograd.grad((log_probs.exp().detach() * k2).sum(), logits)
    torch.testing.assert_close(sampled, exact)


def test_the_likeliest_choices_of_the_teacher_and_one_term_for_the_rest() -> None:
    """top=1 keeps the second choice, .25 against .8; the rest has .75 and .2: .25 log(.3125) + .75 log 3.75 = .7005.

    The two joined choices have .5 and .25 of the rest's .75, and get 2/3 and 1/3 of its gradient.
    """
    kl = 0.25 * math.log(0.3125) + 0.75 * math.log(3.75)
    assert kl == pytest.approx(0.7005, abs=1e-4)
    logits = PI.log().requires_grad_()
    value = exact_kl(logits.log_softmax(0), TEACHER.log(), top=1)
    value.backward()
    rest = 0.75 * (math.log(3.75) - kl)
    expected = [rest * 2 / 3, 0.25 * (math.log(0.3125) - kl), rest / 3]
    assert (value.item(), logits.grad.tolist()) == (pytest.approx(kl), pytest.approx(expected))


def test_more_choices_bring_the_sum_nearer_to_the_exact_kl_from_below() -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = (3 * torch.randn(5, 4, 40, dtype=torch.float64, generator=generator)).log_softmax(-1)
    teacher = (3 * torch.randn(5, 4, 40, dtype=torch.float64, generator=generator)).log_softmax(-1)
    exact = exact_kl(log_probs, teacher)
    values = [exact_kl(log_probs, teacher, top=top) for top in (1, 2, 5, 10, 20, 39)]
    assert exact.shape == (5, 4)
    for fewer, more in zip(values, [*values[1:], exact], strict=True):
        assert bool((fewer <= more + 1e-12).all())
    torch.testing.assert_close(values[-1], exact)  # the rest is one choice, so nothing is joined
    assert torch.equal(exact_kl(log_probs, teacher, top=40), exact)
    assert torch.equal(exact_kl(log_probs, teacher, top=1000), exact)


@pytest.mark.parametrize("top", [None, 1, 2])
def test_a_choice_that_neither_can_take_adds_nothing_and_has_no_gradient(top: int | None) -> None:
    logits = torch.tensor([0.0, 1.0, -torch.inf], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([1.0, 0.0, -torch.inf], dtype=torch.float64)
    kl = exact_kl(logits.log_softmax(0), teacher.log_softmax(0), top=top)
    kl.backward()
    assert kl.item() == pytest.approx(exact_kl(logits[:2].log_softmax(0), teacher[:2].log_softmax(0)).item())
    assert logits.grad[2] == 0
    assert bool(logits.grad.isfinite().all())


def test_no_gradient_reaches_the_teacher() -> None:
    logits, teacher = PI.log().requires_grad_(), TEACHER.log().requires_grad_()
    exact_kl(logits.log_softmax(0), teacher.log_softmax(0), top=2).backward()
    assert teacher.grad is None


ONE_SHAPE = "log_probs and teacher_log_probs must have one shape"


@pytest.mark.parametrize(
    ("log_probs", "teacher_log_probs", "words"),
    [
        (PI.log(), TEACHER[:2].log(), ONE_SHAPE),
        (PI.log().numpy(), TEACHER.log().numpy(), ONE_SHAPE),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), ONE_SHAPE),
        (  # a sum of e + e^2 + e^3 is that of logits, and .9 that of a teacher without one of its choices
            torch.tensor([1.0, 2.0, 3.0]),
            TEACHER.log(),
            r"log_probs must be the log-probs of all choices, .*; got a sum of 30\.2\.",
        ),
        (PI.log(), torch.tensor([0.1, 0.8, 0.0]).double().log(), r"teacher_log_probs must be .*; got a sum of 0\.9\."),
        (PI, PI, r"log_probs must be .*; got a sum of 4\.22\."),
    ],
)
def test_wrong_arguments_are_refused(log_probs, teacher_log_probs, words):
    with as_users_run_it(), pytest.raises(ContractError, match=f"exact_kl: {words}"):
        exact_kl(log_probs, teacher_log_probs)
    with pytest.raises(ConfigError, match=r"exact_kl: top must be >= 1; got 0"):
        exact_kl(PI.log(), TEACHER.log(), top=0)
