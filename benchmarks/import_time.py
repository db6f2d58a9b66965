"""Time of `import grpo` compared with `import torch, numpy`, measured as interleaved processes.

python -m benchmarks.import_time
"""

import statistics
import subprocess
import sys
import time

BASE = "import torch, numpy"
OURS = "import torch, numpy, grpo"
HEAVY = ("transformers", "gymnasium", "matplotlib", "wandb", "adapters")


def seconds(code: str) -> float:
    """Wall time of one interpreter that runs `code`."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main() -> None:
    """Print the medians, the ratio, and the heavy packages that were imported."""
    for code in (BASE, OURS):
        seconds(code)
    pairs = [(seconds(OURS), seconds(BASE)) for _ in range(15)]
    ours, base = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"{BASE:28s}{base:.2f} s\n{OURS:28s}{ours:.2f} s   ratio {ratio:.3f} (median of {len(pairs)} pairs)")
    listing = subprocess.run(
        [sys.executable, "-c", "import grpo, sys; print(' '.join(sys.modules))"],
        check=True,
        capture_output=True,
        text=True,
    )
    loaded = {name.partition(".")[0] for name in listing.stdout.split()}
    print("imported by grpo: " + (", ".join(name for name in HEAVY if name in loaded) or f"none of {', '.join(HEAVY)}"))


if __name__ == "__main__":
    main()
