"""What a few requests per tool teach: held-out accuracy by the number of requests per tool, on three catalogues.

The catalogues are 30 functions of NumPy with their own docstrings (`_numpy_tools`), 37 functions of BFCL's conversations
(`_conversations`), and the 74 functions of BFCL's single calls that have at least four requests (`_bfcl`). Many functions of
BFCL have fewer requests than a row says. Each split has its own training requests and held-out requests.

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
from benchmarks import _bfcl, _conversations, _numpy_tools
from benchmarks.tools_bfcl import REGULARISATION, no_values
from grpo import GRPOConfig, GRPOTrainer, GRPOWarning, ObjectiveConfig

CONFIG = GRPOConfig(
    group_size=8, learning_rate=0.01, objective=ObjectiveConfig(aggregation="row_sum", entropy_coef=0.03)
)
"""Settings of GRPO: those of the guide."""

NUM_ITERATIONS = 30
"""Iterations of GRPO, each with all training requests."""

NUMBERS = {"NumPy": (0, 2, 3, 4), "conversations": (0, 2, 5, 10, 20), "BFCL": (0, 2, 5, 10, 20)}
"""Numbers of training requests per tool."""

HEAD = f"""
| per tool | encoder | untrained | all | fit | share | fit - untrained | least | fit - all | least |
|{"---|" * 10}"""
"""Head of the tables of `fit` and of GRPO."""

ENCODERS = ("hashing", "WordLlama", "WordLlama + fitted")

Split = tuple[ToolCatalogue, list[ToolTask], list[ToolTask]]


@functools.cache
def wordllama() -> Encoder:
    """WordLlama. Vectors are cached, because all policies of a run need the same ones."""
    return CachedEncoder(_bfcl.wordllama_encoder())


def split(catalogue: str, num_per_tool: int, seed: int) -> Split:
    """The tools, the training tasks and the held-out tasks of a split."""
    if catalogue == "NumPy":
        return _numpy_tools.catalogue(), *_numpy_tools.split(num_per_tool, seed)
    if catalogue == "conversations":
        return _conversations.catalogue(), *_conversations.split(num_per_tool, seed)
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


def untrained(data: Split, encoder: str, seed: int) -> dict[str, float]:  # noqa: ARG001  # as `rewarded` is called
    """The same accuracy three times: without a request there is nothing to learn."""
    found = accuracy(new_policy(data, encoder), data[2])
    return {"untrained": found, "all": found, "fit": found, "share": 0.0}


def fitted(data: Split, encoder: str, seed: int) -> dict[str, float]:  # noqa: ARG001  # as `rewarded` is called
    """Accuracies before and after `fit`, and after keeping everything that is learned."""
    policy, all_the_way = new_policy(data, encoder), new_policy(data, encoder)
    found = {"untrained": accuracy(policy, data[2])}
    all_the_way.fit(data[1], num_folds=1)
    found["all"] = accuracy(all_the_way, data[2])
    report = policy.fit(data[1])
    return {**found, "fit": accuracy(policy, data[2]), "share": report.share}


def rewarded(data: Split, encoder: str, seed: int) -> dict[str, float]:
    """The same with GRPO, which sees the rewards of its own calls only."""
    tool_of = {task.text: task.tool for task in data[1]}
    policy = new_policy(data, encoder)
    found = {"untrained": accuracy(policy, data[2])}

    def right(states: Sequence[ToolTask], calls: Sequence[ToolCall]) -> list[float]:
        return [float(call.tool == tool_of[state.text]) for state, call in zip(states, calls, strict=True)]

    def train(tasks: Sequence[ToolTask]) -> None:
        trainer = GRPOTrainer(config=replace(CONFIG, seed=seed), policy=policy, reward_model=right)
        trainer.train(tasks, num_iterations=NUM_ITERATIONS, progress=False)
        found["all"] = accuracy(policy, data[2])  # at last that of the training with all tasks

    report = policy.fit_to_rewards(data[1], train, right)
    return {**found, "fit": accuracy(policy, data[2]), "share": report.share}


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


def compared(runs: Sequence[dict[str, float]], after: str, before: str) -> str:
    """A paired difference over the splits as two cells: its mean with its standard error, and the least."""
    found = [run[after] - run[before] for run in runs]
    error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
    return f"{statistics.fmean(found):+.3f} ± {error:.3f} | {min(found):+.3f}"


def print_kept(
    measure: Callable[[Split, str, int], dict[str, float]],
    catalogue: str,
    numbers: Sequence[int],
    encoders: Sequence[str],
    seeds: Sequence[int],
) -> None:
    """Print the table of `fit` or of GRPO, and the accuracies of other methods."""
    print(HEAD, flush=True)
    by_others = {}
    for num in numbers:
        of_seed = {seed: split(catalogue, num, seed) for seed in seeds}
        found = measure if num else untrained
        of_encoder = {encoder: [found(data, encoder, seed) for seed, data in of_seed.items()] for encoder in encoders}
        of_encoder["all encoders"] = [run for runs in of_encoder.values() for run in runs]
        for encoder, runs in of_encoder.items():
            means = {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}
            shown = " | ".join(f"{means[name]:.3f}" for name in ("untrained", "all", "fit"))
            differences = f"{compared(runs, 'fit', 'untrained')} | {compared(runs, 'fit', 'all')}"
            print(f"| {num} | {encoder} | {shown} | {means['share']:.2f} | {differences} |", flush=True)
        by_others[num] = [others(data) for data in of_seed.values()]
    for num, runs in by_others.items():
        print_means(f"\n{num} per tool, TF-IDF", runs)


def print_threshold(catalogue: str, numbers: Sequence[int], encoders: Sequence[str], seeds: Sequence[int]) -> None:
    """Print the shares of right answers with thresholds from `numbers` requests of each kind."""
    for num, encoder in itertools.product(numbers, encoders):
        runs = [threshold(split(catalogue, 0, seed), encoder, num, seed) for seed in seeds]
        print_means(f"{num} of each kind, {encoder}", runs)


PARTS = {
    "fit": functools.partial(print_kept, fitted),
    "grpo": functools.partial(print_kept, rewarded),
    "threshold": print_threshold,
}


def print_means(title: str, runs: Sequence[dict[str, float]]) -> None:
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
    for part, catalogue in itertools.product(options.parts, options.catalogues):
        print(f"\n{part}, {catalogue}, seeds 0 to {seeds[-1]}\n", flush=True)
        PARTS[part](catalogue, options.numbers or NUMBERS[catalogue], options.encoders, seeds)


if __name__ == "__main__":
    main()
