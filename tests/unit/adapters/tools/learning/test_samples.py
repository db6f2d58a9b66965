"""Samples and groups: JSON there and back, and batches of them that train."""

import copy
import json
import math
import pickle
import struct
from dataclasses import FrozenInstanceError, fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.learning.buffers import GroupBuffer
from adapters.tools.learning.records import SampleError, ToolGroup, ToolSample
from adapters.tools.learning.sample_batches import batch_from_groups, groups_from_batch
from adapters.tools.learning.tasks import ToolTask
from grpo import ActionScores, ExperienceBatch, GRPOConfig, GRPOTrainer, ObjectiveConfig, SampledActions
from tests.support.plain_states import assert_same, through_checkpoint
from tests.support.threads import run_together

TASK = ToolTask(
    text="paint it black",
    tool="paint",
    arguments={"colour": "black"},
    other_calls=(ToolCall(tool="dye", arguments={"colour": "black"}),),
    labels={"art": "easy"},
)


def sample(**changes: Any) -> ToolSample:
    fields: dict[str, Any] = {
        "state": "paint it black",
        "tool": "paint",
        "arguments": {"colour": "black", "coats": [1, 2.5, None, {"a": True}]},
        "log_prob": (-0.1, -1 / 3),
        "ref_log_prob": (-0.2, -0.7),
        "reward": 0.8,
        "value": (0.5, 0.25),
        "done": False,
        "final_value": 0.125,
    }
    return ToolSample(**{**fields, **changes})


class PaintPolicy(nn.Module):
    """First a tool, "paint" or "wait", then, for "paint" alone, one of two colours: rows of 2 steps and of 1.

    One logit for the tool and one for the colour, the same in every state: log pi is log sigmoid(+-logit).
    """

    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([0.3, -0.4], dtype=dtype))
        self.states_seen: list[Any] = []

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        return self.sample_actions(states, num_actions_per_state).actions

    def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
        drawn = torch.rand(len(states), num_actions_per_state, 2) < self.logits.detach().sigmoid()
        calls = {colour: ToolCall(tool="paint", arguments={"colour": colour}) for colour in ("red", "blue")}
        actions = [
            [calls["red" if red else "blue"] if paint else ToolCall(tool="wait") for paint, red in group]
            for group in drawn.tolist()
        ]
        scores = self.score_actions(states, [call for group in actions for call in group])
        return SampledActions(
            actions=actions, mask=scores.mask, behaviour_log_probs=scores.log_probs.detach(), scores=None
        )

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        self.states_seen = list(states)
        paints = torch.tensor([call.tool == "paint" for call in actions])
        reds = torch.tensor([call.arguments.get("colour") == "red" for call in actions])
        signs = torch.stack([paints, reds], 1).to(self.logits.dtype) * 2 - 1
        mask = torch.stack([torch.ones_like(paints), paints], 1)
        log_probs = torch.where(mask, nn.functional.logsigmoid(signs * self.logits), 0.0)
        return ActionScores(log_probs=log_probs, mask=mask)

    def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        return self.score_actions(states, actions).log_probs.sum(1)

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def likes_red(states: Any, actions: Any) -> list[float]:
    return [float(call.arguments.get("colour") == "red") + 0.1 * (call.tool == "wait") for call in actions]


# JSON


def test_a_sample_survives_a_json_round_trip() -> None:
    first = sample()
    assert json.loads(first.to_json()) == {
        "state": "paint it black",
        "tool": "paint",
        "arguments": {"colour": "black", "coats": [1, 2.5, None, {"a": True}]},
        "log_prob": [-0.1, -1 / 3],
        "ref_log_prob": [-0.2, -0.7],
        "reward": 0.8,
        "value": [0.5, 0.25],
        "done": False,
        "final_value": 0.125,
    }
    assert ToolSample.from_json(first.to_json()) == first
    assert first.action == ToolCall(tool="paint", arguments={"colour": "black", "coats": [1, 2.5, None, {"a": True}]})
    assert "\n" not in sample(state="two\nlines").to_json()


