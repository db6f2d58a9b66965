"""One rank of `benchmarks.scale`: it trains for some iterations, and prints what they cost beside what was predicted.

torchrun --nproc-per-node 2 -m benchmarks._scale_rank ENGINE HIDDEN_SIZE LAYERS ITERATIONS
"""

import json
import os
import random
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from adapters.llm import HFPolicy, SamplingConfig
from benchmarks._memory import peak_extra_memory
from examples.scale.costs import EngineName, Machine, Model, Run, bytes_sent, memory, seconds
from examples.scale.model import CHARACTERS, make_model, make_tokenizer
from examples.scale.train import make_engine
from grpo import GRPOConfig, GRPOTrainer

NUM_PROMPTS = 4  # on one rank, so that the work of a rank does not depend on the number of ranks
GROUP_SIZE = 8
PROMPT_LENGTH = 12
NEW_TOKENS = 16
CALIBRATION = 16, 32
"""Rows and positions of the forward pass that measures a rank's speed."""
EXCHANGES = ("all_reduce", "all_gather_into", "reduce_scatter")
"""Methods of the ranks' connections that exchange weights and gradients."""
BYTES_SENT_AT = 200
"""Offset of `tcpi_bytes_sent` in the kernel's `struct tcp_info`."""


def bytes_of_sockets() -> int:
    """Bytes that this process has sent over its open TCP connections, as the kernel counts them."""
    total = 0
    for file in Path("/proc/self/fd").iterdir():
        try:
            if not str(file.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", info, BYTES_SENT_AT)[0]
        except OSError:  # closed meanwhile
            continue
    return total


def resident(field: str = "VmRSS") -> int:
    """Memory of this process in bytes, now (VmRSS) or at its peak (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def num_bytes(tensors: Iterator[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def median_time(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measured_machine(engine: Any, hidden_size: int, num_layers: int) -> Machine:
    """The speeds of this rank while all ranks measure theirs."""
    model, (rows, length) = make_model(hidden_size, num_layers), CALIBRATION
    num_parameters = sum(tensor.numel() for tensor in model.parameters())
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    with torch.no_grad():
        latency = median_time(lambda: model(input_ids=tokens[:1, :1]), 20)
        forward = median_time(lambda: model(input_ids=tokens), 10)
    flops = 2 * rows * length * num_parameters / forward
    link = float("inf")
    if engine.num_ranks > 1:
        gradient = torch.randn(num_parameters)
        once = 2 * (engine.num_ranks - 1) / engine.num_ranks
        link = once * gradient.nbytes / median_time(lambda: engine.sum(gradient), 5)
    return Machine(flops=flops, latency=latency, link=link)


@contextmanager
def timed_exchanges(engine: Any) -> Iterator[list[float]]:
    """The seconds of each large exchange inside the block. Ranks meet before each, so no wait for slower ranks is counted."""
    times: list[float] = []

    def timed(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Tensor) -> Any:
            start = time.perf_counter()
            result = exchange(*tensors)
            times.append(time.perf_counter() - start)
            return result

        return call

    for name in EXCHANGES:
        setattr(engine._meetings, name, timed(getattr(engine._meetings, name)))
    yield times
    for name in EXCHANGES:
        delattr(engine._meetings, name)


def make_trainer(engine: Any, hidden_size: int, num_layers: int) -> GRPOTrainer:
    torch.manual_seed(0)
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)  # equal work on all ranks
    policy = HFPolicy(make_model(hidden_size, num_layers), make_tokenizer(), sampling=sampling)
    config = GRPOConfig(group_size=GROUP_SIZE, learning_rate=1e-4, seed=0)
    return GRPOTrainer(config=config, policy=policy, reward_model=noise, engine=engine)


def noise(states: Any, _actions: Any) -> list[float]:
    """Rewards of which no two are equal, so that every row is trained."""
    return [random.random() for _ in states]


def measured(name: EngineName, hidden_size: int, num_layers: int, num_iterations: int) -> dict[str, Any]:
    before = resident()
    engine = make_engine(name, 60.0)
    trainer = make_trainer(engine, hidden_size, num_layers)
    policy: HFPolicy = trainer.policy
    num_parameters = sum(tensor.numel() for tensor in policy.get_parameters().values())
    model = Model(num_parameters=num_parameters, num_layers=num_layers, hidden_size=hidden_size)
    run = Run(
        num_ranks=engine.num_ranks,
        num_prompts=NUM_PROMPTS,
        group_size=GROUP_SIZE,
        prompt_length=PROMPT_LENGTH,
        new_tokens=NEW_TOKENS,
    )
    draw = random.Random(engine.rank)
    prompts = ["".join(draw.choices(CHARACTERS[1:11], k=PROMPT_LENGTH)) for _ in range(NUM_PROMPTS)]

    trainer.step(prompts)  # one-time costs
    sent = bytes_of_sockets()
    history = [trainer.step(prompts) for _ in range(num_iterations)]
    sent = (bytes_of_sockets() - sent) // num_iterations
    with timed_exchanges(engine) as times:
        for _ in range(3):
            trainer.step(prompts)
    exchanged = sum(times) / 3
    grown = resident("VmHWM") - before

    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    batch = trainer.collect(prompts)
    update = peak_extra_memory(lambda: trainer.update(batch))
    sampling = peak_extra_memory(lambda: trainer.collect(prompts))
    weights, moment_bytes = num_bytes(iter(policy.get_parameters().values())), num_bytes(iter(moments))

    machine = measured_machine(engine, hidden_size, num_layers)
    predicted = memory(model, run, name)
    times = seconds(model, run, machine, name)
    median = {part: statistics.median(metrics[f"time/{part}"] for metrics in history) for part in ("sample", "update")}
    return {
        "num_ranks": engine.num_ranks,
        "num_parameters": num_parameters,
        "machine": {"flops": machine.flops, "latency": machine.latency, "link": machine.link},
        "weights": (predicted["weights"], weights),
        "moments": (predicted["moments"], moment_bytes),
        "update": (predicted["update"], weights + moment_bytes + update),
        "sampling": (predicted["sampling"], weights + moment_bytes + sampling),
        "resident": (max(predicted["update"], predicted["sampling"]), grown),
        "sent": (bytes_sent(model, run, name), sent),
        "seconds of sampling": (times["sampling"], median["sample"]),
        "seconds of the update": (times["update"] + times["exchange"], median["update"]),
        "seconds of the exchange": (times["exchange"], exchanged),
    }


def main() -> None:
    name, hidden_size, num_layers, num_iterations = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measured(name, hidden_size, num_layers, num_iterations)  # type: ignore[arg-type]
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
