"""Compare what ranks with divided weights wrote with ranks that have copies, and with one process."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from grpo.engine import OneProcess
from tests.support.sharded_ranks import CASES, ONLY_ON_RANKS, result_of

WEIGHTS, NORMS = 5e-5, 1e-5
"""Largest differences after the updates, in float32."""


@cache
def in_one_process(name: str) -> dict[str, Any]:
    return result_of(CASES[name], OneProcess())


def assert_equal(found: dict[str, Any], expected: dict[str, Any], *, metrics: bool) -> None:
    assert "error" not in found, found["error"]
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        assert found["weights"][name].shape == value.shape
        assert (found["weights"][name] - value).abs().max() <= WEIGHTS, name
    for got, wanted in zip(found["metrics"], expected["metrics"], strict=True):
        assert got.get("train/grad_norm") == pytest.approx(wanted.get("train/grad_norm"), rel=NORMS)
        if metrics:
            assert got.keys() == wanted.keys()
            for name, number in wanted.items():
                assert got[name] == pytest.approx(number, rel=1e-3, abs=1e-4, nan_ok=True), name


def assert_right(ranks: list[dict[Any, Any]], names: Sequence[str], subtests: pytest.Subtests) -> None:
    for name in names:
        with subtests.test(name=name, num_ranks=len(ranks)):
            for found in ranks:
                assert "error" not in found[name, "replicated"], found[name, "replicated"]["error"]
                assert_equal(found[name, "sharded"], found[name, "replicated"], metrics=True)
                assert str(found[name, "sharded"]["weights"]) == str(ranks[0][name, "sharded"]["weights"])
                is_model = "module" not in name and "moving" not in name  # the tiny module has layers of 7 rows
                share = found[name, "sharded"]["bytes"] / found[name, "replicated"]["bytes"]
                assert share <= (1.1 if is_model else 1.4) / len(ranks), share
            if name not in ONLY_ON_RANKS:
                assert_equal(ranks[0][name, "sharded"], in_one_process(name), metrics=False)
