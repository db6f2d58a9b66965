"""What docs/tools.md says of two and of five requests per tool. `benchmarks/results/tools_few.md` has all figures."""

from collections.abc import Callable, Mapping
from functools import cache
from statistics import fmean

import pytest

from benchmarks.tools_few import ENCODERS, Split, fitted, rewarded, split

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(1800),  # each trains a hundred routers, which takes long on a busy machine
    pytest.mark.filterwarnings("ignore::grpo.errors.GRPOWarning"),  # they say where the weights stay as they were
]

SEEDS = {"NumPy": range(5), "conversations": range(1)}
"""Splits of each catalogue: on the small one, a mean of two says little."""

Measure = Callable[[Split, str, int], dict[str, float]]


@cache
def means(measure: Measure, catalogue: str, num_per_tool: int) -> Mapping[str, Mapping[str, float]]:
    """The mean accuracies over the splits, for each encoder."""
    of_seed = {seed: split(catalogue, num_per_tool, seed) for seed in SEEDS[catalogue]}
    found = {}
    for encoder in ENCODERS:
        runs = [measure(data, encoder, seed) for seed, data in of_seed.items()]
        found[encoder] = {name: fmean(run[name] for run in runs) for name in runs[0]}
    return found


@pytest.mark.parametrize("measure", [fitted, rewarded])
def test_two_requests_per_tool_do_not_make_a_router_worse(measure: Measure) -> None:
    """Not by more than 0.01 in the mean over the encoders, and by more than 0.02 with none of them."""
    found = means(measure, "NumPy", 2)
    differences = [of["fit"] - of["untrained"] for of in found.values()]
    assert fmean(differences) >= -0.01, found
    assert min(differences) >= -0.02, found


def test_all_that_two_requests_per_tool_teach_makes_it_worse() -> None:
    """The test above is not a matter of course."""
    found = means(fitted, "NumPy", 2)
    assert fmean(of["all"] - of["untrained"] for of in found.values()) < -0.02, found


@pytest.mark.parametrize("measure", [fitted, rewarded])
def test_of_five_requests_per_tool_a_router_keeps_all_that_they_teach(measure: Measure) -> None:
    found = means(measure, "conversations", 5)
    assert min(of["fit"] - of["untrained"] for of in found.values()) > 0.04, found
    assert min(of["fit"] - of["all"] for of in found.values()) >= -0.005, found
