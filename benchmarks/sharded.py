"""Memory and time per rank of a language model whose weights are divided among ranks, beside copies of it on each rank.

python -m benchmarks.sharded

The ranks are processes of one machine that meet over gloo, so the times are no prediction for ranks with a GPU each.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from adapters.llm import HFOptions, HFPolicy, SamplingConfig
from adapters.llm.model.loading import add_lora
from grpo import GRPOConfig, GRPOTrainer
from grpo.distributed import Replicated, Sharded
from grpo.engine import OneProcess

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 4096, "head_dim": 64}
HEADS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS = 4, 4, 16


def digits() -> PreTrainedTokenizerFast:
    """A tokenizer of the ten digits."""
    tokenizer = Tokenizer(
        models.WordLevel({"<pad>": 0} | {str(digit): digit + 1 for digit in range(10)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def policy(*, lora: bool, layers: int) -> HFPolicy:
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, num_hidden_layers=layers))
    if lora:
        model = add_lora(model)
    sampling = SamplingConfig(max_new_tokens=MAX_NEW_TOKENS)
    return HFPolicy(model, digits(), sampling=sampling, options=HFOptions(end_token_ids=()))


def megabytes(tensors: Any) -> float:
    """The memory that tensors hold, each storage once."""
    storages = {}
    for tensor in tensors:
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values()) / 2**20


def measured(engine: Any, *, lora: bool, layers: int, iterations: int) -> dict[str, float]:
    trained = policy(lora=lora, layers=layers)
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=GROUP_SIZE, learning_rate=1e-4, seed=0),
        policy=trained,
        reward_model=lambda _, actions: [float(sum(action.token_ids) % 7) for action in actions],
        engine=engine,
    )
    states = [f"{number}" for number in range(PROMPTS)][engine.rank :: engine.num_ranks]
    found = [trainer.step(states) for _ in range(iterations)][1:]
    gc.collect()
    parameters = list(trained.model.parameters())
    assert trainer.optimizer is not None
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    times = {name: statistics.median(one[f"time/{name}"] for one in found) for name in ("sample", "update")}
    alive = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    return {"weights": megabytes(parameters), "moments": megabytes(moments), "alive": megabytes(alive)} | times


def on_rank(rank: int, num_ranks: int, kind: str, folder: Path, **sizes: Any) -> None:
    store = dist.FileStore(str(folder / "rendezvous"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    engine = {"replicated": Replicated, "sharded": Sharded}[kind](timeout=300.0)
    torch.save(measured(engine, **sizes), folder / f"{rank}.pt")
    engine.agree()


def on_ranks(num_ranks: int, kind: str, **sizes: Any) -> dict[str, float]:
    """The largest figure of any rank."""
    with tempfile.TemporaryDirectory() as name:
        folder, children = Path(name), []
        for rank in range(num_ranks):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    on_rank(rank, num_ranks, kind, folder, **sizes)
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        assert not any(os.waitpid(child, 0)[1] for child in children)
        ranks = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(num_ranks)]
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and time per rank, with divided and with copied weights.")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--iterations", type=int, default=4, help="of which the first is not timed (at least 2)")
    options = vars(parser.parse_args())
    torch.set_num_threads(1)
    print("| trained | ranks | weights | moments | of one process | all tensors | sampling | update |")
    print("|---|---|---|---|---|---|---|---|")
    for lora in (False, True):
        alone: dict[str, float] = {}
        for num_ranks, kind in ((1, "one process"), (2, "replicated"), (2, "sharded"), (4, "sharded")):
            begun = time.perf_counter()
            if kind == "one process":
                found = alone = measured(OneProcess(), lora=lora, **options)
            else:
                found = on_ranks(num_ranks, kind, lora=lora, **options)
            ratio = (found["weights"] + found["moments"]) / (alone["weights"] + alone["moments"])
            cells = [
                f"{found['weights']:.1f} MB",
                f"{found['moments']:.1f} MB",
                f"{ratio:.3f} x",
                f"{found['alive']:.1f} MB",
            ]
            cells += [f"{found['sample']:.2f} s", f"{found['update']:.2f} s"]
            print(f"| {'LoRA' if lora else 'all'} | {num_ranks}, {kind} | {' | '.join(cells)} |", flush=True)
            assert time.perf_counter() - begun < 300


if __name__ == "__main__":
    main()
