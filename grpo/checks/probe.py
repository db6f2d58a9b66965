"""A policy under test: its samples and scores by each of its methods, computed once. The policy is restored afterwards."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from grpo._collecting.scoring import Scorer, join_scores
from grpo._common.conversion import pad_steps
from grpo._common.global_state import seed_everything
from grpo.experience_collector import ExperienceCollector
from grpo.policy_base import POLICY_METHODS, HasState, SamplesWithScores, ScoresActions, SplitsSteps
from grpo.types import ActionScores, Rows, SampledActions, repeat_rows, select_rows

from .sampling import as_numbers

MAX_ROWS_ONE_BY_ONE = 32
"""Maximum number of rows that are scored one by one."""
ROWS_PER_FORWARD = 4096
"""Rows per forward pass when many samples are scored."""
FULL_PRECISION, HALF_PRECISION = 1e-4, 0.05
"""Largest difference, relative to 1 + |log-prob|, that counts as rounding, in float32 and in half precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Many actions sampled for one state, with their scores."""

    states: Rows
    """The state, repeated once per sample."""
    actions: Rows
    """The sampled actions."""
    sampled: SampledActions | None
    """The result of `sample_actions`. None: the actions come from `generate_actions`."""
    scores: ActionScores
    """The policy's scores of `actions`."""

    @property
    def is_exact(self) -> bool:
        """Whether the behaviour log-probs, if there are any, equal the policy's log-probs."""
        behaviour = None if self.sampled is None else self.sampled.behaviour_log_probs
        if behaviour is None:
            return True
        return (
            behaviour.shape == self.scores.mask.shape
            and difference(behaviour, self.scores.log_probs, self.scores.mask) < 1e-3
        )


