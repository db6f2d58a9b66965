"""Time of `import torch, numpy, grpo` compared with `import torch, numpy`, measured as interleaved processes.

It fails if the median of the ratios is above `BOUND`. It measures CPU time, which other programs disturb less than wall time.
Each process has one thread and finds compiled bytecode, as after an installation with pip.

python -m benchmarks.import_time
"""

import argparse
import os
import resource
import subprocess
import sys

from benchmarks._timing import time_pairs

BASE = "import torch, numpy"
OURS = "import torch, numpy, grpo"
BOUND = 1.25
"""The largest ratio that is accepted."""
HEAVY = ("transformers", "gymnasium", "matplotlib", "wandb", "adapters")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {
    "OMP_NUM_THREADS": "1"
}


def run(code: str) -> str:
    """The output of an interpreter that runs `code`."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True).stdout


def cpu_seconds() -> float:
    """CPU time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print the medians, the ratio, and the heavy packages that were imported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=31, help="number of pairs of processes (default: 31)")
    pairs = parser.parse_args().pairs
    times = time_pairs(lambda: run(OURS), lambda: run(BASE), repeats=pairs, warmup=2, clock=cpu_seconds)
    print(f"{OURS}\n  {times} to {BASE}, {pairs} pairs of processes; the bound is {BOUND}")
    loaded = {name.partition(".")[0] for name in run("import grpo, sys; print(*sys.modules)").split()}
    print("imported by grpo: " + (", ".join(name for name in HEAVY if name in loaded) or f"none of {', '.join(HEAVY)}"))
    if times.ratio > BOUND:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
