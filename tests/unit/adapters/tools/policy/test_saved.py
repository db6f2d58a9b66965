"""Saved policies: what comes back, and files that are refused."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from adapters.tools import FittedEncoder, HashingEncoder, JoinedEncoder, Tool, ToolCatalogue, ToolSelectionPolicy
from grpo.errors import ConfigError
from tests.support.tool_policies import CATALOGUE, TEXTS, VECTORS, call, policy, pong


def load(folder: Path, catalogue: ToolCatalogue = CATALOGUE) -> Any:
    return ToolSelectionPolicy.load(folder, catalogue, encoder=HashingEncoder(48))


def test_a_saved_policy_is_loaded_bit_for_bit(tmp_path, subtests: pytest.Subtests) -> None:
    calls = [call("ping"), call("shout", tone="plain"), call("convert", unit="foot"), call("whisper", tone="soft")]
    for options in ({}, {"hidden": [6, 5]}, {"num_features": 3}, {"num_features": 3, "hidden": [4]}):
        with subtests.test(str(options)):
            made, states = policy(**options), VECTORS if "num_features" in options else TEXTS
            made.save(tmp_path / "new" / "folder")
            loaded = load(tmp_path / "new" / "folder")
            assert torch.equal(loaded.tool_probabilities(states), made.tool_probabilities(states))
            found, expected = (one.score_actions(states, calls).log_probs for one in (loaded, made))
            assert torch.equal(found, expected)


def test_a_saved_policy_can_choose_from_another_catalogue(tmp_path) -> None:
    """Tools that the saved policy lacked count as added."""
    made = policy()
    made.save(tmp_path)
    larger = CATALOGUE.with_tools(Tool.from_function(pong))
    loaded = load(tmp_path, larger)
    made.add_tools(larger["pong"])
    assert torch.equal(loaded.tool_probabilities(TEXTS), made.tool_probabilities(TEXTS))
    assert (set(loaded.menu.offset_of), load(tmp_path).menu.offset_of) == ({"pong"}, {})


def test_a_policy_trained_with_another_encoder_is_refused(tmp_path, subtests: pytest.Subtests) -> None:
    """The last encoder is a bag of the catalogue's words, loaded with the same words in another order."""
    words = sorted({word for tool in CATALOGUE.values() for word in tool.text.lower().split()})

    def reversed_texts(texts: list[str]) -> torch.Tensor:
        return HashingEncoder(48)([text[::-1] for text in texts])

    def bag(vocabulary: list[str]) -> Any:
        return lambda texts: [[float(text.lower().split().count(word)) for word in vocabulary] for text in texts]

    own = HashingEncoder(48)
    for encoder, other in (
        (own, HashingEncoder(32)), (own, reversed_texts), (own, None), (bag(words), bag(words[::-1])),
    ):  # fmt: skip
        with subtests.test(str(other)):
            policy(encoder=encoder).save(tmp_path)
            with pytest.raises(ConfigError, match=r"trained with an.*encoder.*Pass the encoder of the training"):
                ToolSelectionPolicy.load(tmp_path, CATALOGUE, encoder=other)
    ToolSelectionPolicy.load(tmp_path, CATALOGUE, encoder=bag(words))


def test_a_loaded_encoder_may_return_another_precision(tmp_path) -> None:
    made = policy()
    made.save(tmp_path)
    loaded = ToolSelectionPolicy.load(tmp_path, CATALOGUE, encoder=lambda texts: HashingEncoder(48)(texts).bfloat16())
    torch.testing.assert_close(loaded.tool_probabilities(TEXTS), made.tool_probabilities(TEXTS), rtol=0, atol=0.05)
    with safe_open(tmp_path / "policy.safetensors", framework="pt") as file:
        description = json.loads(file.metadata()["description"])
    assert description["tools"] == list(CATALOGUE), "the file tells which tools the policy knew"


def test_files_that_are_no_policy_are_refused_by_name(tmp_path, subtests: pytest.Subtests) -> None:
    file = tmp_path / "policy.safetensors"
    (tmp_path / "file").touch()
    for folder in ("nowhere", "file"):
        message = rf"{folder}.policy\.safetensors must be a file that ToolSelectionPolicy\.save"
        with subtests.test(folder), pytest.raises(ConfigError, match=message):
            load(tmp_path / folder)
    policy().save(tmp_path)
    whole = file.read_bytes()
    for length in (0, 5, 100, -1):
        file.write_bytes(whole[:length])
        message = r"policy\.safetensors must .*not be truncated or altered.* Save the policy again"
        with subtests.test(str(length)), pytest.raises(ConfigError, match=message):
            load(tmp_path)
    for metadata in (None, {"format": "pt"}, {"description": "{"}, {"description": "{}"}):
        save_file({"weight": torch.zeros(2)}, file, metadata)
        message = r"must be a file that ToolSelectionPolicy\.save wrote"
        with subtests.test(str(metadata)), pytest.raises(ConfigError, match=message):
            load(tmp_path)


def test_an_unfinished_file_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "policy.safetensors.unfinished").symlink_to(tmp_path / "victim")
    policy().save(tmp_path)
    assert (tmp_path / "victim").read_bytes() == b"mine"
    assert {entry.name for entry in tmp_path.iterdir()} == {"victim", "policy.safetensors"}


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_interrupted_saving_leaves_the_previous_policy(tmp_path, monkeypatch, function: str) -> None:
    before, after = policy(), policy()
    before.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, function, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            after.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["policy.safetensors"]
    assert torch.equal(load(tmp_path).tool_probabilities(TEXTS), before.tool_probabilities(TEXTS))
    after.save(tmp_path)
    assert torch.equal(load(tmp_path).tool_probabilities(TEXTS), after.tool_probabilities(TEXTS))


def test_fitted_encoders_are_saved_and_a_loaded_policy_leaves_the_given_encoder_to_others(tmp_path) -> None:
    """Policies with encoders fitted to other texts are loaded with the same encoder object, which need not be fitted."""
    tools, new = [tool.text for tool in CATALOGUE.values()], [*TEXTS, "a text that no policy has encoded before"]
    joined = JoinedEncoder(HashingEncoder(16), FittedEncoder(8).fit([*TEXTS, *tools]))
    shared = FittedEncoder(8)
    made = [
        (policy(encoder=FittedEncoder(8).fit([*TEXTS, *tools])), shared),
        (policy(encoder=FittedEncoder(8).fit([*TEXTS[3:], *tools])), shared),
        (policy(encoder=joined), JoinedEncoder(HashingEncoder(16), FittedEncoder(8))),
    ]
    loaded = []
    for number, (one, again) in enumerate(made):
        one.save(tmp_path / str(number))
        loaded.append(ToolSelectionPolicy.load(tmp_path / str(number), CATALOGUE, encoder=again))
    for (before, _), after in zip(made, loaded, strict=True):
        assert torch.equal(after.tool_probabilities(new), before.tool_probabilities(new))


def test_the_calibration_is_saved_and_is_part_of_the_state(tmp_path) -> None:
    made = policy()
    made.add_tools(Tool.from_function(pong))
    made.calibrate(TEXTS, share=0.5)
    made.threshold = 0.25
    made.save(tmp_path)
    loaded = load(tmp_path, made.catalogue)
    other = policy(made.catalogue)
    other.load_state_dict(made.state_dict())
    for copy in (loaded, other):
        assert torch.equal(copy.tool_probabilities(TEXTS), made.tool_probabilities(TEXTS))
        assert (copy.threshold, [*copy.menu.offset_of]) == (0.25, ["pong"])