class PolicyProbe:
    """A policy under test, and its samples and scores. Every rule for policies gets this object.

    Args:
        policy: The policy under test. Every rule but the first relies on its six methods.
        states: B states.
        num_actions: Number of actions per state, G.
        seed: Seed of all random numbers.
        num_samples: Number of actions drawn for the first state, for tests of distributions.
        device: Device to test on. None: where the policy is.
    """

    def __init__(
        self, policy: Any, states: Rows, num_actions: int, seed: int, num_samples: int, device: Any = None
    ) -> None:
        self.policy = policy
        self.states = states
        self.num_actions = num_actions
        self.num_samples = num_samples
        self.name = type(policy).__name__
        self._seed = seed
        self._device = device

    def prepare(self) -> None:
        """Reset the seed, move the policy to the device and switch it to `eval()`, so that rules are independent."""
        seed_everything(self._seed)
        if self._device is not None:
            self.policy.to(self._device)
        self.policy.eval()

    @cached_property
    def rows(self) -> tuple[Rows, Rows, Int[Tensor, " N"]]:
        """States, actions and group ids of N = B G rows. The actions come from `generate_actions`."""
        states, actions, _ = self.sample(self.only(), self.states, self.num_actions)
        return states, actions, torch.arange(len(self.states)).repeat_interleave(self.num_actions)

    @cached_property
    def scores(self) -> ActionScores:
        """Scores of `rows` without gradient, from `row_scorer`."""
        return self.score(self.row_scorer, *self.rows)

    @cached_property
    def row_scorer(self) -> Scorer:
        """Scores rows with `score_actions` if the policy has it, else with `get_log_probabilities`."""
        return Scorer(self.only("score_actions") if isinstance(self.policy, ScoresActions) else self.only())

    @cached_property
    def generated(self) -> Draws:
        """Actions for the first state, drawn with `generate_actions`."""
        return self._draw(self.only())

    @cached_property
    def sampled(self) -> Draws:
        """Actions for the first state, drawn with `sample_actions`."""
        return self._draw(self.only("sample_actions"))

    @property
    def drawn(self) -> Draws:
        """Actions for the first state, drawn with the method that training uses."""
        return self.sampled if isinstance(self.policy, SamplesWithScores) else self.generated

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters that require a gradient, by name."""
        return {name: value for name, value in self.policy.get_parameters().items() if value.requires_grad}

    @cached_property
    def tolerance(self) -> float:
        """The largest difference that rounding explains, given the coarsest floating type in use."""
        in_use = [value for value in self.policy.get_parameters().values() if value.is_floating_point()]
        in_use.append(self.raw_log_probs(*self.rows[:2]))
        return HALF_PRECISION if any(value.element_size() < 4 for value in in_use) else FULL_PRECISION

    @property
    def no_sampling_test(self) -> str:
        """Why samples cannot be compared with log-probs. Empty: they can be compared."""
        if self.num_samples == 0:
            return "num_samples=0."
        if isinstance(self.policy, SplitsSteps) and bool((self.scores.mask.sum(1) > 1).any()):
            return "Actions are episodes (split_steps), so their distribution also depends on the environment."
        return ""

    def only(self, *methods: str) -> Any:
        """Return an object with the policy's six required methods and `methods`, to test one optional method at a time."""
        # a class, because messages name a policy by its class; staticmethod, because the methods are bound already
        kept = {name: staticmethod(getattr(self.policy, name)) for name in (*POLICY_METHODS, *methods)}
        return type(self.name, (), kept)()

    def sample(self, policy: Any, states: Rows, num_actions: int) -> tuple[Rows, Rows, SampledActions | None]:
        """Sample actions as in training, with the same checks as in training."""
        collector = ExperienceCollector(policy=policy, reward_model=lambda *_: 0.0, group_size=num_actions)
        return collector.sample(states, num_actions)

    def raw_log_probs(self, states: Rows, actions: Rows) -> Any:
        """The return value of `get_log_probabilities`, unchecked."""
        with torch.no_grad():
            return self.policy.get_log_probabilities(states, actions)

    def score(self, scorer: Scorer, states: Rows, actions: Rows, group_ids: Int[Tensor, " N"]) -> ActionScores:
        """The scores of N rows, without gradient."""
        with torch.no_grad():
            return scorer(states, actions, group_ids)

    def score_one_state(self, state: Rows, actions: Rows) -> ActionScores:
        """Scores of M actions for one state, in forward passes of bounded size."""
        parts = []
        for start in range(0, len(actions), ROWS_PER_FORWARD):
            part = select_rows(actions, slice(start, start + ROWS_PER_FORWARD))
            ids = torch.zeros(len(part), dtype=torch.int64)
            scores = self.score(self.row_scorer, repeat_rows(state, len(part)), part, ids)
            parts.append(ActionScores(log_probs=scores.log_probs, mask=scores.mask))
        return join_scores(parts)

    @cached_property
    def noise(self) -> Bool[Tensor, " D"] | None:
        """For actions of D real numbers: the numbers that are drawn, but that do not depend on the parameters.

        They are the same in samples of the same random numbers before and after the parameters change. None: the actions are
        not real numbers, or the samples of the same random numbers differ.
        """
        if not self.parameters or as_numbers(self._noise_draw()) is None:
            return None
        first, again = self._noise_draw(), self._noise_draw()
        with perturbed(self.parameters.values()):
            moved = self._noise_draw()
        one, two, three = (numbers[0] for rows in (first, again, moved) if (numbers := as_numbers(rows)) is not None)
        if not one.shape == two.shape == three.shape or not torch.equal(one, two):
            return None
        return (one == three).all(0)

    def _noise_draw(self) -> Rows:
        seed_everything(self._seed)
        with left_as_found(self.policy):
            self.policy.eval()
            drawn = self.sample(self.only(), select_rows(self.states, slice(0, 1)), 8)[1]
        self.policy.eval()
        return drawn

    def draw(self) -> Draws:
        """Draw new actions for the first state, with the method that training uses."""
        return self._draw(self.only("sample_actions") if isinstance(self.policy, SamplesWithScores) else self.only())

    def _draw(self, policy: Any) -> Draws:
        states, actions, sampled = self.sample(policy, select_rows(self.states, slice(0, 1)), self.num_samples)
        scores = self.score(self.row_scorer, states, actions, torch.zeros(len(states), dtype=torch.int64))
        return Draws(states=states, actions=actions, sampled=sampled, scores=scores)


def difference(found: Tensor, expected: Tensor, mask: Tensor | None = None) -> float:
    """max |found - expected| / (1 + |expected|) where the mask is True. Infinite if exactly one of two numbers is NaN."""
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    gaps = ((found - expected).abs() / (1 + expected.abs())).nan_to_num(float("inf"))
    equal = (found == expected) | (found.isnan() & expected.isnan())
    gaps = torch.where(equal, 0.0, gaps)  # inf - inf is NaN, but infinity equals itself
    if mask is not None:
        gaps = gaps[mask.cpu()]
    return float(gaps.max()) if gaps.numel() else 0.0


