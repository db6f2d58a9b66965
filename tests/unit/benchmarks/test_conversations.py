"""The catalogue of BFCL's conversations: one right function per request, and splits that share no request."""

from collections import Counter

from benchmarks import _bfcl, _conversations


def test_every_request_has_one_function_of_the_catalogue() -> None:
    catalogue = _conversations.catalogue()
    tasks = [task for part in _conversations.split(10**6, seed=0) for task in part]
    assert (len(catalogue), len(tasks)) == (37, 427)
    assert len({" ".join(task.text.split()).casefold() for task in tasks}) == len(tasks)
    counts = Counter(task.tool for task in tasks)
    assert {*counts} == {*catalogue}
    assert min(counts.values()) == 6
    assert catalogue["tail"].description.endswith("Display the last part of a file of any extension.")
    assert not {tool.text for tool in catalogue.values()} & {tool.text for tool in _bfcl.tools().values()}
    # its right calls are cd(folder='document'), mv(...) and others: of two functions apart from cd
    assert not [task for task in tasks if task.text.startswith("Move 'final_report.pdf' within document directory")]
    # its right calls are cd(folder='temp') and grep(...)
    [found] = [task for task in tasks if task.text.startswith("Perform a detailed search using grep to identify")]
    assert found.tool == "grep"


def test_a_split_holds_out_what_is_not_trained() -> None:
    of_tool = Counter(task.tool for part in _conversations.split(10**6, seed=3) for task in part)
    training, held_out = _conversations.split(5, seed=3)
    assert not {task.text for task in training} & {task.text for task in held_out}
    assert held_out == _conversations.split(2, seed=3)[1]
    assert {task.text for task in _conversations.split(2, seed=3)[0]} < {task.text for task in training}
    for tool, num in Counter(task.tool for task in held_out).items():
        assert abs(num - of_tool[tool] / 3) < 1, tool
    assert max(Counter(task.tool for task in training).values()) == 5
    assert training != _conversations.split(5, seed=4)[0]
