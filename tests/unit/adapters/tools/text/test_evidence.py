"""Values in a request as evidence: hand-worked counts, and what a policy makes of them."""

import copy
import datetime
import pickle
from typing import Literal

import pytest
import torch

from adapters.tools import Tool, ToolCatalogue, ToolSelectionPolicy
from adapters.tools.text.evidence import Evidence
from tests.support.tool_policies import policy


def play(
    artist: str, genre: Literal["Hip Hop", "hip", "jazz"], volume: int, loop: bool = False, year: int | None = None
): ...
def remind(day: datetime.date, text: str, at: Literal["in", "morning"], repeats: list[int] | None = None): ...
def scan(device: Literal["jazz drive", "morning", "new_york"], options: dict[str, str], sheets: list[int]): ...


TOOLS = [Tool.from_function(function, description="Do it.") for function in (play, remind, scan)]
OWN = ToolCatalogue(TOOLS)
EVIDENCE = Evidence(OWN)


def read(text: str) -> tuple[list[float], list[float], set[str]]:
    """`named`, `filled`, and the value texts that the request contains."""
    named, filled, contained = EVIDENCE([text])
    values = {value for value, place in OWN.value_places.items() if contained[0, place]}
    return named[0].tolist(), filled[0].tolist(), values


@pytest.mark.parametrize(("text", "named", "values"), [
    ("some jazz", [1, 0, 0], {"jazz genre"}), ("SOME JAZZ!", [1, 0, 0], {"jazz genre"}),
    ("the Jazz Drives", [1, 0, 1], {"jazz genre", "jazz drive device"}),  # a final s does not count
    ("a jazz/drive", [1, 0, 1], {"jazz genre", "jazz drive device"}),  # signs are no words
    ("jazz for the drive", [1, 0, 0], {"jazz genre"}),  # other words are
    ("hip hop", [2, 0, 0], {"Hip Hop genre", "hip genre"}),
    ("this morning, every morning", [0, 1, 1], {"morning at", "morning device"}),  # once for each value
    ("a jazzy evening in the mornings' light", [0, 1, 1], {"morning at", "morning device"}),
    ("a flight to New York", [0, 0, 1], {"new_york device"}),
    ("look in here", [0, 0, 0], set()),  # two letters are too few
    ("true or false", [0, 0, 0], set()),  # not said of a boolean
    ("", [0, 0, 0], set()), ("x " * 1990 + "jazz", [1, 0, 0], {"jazz genre"}),
    ("x " * 2000 + "jazz", [0, 0, 0], set()),  # only the start of a long request is read
])  # fmt: skip
def test_the_values_that_a_request_contains(text: str, named: list[float], values: set[str]) -> None:
    assert read(text)[::2] == (named, values)


@pytest.mark.parametrize(("text", "filled"), [
    # Free: play takes a text and a number (required) and a number; remind a date and a text (required) and numbers; scan
    # numbers (required, a list), and an object that is of no kind.
    ("please", [-2, -2, -1]),
    ("3", [1 - 1, 1 - 2, 1]),  # play lacks the text; remind lacks date and text, but takes the number
    ("3 and 4", [2 - 1, 1 - 2, 1]),
    ("3 and 4 and 5", [2 - 1, 1 - 2, 1]),  # no parameter is left for the third
    ("'so what' 3", [1 + 1, 1 + 1 - 1, 1]), ("'so what' on 2027-05-05", [1 - 1, 2, -1]),
    ("'so what' on 2027-05-05 at 12:30", [1 - 1, 2, -1]),  # a time is a text
    ("mail it to a@b.org", [1 - 1, 1 - 1, -1]),  # and so is an address
])  # fmt: skip
def test_parameters_that_the_values_of_a_request_fill(text: str, filled: list[float]) -> None:
    assert read(text)[1] == filled


def test_each_request_is_read_alone_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence, texts = Evidence(OWN), ["some jazz", "3 and 4", "hip hop in the morning"]
    together = evidence(texts)
    monkeypatch.setattr(evidence, "_readings", None)
    for row, text in enumerate(texts):
        for part, alone in zip(together, evidence([text]), strict=True):
            assert torch.equal(part[row], alone[0])
    assert [part.shape for part in evidence([])] == [(0, 3), (0, 3), (0, len(OWN.value_places))]


def test_added_and_removed_tools_change_the_evidence_which_can_be_copied_and_pickled() -> None:
    made = ToolSelectionPolicy(ToolCatalogue(TOOLS[:1]))
    made.add_tools(*TOOLS[1:])
    assert made.menu.evidence(["the morning"])[0].tolist() == [[0, 1, 1]]
    made.remove_tools("remind")
    for menu in (made.menu, copy.deepcopy(made.menu), pickle.loads(pickle.dumps(made.menu))):
        assert menu.evidence(["the morning"])[0].tolist() == [[0, 1]]


def test_the_evidence_is_added_in_float32_at_least() -> None:
    """In bfloat16, 2 + 0.6 would be 2.59375."""
    assert policy(num_features=3).network.evidence is None, "vectors have no values"
    made = policy(random=False).to(torch.bfloat16)
    with torch.no_grad():
        made.network.similarity.zero_()
    logits, _ = made._logits(["two miles"])
    assert logits.tolist() == [[0, 0, 2 + 4 * made.network.evidence[1].item(), 0]]
