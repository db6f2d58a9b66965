"""What a few requests per tool teach: held-out accuracy by the number of requests per tool, on two catalogues.

The catalogues are 30 functions of NumPy with their own docstrings (`_numpy_tools`), and 74 functions of BFCL (`_bfcl`). Many
functions of BFCL have fewer requests than a row says. Each split has its own training requests and held-out requests.

    python -m benchmarks.tools_few                               # about half an hour
    python -m benchmarks.tools_few --catalogues NumPy --encoders WordLlama --seeds 2 --numbers 2
    python -m benchmarks.tools_few --parts grpo                  # the same with GRPO, about half an hour
    python -m benchmarks.tools_few --parts threshold
"""

import argparse
import functools
import itertools
import random
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from adapters.tools import (
    FittedEncoder,
    HashingEncoder,
    JoinedEncoder,
    ToolCall,
    ToolCatalogue,
    ToolSelectionPolicy,
    ToolTask,
)
from adapters.tools.policy.fitting import has_right_tool
from adapters.tools.policy.threshold import best_threshold
from adapters.tools.text.encoders import CachedEncoder, Encoder
from benchmarks import _bfcl, _numpy_tools
from benchmarks.tools_bfcl import REGULARISATION, no_values
from grpo import GRPOConfig, GRPOTrainer, GRPOWarning, ObjectiveConfig

CONFIG = GRPOConfig(group_size=8, objective=ObjectiveConfig(aggregation="row_sum", entropy_coef=0.03))
"""Settings of GRPO, beside the learning rate: those of the guide."""

RATES = (0.05, 0.01)
"""Learning rates of GRPO."""

NUM_ITERATIONS = 30
"""Iterations of GRPO, each with all training requests."""

NUMBERS = {"NumPy": (2, 3, 4), "BFCL": (2, 5, 10, 20)}
"""Numbers of training requests per tool."""

ENCODERS = ("hashing", "WordLlama", "WordLlama + fitted")
PARTS = ("fit", "grpo", "threshold")

Split = tuple[ToolCatalogue, list[ToolTask], list[ToolTask]]


@functools.cache
def wordllama() -> Encoder:
    """WordLlama. Vectors are cached, because all policies of a run need the same ones."""
    return CachedEncoder(_bfcl.wordllama_encoder())


def split(catalogue: str, num_per_tool: int, seed: int) -> Split:
    """The tools, the training tasks and the held-out tasks of a split."""
    if catalogue == "NumPy":
        return _numpy_tools.catalogue(), *_numpy_tools.split(num_per_tool, seed)
    tools = _bfcl.catalogue_of(4)
    training, validation, held_out = _bfcl.split(_bfcl.questions(tools), seed)
    of_tool: dict[str, list[_bfcl.Question]] = {}
    for question in (*training, *validation):
        of_tool.setdefault(question.tool, []).append(question)
    chosen = [
        question
        for name, own in of_tool.items()
        for question in random.Random(f"{seed} {name}").sample(own, min(num_per_tool, len(own)))
    ]
    return tools, [question.task(tools) for question in chosen], [question.task(tools) for question in held_out]


def new_policy(data: Split, encoder: str) -> ToolSelectionPolicy:
    """An untrained policy."""
    texts = [*(task.text for task in data[1]), *(tool.text for tool in data[0].values())]
    encoders: dict[str, Callable[[], Encoder]] = {
        "hashing": HashingEncoder,
        "WordLlama": wordllama,
        "WordLlama + fitted": lambda: JoinedEncoder(wordllama(), FittedEncoder().fit(texts)),
    }
    return ToolSelectionPolicy(data[0], encoder=encoders[encoder](), fill=no_values)


def accuracy(policy: ToolSelectionPolicy, tasks: Sequence[ToolTask]) -> float:
    """Share of the tasks whose most likely tool is right."""
    return float(has_right_tool(policy, tasks).mean())


def fitted(data: Split, encoder: str) -> dict[str, float]:
    """Accuracies before and after `fit`, and after keeping everything that is learned."""
    policy, all_the_way = new_policy(data, encoder), new_policy(data, encoder)
    found = {"untrained": accuracy(policy, data[2])}
    all_the_way.fit(data[1], num_folds=1)
    found["num_folds=1"] = accuracy(all_the_way, data[2])
    report = policy.fit(data[1])
    return {**found, "fit": accuracy(policy, data[2]), "share": report.share}


def rewarded(data: Split, encoder: str, seed: int) -> dict[str, float]:
    """Accuracies before and after GRPO, with weights that are free and with weights that are held."""
    tool_of = {task.text: task.tool for task in data[1]}

    def right(states: Sequence[ToolTask], calls: Sequence[ToolCall]) -> list[float]:
        return [float(call.tool == tool_of[state.text]) for state, call in zip(states, calls, strict=True)]

    found = {"untrained": accuracy(new_policy(data, encoder), data[2])}
    for rate, (name, strength) in itertools.product(RATES, (("free", 0.0), ("held", 0.05))):
        torch.manual_seed(seed)
        policy = new_policy(data, encoder)
        policy.hold_weights(num_requests=len(data[1]), strength=strength)
        trainer = GRPOTrainer(config=replace(CONFIG, learning_rate=rate), policy=policy, reward_model=right)
        for _ in range(NUM_ITERATIONS):
            trainer.step(data[1])
        found[f"{name}, rate {rate}"] = accuracy(policy, data[2])
        found[f"{name}, rate {rate}, training"] = accuracy(policy, data[1])
    return found


