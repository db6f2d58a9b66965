"""What ranks that divide weights do besides updates: errors, precision, offloading, sampling, and files.

    python -m tests.support.sharded_extras FOLDER [llm]

The process forks two ranks, which write what they found to FOLDER. With "llm", they save a language model.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from grpo import GRPOConfig, GRPOTrainer
from grpo.distributed import Replicated, Sharded
from tests.support.layered import Layered
from tests.support.sharded_ranks import CASES, language_model, result_of, results_of, rows_of, trained, whole_weights

NUM_RANKS = 2
DAILY = ["module, a rank without rows", "module, float64", "module, sampling", "moving reference"]
DAILY += [
    "module, a hint",
    "module, two teachers",
    "module, KPop",
    "module, demonstrations",
    "module, demonstrations and observations",
]
"""Cases that need no language model."""


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def built(policy: Any, engine: Any, **options: Any) -> GRPOTrainer:
    config = GRPOConfig(group_size=2, seed=0, autocast_dtype=options.pop("autocast_dtype", None))
    return GRPOTrainer(config=config, policy=policy, reward_model=lambda s, a: [0.0] * len(s), engine=engine, **options)


class Holder:
    """A policy that holds a module and is none, without `shard_units`."""

    def __init__(self) -> None:
        self.inner = Layered()

    def __getattr__(self, name: str) -> Any:
        if name == "shard_units":
            raise AttributeError(name)
        return getattr(self.inner, name)


class Bad(Layered):
    """A policy whose `shard_units` returns something that cannot be divided."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "shared":
            self.layers[1].weight = nn.Parameter(torch.ones(7, 7))
            self.layers.append(nn.Linear(7, 7))
            self.layers[3].weight = self.layers[1].weight
        if kind == "quantised":
            self.layers[0].register_parameter(
                "codes", nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
            )
        if kind == "dtypes":
            self.layers[0].bias = nn.Parameter(torch.zeros(7, dtype=torch.float64))

    def shard_units(self) -> Any:
        return "layers" if self.kind == "words" else super().shard_units()


class RunsOut(Layered):
    """Rank 1 runs out of memory in the forward pass of an update with several rows."""

    rank = 0

    def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        if self.rank == 1 and self.training:
            raise torch.OutOfMemoryError("no memory today")
        return super().get_log_probabilities(states, actions)


class SamplesElsewhere(Layered):
    """A policy whose sampler has weights of its own."""

    samples_itself = False

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> list[list[int]]:
        self.seen = type(self.layers[0].weight.detach()).__name__
        return [[state % 3, (state + 1) % 3] for state in states][: len(states)]

    def sync_sampler(self) -> None:
        self.copied = self.layers[0].weight.detach().clone()


def refused(engine: Sharded) -> dict[str, str]:
    policy = Layered()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    messages = {
        "optimizer": message_of(lambda: built(policy, engine, optimizer=optimizer)),
        "float16": message_of(lambda: built(Layered(), engine, autocast_dtype="float16")),
        "no module": message_of(lambda: built(Holder(), engine)),
        "precision": message_of(lambda: Sharded(mixed_precision=torch.bfloat16)),
        "function": message_of(lambda: built(Layered(), engine, optimizer=lambda tensors: len(tensors))),
    }
    return messages | {
        kind: message_of(partial(built, Bad(kind), engine)) for kind in ("words", "shared", "quantised", "dtypes")
    }


def out_of_memory(engine: Sharded) -> str:
    policy = RunsOut()
    policy.rank = engine.rank
    trainer = built(policy, engine)
    return message_of(lambda: trainer.update(rows_of(CASES["module"], policy, engine.rank, NUM_RANKS)))


def other_calls(engine: Sharded) -> str:
    """One rank scores, and the other rank samples."""
    trainer = built(Layered(), engine)
    if engine.rank == 0:
        return message_of(lambda: trainer.policy.get_log_probabilities([0], [1]))
    return message_of(lambda: trainer.engine.sum(torch.zeros(1)))


def scheduled(engine: Any) -> list[float]:
    """The learning rates of a scheduler that is built from the optimizer."""
    options = {
        "optimizer": partial(torch.optim.SGD, lr=1.0),
        "lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1),
    }
    trainer = built(Layered(), engine, **options)
    rows = rows_of(CASES["module"], trainer.policy, engine.rank, NUM_RANKS)
    return [trainer.update(rows)["train/learning_rate"] for _ in range(2)]