def scores_difference(found: ActionScores, expected: ActionScores) -> float:
    """`difference` of two scorings of the same rows, at the steps of the mask. Infinite if the masks differ."""
    width = max(found.mask.shape[1], expected.mask.shape[1])
    mask = pad_steps(expected.mask, width, False)
    if not torch.equal(pad_steps(found.mask, width, False).cpu(), mask.cpu()):
        return float("inf")
    return difference(pad_steps(found.log_probs, width, 0.0), pad_steps(expected.log_probs, width, 0.0), mask)


def first_difference(found: Any, expected: Any, where: str = "value", above: frozenset[int] = frozenset()) -> str:
    """The first place where two nested values differ. Empty: they are equal. Objects are compared by their attributes.

    Args:
        found: A value.
        expected: What it must be. A list equals a tuple of the same entries, as after a checkpoint.
        where: What the place is called.
        above: The ids of the values that contain `expected`, so that a value that contains itself is no endless loop.
    """
    if found is expected or id(expected) in above:
        return ""
    if isinstance(expected, Tensor):
        same = isinstance(found, Tensor) and found.shape == expected.shape and difference(found, expected) == 0.0
        return "" if same else where
    if isinstance(expected, np.ndarray):
        return "" if np.array_equal(found, expected, equal_nan=expected.dtype.kind in "fc") else where
    parts, expected_parts = _parts_of(found), _parts_of(expected)
    if parts is None or expected_parts is None:
        has_identity_only = type(found) is type(expected) and type(expected).__eq__ is object.__eq__  # type: ignore[comparison-overlap]
        return "" if has_identity_only or found == expected or (found != found and expected != expected) else where
    if parts.keys() != expected_parts.keys():
        return where
    above |= {id(expected)}
    places = ((f"{where}[{key!r}]", parts[key], part) for key, part in expected_parts.items())
    return next((bad for place, one, other in places if (bad := first_difference(one, other, place, above))), "")


def _parts_of(value: Any) -> Mapping[Any, Any] | None:
    """What a value contains, by name or number. None: it has no parts."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return value if isinstance(value, Mapping) else getattr(value, "__dict__", None)


def some_rows(num_rows: int) -> list[int]:
    """At most `MAX_ROWS_ONE_BY_ONE` row indices, evenly spread over all rows."""
    step = -(-num_rows // MAX_ROWS_ONE_BY_ONE)
    return list(range(0, num_rows, step))


@contextmanager
def perturbed(parameters: Iterable[Tensor], relative: float | None = None) -> Iterator[None]:
    """Add noise to every floating parameter inside the block, and restore the exact values afterwards.

    The noise has a standard deviation of 0.1, or of `relative` times the parameter's own root mean square if that is not 0.
    """
    saved = [(value, value.detach().clone()) for value in parameters if value.is_floating_point()]
    try:
        with torch.no_grad():
            for value, before in saved:
                size = 0.0 if relative is None else relative * float(before.cpu().double().square().mean().sqrt())
                value.add_(torch.randn_like(value), alpha=size or 0.1)
        yield
    finally:
        _put_back(saved)


@contextmanager
def left_as_found(policy: Any) -> Iterator[None]:
    """Restore the policy's parameters, buffers, `state_dict()` and device after the block. The policy ends in `train()`.

    Exceptions from the policy's methods are ignored here: the rule that calls such a method reports the exception.
    """
    saved = {name: (value.device, value.detach().clone()) for name, value in _tensors(policy).items()}
    state: Any = None
    # the state of a plain module is its parameters and buffers, which are put back below without a second copy
    if isinstance(policy, HasState) and type(policy).state_dict is not nn.Module.state_dict:
        with suppress(Exception):
            state = copy.deepcopy(policy.state_dict())
    try:
        yield
    finally:
        with suppress(Exception):
            moved = [home for name, (home, _) in saved.items() if _tensors(policy)[name].device != home]
            if moved:
                policy.to(moved[0])
        if state is not None:
            with suppress(Exception):
                policy.load_state_dict(state)
        _put_back([(value, saved[name][1]) for name, value in _tensors(policy).items() if name in saved])
        with suppress(Exception):
            policy.train()


def _tensors(policy: Any) -> dict[str, Tensor]:
    """The parameters, and the buffers of a module. Parameters are left out if `get_parameters` raises."""
    found: dict[str, Any] = dict(policy.named_buffers()) if isinstance(policy, nn.Module) else {}
    with suppress(Exception):
        found |= policy.get_parameters()
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _put_back(saved: Sequence[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for value, bits in saved:
            value.copy_(bits)
