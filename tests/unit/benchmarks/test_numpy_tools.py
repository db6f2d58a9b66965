"""The small catalogue: real docstrings, requests that name no function, and splits that share no request."""

import inspect
import re

import numpy as np

from benchmarks import _numpy_tools


def test_every_function_has_five_requests_of_its_own_and_numpys_docstring() -> None:
    catalogue = _numpy_tools.catalogue()
    tasks = _numpy_tools.tasks()
    assert len(catalogue) == 30
    assert len({task.text for task in tasks}) == len(tasks) == 150
    assert catalogue["median"].description.startswith((inspect.getdoc(np.median) or "").splitlines()[0])
    for name, tool in catalogue.items():
        assert len(tool.description) > 20, name
        assert "Parameters\n---" not in tool.description
        own = [task.text for task in tasks if task.tool == name]
        assert not [text for text in own if re.search(rf"\b{name.split('.')[-1]}\b", text)], name


def test_a_split_holds_out_what_is_not_trained() -> None:
    training, held_out = _numpy_tools.split(2, seed=3)
    assert (len(training), len(held_out)) == (60, 90)
    assert {task.text for task in training} | {task.text for task in held_out} == {t.text for t in _numpy_tools.tasks()}
    assert training != _numpy_tools.split(2, seed=4)[0]
    assert {task.text for task in training} < {task.text for task in _numpy_tools.split(3, seed=3)[0]}