def test_optional_fields_of_a_sample_stay_absent() -> None:
    least = ToolSample(state=[1, 2.5], tool="wait", log_prob=[-1], reward=1)  # type: ignore[arg-type]
    assert (least.state, least.log_prob, least.reward, least.arguments) == ((1.0, 2.5), (-1.0,), 1.0, {})
    assert (least.ref_log_prob, least.value, least.done, least.final_value) == (None, None, True, None)
    assert ToolSample.from_json(least.to_json()) == least
    assert ToolSample.from_json('{"state": "s", "tool": "t", "log_prob": [0], "reward": 2}').reward == 2.0


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(log_prob=st.lists(FINITE, min_size=1, max_size=3), reward=FINITE, state=st.lists(FINITE, max_size=3))
def test_floats_survive_json_bit_for_bit(log_prob: list[float], reward: float, state: list[float]) -> None:
    first = ToolSample(state=tuple(state), tool="t", log_prob=tuple(log_prob), reward=reward)
    again = ToolSample.from_json(first.to_json())
    for name in ("state", "log_prob"):
        numbers, back = getattr(first, name), getattr(again, name)
        assert struct.pack(f"{len(numbers)}d", *numbers) == struct.pack(f"{len(back)}d", *back)
    assert struct.pack("d", first.reward) == struct.pack("d", again.reward)


def test_a_group_survives_a_json_round_trip() -> None:
    group = ToolGroup(id="task 7", context=TASK.to_dict(), samples=(sample(), sample(reward=0.1)))
    assert ToolGroup.from_json(group.to_json()) == group
    assert ToolTask.from_dict(ToolGroup.from_json(group.to_json()).context) == TASK
    assert ToolGroup.from_json(ToolGroup(id=3, samples=(sample(),)).to_json()).id == 3


def test_records_are_frozen_dataclasses_that_can_be_copied_and_pickled(subtests: pytest.Subtests) -> None:
    for first in (sample(state="not UTF-8: \ud800"), ToolGroup(id=1, samples=(sample(),)), TASK):
        with subtests.test(type(first).__name__):
            for again in (
                pickle.loads(pickle.dumps(first)),
                copy.deepcopy(first),
                replace(first),
                type(first).from_json(first.to_json()),
            ):
                assert again == first
                assert again is not first
            assert not hasattr(first, "__dict__"), "slots only"
            with pytest.raises(FrozenInstanceError):
                setattr(first, fields(first)[0].name, None)
            with pytest.raises(
                type(first).error, match=f"^{type(first).__name__}.colour: Unexpected keyword argument; got 1"
            ):
                replace(first, colour=1)


def test_a_sample_copies_its_arguments() -> None:
    given_arguments: dict[str, Any] = {"sizes": (1, 2)}
    first = sample(arguments=given_arguments)
    given_arguments["sizes"] = ()
    assert first.arguments == {"sizes": [1, 2]}


def test_invalid_fields_of_a_sample_are_refused(subtests: pytest.Subtests) -> None:
    for changes, text in (
        ({"reward": math.nan}, r"ToolSample\.reward: Input should be a finite number; got nan"),
        ({"reward": True}, "reward: Input should be a valid number; got True"),
        ({"log_prob": [-math.inf, 0]}, "log_prob.0: Input should be a finite number; got -inf"),
        ({"log_prob": -0.5}, r"log_prob: Input should be a valid tuple; got -0\.5"),
        ({"ref_log_prob": [-0.5]}, "ref_log_prob and value must be as long as log_prob"),
        ({"value": [1, 2, 3]}, "ref_log_prob and value must be as long as log_prob"),
        ({"state": {"text": "x"}}, "state.str: Input should be a valid string"),
        ({"tool": 3}, "tool: Input should be a valid string; got 3"),
        ({"done": 1}, "done: Input should be a valid boolean"),
        ({"done": True}, r"final_value must be a number if .* None otherwise; got final_value=0\.125, done=True"),
        ({"done": True, "final_value": 0.0}, r"None otherwise; got final_value=0\.0, done=True"),
        ({"value": None}, r"None otherwise; got final_value=0\.125, done=False, value=None"),
        ({"final_value": None}, r"None otherwise; got final_value=None, done=False, value=\(0\.5, 0\.25\)"),
        ({"final_value": math.nan}, "final_value: Input should be a finite number; got nan"),
        ({"arguments": {"x": math.inf}}, "arguments: .*not JSON compliant"),
        ({"arguments": {"x": {1, 2}}}, "arguments: .*not JSON serializable"),
        ({"arguments": [1]}, "arguments: Input should be a valid dictionary"),
    ):
        with subtests.test(text), pytest.raises(SampleError, match=text):
            sample(**changes)


