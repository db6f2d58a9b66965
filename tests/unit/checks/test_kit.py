"""The conformance kit: conforming policies fail nothing, and how the kit reports what fails.

For every rule there is a policy or a reward that breaks just that: `test_rules.py`, `test_reward_rules.py`.
"""

import copy

import numpy as np
import pytest
import torch

from grpo.checks import check_policy
from grpo.checks.kit import POLICY_RULES
from grpo.errors import ConfigError, ContractError
from tests.support.checked_policies import (
    SEQUENCE_STATES,
    STATES,
    Episodes,
    Gaussian,
    Plane,
    Sequences,
    Squashed,
    Table,
    greedy,
    raising,
    statuses,
    table,
)


@pytest.mark.slow
def test_conforming_policy_passes_every_check_that_applies(subtests):
    cases = [
        (
            Table(),
            STATES,
            {
                *("sync_sampler", "score_actions", "score_groups", "sample_actions", "sampled samples", "entropy"),
                *("plan_micro_batches", "split_steps", "penalty", "reference", "state", "values", "kl", "state_keys"),
            },
        ),
        (
            Gaussian(),
            STATES,
            {
                *("sync_sampler", "score_actions", "score_groups", "sample_actions", "sampled samples", "entropy"),
                *("plan_micro_batches", "split_steps", "penalty", "reference", "values", "kl", "state_keys"),
            },
        ),
        (Sequences(), SEQUENCE_STATES, {"split_steps"}),
        (Episodes(), SEQUENCE_STATES, {"generated samples", "sampled samples", "samples after an update"}),
    ]
    for policy, states, not_passed in cases:
        with subtests.test(policy=type(policy).__name__):
            report = check_policy(policy, states, num_samples=2048, strict=True)
            assert report.ok
            others = {name: status for name, status in statuses(report).items() if status != "passed"}
            assert set(others) == set(not_passed)
            assert set(others.values()) <= {"absent", "skipped"}  # the entropy of a policy that has none is skipped


SLOWER = [pytest.param(policy, marks=pytest.mark.slow) for policy in (Squashed, Plane)]


@pytest.mark.parametrize("policy", [Gaussian, *SLOWER])
def test_conforming_densities_pass_the_comparison_with_samples(policy):
    result = check_policy(policy(), STATES, strict=True)["generated samples"]
    assert result.status == "passed"
    assert "Kolmogorov-Smirnov" in result.message


def test_together_the_conforming_policies_pass_every_check():
    reports = [
        check_policy(Gaussian(), STATES),
        *(check_policy(kind(), SEQUENCE_STATES, num_samples=512) for kind in (Sequences, Episodes)),
    ]
    seen = {result.name for report in reports for result in report.results if result.status == "passed"}
    assert seen == {rule.name for rule in POLICY_RULES}


def test_rules_that_need_a_failed_one_are_skipped_and_the_others_run():
    report = check_policy(table(generate_actions=raising), STATES)
    assert report["parameters"].status == "passed"
    assert report["log-prob shape"].message == "Needs 'number of actions', which failed."
    assert report["log-prob dtype"].message == "Needs 'log-prob shape', which was skipped."
    assert report["gradient"].status == "skipped"


class Stirring(Sequences):
    """Changes everything it can while it is looked at, but what `get_parameters` and `load_state_dict` give back."""

    def __init__(self):
        super().__init__(dropout=0.3)
        self.register_buffer("calls", torch.zeros(1))

    def score_actions(self, states, actions):
        self.calls += 1
        np.random.rand()  # noqa: NPY002
        torch.rand(3)
        return super().score_actions(states, actions)


def test_the_policy_and_the_random_generators_are_left_as_they_were():
    policy = Stirring()
    policy.table.grad = torch.ones_like(policy.table)
    before = copy.deepcopy(policy.state_dict())
    # Python's own generator is not compared: the type checker that watches grpo in tests draws from it.
    random_states = np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    policy.eval()
    check_policy(policy, SEQUENCE_STATES, num_samples=256)
    assert policy.training
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert torch.equal(policy.table.grad, torch.ones_like(policy.table))
    assert np.array_equal(np.random.get_state()[1], random_states[0][1])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), random_states[1])


def test_the_kit_restores_everything_in_the_policys_state_dict():
    policy = Gaussian()
    check_policy(policy, STATES, num_samples=256)
    assert policy.num_calls == 0
    assert torch.equal(policy.generator.get_state(), torch.Generator().manual_seed(0).get_state())


@pytest.mark.slow
def test_conforming_samplers_are_not_accused_whatever_the_seed(subtests):
    for kind in [Table, Gaussian, Squashed, Plane]:
        with subtests.test(kind=kind):
            for seed in range(4):
                policy = kind()
                if isinstance(policy, Gaussian):
                    policy.generator.manual_seed(seed)
                assert check_policy(policy, STATES, num_samples=1024, seed=seed)["generated samples"].status == "passed"


def test_the_same_seed_gives_the_same_report():
    assert check_policy(Table(), STATES) == check_policy(Table(), STATES)


def test_rules_can_be_left_out():
    report = check_policy(table(generate_actions=greedy), STATES, skip=["generated samples"], strict=True)
    assert report["generated samples"].message == "Left out by skip=."
    assert check_policy(Table(), STATES, num_samples=0)["generated samples"].message == "num_samples=0."
    with pytest.raises(ConfigError, match=r"skip must contain names of checks, \['methods'.*got \['samples'\]"):
        check_policy(Table(), STATES, skip=["samples"])


def test_empty_states_are_refused():
    with pytest.raises(ConfigError, match="at least one state"):
        check_policy(Table(), [])


def test_strict_raises_with_all_failures():
    policy = table(generate_actions=greedy, __deepcopy__=raising)
    with pytest.raises(
        ContractError, match=r"(?s)breaks 2 of 30 rules:\n- generated samples: .*\n- deepcopy: .*not today"
    ):
        check_policy(policy, STATES, strict=True)
    report = check_policy(policy, STATES)
    assert not report.ok
    assert [result.name for result in report.failures] == ["generated samples", "deepcopy"]
    with pytest.raises(ContractError, match="breaks 2 of 30"):
        report.raise_for_failures()


def test_the_report_prints_as_an_aligned_table():
    lines = str(check_policy(table(to=raising), STATES)).splitlines()
    assert lines[0] == "check_policy(Broken): 15 passed, 11 absent, 3 skipped, 1 failed"
    assert lines[1].startswith("  passed   methods                  Broken has generate_actions")
    [failure] = [line for line in lines if line.startswith("  FAILED")]
    assert failure.startswith("  FAILED   to                       No exception was expected; RuntimeError: not today")
    assert max(map(len, lines)) <= 120
    absent = next(
        i for i, line in enumerate(lines) if line.startswith("  optional, not implemented: sync_sampler, score_")
    )
    assert all(line[35] == " " and line[36] != " " for line in lines[1:absent])
