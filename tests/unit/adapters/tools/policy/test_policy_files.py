"""Saved policies: what comes back, and files that are refused."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.tools.catalogue.tools import Tool
from adapters.tools.policy.encoders import HashingEncoder
from adapters.tools.policy.policy import ToolSelectionPolicy
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
    for other in (HashingEncoder(32), HashingEncoder(48, pair_weight=0), None):
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
    with pytest.raises(ConfigError, match=r"nowhere holds no policy: policy\.json is missing"):
        ToolSelectionPolicy.load(tmp_path / "nowhere", CATALOGUE)


def load(folder: Path) -> Any:
    return ToolSelectionPolicy.load(folder, CATALOGUE, encoder=HashingEncoder(48))


def test_missing_or_truncated_weights_are_refused_by_name(tmp_path, subtests: pytest.Subtests) -> None:
    for length in (None, 0, 5, 100, -1):
        with subtests.test(str(length)):
            policy().save(tmp_path)
            weights = tmp_path / "policy.safetensors"
            whole = weights.read_bytes()
            weights.unlink()
            if length is not None:
                weights.write_bytes(whole[:length])
            with pytest.raises(
                ConfigError, match=r"policy\.safetensors (is missing|does not belong).* Save the policy again"
            ):
                load(tmp_path)


def test_an_invalid_policy_json_is_refused(tmp_path, subtests: pytest.Subtests) -> None:
    for text, message in (
        (b"{", r"policy\.json is not JSON"),
        (b"\xff", r"policy\.json is not JSON"),
        (b"[" * 100_000, r"policy\.json is not JSON"),
        (b"[]", r"policy\.json must hold an object; got \[\]"),
        (b"{}", r"policy\.json must have num_features, hidden, num_text_features, weights_sha256"),
        (
            b'{"num_features": "3", "hidden": [], "num_text_features": 48, "weights_sha256": ""}',
            "must have num_features with",
        ),
        (
            b'{"num_features": 3, "hidden": ["4"], "num_text_features": 48, "weights_sha256": ""}',
            "must have hidden with",
        ),
    ):
        with subtests.test(message):
            policy().save(tmp_path)
            (tmp_path / "policy.json").write_bytes(text)
            with pytest.raises(ConfigError, match=rf"{message}.* Save the policy again"):
                load(tmp_path)


def test_altered_sizes_are_refused_by_name(tmp_path) -> None:
    policy(num_features=3, hidden=[4]).save(tmp_path)
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden": [5]}))
    with pytest.raises(ConfigError, match=r"(?s)the weights must have the sizes in policy\.json: .*size mismatch"):
        load(tmp_path)


def test_a_file_instead_of_a_folder_is_refused(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file holds no policy: policy\.json is missing"):
        load(tmp_path / "file")


def test_the_weights_of_one_policy_do_not_load_with_the_sizes_of_another(tmp_path) -> None:
    for name in ("one", "other"):
        policy().save(tmp_path / name)
    (tmp_path / "one" / "policy.safetensors").replace(tmp_path / "other" / "policy.safetensors")
    with pytest.raises(ConfigError, match=r"policy\.safetensors does not belong to policy\.json"):
        load(tmp_path / "other")


class Ended(BaseException):
    """The process, at this place."""


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("place", [1, 2])
def test_interrupted_saving_never_mixes_two_policies(tmp_path, monkeypatch, function: str, place: int) -> None:
    """Weights and description are both on the disk, and then both moved: before the first move the old policy is whole."""
    before, after = policy(), policy()
    before.save(tmp_path)
    calls = itertools.count(1)
    real = getattr(os, function)

    def end(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == place:
            raise Ended
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, function, end)
        with pytest.raises(Ended):
            after.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"policy.json", "policy.safetensors"}
    if function == "fsync" or place == 1:
        assert torch.equal(load(tmp_path).tool_probabilities(TEXTS), before.tool_probabilities(TEXTS))
    else:
        with pytest.raises(ConfigError, match="or saving was interrupted"):
            load(tmp_path)
    after.save(tmp_path)
    assert torch.equal(load(tmp_path).tool_probabilities(TEXTS), after.tool_probabilities(TEXTS))