def test_values_that_are_too_deep_for_json_are_refused() -> None:
    with pytest.raises(SampleError, match="a ToolSample must be JSON: maximum recursion depth"):
        ToolSample.from_json("[" * 100_000)
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(SampleError, match=r"^ToolSample\.arguments: maximum recursion depth"):
        sample(arguments={"x": deep})


def test_json_that_is_no_sample_or_group_is_refused(subtests: pytest.Subtests) -> None:
    for read, text in (
        (lambda: ToolSample.from_json("{"), "a ToolSample must be JSON"),
        (lambda: ToolSample.from_json("[]"), r"ToolSample: Input should be a dictionary .*; got \[\]"),
        (
            lambda: ToolSample.from_json('{"state": "s", "tool": "t", "reward": 1}'),
            "ToolSample.log_prob: Field required",
        ),
        (
            lambda: ToolSample.from_dict({**sample().to_dict(), "mood": 1}),
            "ToolSample.mood: Unexpected keyword argument; got 1",
        ),
        (
            lambda: ToolSample.from_json(sample().to_json().replace("0.8", "NaN")),
            "reward: Input should be a finite number",
        ),
        (
            lambda: ToolSample.from_json(sample().to_json().replace("0.8", "1" + "0" * 400)),
            "reward: Input should be a valid number",
        ),
        (lambda: ToolGroup.from_json('{"id": 1, "samples": []}'), "at least 1 item"),
        (lambda: ToolGroup.from_json('{"id": 1, "samples": {}}'), "samples: Input should be a valid tuple"),
        (lambda: ToolGroup.from_json('{"id": 1, "samples": [{}]}'), "ToolGroup.samples.0.state: Field required"),
        (
            lambda: ToolGroup.from_dict({"id": 1, "samples": [{**sample().to_dict(), "mood": 1}]}),
            "samples.0.mood: Unexpected",
        ),
        (lambda: ToolGroup.from_json('{"samples": []}'), "ToolGroup.id: Field required"),
        (lambda: ToolGroup(id=1.5, samples=(sample(),)), "ToolGroup.id.str: Input should be a valid string"),  # type: ignore[arg-type]
        (lambda: ToolGroup(id=1, samples=("no",)), "an instance of ToolSample"),  # type: ignore[arg-type]
        (
            lambda: ToolGroup(id=1, context={"x": math.nan}, samples=(sample(),)),
            "ToolGroup.context: .*not JSON compliant",
        ),
    ):
        with subtests.test(text), pytest.raises(SampleError, match=text):
            read()


# Batches


def test_a_batch_of_groups_equals_hand_worked_tensors() -> None:
    short = sample(tool="wait", arguments={}, log_prob=(-2.0,), ref_log_prob=(-3.0,), value=(1.0,), reward=0.1)
    batch = batch_from_groups(
        [
            ToolGroup(id="x", samples=(sample(), short)),
            ToolGroup(id="x", samples=(sample(done=True, final_value=None),)),
        ]
    )
    assert batch.states == ["paint it black"] * 3
    assert batch.actions[1] == ToolCall(tool="wait")
    assert batch.group_ids.tolist() == [0, 0, 1]  # of one id, but two groups
    assert batch.rewards.tolist() == [0.8, 0.1, 0.8]
    assert batch.mask.tolist() == [[True, True], [True, False], [True, True]]
    for values, expected in [
        (batch.behaviour_log_probs, [[-0.1, -1 / 3], [-2.0, 0.0], [-0.1, -1 / 3]]),
        (batch.ref_log_probs, [[-0.2, -0.7], [-3.0, 0.0], [-0.2, -0.7]]),
        (batch.values, [[0.5, 0.25], [1.0, 0.0], [0.5, 0.25]]),
        (batch.final_values, [0.125, 0.125, 0.0]),
    ]:
        assert values.tolist() == expected
    assert batch.old_log_probs is None


