"""Groups that branch: conversations that begin together and go on differently."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

from grpo.errors import ConfigError

from .messages import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """Where the conversations of a group branch. What comes before a fork is sampled and forwarded once.

    After `at[i]` messages of the policy, a conversation forks into `width[i]` branches. So prod(width) rows of a group grow
    from one root, and a group of G rows has G / prod(width) roots. Two roots at least are needed to compare what comes before
    the first fork.

    A conversation that ends before a fork stands for all rows that would have grown from it: its row is repeated. So a root
    counts as much as any other root, and a branch as much as its siblings, whenever they end. The sum over rows of
    R grad log pi is then G times an unbiased estimate of the gradient of E[R]. It would be biased if other roots took the
    place of early ends, because roots that end early would then be more frequent among the rows.

    An edge u has the turns between two forks. L(u) rows pass through it, and V(node) is the mean reward of the rows that pass
    through a node. Each row has its own advantage, and the loss adds up the rows. So a token of u is weighted by the sum over
    L(u) rows:

    - `credit="row"`: L(u) (V(child) - V(group)). The group's mean has the rows of u in it, so the expected weight is
      1 - L(u) / G of that without a baseline (for independent rows, 1 - 1 / G).
    - `credit="gigpo"`: gigpo_weight L(u) (V(child) - V(parent)) in addition. An edge is compared with those that begin at the
      same fork. The expected weight is 1 - 1 / width.

    Args:
        at: Numbers of messages of the policy after which conversations fork, ascending.
        width: Number of branches of each fork, at least 2.

    Raises:
        ConfigError: The numbers are out of order or out of range.

    Example:
        Groups of 8 rows from 2 roots, with 2 branches after the first message and 2 more after the third::

            policy = AgentPolicy(model, make, branch=Branching(at=(1, 3), width=(2, 2)))
            trainer = GRPOTrainer(config=GRPOConfig(group_size=8), policy=policy, reward_model=EnvironmentReward())

    Source:
        Ji et al. 2025 (Tree-GRPO), arXiv:2509.21240, which adds the comparisons between and within trees, too.
    """

    at: tuple[int, ...]
    """Numbers of messages of the policy after which conversations fork, ascending. Later ones cost less."""
    width: tuple[int, ...]
    """Number of branches of each fork. More compare a decision better, and leave fewer roots in a group."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        both: Any = (self.at, self.width)
        is_right = (
            all(type(given) is tuple and all(type(number) is int for number in given) for given in both)
            and len(self.at) == len(self.width) > 0
            and all(before < after for before, after in pairwise((0, *self.at)))
            and min(self.width) >= 2
        )
        if not is_right:
            raise ConfigError(
                "Branching: at must be a tuple of ascending integers of at least 1, and width one of as many integers of at "
                f"least 2; got at={self.at!r} and width={self.width!r}. Pass, for example, at=(2,), "
                "width=(4,)."
            )

    @property
    def num_leaves(self) -> int:
        """Number of rows that grow from one root."""
        return prod(self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What an environment and its loop need to go on from a fork."""

    snapshot: Any
    """What the environment's `snapshot()` returned."""
    messages: list[Message]
    """What was said, with the environment's answer."""
    rewards: list[float]
    """The rewards so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The place of a conversation in the tree that grows from its root."""

    branching: Branching
    """Where the tree forks."""
    leaf: int
    """The first of the rows that the conversation stands for."""
    num_leaves: int
    """Number of these rows. A fork divides them."""
    node: tuple[int, ...] = ()
    """The last fork: the number of turns before it, and the first row below it. Empty: the root."""
    num_forks: int = 0
    """Number of forks so far."""
    num_shared_turns: int = 0
    """Number of turns that an earlier branch sampled."""
    saved: Saved | None = None
    """What the conversation begins with. None: it begins with `reset`."""

    def width_after(self, num_turns: int) -> int:
        """Number of branches that go on after this number of turns. 1: there is no fork."""
        at, width = self.branching.at, self.branching.width
        return width[self.num_forks] if num_turns in at[self.num_forks : self.num_forks + 1] else 1

    def forked(self, num_turns: int, saved: Sequence[Saved]) -> list["Branch"]:
        """The branches of a fork after this number of turns. The first goes on, the others begin with `saved`."""
        num_leaves = self.num_leaves // (1 + len(saved))
        first = replace(self, num_leaves=num_leaves, node=(num_turns, self.leaf), num_forks=self.num_forks + 1)
        others = [
            replace(first, leaf=self.leaf + i * num_leaves, num_shared_turns=num_turns, saved=each)
            for i, each in enumerate(saved, start=1)
        ]
        return [first, *others]
