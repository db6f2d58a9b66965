"""Each choice of a setting is explained in the docstring that users read. The tests named below work it out by hand.

Baselines and scales: `test_advantage_estimator.py`; credits: `test_advantage_estimator_settings.py`; surrogates:
`test_surrogates_traits.py`; aggregations: `_objective/test_weights.py`. Each has a table that must have every choice.
"""

import ast
import inspect
import re
from typing import get_args

import pytest

from grpo import config, group_relative_advantages, step_weights
from grpo._advantages.groups import Baseline, Credit, Scale
from grpo._objective.weights import Aggregation
from grpo.surrogates import SURROGATES


def choices_in(table: str) -> list[str]:
    """The first words of the table's lines, each followed by two spaces or more."""
    return re.findall(r"^ +(\w+)  +\S", table, re.MULTILINE)


def test_the_docstrings_of_the_functions_have_a_line_for_each_choice() -> None:
    baselines, scales = (group_relative_advantages.__doc__ or "").split("the scale s is one of")
    assert set(choices_in(baselines)) == {*get_args(Baseline)}
    assert set(choices_in(scales)) == {*get_args(Scale)}
    assert set(choices_in(step_weights.__doc__ or "")) == {*get_args(Aggregation)}


def test_the_docstring_of_credit_explains_each_credit() -> None:
    (settings,) = ast.parse(inspect.getsource(config.AdvantageConfig)).body
    assert isinstance(settings, ast.ClassDef)
    fields = [node.target.id if isinstance(node, ast.AnnAssign) else "" for node in settings.body]  # type: ignore[union-attr]
    docstring = ast.unparse(settings.body[fields.index("credit") + 1])
    assert set(re.findall(r"`(\w+)`: ", docstring)) == {*get_args(Credit)}


@pytest.mark.parametrize("name", SURROGATES)
def test_the_docstring_of_each_surrogate_has_its_formula_and_its_source(name: str) -> None:
    text = inspect.getdoc(SURROGATES[name]) or ""
    assert re.search(r"^l\[n,t\] = .+\n(.*\n)+Source:\n    \S", text, re.MULTILINE), text