def test_fields_that_only_some_samples_have_are_left_out_of_the_batch() -> None:
    group = ToolGroup(id=0, samples=(sample(), sample(ref_log_prob=None, value=None, final_value=None)))
    batch = batch_from_groups([group])
    assert (batch.ref_log_probs, batch.values, batch.final_values) == (None, None, None)


def test_truncated_and_terminated_samples_are_distinguished() -> None:
    """A final value of 0 of a truncated sample is the critic's. One that was never given is None."""
    assert sample(final_value=0.0).final_value == 0.0
    cut_off, ended = sample(value=None, final_value=None), sample(value=None, final_value=None, done=True)
    assert cut_off != ended
    for one in (cut_off, ended):
        assert ToolSample.from_json(one.to_json()) == one
    batch = batch_from_groups(
        [ToolGroup(id=0, samples=(sample(final_value=-0.5), sample(done=True, final_value=None)))]
    )
    assert batch.final_values.tolist() == [-0.5, 0.0]
    back = groups_from_batch(batch)[0].samples
    assert [(one.done, one.final_value) for one in back] == [(False, -0.5), (True, None)]


def test_vector_states_become_a_tensor_and_mixed_states_are_refused() -> None:
    batch = batch_from_groups({"a": [sample(state=[1, 2]), sample(state=[3, 4])]})
    assert isinstance(batch.states, Tensor)
    assert batch.states.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    for states in (["text", [1.0]], [[1.0], [1.0, 2.0]]):
        with pytest.raises(SampleError, match="states must all be texts, or all vectors of one length"):
            batch_from_groups({"a": [sample(state=state) for state in states]})
    with pytest.raises(SampleError, match="at least one group"):
        batch_from_groups({})


def test_a_batch_read_back_from_json_trains_the_same(subtests: pytest.Subtests) -> None:
    for states in (["one", "two"], [TASK, TASK], torch.tensor([[0.1, 0.2], [0.3, 0.4]])):
        with subtests.test(type(states[0]).__name__):

            def trainer() -> GRPOTrainer:
                torch.manual_seed(0)
                return GRPOTrainer(
                    config=GRPOConfig(
                        group_size=5, num_epochs_per_update=2, seed=3, objective=ObjectiveConfig(kl_coef=0.1)
                    ),
                    policy=PaintPolicy(),
                    reference_policy=PaintPolicy(),
                    reward_model=likes_red,
                )

            one, other = trainer(), trainer()
            batch = one.collect(states)
            groups = [ToolGroup.from_json(group.to_json()) for group in groups_from_batch(batch)]
            assert [len(group.samples) for group in groups] == [5, 5]
            restored = batch_from_groups(groups)
            assert torch.equal(restored.mask, batch.mask)
            assert torch.equal(restored.behaviour_log_probs.float()[batch.mask], batch.behaviour_log_probs[batch.mask])
            direct, read = one.update(batch), other.update(restored)
            assert torch.equal(one.policy.logits, other.policy.logits)
            assert not torch.equal(one.policy.logits, PaintPolicy().logits)
            assert read["train/total_loss"] == pytest.approx(direct["train/total_loss"], abs=1e-9)


def test_tasks_survive_in_the_context_of_samples() -> None:
    trainer = GRPOTrainer(config=GRPOConfig(group_size=2), policy=PaintPolicy(), reward_model=likes_red)
    groups = groups_from_batch(trainer.collect([TASK]))
    assert groups[0].samples[0].state == TASK.text
    batch = batch_from_groups(groups, state=lambda group, _: ToolTask.from_dict(group.context))
    assert batch.states == [TASK, TASK]


