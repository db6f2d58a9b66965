"""Agents with the vLLM samplers: what vLLM is asked does not depend on how many conversations go on at a time."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adapters.agents import AgentPolicy
from adapters.llm import SamplingConfig, VLLMSampler, VLLMServerSampler
from adapters.llm.sampling import vllm_server
from adapters.llm.sampling.vllm_requests import Answer
from tests.support.agents import CHATML, FORGETFUL, Echo, Tools, chat_tokenizer, language_model, says_call

Asked = list[tuple[tuple[int, ...], int, str]]
"""Requests: the tokens of the prompt, the seed, and the settings."""
TOKENIZER = chat_tokenizer()


def says(seed: int) -> list[int]:
    """What the imitated vLLM answers, drawn with the seed alone: a call, or some letters, and the end of the turn."""
    draw = np.random.default_rng(seed)
    text = says_call() if draw.random() < 0.6 else "".join(draw.choice(list("abcxyz"), draw.integers(1, 6)))
    return TOKENIZER(text + "<|im_end|>", add_special_tokens=False)["input_ids"]


def engine(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> VLLMSampler:
    """A `VLLMSampler` with an imitated engine."""

    class LLM:
        llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(max_model_len=4096)))

        def __init__(self, *args: Any, **options: Any) -> None: ...

        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> Any:
            answers = []
            for prompt, settings in zip(prompts, params, strict=True):
                seed = settings.pop("seed")
                asked.append((tuple(prompt["prompt_token_ids"]), seed, str(settings)))
                tokens = says(seed)
                log_probs = [{token: SimpleNamespace(logprob=-1.0)} for token in tokens]
                answer = {
                    "token_ids": tokens,
                    "logprobs": log_probs,
                    "finish_reason": "stop",
                    "stop_reason": tokens[-1],
                }
                answers.append(SimpleNamespace(outputs=[SimpleNamespace(**answer)]))
            return answers

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=dict))
    return VLLMSampler("any")


def server(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> VLLMServerSampler:
    """A `VLLMServerSampler` with an imitated server."""

    class Worker:
        url = "http://localhost"

        def __init__(self, base_url: str, *, timeout: float) -> None: ...

        def version(self) -> str:
            return "default"

        def max_length(self) -> int:
            return 4096

        def complete(self, body: Any, version: str | None) -> Answer:
            settings = body["sampling_params"]
            asked.append((tuple(body["token_ids"]), settings.pop("seed"), str(settings)))
            tokens = says(asked[-1][1])
            return Answer(
                token_ids=tokens, log_probs=[-1.0] * len(tokens), finish_reason="stop", stop_reason=tokens[-1]
            )

    monkeypatch.setattr(vllm_server, "VLLMWorker", Worker)
    return VLLMServerSampler("http://localhost", weights_folder=Path("unused"), max_concurrency=1)


@pytest.mark.slow
@pytest.mark.parametrize("make_sampler", [engine, server])
def test_requests_and_seeds_do_not_depend_on_the_concurrency(
    make_sampler: Any, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for template, make in ((CHATML, Echo), (CHATML, Tools), (FORGETFUL, Echo)):
        with subtests.test(template=template, make=make):
            found: list[tuple[Any, Any]] = []
            for concurrency in (1, 64):
                asked: Asked = []
                tokenizer = TOKENIZER if template == CHATML else chat_tokenizer(template)
                policy = language_model(
                    tokenizer=tokenizer,
                    sampler=make_sampler(asked, monkeypatch),
                    sampling=SamplingConfig(max_new_tokens=100, temperature=0.7),
                )
                torch.manual_seed(0)
                agent = AgentPolicy(policy, make, max_turns=3, concurrency=concurrency)
                sampled = agent.sample_actions(["you", "me"], 4)
                assert sampled.scores is None
                assert "'temperature': 0.7" in asked[0][2]
                found.append((sorted(asked), sampled.actions))
            assert found[0] == found[1]
            rows = [row for group in found[0][1] for row in group]
            seeds = [seed for _, seed, _ in found[0][0]]
            assert len(seeds) == len(set(seeds)) == sum(len(row.turns) for row in rows) > 10
            assert {len(row.turns) for row in rows} >= {3}
