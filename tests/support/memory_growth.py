"""Train for many iterations, and print how much the resident memory grows in the second half, in MB.

python -m tests.support.memory_growth bandit|control|critic|tools|llm NUM_ITERATIONS FOLDER
"""

import ctypes
import gc
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.adapter_runs import RUNS


class Measuring:
    """A sink that measures the resident memory after some iterations."""

    def __init__(self, at: tuple[int, ...]) -> None:
        self.at, self.found = at, list[float]()

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        if iteration in self.at:
            self.found.append(resident_memory())

    def close(self) -> None: ...


def resident_memory() -> float:
    """MB that the process holds, after memory that is free inside the process was returned."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main(name: str, num_iterations: int, folder: Path) -> None:
    logging.disable(logging.CRITICAL)
    trainer, states, options = RUNS[name](1)
    sink = Measuring((num_iterations // 2, num_iterations))
    trainer.train(
        states,
        num_iterations=num_iterations,
        sinks=[sink],
        checkpoint_dir=folder,
        checkpoint_every=num_iterations // 20,
        progress=False,
        **options,
    )
    print(sink.found[1] - sink.found[0])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
