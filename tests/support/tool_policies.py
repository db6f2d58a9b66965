"""What the tests of `ToolSelectionPolicy` share: a small catalogue, all its calls, and policies of random weights."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.learning.tasks import ToolTask
from adapters.tools.policy.policy import ToolSelectionPolicy
from adapters.tools.text.encoders import HashingEncoder


def ping() -> str:
    """Say that you are there."""
    return "pong"


def shout(text: str = "", tone: Literal["loud", "soft", "plain"] = "loud") -> str:
    """Write a text in capitals."""
    return text + tone


def convert(unit: Literal["mile", "foot"], exact: bool | None = None, value: float = 1.0) -> float:
    """Convert a length."""
    return value


def whisper(tone: Literal["loud", "soft"], text: str = "") -> str:
    """Write a text in small letters."""
    return text + tone


def pong(sure: bool) -> str:
    """Answer a greeting."""
    return str(sure)


CATALOGUE = ToolCatalogue(Tool.from_function(function) for function in (ping, shout, convert, whisper))
TEXTS = ["are you there?", "capital letters, loud", "how many feet are two miles?", "very quietly please"]
VECTORS = [[0.3, -1.0, 2.0], [1.5, 0.0, -0.5], [0.0, 0.0, 1.0], [-1.0, 1.0, 0.25]]


def call(tool: str, **arguments: Any) -> ToolCall:
    return ToolCall(tool=tool, arguments=arguments)


ALL_CALLS = [
    call("ping"),
    *(call("shout", tone=tone) for tone in ("loud", "soft", "plain")),
    *(call("convert", unit=unit, exact=exact) for unit in ("mile", "foot") for exact in (False, True)),
    *(call("convert", unit=unit) for unit in ("mile", "foot")),
    *(call("whisper", tone=tone) for tone in ("loud", "soft")),
]
"""1 + 3 + 2 * 3 + 2: there are no others."""


def task(asked: str, **slots: Any) -> ToolTask:
    return ToolTask(text=asked, tool="shout", slots=slots)


def policy(catalogue: ToolCatalogue = CATALOGUE, *, random: bool = True, scale: float = 0.4, **options: Any) -> Any:
    """A policy over a small encoder; its weights are random unless told otherwise."""
    made = ToolSelectionPolicy(catalogue, **({"encoder": HashingEncoder(48)} | options))
    if random:
        with torch.no_grad():
            for value in made.parameters():
                value.normal_(0, scale)
    return made


def assert_gradients_agree(made: Any, loss: Callable[[], torch.Tensor], tolerance: float = 1e-12) -> None:
    """Compare the gradients of all weights with finite differences, each in one random direction."""
    loss().backward()
    for name, value in made.named_parameters():
        direction = torch.randn_like(value)
        slopes = []
        for sign in (1, -1):
            with torch.no_grad():
                value += sign * 1e-5 * direction
                slopes.append(float(loss()))
                value -= sign * 1e-5 * direction
        exact = float((value.grad * direction).sum())
        assert abs(exact) > 1e-6, f"{name}: zero would agree with anything broken"
        assert exact == pytest.approx((slopes[0] - slopes[1]) / 2e-5, rel=1e-5, abs=tolerance), name


def without_ping(state: Any) -> list[str]:
    return ["shout", "convert", "whisper"]


def by_first_letter(state: str) -> list[str] | None:
    return {"a": ["ping"], "c": ["shout", "convert"]}.get(state[0])