def batch_with(**changes: Any) -> ExperienceBatch:
    fields: dict[str, Any] = {
        "states": ["a", "b"],
        "actions": [ToolCall(tool="t")] * 2,
        "rewards": [0.0, 1.0],
        "group_ids": [9, 9],
        "behaviour_log_probs": torch.zeros(2, 2),
    }
    return ExperienceBatch.from_rows(**{**fields, **changes})


def test_the_log_probs_of_the_sampling_policy_are_kept_before_those_of_the_old_policy() -> None:
    both = replace(batch_with(), old_log_probs=torch.full((2, 2), -1.0))
    assert groups_from_batch(both)[0].samples[0].log_prob == (0.0, 0.0)
    old = replace(both, behaviour_log_probs=None)
    assert groups_from_batch(old)[0].samples[0].log_prob == (-1.0, -1.0)


def test_states_that_are_arrays_become_vectors() -> None:
    batch = batch_with(states=[np.array([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    assert [one.state for one in groups_from_batch(batch)[0].samples] == [(1.0, 2.0), (3.0, 4.0)]


def test_any_key_of_a_mapping_becomes_the_id_of_a_group() -> None:
    batch = batch_from_groups({("x", 1): [sample()], 2: [sample()]}, state=lambda group, _: group.id)
    assert list(batch.states) == ["('x', 1)", "2"]


def test_a_batch_that_is_not_of_tool_calls_is_refused(subtests: pytest.Subtests) -> None:
    for changes, text in (
        ({"actions": ["t", "t"]}, "actions must be ToolCalls; got 't'"),
        ({"rewards": torch.zeros(2, 2)}, r"rewards must be one per row, \[N\], .*got rewards \[2, 2\]"),
        ({"behaviour_log_probs": None}, "needs behaviour_log_probs"),
        ({"mask": torch.tensor([[True, True], [False, True]])}, "without holes"),
        ({"behaviour_log_probs": torch.full((2, 2), math.nan)}, "log_prob.0: Input should be a finite number"),
    ):
        with subtests.test(text), pytest.raises(SampleError, match=text):
            groups_from_batch(batch_with(**changes))


def test_decisions_of_several_threads_train_through_a_buffer() -> None:
    buffer = GroupBuffer[str, ToolSample]()
    trainer = GRPOTrainer(
        config=GRPOConfig(learning_rate=0.2, objective=ObjectiveConfig(sampler_correction="truncate")),
        policy=PaintPolicy(),
        reward_model=likes_red,
    )
    chosen = {"red": (-0.6, -0.9), "blue": (-0.6, -0.5)}

    def serve(thread: int) -> None:
        for number in range(20):
            for colour, log_prob in chosen.items():
                one = ToolSample(
                    state=f"request {number}",
                    tool="paint",
                    arguments={"colour": colour},
                    log_prob=log_prob,
                    reward=float(colour == "red"),
                )
                buffer.add(f"{thread}.{number}", one)

    run_together(*(partial(serve, thread) for thread in range(8)))
    metrics = trainer.update(batch_from_groups(buffer.drain()))
    assert (metrics["group_stats/num_groups"], metrics["group_stats/avg_group_size"]) == (160.0, 2.0)
    assert len(buffer) == 0
    assert trainer.policy.logits[1] > -0.4  # red has become likelier
    assert metrics["train/advantages_mean"] == pytest.approx(0.0, abs=1e-12)  # +1/2 and -1/2 in each pair


def test_samples_and_groups_come_back_from_a_checkpoint(tmp_path) -> None:
    whole, short = sample(), sample(state=(0.1, -0.0), ref_log_prob=None, value=None, done=True, final_value=None)
    assert_same(through_checkpoint(whole, tmp_path / "whole"), whole)
    for name, group in (
        ("text", ToolGroup(id="7", context={"a": [1, None]}, samples=(whole, short))),
        ("number", ToolGroup(id=7, samples=(short,))),
    ):
        assert_same(through_checkpoint(group, tmp_path / name), group)
