"""What the loss reports: counts, sums and sums of squares over the valid steps."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from grpo import Truncate
from grpo._objective.metrics import Measured, all_moments, measured_steps
from grpo.surrogates import Steps
from tests.support.objective_inputs import objective_inputs

MASK = torch.tensor([[True, True, False], [True, False, False]])


def moments(per_step: Mapping[str, Tensor | float], mask: Tensor = MASK, **terms: Tensor) -> dict[str, Tensor]:
    return Measured(terms=terms, per_step=per_step, mask=mask).moments()


def test_moments_are_over_the_valid_steps():
    # 1, 3 | -2: sum 2, squares 14
    found = moments({"entropy": torch.tensor([[1.0, 3.0, math.nan], [-2.0, math.inf, 9.0]])})
    assert list(found) == ["entropy"]
    assert found["entropy"].tolist() == [3, 2, 14]
    assert found["entropy"].dtype == torch.float64


def test_one_value_per_row_counts_at_each_valid_step_of_the_row():
    # 2, 2 | 5
    assert moments({"ratio": torch.tensor([[2.0], [5.0]])})["ratio"].tolist() == [3, 9, 33]


def test_the_moments_of_booleans_count_the_true_ones():
    flags = torch.tensor([[True, False, True], [True, True, True]])
    assert moments({"kept_fraction": flags})["kept_fraction"].tolist() == [3, 2, 2]


def test_a_scalar_counts_once_per_valid_step():
    values = {"ratio": 1.0, "entropy": torch.zeros(2, 3), "clip_fraction": 0.0, "other": 3.0}
    found = {name: value.tolist() for name, value in moments(values).items()}
    assert found == {"entropy": [3, 0, 0], "ratio": [3, 3, 3], "clip_fraction": [3, 0, 0], "other": [3, 9, 27]}


def test_moments_are_summed_in_float64():
    # in float32, 1e8 + 1 is 1e8
    found = moments({"kl": torch.tensor([[1e8, 1.0, 0.0], [0.0, 0.0, 0.0]])})
    assert found["kl"].tolist() == [3, 1e8 + 1, 1e16 + 1]


def test_loss_terms_are_reported_as_shares_with_a_count_of_0():
    found = moments({}, policy_loss=torch.tensor(-2.5), total_loss=torch.tensor(-2.25, dtype=torch.float64))
    assert {name: values.tolist() for name, values in found.items()} == {
        "policy_loss": [0, -2.5, 0],
        "total_loss": [0, -2.25, 0],
    }
    assert all(values.dtype == torch.float64 for values in found.values())


def test_micro_batches_that_are_measured_together_have_the_moments_that_each_has_alone():
    def measured(num_rows: int, width: int = 1, **more: Tensor) -> Measured:
        values = {"ratio": torch.rand(num_rows, 1), "kl": torch.randn(num_rows, width), "clip_fraction": 0.0}
        terms = {"policy_loss": torch.rand(()), "total_loss": torch.rand((), dtype=torch.float64)}
        return Measured(terms=terms, per_step=values | more, mask=torch.rand(num_rows, width) < 0.8)

    torch.manual_seed(0)
    ready = {"own": torch.tensor([1.0, 2.0, 4.0])}
    added = [
        measured(200),
        measured(7, 3),
        ready,
        measured(31),
        measured(9, 3),
        measured(1),
        measured(5, kept=torch.ones(5, 1)),
    ]
    together = all_moments(added)
    assert together[2] is ready
    for found, each in zip(together, added, strict=True):
        alone = each.moments() if isinstance(each, Measured) else each
        assert {name: value.tolist() for name, value in found.items()} == {
            name: value.tolist() for name, value in alone.items()
        }


def steps_of(old: list | None, **others: object) -> Steps:
    """Rows whose log-probs are 0, so that the log-ratio is -old."""
    log_probs = torch.zeros(MASK.shape, dtype=torch.float64)
    correction = Truncate() if "behaviour_log_probs" in others else None
    old_log_probs = None if old is None else torch.tensor(old, dtype=torch.float64)
    return Steps(
        objective_inputs(log_probs, torch.ones(2), old_log_probs=old_log_probs, mask=MASK, **others), correction
    )


def found_by(
    steps: Steps, level: str = "step", stopped: object = None, **others: Tensor | None
) -> dict[str, list[float]]:
    return {
        name: values.tolist() for name, values in measured_steps({}, steps, level, stopped, others).moments().items()
    }


FRACTIONS = ("ratio_clamped_fraction", "clip_fraction_low", "clip_fraction_high", "clip_fraction")
NOTHING = {name: [3, 0, 0] for name in FRACTIONS}


def test_on_policy_every_ratio_is_1():
    entropy = torch.zeros(2, 3)
    assert found_by(steps_of(None), entropy=entropy) == {"ratio": [3, 3, 3], **NOTHING, "entropy": [3, 0, 0]}


def test_the_ratio_is_at_the_level_that_is_asked_for():
    # log-ratios log 2, -log 2, and a clamped 30;  row sums 0, 30
    steps = steps_of([[-math.log(2), math.log(2), 99.0], [-30.0, 99.0, 99.0]])
    by_step = found_by(steps)
    assert by_step["ratio"] == pytest.approx([3, 2.5 + math.exp(20), 4.25 + math.exp(40)], rel=1e-14)
    assert by_step["ratio_clamped_fraction"] == [3, 1, 1]
    assert found_by(steps, "row_sum")["ratio"] == pytest.approx([3, 2 + math.exp(20), 2 + math.exp(40)], rel=1e-14)


def test_clipped_steps_are_those_that_are_stopped_at_either_end():
    low = torch.tensor([[True, False, True], [True, True, True]])
    high = torch.tensor([[False, False, True], [True, True, True]])
    found = found_by(steps_of([[0.1] * 3] * 2), stopped=(low, high))
    names = ("clip_fraction_low", "clip_fraction_high", "clip_fraction")
    assert [found[name] for name in names] == [[3, 2, 2], [3, 1, 1], [3, 2, 2]]


def test_only_metrics_of_the_given_inputs_are_reported():
    # sampler weights 1, 2 | 1/2;  one selected step;  entropy 1 at each step
    behaviour = torch.tensor([[1.0, 0.5, 9.0], [2.0, 9.0, 9.0]], dtype=torch.float64).log()
    selected = torch.tensor([[False, True, True], [False, True, True]])
    steps = steps_of(None, behaviour_log_probs=behaviour, selected=selected)
    assert found_by(steps, entropy=torch.ones(2, 3), kl=None) == {
        "ratio": [3, 3, 3],
        **NOTHING,
        "sampler_ratio": pytest.approx([3, 3.5, 5.25]),
        "selected_fraction": [3, 1, 1],
        "entropy": [3, 3, 3],
    }
