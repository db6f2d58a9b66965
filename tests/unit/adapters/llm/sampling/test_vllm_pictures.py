"""Prompts with pictures for both vLLM samplers: what vLLM is asked, and that it reads what the policy scores.

VLLM is imitated: it replaces each mark by as many tokens as its own processor says, as vLLM 0.32 does.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adapters.agents import AgentPolicy
from adapters.llm import HFPolicy, Picture, SamplingConfig, VLLMSampler, VLLMServerSampler
from adapters.llm.sampling.samplers import SamplerError
from adapters.llm.sampling.vllm_worker import VLLMWorker
from grpo.errors import ContractError
from tests.support.vision_models import FAMILIES, IDS, IMAGE, chat, picture, tiny_vision

STATES = [chat("how many?", picture(32, 48)), chat("a?", picture(56, 24, 1), picture(20, 36, 2)), chat("12+34=?")]
ANSWER = [7, 8, 1]


def expanded(processor: Any, token_ids: Sequence[int], pictures: Sequence[Any]) -> list[int]:
    """The token ids with the tokens of each picture in place of its mark, four patches a token."""
    left = iter(pictures)
    found: list[int] = []
    for token in token_ids:
        count = 1
        if token == IMAGE:
            patches = processor.image_processor(images=[next(left)], return_tensors="pt")["image_grid_thw"].prod()
            count = int(patches) // 4
        found += [token] * count
    assert next(left, None) is None
    return found


def engine(asked: list[Any], processor: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> VLLMSampler:
    class LLM:
        llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(max_model_len=256)))

        def __init__(self, *args: Any, **options: Any) -> None: ...

        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> Any:
            answers = []
            for prompt, settings in zip(prompts, params, strict=True):
                ids, pictures = prompt["prompt_token_ids"], prompt.get("multi_modal_data", {}).get("image", [])
                asked.append((ids, pictures, settings))
                log_probs = [{token: SimpleNamespace(logprob=-1.0)} for token in ANSWER]
                said = {"token_ids": ANSWER, "logprobs": log_probs, "finish_reason": "stop", "stop_reason": 1}
                read = expanded(processor, ids, pictures)
                answers.append(SimpleNamespace(outputs=[SimpleNamespace(**said)], prompt_token_ids=read))
            return answers

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=dict))
    return VLLMSampler("any")


def server(asked: list[Any], processor: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> VLLMServerSampler:
    def post(self: VLLMWorker, path: str, body: Any, **options: Any) -> Any:
        pictures = [Picture.of(part["url"]).image for part in body.get("content_parts", [])]
        assert all(part["type"] == "image_url" for part in body.get("content_parts", []))
        asked.append((body["token_ids"], pictures, body["sampling_params"]))
        steps = [{"token_id": token, "logprob": -1.0} for token in ANSWER]
        choice = {"token_ids": ANSWER, "logprobs": {"content": steps}, "finish_reason": "stop", "stop_reason": 1}
        read = expanded(processor, body["token_ids"], pictures)
        told = {"prompt_token_ids": read} if body.get("return_token_ids") else {}
        return {"choices": [choice | {"weight_versions": None}], **told}

    monkeypatch.setattr(VLLMWorker, "post", post)
    monkeypatch.setattr(VLLMWorker, "version", lambda self: "default")
    monkeypatch.setattr(VLLMWorker, "max_length", lambda self: 256)
    return VLLMServerSampler("http://localhost", weights_folder=tmp_path, max_concurrency=1)


@pytest.mark.parametrize("make_sampler", [engine, server])
def test_vllm_gets_pictures_and_their_marks(make_sampler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, processor = tiny_vision("qwen2_5_vl")
    asked: list[Any] = []
    sampler = make_sampler(asked, processor, monkeypatch, tmp_path)
    policy = HFPolicy(model, processor, sampler=sampler, sampling=SamplingConfig(max_new_tokens=6))
    groups = policy.generate_actions(STATES, 2)
    assert [[action.token_ids for action in group] for group in groups] == [[tuple(ANSWER)] * 2] * 3
    shown = [[part["image"] for part in state[0]["content"] if part["type"] == "image"] for state in STATES]
    for (ids, pictures, settings), given in zip(asked, [each for each in shown for _ in range(2)], strict=True):
        assert ids.count(IMAGE) == len(pictures) == len(given)
        assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(pictures, given, strict=True))
        # the head of the policy excludes these tokens, and vLLM has a head of its own
        assert settings["logit_bias"] == {IMAGE: -100.0, IDS["<video>"]: -100.0}
    scores = policy.score_groups(STATES, groups)
    assert torch.equal(scores.log_probs[0], scores.log_probs[1])


@pytest.mark.parametrize("make_sampler", [engine, server])
def test_other_sizes_in_vllm_are_found(make_sampler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """VLLM would sample behind a prompt that the policy does not score."""
    model, processor = tiny_vision("qwen2_5_vl")
    _, other = tiny_vision("qwen2_5_vl")
    other.image_processor.size = {"shortest_edge": 64, "longest_edge": 256}
    sampler = make_sampler([], other, monkeypatch, tmp_path)
    policy = HFPolicy(model, processor, sampler=sampler, sampling=SamplingConfig(max_new_tokens=6))
    assert len(policy.generate_actions([chat("12+34=?")], 1)) == 1
    message = r"vLLM must read a prompt with pictures as the policy's processor does; of row 0"
    with pytest.raises(SamplerError, match=message):
        policy.generate_actions(STATES[:1], 1)


@pytest.mark.parametrize("make_sampler", [engine, server])
def test_vllm_samples_conversations(make_sampler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Screens:
        def __init__(self, state: int) -> None:
            self.turn = 0

        def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
            return picture(16, 24), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.turn += 1
            return picture(24, 16, self.turn), 1.0, self.turn == 2, False, {}

    model, processor = tiny_vision("qwen2_5_vl")
    asked: list[Any] = []
    sampler = make_sampler(asked, processor, monkeypatch, tmp_path)
    policy = HFPolicy(model, processor, sampler=sampler, sampling=SamplingConfig(max_new_tokens=6))
    [[row]] = AgentPolicy(policy, Screens).generate_actions([0], 1)
    assert [len(pictures) for _, pictures, _ in asked] == [ids.count(IMAGE) for ids, _, _ in asked] == [1, 2]
    assert [len(segment.pictures) for segment in row.segments][-1] == 2


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)  # GLM-4V
@pytest.mark.parametrize("family", FAMILIES)
def test_marks_are_found_again_in_the_tokens_of_a_context(family: str) -> None:
    """Prompts of conversations have token ids and pictures only. Two of the pictures are equal."""
    model, processor = tiny_vision(family)
    policy = HFPolicy(model, processor)
    pictures = [picture(32, 48), picture(24, 40, 1), picture(32, 48)]
    text = processor.apply_chat_template(chat("how many?", *pictures), tokenize=False)
    reader = policy.picture_reader
    token_ids = reader.encoded([text], [Picture.of(one) for one in pictures], "A test")
    marked, images = reader.prompt(token_ids, [Picture.of(one) for one in pictures]).marked
    assert marked == policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [image.size for image in images] == [(48, 32), (40, 24), (48, 32)]


def test_fields_alone_are_no_prompt_for_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, processor = tiny_vision("qwen2_5_vl")
    sampler = engine([], processor, monkeypatch, tmp_path)
    policy = HFPolicy(model, processor, sampler=sampler, sampling=SamplingConfig(max_new_tokens=6))
    [prompt] = policy._encode(STATES[:1])
    prompt = type(prompt)(list(prompt), prompt.fields)  # type: ignore[call-arg, union-attr]
    with pytest.raises(ContractError, match="for another engine needs its pictures"):
        policy.sample_tokens([prompt], seeds=[0])
