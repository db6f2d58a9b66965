"""What each rank runs in `tests/vllm/test_vllm_servers.py`: six iterations with servers that the test kills and starts.

torchrun --nproc-per-node 2 -m tests.support.ranks_with_vllm MODEL FOLDER URL URL
"""

import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapters.llm import HFPolicy, SamplingConfig, VLLMServerSampler
from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig
from grpo.distributed import Replicated, Sharded

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


def make_trainer(model: str, folder: Path, urls: list[str], engine: Replicated, num_ahead: int) -> GRPOTrainer:
    policy = HFPolicy(
        AutoModelForCausalLM.from_pretrained(model),
        AutoTokenizer.from_pretrained(model),
        sampling=SamplingConfig(max_new_tokens=6, temperature=0.7),
        sampler=VLLMServerSampler(urls, weights_folder=folder / "weights", engine=engine),
    )
    config = GRPOConfig(
        seed=0,
        group_size=4,
        learning_rate=0.01,
        iterations_ahead=num_ahead,
        objective=ObjectiveConfig(sampler_correction="truncate"),
    )
    return GRPOTrainer(config=config, policy=policy, reward_model=low_numbers, engine=engine)


def steps(trainer: GRPOTrainer, folder: Path, urls: list[str], num_iterations: int, pauses: tuple[int, ...]) -> Any:
    """Iterations, with the versions of the servers after each."""
    engine: Any = trainer.engine
    ratios, seen = [], []
    for iteration in range(1, num_iterations + 1):
        metrics = trainer.step(STATES[engine.rank :: engine.num_ranks])
        ratios.append(metrics["train/sampler_ratio_mean"])
        labels = versions(urls)
        assert len(set(labels)) == 1, labels
        seen.append((int(labels[0].split(".")[-1]), len(labels)))
        engine.agree()
        if engine.rank == 0:
            print(f"iteration {iteration}", flush=True)
        if iteration in pauses:
            wait_for_the_test(engine, folder)
    return {"ratios": ratios, "versions": seen}


def main(kind: str, model: str, folder: Path, urls: list[str]) -> None:
    dist.init_process_group("gloo")
    engine = (Sharded if kind == "parts" else Replicated)(timeout=120)
    trainer = make_trainer(model, folder, urls, engine, num_ahead=int(kind == "ahead"))
    if kind == "ahead":
        history = trainer.train(STATES, num_iterations=5, progress=False)
        result = {"rewards": [metrics["rewards/mean"] for metrics in history]}
    else:
        result = steps(trainer, folder, urls, 6 if kind == "copies" else 2, (2, 4) if kind == "copies" else ())
    weights = [
        value.full_tensor() if isinstance(value, DTensor) else value
        for value in trainer.policy.get_parameters().values()
    ]
    result["weights"] = torch.cat([value.detach().flatten() for value in weights]).tolist()
    (folder / f"rank{engine.rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
