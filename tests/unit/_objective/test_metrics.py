"""What the loss reports: counts, sums and sums of squares over the valid steps."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from grpo import Truncate
from grpo._objective.metrics import Measured, all_moments, measured_steps
from grpo.surrogates import Steps
from tests.support.objective_inputs import double, objective_inputs

MASK = torch.tensor([[True, True, False], [True, False, False]])


def moments(per_step: Mapping[str, Tensor | float], mask: Tensor = MASK, **terms: Tensor) -> dict[str, Tensor]:
    return Measured(terms=terms, per_step=per_step, mask=mask).moments()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[1.0, 3.0, math.nan], [-2.0, math.inf, 9.0]], [3, 2, 14]),  # 1, 3 | -2: sum 2, squares 14
        ([[2.0], [5.0]], [3, 9, 33]),  # one value per row counts at each of its steps: 2, 2 | 5
        ([[True, False, True], [True, True, True]], [3, 2, 2]),
        ([[1e8, 1.0, 0.0], [0.0, 0.0, 0.0]], [3, 1e8 + 1, 1e16 + 1]),  # in float32, 1e8 + 1 is 1e8
    ],
)
def test_moments_are_over_the_valid_steps_and_in_float64(values, expected):
    found = moments({"entropy": torch.tensor(values)})
    assert (list(found), found["entropy"].tolist(), found["entropy"].dtype) == (["entropy"], expected, torch.float64)


def test_a_scalar_counts_once_per_valid_step():
    values = {"ratio": 1.0, "entropy": torch.zeros(2, 3), "clip_fraction": 0.0, "other": 3.0}
    found = {name: value.tolist() for name, value in moments(values).items()}
    assert found == {"entropy": [3, 0, 0], "ratio": [3, 3, 3], "clip_fraction": [3, 0, 0], "other": [3, 9, 27]}


def test_loss_terms_are_reported_as_shares_with_a_count_of_0():
    found = moments({}, policy_loss=torch.tensor(-2.5), total_loss=torch.tensor(-2.25, dtype=torch.float64))
    as_lists = {name: values.tolist() for name, values in found.items()}
    assert as_lists == {"policy_loss": [0, -2.5, 0], "total_loss": [0, -2.25, 0]}
    assert all(values.dtype == torch.float64 for values in found.values())


def test_micro_batches_that_are_measured_together_have_the_moments_that_each_has_alone():
    def measured(num_rows: int, width: int = 1, **more: Tensor) -> Measured:
        values = {"ratio": torch.rand(num_rows, 1), "kl": torch.randn(num_rows, width), "clip_fraction": 0.0}
        terms = {"policy_loss": torch.rand(()), "total_loss": torch.rand((), dtype=torch.float64)}
        return Measured(terms=terms, per_step=values | more, mask=torch.rand(num_rows, width) < 0.8)

    torch.manual_seed(0)
    ready = {"own": torch.tensor([1.0, 2.0, 4.0])}
    kept = measured(5, kept=torch.ones(5, 1))
    added = [measured(200), measured(7, 3), ready, measured(31), measured(9, 3), measured(1), kept]
    together = all_moments(added)
    assert together[2] is ready
    for found, each in zip(together, added, strict=True):
        alone = each.moments() if isinstance(each, Measured) else each
        assert found.keys() == alone.keys()
        assert all(torch.equal(value, alone[name]) for name, value in found.items())


def test_only_metrics_of_the_given_inputs_are_reported():
    # log-probs and log-ratios are 0;  sampler weights 1, 2 | 1/2;  one selected step;  entropy 1 at each step
    inputs = {
        "behaviour_log_probs": double([[1.0, 0.5, 9.0], [2.0, 9.0, 9.0]]).log(),
        "selected": torch.tensor([[False, True, True], [False, True, True]]),
    }
    log_probs = torch.zeros(MASK.shape, dtype=torch.float64)
    steps = Steps(objective_inputs(log_probs, torch.ones(2), old_log_probs=None, mask=MASK, **inputs), Truncate())
    found = measured_steps({}, steps, "step", None, {"entropy": torch.ones(2, 3), "kl": None}).moments()
    fractions = ("ratio_clamped_fraction", "clip_fraction_low", "clip_fraction_high", "clip_fraction")
    assert {name: values.tolist() for name, values in found.items()} == {
        "ratio": [3, 3, 3],
        **{name: [3, 0, 0] for name in fractions},
        "sampler_ratio": pytest.approx([3, 3.5, 5.25]),
        "selected_fraction": [3, 1, 1],
        "entropy": [3, 3, 3],
    }
