"""Saved policies: what comes back, and files that are refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from adapters.tools.catalogue.tools import Tool
from adapters.tools.policy.policy import ToolSelectionPolicy
from adapters.tools.text.encoders import HashingEncoder
from adapters.tools.text.fitted import FittedEncoder, JoinedEncoder
from grpo.errors import ConfigError
from tests.support.tool_policies import (
    CATALOGUE,
    TEXTS,
    VECTORS,
    call,
    policy,
    pong,
)


def test_a_saved_policy_is_loaded_bit_for_bit(tmp_path, subtests: pytest.Subtests) -> None:
    for options in ({}, {"hidden": [6, 5]}, {"num_features": 3}, {"num_features": 3, "hidden": [4]}):
        with subtests.test(str(options)):
            made, states = policy(**options), VECTORS if "num_features" in options else TEXTS
            made.save(tmp_path / "new" / "folder")
            loaded = ToolSelectionPolicy.load(tmp_path / "new" / "folder", CATALOGUE, encoder=HashingEncoder(48))
            assert torch.equal(loaded.tool_probabilities(states), made.tool_probabilities(states))
            calls = [
                call("ping"),
                call("shout", tone="plain"),
                call("convert", unit="foot"),
                call("whisper", tone="soft"),
            ]
            assert torch.equal(
                loaded.score_actions(states, calls).log_probs, made.score_actions(states, calls).log_probs
            )


def test_a_saved_policy_can_choose_from_another_catalogue(tmp_path) -> None:
    made = policy()
    made.save(tmp_path)
    larger = CATALOGUE.with_tools(Tool.from_function(pong))
    loaded = ToolSelectionPolicy.load(tmp_path, larger, encoder=HashingEncoder(48))
    made.add_tools(larger["pong"])
    assert torch.equal(loaded.tool_probabilities(TEXTS), made.tool_probabilities(TEXTS))


def test_a_policy_trained_with_another_encoder_is_refused(tmp_path, subtests: pytest.Subtests) -> None:
    def reversed_texts(texts: list[str]) -> torch.Tensor:
        return HashingEncoder(48)([text[::-1] for text in texts])

    for other in (HashingEncoder(32), reversed_texts, None):
        with subtests.test(str(other)):
            policy().save(tmp_path)
            with pytest.raises(ConfigError, match=r"trained with an.*encoder.*Pass the encoder of the training"):
                ToolSelectionPolicy.load(tmp_path, CATALOGUE, encoder=other)


def test_a_loaded_encoder_may_return_another_precision(tmp_path) -> None:
    made = policy()
    made.save(tmp_path)
    loaded = ToolSelectionPolicy.load(tmp_path, CATALOGUE, encoder=lambda texts: HashingEncoder(48)(texts).bfloat16())
    torch.testing.assert_close(loaded.tool_probabilities(TEXTS), made.tool_probabilities(TEXTS), rtol=0, atol=0.05)


def test_a_folder_without_a_policy_is_refused(tmp_path) -> None:
    (tmp_path / "file").touch()
    for folder in ("nowhere", "file"):
        with pytest.raises(
            ConfigError, match=rf"{folder}.policy\.safetensors must be a file that ToolSelectionPolicy\.save"
        ):
            ToolSelectionPolicy.load(tmp_path / folder, CATALOGUE)


def load(folder: Path) -> Any:
    return ToolSelectionPolicy.load(folder, CATALOGUE, encoder=HashingEncoder(48))


def test_a_truncated_file_is_refused_by_name(tmp_path, subtests: pytest.Subtests) -> None:
    for length in (0, 5, 100, -1):
        with subtests.test(str(length)):
            policy().save(tmp_path)
            file = tmp_path / "policy.safetensors"
            file.write_bytes(file.read_bytes()[:length])
            with pytest.raises(
                ConfigError, match=r"policy\.safetensors must .*not be truncated or altered.* Save the policy again"
            ):
                load(tmp_path)


def test_weights_that_are_no_policy_are_refused(tmp_path, subtests: pytest.Subtests) -> None:
    for metadata in (None, {"format": "pt"}, {"description": "{"}, {"description": "{}"}):
        with subtests.test(str(metadata)):
            save_file({"weight": torch.zeros(2)}, tmp_path / "policy.safetensors", metadata)
            with pytest.raises(ConfigError, match=r"must be a file that ToolSelectionPolicy\.save wrote"):
                load(tmp_path)


def test_the_file_tells_which_tools_the_policy_knew(tmp_path) -> None:
    policy().save(tmp_path)
    with safe_open(tmp_path / "policy.safetensors", framework="pt") as file:
        description = json.loads(file.metadata()["description"])
    assert description["tools"] == list(CATALOGUE)


class Ended(BaseException):
    """The process, at this place."""


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_interrupted_saving_leaves_the_previous_policy(tmp_path, monkeypatch, function: str) -> None:
    before, after = policy(), policy()
    before.save(tmp_path)

    def end(*args: Any, **kwargs: Any) -> Any:
        raise Ended

    with monkeypatch.context() as patch:
        patch.setattr(os, function, end)
        with pytest.raises(Ended):
            after.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["policy.safetensors"]
    assert torch.equal(load(tmp_path).tool_probabilities(TEXTS), before.tool_probabilities(TEXTS))
    after.save(tmp_path)
    assert torch.equal(load(tmp_path).tool_probabilities(TEXTS), after.tool_probabilities(TEXTS))


def test_a_fitted_encoder_is_saved_and_need_not_be_fitted_again(tmp_path) -> None:
    def unfitted() -> list[Any]:
        return [FittedEncoder(8), JoinedEncoder(HashingEncoder(16), FittedEncoder(8))]

    for encoder, again in zip(unfitted(), unfitted(), strict=True):
        own = encoder if isinstance(encoder, FittedEncoder) else encoder.encoders[1]
        own.fit([*TEXTS, *(tool.text for tool in CATALOGUE.values())])
        made = policy(encoder=encoder)
        made.save(tmp_path)
        loaded = ToolSelectionPolicy.load(tmp_path, CATALOGUE, encoder=again)
        assert torch.equal(loaded.tool_probabilities(TEXTS), made.tool_probabilities(TEXTS))


def test_a_loaded_policy_leaves_the_given_encoder_to_other_policies(tmp_path) -> None:
    """Two policies with encoders fitted to other texts are loaded with the same encoder object."""
    made = []
    for number in (0, 3):
        encoder = FittedEncoder(8).fit([*TEXTS[number:], *(tool.text for tool in CATALOGUE.values())])
        made.append(policy(encoder=encoder))
        made[-1].save(tmp_path / str(number))
    shared = FittedEncoder(8)
    loaded = [ToolSelectionPolicy.load(tmp_path / str(number), CATALOGUE, encoder=shared) for number in (0, 3)]
    new = ["a text that no policy has encoded before"]
    for before, after in zip(made, loaded, strict=True):
        assert torch.equal(after.tool_probabilities(new), before.tool_probabilities(new))


def test_an_encoder_that_differs_for_the_tools_texts_only_is_refused(tmp_path) -> None:
    """A bag of the catalogue's words, and the same words in another order."""
    words = sorted({word for tool in CATALOGUE.values() for word in tool.text.lower().split()})

    def bag(vocabulary: list[str]) -> Any:
        return lambda texts: [[float(text.lower().split().count(word)) for word in vocabulary] for text in texts]

    policy(encoder=bag(words)).save(tmp_path)
    ToolSelectionPolicy.load(tmp_path, CATALOGUE, encoder=bag(words))
    with pytest.raises(ConfigError, match="trained with another encoder"):
        ToolSelectionPolicy.load(tmp_path, CATALOGUE, encoder=bag(words[::-1]))


def test_the_calibration_is_saved_and_is_part_of_the_state(tmp_path) -> None:
    made = policy()
    made.add_tools(Tool.from_function(pong))
    made.calibrate(TEXTS, share=0.5)
    made.threshold = 0.25
    made.save(tmp_path)
    loaded = ToolSelectionPolicy.load(tmp_path, made.catalogue, encoder=HashingEncoder(48))
    other = policy(made.catalogue)
    other.load_state_dict(made.state_dict())
    for copy in (loaded, other):
        assert torch.equal(copy.tool_probabilities(TEXTS), made.tool_probabilities(TEXTS))
        assert (copy.threshold, [*copy.menu.offset_of]) == (0.25, ["pong"])


def test_tools_that_the_saved_policy_lacked_count_as_added(tmp_path) -> None:
    policy().save(tmp_path)
    larger = CATALOGUE.with_tools(Tool.from_function(pong))
    loaded = ToolSelectionPolicy.load(tmp_path, larger, encoder=HashingEncoder(48))
    assert set(loaded.menu.offset_of) == {"pong"}
    assert load(tmp_path).menu.offset_of == {}
