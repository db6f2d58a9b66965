"""What each rank runs in `tests/vllm/test_vllm_servers.py`: six iterations with servers that the test kills and starts.

torchrun --nproc-per-node 2 -m tests.support.ranks_with_vllm MODEL FOLDER URL URL
"""

import hashlib
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapters.llm import HFPolicy, SamplingConfig, VLLMServerSampler
from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig
from grpo.distributed import Replicated

STATES = ["w1 w2 w3", "w4", "w5 w6", "w7 w8"]


def low_numbers(states: Any, actions: Any) -> list[float]:
    return [-sum(action.token_ids) / len(action) for action in actions]


def versions(urls: list[str]) -> list[str]:
    """The versions of the servers that answer."""
    found = []
    for url in urls:
        try:
            with urllib.request.urlopen(f"{url}/weight_info", timeout=20) as answer:
                found.append(json.loads(answer.read())["weight_version"])
        except OSError:
            pass
    return found


def wait_for_the_test(engine: Replicated, folder: Path) -> None:
    with engine.waiting(300, "it waits for the test"):
        while engine.rank == 0 and not (folder / "go on").exists():
            time.sleep(0.1)
        engine.agree()
    if engine.rank == 0:
        (folder / "go on").unlink()


def main(model: str, folder: Path, urls: list[str]) -> None:
    dist.init_process_group("gloo")
    engine = Replicated(timeout=120)
    sampler = VLLMServerSampler(urls, weights_folder=folder / "weights", engine=engine)
    sampling = SamplingConfig(max_new_tokens=6, temperature=0.7)
    policy = HFPolicy(
        AutoModelForCausalLM.from_pretrained(model),
        AutoTokenizer.from_pretrained(model),
        sampling=sampling,
        sampler=sampler,
    )
    config = GRPOConfig(
        seed=0, group_size=4, learning_rate=0.01, objective=ObjectiveConfig(sampler_correction="truncate")
    )
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=low_numbers, engine=engine)
    ratios, seen = [], []
    for iteration in range(1, 7):
        metrics = trainer.step(STATES[engine.rank :: engine.num_ranks])
        ratios.append(metrics["train/sampler_ratio_mean"])
        labels = versions(urls)
        assert len(set(labels)) == 1, labels
        seen.append((int(labels[0].split(".")[-1]), len(labels)))
        engine.agree()
        if engine.rank == 0:
            print(f"iteration {iteration}", flush=True)
        if iteration in (2, 4):
            wait_for_the_test(engine, folder)
    found = hashlib.sha256()
    for value in policy.get_parameters().values():
        found.update(value.detach().numpy().tobytes())
    result = {"ratios": ratios, "versions": seen, "weights": found.hexdigest()}
    (folder / f"rank{engine.rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
