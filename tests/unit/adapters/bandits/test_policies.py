"""Policies: torch.distributions as the oracle of values and gradients, chi-square of the samplers; and wrong arguments."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch.distributions import Categorical

from adapters.bandits import (
    EXP3S,
    UCB1,
    BanditEnv,
    BanditReward,
    DiscountedUCB,
    GradientBandit,
    MLPPolicy,
    Oracle,
    SlidingWindowUCB,
    SoftmaxPolicy,
    Testbed,
    ThompsonSampling,
    Uniform,
    random_walk_testbed,
)
from grpo import ActionScores
from grpo._common.protocols import require_methods
from grpo.errors import ConfigError, ContractError
from grpo.policy_base import POLICY_METHODS, SamplesWithScores, ScoresActions, ScoresGroups, ScoresReference


def table_policy(num_states: int, num_actions: int = 5) -> SoftmaxPolicy:
    policy = SoftmaxPolicy(num_actions, num_states).double()
    with torch.no_grad():
        policy.logits.copy_(torch.randn(num_states, num_actions, dtype=torch.float64) * 2)
    return policy


def mlp_policy(**kwargs) -> MLPPolicy:
    policy = MLPPolicy(3, 5, hidden=(8,), **kwargs).double()
    with torch.no_grad():
        policy.head.weight.mul_(100)
    return policy


def test_policies_have_their_documented_capabilities() -> None:
    softmax, mlp = SoftmaxPolicy(3), MLPPolicy(2, 3)
    for policy in (softmax, mlp):
        require_methods(policy, POLICY_METHODS, "policy", "PolicyModel")
        assert isinstance(policy, ScoresActions)
        assert isinstance(policy, SamplesWithScores)
    assert isinstance(softmax, ScoresReference)
    assert not isinstance(mlp, ScoresReference)
    assert isinstance(mlp, ScoresGroups)
    assert softmax.get_parameters()["logits"] is softmax.logits
    assert sum(tensor.numel() for tensor in mlp.get_parameters().values()) == 2 * 64 + 64 + 64 * 64 + 64 + 64 * 3 + 3


def test_softmax_policy_starts_uniform_and_ignores_the_states_of_a_single_row() -> None:
    policy = SoftmaxPolicy(4, num_states=2)
    torch.testing.assert_close(policy.probabilities(), torch.full((2, 4), 0.25))
    for scores, reference in (
        (policy.score_actions([0, 1], [3, 2]), policy.reference_log_probabilities([0, 1], [3, 2])),
        (SoftmaxPolicy(4).score_actions(["any", None], [3, 2]), torch.full((2, 1), -math.log(4))),
    ):
        torch.testing.assert_close(scores.log_probs, torch.full((2, 1), -math.log(4)))
        torch.testing.assert_close(scores.entropy, torch.full((2, 1), math.log(4)))
        torch.testing.assert_close(reference, scores.log_probs)
        assert scores.mask.tolist() == [[True], [True]]


def assert_same_scores(policy: Any, scores: ActionScores, expected: Categorical, actions: torch.Tensor) -> None:
    """Values, and gradients of their sums."""
    for got, wanted in ((scores.log_probs, expected.log_prob(actions)), (scores.entropy, expected.entropy())):
        torch.testing.assert_close(got, wanted.unsqueeze(1))
        gradients = [
            torch.autograd.grad(each.square().sum(), policy.parameters(), retain_graph=True) for each in (got, wanted)
        ]
        torch.testing.assert_close(*gradients)


def test_table_agrees_with_torch_distributions() -> None:
    policy = table_policy(num_states=7)
    states, actions = torch.randint(7, (40,)), torch.randint(5, (40,))
    scores = policy.score_actions(states, actions)
    assert_same_scores(policy, scores, Categorical(logits=policy.logits[states]), actions)
    for rows in ((states.tolist(), actions.tolist()), (states.numpy(), actions.numpy())):
        torch.testing.assert_close(policy.get_log_probabilities(*rows), scores.log_probs[:, 0])


def test_mlp_agrees_with_its_own_layers(subtests: pytest.Subtests) -> None:
    for activation in ("tanh", "relu"):
        with subtests.test(activation):
            policy = mlp_policy(activation=activation)
            states, actions = torch.randn(6, 3, dtype=torch.float64), torch.randint(5, (6,))
            first = policy.body[0]
            hidden = getattr(torch, activation)(states @ first.weight.T + first.bias)
            expected = Categorical(logits=hidden @ policy.head.weight.T + policy.head.bias)
            scores = policy.score_actions(states, actions)
            assert_same_scores(policy, scores, expected, actions)
            listed = policy.get_log_probabilities([state.numpy() for state in states], actions.tolist())
            torch.testing.assert_close(listed, scores.log_probs.squeeze(1))
            torch.testing.assert_close(policy.get_log_probabilities(list(states), actions), listed)
            groups, rows = torch.randint(5, (6, 3)), torch.arange(6).repeat_interleave(3)
            of_groups = Categorical(logits=expected.logits[rows])
            assert_same_scores(policy, policy.score_groups(states, groups), of_groups, groups.flatten())


def test_mlp_starts_nearly_uniform_and_can_be_linear() -> None:
    probabilities = MLPPolicy(3, 5).action_log_probs(torch.randn(100, 3)).exp()
    assert (probabilities - 0.2).abs().max() < 0.005
    assert [name for name, _ in MLPPolicy(3, 5, hidden=()).named_parameters()] == ["head.weight", "head.bias"]


def test_groups_are_scored_like_their_rows() -> None:
    policy = mlp_policy()
    states = torch.randn(4, 3, dtype=torch.float64)
    actions = torch.randint(5, (4, 6))
    ragged = [torch.tensor([4, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([1, 1, 2]), torch.tensor([3])]
    for groups in (actions, actions.numpy(), list(actions), actions.tolist(), ragged):
        rows = torch.tensor([row for row, group in enumerate(groups) for _ in group])
        by_row = policy.score_actions(states[rows], torch.cat([torch.as_tensor(group) for group in groups]))
        by_group = policy.score_groups(states, groups)
        torch.testing.assert_close(by_group.log_probs, by_row.log_probs)
        torch.testing.assert_close(by_group.entropy, by_row.entropy)
        assert by_group.mask.shape == (len(rows), 1)
        assert by_group.mask.all()


def test_sampling_frequencies_are_the_probabilities(subtests: pytest.Subtests) -> None:
    for policy in (table_policy(1), table_policy(2), mlp_policy()):
        with subtests.test(type(policy).__name__):
            states = torch.randn(2, 3) if isinstance(policy, MLPPolicy) else torch.tensor([0, 1])
            num_draws = 20_000
            if isinstance(policy, MLPPolicy):
                probabilities = policy.action_log_probs(states).exp().detach()
            else:
                probabilities = policy.probabilities().expand(2, 5)
            actions = policy.generate_actions(states, num_draws, generator=torch.Generator().manual_seed(1))
            assert actions.shape == (2, num_draws)
            assert actions.dtype == torch.int64
            for row, expected in zip(actions, probabilities.numpy(), strict=True):
                counts = np.bincount(row.numpy(), minlength=5)
                assert chisquare(counts, num_draws * expected / expected.sum()).pvalue > 1e-3


def test_sampled_actions_carry_the_scores_of_the_policy(subtests: pytest.Subtests) -> None:
    for policy in (table_policy(1), table_policy(9), mlp_policy()):
        with subtests.test(type(policy).__name__):
            states = torch.randn(3, 3) if isinstance(policy, MLPPolicy) else torch.tensor([8, 0, 8]) % policy.num_states
            sampled = policy.sample_actions(states, 4)
            assert sampled.behaviour_log_probs is sampled.scores.log_probs
            assert sampled.mask.shape == (12, 1)
            assert not sampled.scores.log_probs.requires_grad
            scores = policy.score_actions(states.repeat_interleave(4, dim=0), sampled.actions.flatten())
            torch.testing.assert_close(sampled.scores.log_probs, scores.log_probs.detach())
            torch.testing.assert_close(sampled.scores.entropy, scores.entropy.detach())
            assert scores.log_probs.requires_grad
            assert scores.entropy.requires_grad


def test_invalid_actions_and_states_are_refused() -> None:
    policy = SoftmaxPolicy(3, num_states=2)
    mlp = MLPPolicy(2, 3)
    for score, states, actions, words in (
        (policy.score_actions, [0, 1], [1, 3], r"actions must lie in 0\.\.2; got 1 to 3"),
        (policy.score_actions, [-1, 0], [0, 0], r"states must lie in 0\.\.1; got -1 to 0"),
        (policy.score_actions, [0], torch.tensor([0.5]), r"must be whole numbers \[N\]; got float32 \[1\]"),
        (policy.score_actions, [0], [0, 1], "got 1 states, 2 actions"),
        (mlp.score_actions, torch.zeros(2, 2), [0], "got 2 states, 1 actions"),
        (mlp.score_groups, torch.zeros(2, 2), [[0]], "got 2 states, 1 groups"),
        (mlp.score_groups, torch.zeros(1, 2), [[-1]], r"actions must lie in 0\.\.2"),
    ):
        with pytest.raises(ContractError, match=words):
            score(states, actions)
    with pytest.raises(TypeError, match="temperature"):
        policy.generate_actions([0], 2, temperature=0.5)


# --- wrong arguments of every class


RIGHT: dict[Any, dict[str, Any]] = {
    SoftmaxPolicy: {"num_actions": 2, "num_states": 1},
    MLPPolicy: {"num_features": 2, "num_actions": 2, "hidden": (4,), "activation": "tanh"},
    Testbed: {"means": np.zeros((1, 2, 3)), "noise": "bernoulli", "num_runs": 2, "pulls_per_step": 1, "seed": 0},
    random_walk_testbed: {"num_runs": 1, "num_steps": 3, "step_std": 0.1, "pulls_per_step": 1, "seed": 0},
    UCB1: {"num_runs": 1, "num_arms": 2, "exploration": 0.5, "reward_range": 1.0},
    DiscountedUCB: {"num_runs": 1, "num_arms": 2, "horizon": 9, "discount": 0.9},
    SlidingWindowUCB: {"num_runs": 1, "num_arms": 2, "horizon": 9, "window": 3},
    ThompsonSampling: {"num_runs": 1, "num_arms": 2, "discount": 0.9, "likelihood": "gaussian"},
    EXP3S: {"num_runs": 1, "num_arms": 2, "horizon": 9, "num_changes": 1, "exploration": 0.1, "sharing": 0.1},
    GradientBandit: {"num_runs": 1, "num_arms": 2, "step_size": 0.1, "baseline_step_size": 0.1, "logit_decay": 0.1},
    Uniform: {"num_runs": 1, "num_arms": 2},
    BanditReward: {"testbed": Testbed(np.zeros((1, 1, 2)))},
    BanditEnv: {"testbed": Testbed(np.zeros((1, 1, 2)))},
    Oracle: {"testbed": Testbed(np.zeros((1, 1, 2)))},
}


BEYOND: list[tuple[Any, dict[str, Any]]] = [
    (SoftmaxPolicy, {"num_actions": 0}), (SoftmaxPolicy, {"num_states": 0}), (MLPPolicy, {"num_features": 0}),
    (MLPPolicy, {"hidden": (0,)}), (MLPPolicy, {"activation": "gelu"}), (UCB1, {"reward_range": 0}),
    (DiscountedUCB, {"discount": 0.0}), (SlidingWindowUCB, {"window": 0}), (ThompsonSampling, {"discount": 1.1}),
    (ThompsonSampling, {"likelihood": "poisson"}), (EXP3S, {"reward_low": 1.0}), (EXP3S, {"exploration": 0.0}),
    (GradientBandit, {"step_size": 0.0}), (GradientBandit, {"baseline_step_size": 0.0}), (GradientBandit, {"logit_decay": 1.0}),
    (Testbed, {"num_runs": 0}), (Testbed, {"pulls_per_step": 0}), (Testbed, {"noise": "poisson"}),
    (random_walk_testbed, {"num_runs": 0}),
]  # fmt: skip
"""Values just outside the bounds of an argument."""


def test_wrong_arguments_are_refused_by_name(subtests: pytest.Subtests) -> None:
    kinds = ("abc", {}, [None], float("nan"), object(), b"x", -1)
    of_wrong_kinds = [(make, {name: wrong}) for make, right in RIGHT.items() for name in right for wrong in kinds]
    for make, right in RIGHT.items():
        make(**right)
    for make, wrong in of_wrong_kinds + BEYOND:
        with subtests.test(make=make.__name__, wrong=repr(wrong)):
            with pytest.raises(ConfigError) as raised:
                make(**RIGHT[make] | wrong)
            assert next(iter(wrong)) in str(raised.value)