def samples_elsewhere(engine: Sharded) -> dict[str, Any]:
    trainer = built(SamplesElsewhere(), engine)
    trainer.step([0, 1])
    policy = trainer.policy
    return {
        "seen": policy.seen,
        "copied": list(policy.copied.shape),
        "parts": list(policy.layers[0].weight.to_local().shape),
    }


def whole_state(engine: Sharded) -> dict[str, Any]:
    """What a state_dict has inside and outside of `whole`, and what sampling gives afterwards."""
    trainer, _ = trained(CASES["module"], engine)
    policy = trainer.policy
    with engine.whole(policy), engine.whole(policy):
        inside = {name: list(value.shape) for name, value in policy.state_dict().items()}
        kinds = {type(value).__name__ for value in policy.state_dict().values()}
    outside = {type(value).__name__ for value in policy.state_dict().values()}
    return {"inside": inside, "kinds": sorted(kinds), "outside": sorted(outside)}


def saved_language_model(engine: Sharded, folder: Path) -> None:
    for name in ("llama", "llama lora"):
        trainer, _ = trained(CASES[name], engine)
        policy = trainer.policy
        policy.save_pretrained(folder / name)
        policy.save_pretrained(folder / f"{name} merged", merge=True)
        with engine.whole(policy):
            torch.save(policy.model.state_dict(), folder / f"{name} {engine.rank}.pt")


class ReadsLayers:
    """A sampler that copies the weights one after another, and notes how many layers are whole at the same time."""

    reads_by_unit = True

    def __init__(self) -> None:
        self.copied: dict[str, Tensor] = {}
        self.most_whole = 0

    def sync(self, model: Any) -> None:
        from adapters.llm import merged_weights

        layers = [module for name, module in model.named_modules() if name.endswith(("layers.0", "layers.1"))]
        assert len(layers) == 2
        for name, weight in merged_weights(model):
            self.copied[name] = weight.clone()
            whole = [not hasattr(next(layer.parameters()), "device_mesh") for layer in layers]
            self.most_whole = max(self.most_whole, sum(whole))

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nothing is sampled")


def read_by_layers(engine: Sharded) -> dict[str, Any]:
    """What a separate sampler copies after updates, and whether it has all weights, for a model with and without adapters."""
    from adapters.llm import merged_weights

    found = {}
    for name, is_lora in (("all", False), ("lora", True)):
        sampler = ReadsLayers()
        case = replace(CASES["llama"], policy=partial(language_model, "qwen3", lora=is_lora, sampler=sampler))
        trainer, _ = trained(case, engine)
        with engine.whole(trainer.policy):
            wanted = {key: value.clone() for key, value in merged_weights(trainer.policy.model)}
        is_equal = sampler.copied.keys() == wanted.keys() and all(
            torch.equal(sampler.copied[key], value) for key, value in wanted.items()
        )
        again = trainer.update(rows_of(case, trainer.policy, engine.rank, NUM_RANKS))["train/grad_norm"]
        found[name] = {"is equal": is_equal, "most whole": sampler.most_whole, "norm": again}
    return found


def main(rank: int, folder: Path, is_llm: bool) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*gradient_checkpointing")
    store = dist.FileStore(str(folder / "rendezvous"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(minutes=3))
    engine = Sharded(timeout=20.0)
    if is_llm:
        saved_language_model(engine, folder)
        torch.save(read_by_layers(engine), folder / f"read {rank}.pt")
        engine.agree()
        return
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found: dict[str, Any] = {
        "folder": str(folder),
        "cases": results_of(DAILY, {"sharded": engine, "replicated": Replicated()}, "sharded", folder),
        "refused": refused(engine),
        "scheduled": scheduled(engine),
        "elsewhere": samples_elsewhere(engine),
        "whole": whole_state(engine),
        "plain": result_of(CASES["module"], engine),
        "offloaded": result_of(CASES["module"], Sharded(cpu_offload=True)),
        "half": result_of(CASES["module"], Sharded(mixed_precision=half)),
        "replicated": whole_weights(trained(CASES["module"], Replicated())[0]),
        "out of memory": out_of_memory(engine),
        "other calls": other_calls(engine),
    }
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.multiprocessing.start_processes(
        main, (Path(sys.argv[1]), "llm" in sys.argv), nprocs=NUM_RANKS, start_method="fork"
    )