def others(data: Split) -> dict[str, float]:
    """Accuracies of the nearest description by TF-IDF, and of logistic regression on TF-IDF.

    The regression learns from the descriptions, too. Its regularisation is the best of four on the held-out requests, which
    favours it.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    tools, training, held_out = data
    texts = [tool.text for tool in tools.values()] + [task.text for task in training]
    names = [*tools, *(task.tool for task in training)]
    vectorizer = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), stop_words="english").fit(texts)
    features, asked = vectorizer.transform(texts), vectorizer.transform([task.text for task in held_out])
    right = [task.tool for task in held_out]
    nearest = (asked @ features[: len(tools)].T).toarray().argmax(1)
    classifiers = [LogisticRegression(C=c, max_iter=500).fit(features, names) for c in REGULARISATION]
    return {
        "nearest description": statistics.fmean(names[n] == one for n, one in zip(nearest, right, strict=True)),
        "regression": max(float(model.score(asked, right)) for model in classifiers),
    }


def threshold(data: Split, encoder: str, num: int, seed: int) -> dict[str, float]:
    """Shares of right answers of an untrained policy on other requests, with thresholds from `num` requests of each kind.

    The threshold is that of `calibrate_threshold`, and the best one on these requests, which is not confirmed.
    """
    policy = new_policy(data, encoder)
    wanted = random.Random(seed).sample(data[2], len(data[2]))
    unwanted = random.Random(seed).sample(
        [ToolTask(text=text, tool=None) for text in sorted(set(_bfcl.irrelevant()["irrelevance"]))], 200
    )
    best = best_threshold(*(torch.tensor(confidences(policy, tasks[:num])) for tasks in (wanted, unwanted)))
    policy.calibrate_threshold(wanted[:num], unwanted[:num])
    found = {"right tool, no threshold": accuracy(policy, wanted[num:]), "chosen": float(policy.threshold > 0)}
    for name, value in (("calibrated", policy.threshold), ("always chosen", best)):
        policy.threshold = value
        calls = zip(policy.predict(wanted[num:]), wanted[num:], strict=True)
        found[f"right tool, {name}"] = statistics.fmean(
            call is not None and call.tool == task.tool for call, task in calls
        )
        found[f"no tool, {name}"] = statistics.fmean(call is None for call in policy.predict(unwanted[num:]))
    return found


def confidences(policy: ToolSelectionPolicy, tasks: Sequence[ToolTask]) -> list[float]:
    """The confidence in the most likely tool of each task."""
    return [best.confidence for [best] in policy.predict_top(tasks, 1)]


def row(title: str, runs: Sequence[dict[str, float]]) -> None:
    """Print the means over the splits, each with its name."""
    shown = "; ".join(f"{name} {statistics.fmean(run[name] for run in runs):.3f}" for name in runs[0])
    print(f"{title}: {shown}", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="number of splits (default 5)")
    parser.add_argument("--catalogues", nargs="+", choices=NUMBERS, default=[*NUMBERS])
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=ENCODERS)
    parser.add_argument("--numbers", nargs="+", type=int, help="requests per tool (default: several)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["fit"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", GRPOWarning)  # the tables show what the warnings say
    seeds = range(options.seeds)
    for part in options.parts:
        for catalogue in options.catalogues:
            print(f"\n{part}, {catalogue}, seeds 0 to {seeds[-1]}\n", flush=True)
            for num in options.numbers or NUMBERS[catalogue]:
                of_seed = [split(catalogue, 0 if part == "threshold" else num, seed) for seed in seeds]
                if part == "fit":
                    row(f"{num}, TF-IDF", [others(data) for data in of_seed])
                for encoder in options.encoders:
                    match part:
                        case "fit":
                            runs = [fitted(data, encoder) for data in of_seed]
                            least = min(run["fit"] - run["untrained"] for run in runs)
                            title = f"{num}, {encoder}, least {least:+.3f}"
                        case "grpo":
                            runs = [rewarded(data, encoder, seed) for data, seed in zip(of_seed, seeds, strict=True)]
                            least = min(run["held, rate 0.01"] - run["untrained"] for run in runs)
                            title = f"{num}, {encoder}, least {least:+.3f}"
                        case "threshold":
                            runs = [
                                threshold(data, encoder, num, seed) for data, seed in zip(of_seed, seeds, strict=True)
                            ]
                            title = f"{num}, {encoder}"
                    row(title, runs)


if __name__ == "__main__":
    main()
