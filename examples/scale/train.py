"""Train one policy on one process, on several ranks, or on several GPUs. The script is the same, and so are its settings.

    python -m examples.scale.train                               # one process; ten seconds, nothing is downloaded
    torchrun --nproc-per-node 2 -m examples.scale.train          # two ranks; on CPUs, or on a GPU each
    torchrun --nproc-per-node 2 -m examples.scale.train --engine sharded --iterations-ahead 1

A tiny language model learns to repeat the digits of its prompt. Each rank samples for its share of the prompts, and an update
uses the rows of all ranks. With --engine sharded, each rank holds a part of the weights. Checkpoints are in runs/scale. If the
run is stopped, the same command continues it.
"""

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from adapters.llm import CompletionRewards, HFPolicy, SamplingConfig
from grpo import GRPOConfig, GRPOTrainer
from grpo.distributed import Replicated, Sharded
from grpo.engine import Engine, OneProcess

from .model import NUM_DIGITS, make_model, make_prompts, make_tokenizer, repeated


def join_ranks() -> str:
    """Join the processes that `torchrun` started, and return this process's device."""
    has_gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if has_gpu else "cpu"
    if has_gpu:
        torch.cuda.set_device(device)
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if has_gpu else "gloo")
    return device


ENGINES = {"replicated": Replicated, "sharded": Sharded}


def make_engine(name: str, timeout: float) -> Engine:
    """The engine of that name, or the one for a single process."""
    return ENGINES[name](timeout=timeout) if dist.is_initialized() else OneProcess()


def make_policy(hidden_size: int, num_layers: int, seed: int) -> HFPolicy:
    torch.manual_seed(seed)  # all ranks start from the same weights
    model = make_model(hidden_size, num_layers)
    return HFPolicy(model, make_tokenizer(), sampling=SamplingConfig(max_new_tokens=NUM_DIGITS))


def fingerprint(policy: HFPolicy) -> str:
    """SHA-256 of the trained weights, shortened. Divided weights are gathered, so all ranks call this function."""
    found = hashlib.sha256()
    for value in policy.get_parameters().values():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(value.detach().cpu().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def train(args: argparse.Namespace, device: str) -> None:
    engine = make_engine(args.engine, args.timeout)
    policy = make_policy(args.hidden_size, args.layers, args.seed)
    prompts, held_out = make_prompts(args.seed)
    config = GRPOConfig(
        group_size=8,
        num_states_per_iteration=32,  # on all ranks together
        batch_size=64 // engine.num_ranks,  # rows per update on one rank
        learning_rate=3e-3,
        iterations_ahead=args.iterations_ahead,
        seed=args.seed,
        device=device,
    )
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=CompletionRewards(repeated), engine=engine)
    own = held_out[engine.rank :: engine.num_ranks]  # the evaluation counts the rows of all ranks
    before = trainer.evaluate(own)["eval/avg_reward"]
    trainer.train(
        prompts, num_iterations=args.iterations, checkpoint_dir=args.folder, resume="auto", progress=engine.rank == 0
    )
    after = trainer.evaluate(own)["eval/avg_reward"]
    fingerprints = engine.gather_objects(fingerprint(policy))
    if engine.rank == 0:
        print(f"{engine.num_ranks} ranks on {device}, {sum(p.numel() for p in policy.model.parameters()):,} parameters")
        print(
            f"digits right on held-out prompts: {before:.3f} before, {after:.3f} after {trainer.iteration} iterations"
        )
        print(f"weights of each rank: {' '.join(fingerprints)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="replicated", help="with torchrun (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--iterations-ahead", type=int, default=0, help="sample so many iterations before the update")
    parser.add_argument("--hidden-size", type=int, default=64, help="a multiple of 32 (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that ranks wait for one another")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/scale"), help="checkpoints (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # more threads do not help a model this small
    device = join_ranks()
    try:
        train(args, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
