"""Memory, bytes sent and time of an iteration on 1, 2 and 4 ranks, beside what `examples.scale.costs` predicts.

python -m benchmarks.scale
python -m benchmarks.scale --ranks 1 2 --hidden-size 64 --layers 2 --iterations 2

Each configuration runs in processes of its own, which `torchrun` starts on this machine. All ranks do the same work.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from examples.scale.train import ENGINES

ROOT = Path(__file__).resolve().parents[1]
MEGABYTES = ("weights", "moments", "update", "sampling", "resident", "sent")
SECONDS = ("seconds of sampling", "seconds of the update", "seconds of the exchange")


def run(engine: str, num_ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    sizes = [str(args.hidden_size), str(args.layers), str(args.iterations)]
    done = subprocess.run(
        [*launcher, "-m", "benchmarks._scale_rank", engine, *sizes],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{engine} on {num_ranks} ranks failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def table(found: list[tuple[str, dict[str, Any]]], names: tuple[str, ...], unit: float, digits: int) -> list[str]:
    """One line per configuration: predicted / measured."""
    lines = [f"| engine | ranks | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for engine, result in found:
        cells = [" / ".join(f"{value / unit:.{digits}f}" for value in result[name]) for name in names]
        lines.append(f"| {engine} | {result['num_ranks']} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=9)
    args = parser.parse_args()
    found = [(engine, run(engine, ranks, args)) for engine in args.engines for ranks in args.ranks]
    print(f"{found[0][1]['num_parameters']:,} parameters, float32. Each cell: predicted / measured, of rank 0.\n")
    print("MB of memory and of bytes sent per iteration\n", *table(found, MEGABYTES, 1e6, 1), sep="\n")
    print("\nseconds per iteration, medians\n", *table(found, SECONDS, 1.0, 3), sep="\n")
    print("\nmeasured speeds of a rank\n")
    for engine, result in found:
        machine = result["machine"]
        print(
            f"{engine}, {result['num_ranks']} ranks: {machine['flops'] / 1e9:.0f} GFLOP/s, a step in "
            f"{1e3 * machine['latency']:.1f} ms, {machine['link'] / 1e6:.0f} MB/s to other ranks"
        )


if __name__ == "__main__":
    main()
