"""Choose among the functions of the Berkeley Function Calling Leaderboard (BFCL), whose requests nobody here wrote.

Each question of BFCL is a state, and a call gets reward 0.5 for the right function and up to 0.5 for the right values of its
enumerated parameters. Training sees the rewards of its own calls only. Figures are the share of the held-out requests, which
share no text with the training requests, for which the right function is chosen.

    python -m benchmarks.tools_bfcl                   # about ten minutes
    python -m benchmarks.tools_bfcl --seeds 1 --parts requests
    python -m benchmarks.tools_bfcl --tune            # the search for the settings, on the validation requests
"""

import argparse
import functools
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from adapters.tools import (
    FittedEncoder,
    HashingEncoder,
    JoinedEncoder,
    ToolCall,
    ToolCatalogue,
    ToolSelectionPolicy,
    fill_from_request,
)
from adapters.tools.text.encoders import CachedEncoder, Encoder
from benchmarks._bfcl import (
    Question,
    catalogue_of,
    irrelevant,
    is_right,
    minilm_encoder,
    questions,
    split,
    split_tools,
    tools,
    wordllama_encoder,
)
from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig
from grpo.errors import GRPOWarning

CONFIG = GRPOConfig(
    group_size=8,
    num_states_per_iteration=64,
    batch_size=64,
    learning_rate=0.005,
    lr_schedule="cosine",
    objective=ObjectiveConfig(aggregation="row_sum", entropy_coef=0.01),
)
"""Settings chosen in a few trial runs on other splits of the same questions. `--tune` searches on the validation requests."""

NUM_ITERATIONS = 400
"""400 iterations of 64 requests with 8 calls: 204,800 calls."""

MORE, MORE_ITERATIONS = replace(CONFIG, num_states_per_iteration=512, batch_size=128, learning_rate=0.01), 20
"""Settings and number of iterations after tools are added: 81,920 calls."""

REGULARISATION = (1.0, 10.0, 100.0, 1000.0)
"""Inverse strengths of regularisation, among which the validation requests choose for logistic regression."""

SHARE = 0.05
"""`share` of `ToolSelectionPolicy.calibrate`: its default."""

MIN_QUESTIONS = {74: 4, 261: 2}
"""Maps the number of tools of a table to the number of questions that each of them has at least."""

PARTS = ("requests", "added", "no tool", "speed")

LIGHT, BEST = "WordLlama + fitted", "MiniLM + WordLlama + fitted"
"""Names of encoders: one whose vectors cost 0.1 ms per text, and one with a sentence transformer. BEST has the best validation
accuracy of `fit` over both tables."""


def no_values(state: Any, tool: Any) -> dict[str, Any]:  # noqa: ARG001
    """No value: in training, only the function and its enumerated parameters count."""
    return {}


def reward(asked: Sequence[Question], calls: Sequence[ToolCall]) -> list[float]:
    """0.5 for the right function, and 0.5 times the share of its enumerated parameters with a right value."""
    return [_reward(question, call) for question, call in zip(asked, calls, strict=True)]


def _reward(question: Question, call: ToolCall) -> float:
    if call.tool != question.tool:
        return 0.0
    decided = [choices.name for choices in question.offered.choices if choices.name in question.allowed]
    right = [name for name in decided if call.arguments.get(name, "") in question.allowed[name]]
    return 0.5 + 0.5 * (len(right) / len(decided) if decided else 1.0)


@functools.cache
def minilm() -> Encoder:
    """all-MiniLM-L6-v2. Vectors are cached, because all policies of a run need the same ones."""
    return CachedEncoder(minilm_encoder())


def encoders(texts: Sequence[str]) -> dict[str, Callable[[], Encoder]]:
    """Encoders by name. `texts` are the training requests and the texts of the tools."""
    return {
        "hashing": HashingEncoder,
        "fitted": lambda: FittedEncoder().fit(texts),
        "WordLlama": wordllama_encoder,
        LIGHT: lambda: JoinedEncoder(wordllama_encoder(), FittedEncoder().fit(texts)),
        BEST: lambda: JoinedEncoder(minilm(), wordllama_encoder(), FittedEncoder().fit(texts)),
    }


def new_policy(catalogue: ToolCatalogue, training: Sequence[Question], encoder: str) -> ToolSelectionPolicy:
    """An untrained policy over a catalogue."""
    texts = [*(question.text for question in training), *(tool.text for tool in catalogue.values())]
    return ToolSelectionPolicy(
        catalogue, encoder=encoders(texts)[encoder](), describe=lambda question: question.text, fill=no_values
    )


def right_tool(policy: ToolSelectionPolicy, asked: Sequence[Question]) -> float:
    """Share of the questions, in percent, for which the most likely function is right."""
    calls = policy.predict(asked)
    right = [call is not None and call.tool == question.tool for question, call in zip(asked, calls, strict=True)]
    return 100 * statistics.fmean(right)


def learn(
    policy: ToolSelectionPolicy,
    asked: Sequence[Question],
    seed: int,
    num_iterations: int = NUM_ITERATIONS,
    config: GRPOConfig = CONFIG,
) -> None:
    """Train a policy from rewards alone."""
    trainer = GRPOTrainer(config=replace(config, seed=seed), policy=policy, reward_model=reward)
    shuffled = random.Random(seed).sample(list(asked), len(asked))
    trainer.train(shuffled, num_iterations=num_iterations, progress=False)


def logistic_regression(
    training: Sequence[Question], validation: Sequence[Question], held_out: Sequence[Question], policy: Any | None
) -> float:
    """Accuracy in percent of a classifier that is told the right function, on TF-IDF or on the policy's encoder.

    The validation requests choose the regularisation. Then they are learned from, too.
    """
    import scipy.sparse
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    texts = [[question.text for question in part] for part in (training, validation, held_out)]
    names = [[question.tool for question in part] for part in (training, validation, held_out)]
    described = [tools()[name] for name in dict.fromkeys(names[0])]  # every class also has its description
    texts[0] += [tool.text for tool in described]
    names[0] += [tool.name for tool in described]
    if policy is None:
        tfidf = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2)).fit(texts[0])
        features: list[Any] = [tfidf.transform(part) for part in texts]
    else:
        features = [policy.encoder(part).numpy() for part in texts]
    fitted = [LogisticRegression(C=c, max_iter=500).fit(features[0], names[0]) for c in REGULARISATION]
    best = max(fitted, key=lambda model: model.score(features[1], names[1]))
    join = np.concatenate if policy is not None else scipy.sparse.vstack
    final = LogisticRegression(C=best.C, max_iter=500).fit(join(features[:2]), names[0] + names[1])
    return 100 * final.score(features[2], names[2])


def call_figures(policy: ToolSelectionPolicy, asked: Sequence[Question]) -> dict[str, float]:
    """Shares in percent of right calls by BFCL's rule: with the stock `fill`, and with the right values."""
    found = {}
    for name, fill in (
        ("right call, stock fill", lambda question, tool: fill_from_request(question.text, tool)),
        ("right call, values given", lambda question, tool: question.arguments if tool.name == question.tool else {}),
    ):
        policy.fill = fill
        calls = policy.predict(asked)
        right = [call is not None and is_right(question, call) for question, call in zip(asked, calls, strict=True)]
        found[name] = 100 * statistics.fmean(right)
    policy.fill = no_values
    return found


def what_is_missing(policy: ToolSelectionPolicy, asked: Sequence[Question]) -> dict[str, float]:
    """Shares in percent that tell why the most likely function is wrong: many functions of BFCL do the same."""
    several = [question for question in asked if len({*question.menu} & {*policy.catalogue}) > 1]
    first_three = [{one.call.tool for one in best} for best in policy.predict_top(asked, 3)]
    hits = [question.tool in names for question, names in zip(asked, first_three, strict=True)]
    found = {
        "right tool among the first three": 100 * statistics.fmean(hits),
        "right tool, questions that offer several": right_tool(policy, several),
    }
    policy.available = lambda question: question.menu
    found["right tool of those that are offered, the same questions"] = right_tool(policy, several)
    policy.available = None
    return found


def on_held_out_requests(min_questions: int, num_iterations: int, seed: int) -> dict[str, float]:
    """Figures where every tool has training requests."""
    catalogue = catalogue_of(min_questions)
    training, validation, held_out = split(questions(catalogue), seed)
    both = [*training, *validation]  # the settings stand, so the validation requests are learned from, too
    found = {"untrained, hashing": right_tool(new_policy(catalogue, training, "hashing"), held_out)}
    supervised = {"logistic regression, TF-IDF": logistic_regression(training, validation, held_out, None)}
    for encoder in (LIGHT, BEST):
        policy = new_policy(catalogue, training, encoder)
        found[f"untrained, {encoder}"] = right_tool(policy, held_out)
        supervised[f"logistic regression, {encoder}"] = logistic_regression(training, validation, held_out, policy)
        policy.fit([question.task(catalogue) for question in both])
        supervised[f"supervised (fit), {encoder}"] = right_tool(policy, held_out)
    found |= supervised
    for encoder in ("hashing", "fitted", "WordLlama", LIGHT, BEST):
        policy = new_policy(catalogue, both, encoder)
        learn(policy, both, seed, num_iterations)
        found[f"GRPO, {encoder}"] = right_tool(policy, held_out)
    return found | what_is_missing(policy, held_out) | call_figures(policy, held_out)


def on_added_tools(num_iterations: int, seed: int) -> dict[str, float]:
    """Figures where 24 of 74 tools are added after the training with the other 50."""
    everything = catalogue_of(4)
    known, new = split_tools(everything, seed=seed)
    training, _, held_out = split(questions(known), seed)
    training_new, _, held_out_new = split(questions(new), seed)
    asked_new = questions(new)
    policy = new_policy(everything.without(*new), training, LIGHT)
    untrained = ToolSelectionPolicy(
        everything, encoder=policy.encoder, describe=lambda question: question.text, fill=no_values
    )
    found = {"new, untrained (nearest description)": right_tool(untrained, asked_new)}
    learn(policy, training, seed, num_iterations)
    found["known, before"] = right_tool(policy, held_out)
    policy.add_tools(*(everything[name] for name in new))
    found["new, added"] = right_tool(policy, asked_new)
    policy.calibrate(training, share=SHARE)
    found["new, calibrated"] = right_tool(policy, asked_new)
    found["new, calibrated minus nearest"] = found["new, calibrated"] - found["new, untrained (nearest description)"]
    found["known, calibrated"] = right_tool(policy, held_out)
    policy.available = lambda _: new
    found["new, among the new tools only"] = right_tool(policy, asked_new)
    policy.available = None
    both = [*training, *training_new]
    learn(policy, both, seed, MORE_ITERATIONS, MORE)
    found[f"new, after {MORE_ITERATIONS} iterations"] = right_tool(policy, held_out_new)
    found[f"known, after {MORE_ITERATIONS} iterations"] = right_tool(policy, held_out)
    whole = new_policy(everything, both, LIGHT)
    learn(whole, both, seed, num_iterations)
    found["new, trained with all 74 from the start"] = right_tool(whole, held_out_new)
    found["known, trained with all 74 from the start"] = right_tool(whole, held_out)
    return found


def on_irrelevant_requests(num_iterations: int, seed: int) -> dict[str, float]:
    """How well the confidence separates held-out requests from requests for which no function is right."""
    catalogue = catalogue_of(4)
    training, validation, held_out = split(questions(catalogue), seed)
    policy = new_policy(catalogue, training, LIGHT)
    learn(policy, training, seed, num_iterations)
    policy.describe = lambda asked: asked if isinstance(asked, str) else asked.text
    found = {}
    for name, others in irrelevant().items():
        random.Random(seed).shuffle(others)
        half = len(others) // 2
        policy.threshold = 0.0  # a threshold of the other file would stay where these requests confirm no better one
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", GRPOWarning
            )  # a threshold that too few requests confirm stays: the table shows it
            policy.calibrate_threshold(validation, others[:half])
        wanted, unwanted = (
            torch.tensor([row[0].confidence for row in policy.predict_top(asked, 1)])
            for asked in (held_out, others[half:])
        )
        above = wanted.unsqueeze(1) - unwanted
        found[f"{name}: AUROC"] = float((above > 0).double().mean() + 0.5 * (above == 0).double().mean())
        found[f"{name}: requests that keep a tool"] = 100 * float((wanted >= policy.threshold).double().mean())
        found[f"{name}: requests that rightly get none"] = 100 * float((unwanted < policy.threshold).double().mean())
    return found


def on_a_thousand_tools(seed: int) -> dict[str, float]:
    """CPU time of `predict` per new request over 1,000 functions, in milliseconds, one request at a time."""
    catalogue = ToolCatalogue(list(tools().values())[:1000])
    asked = random.Random(seed).sample(questions(), 200)
    found = {}
    minilm.cache_clear()  # it would know the requests
    for encoder in ("hashing", LIGHT, BEST):
        policy = new_policy(catalogue, questions(), encoder)
        policy.predict(asked[:1])
        start = time.process_time()
        for question in asked[1:]:
            policy.predict([question])
        found[f"ms per request, {encoder}"] = 1000 * (time.process_time() - start) / (len(asked) - 1)
    return found


def tune(seeds: Sequence[int]) -> None:
    """Print the accuracy on the validation requests for each setting."""
    catalogue = catalogue_of(4)
    for rate in (0.002, 0.005, 0.01, 0.02):
        for entropy in (0.003, 0.01, 0.03):
            config = replace(CONFIG, learning_rate=rate, objective=replace(CONFIG.objective, entropy_coef=entropy))
            found = []
            for seed in seeds:
                training, validation, _ = split(questions(catalogue), seed)
                policy = new_policy(catalogue, training, BEST)
                learn(policy, training, seed, config=config)
                found.append(right_tool(policy, validation))
            print(f"learning_rate {rate}, entropy_coef {entropy}: {statistics.fmean(found):.1f} %", flush=True)


def table(title: str, measure: Callable[[int], dict[str, float]], seeds: Sequence[int]) -> None:
    """Print the median, the smallest and the largest of each figure over the seeds."""
    runs = [measure(seed) for seed in seeds]
    print(f"\n{title}, seeds {seeds[0]} to {seeds[-1]}\n\n| | median | least | most |\n|---|---|---|---|")
    for name in runs[0]:
        found = sorted(run[name] for run in runs)
        digits = 3 if name.endswith("AUROC") or name.startswith("ms") else 1
        shown = " | ".join(f"{value:.{digits}f}" for value in (statistics.median(found), found[0], found[-1]))
        print(f"| {name} | {shown} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="number of splits (default 5)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="tables to print (default all)")
    parser.add_argument(
        "--tools", type=int, nargs="+", choices=MIN_QUESTIONS, default=[*MIN_QUESTIONS], help="of the part 'requests'"
    )
    parser.add_argument("--iterations", type=int, default=NUM_ITERATIONS, help="of training (default 400)")
    parser.add_argument("--tune", action="store_true", help="search for the settings on the validation requests")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "ToolSelectionPolicy: fill gave no value")  # `no_values`
    seeds, num_iterations = range(options.seeds), options.iterations
    if options.tune:
        return tune(seeds)
    for part in options.parts:
        match part:
            case "requests":
                for num_tools in options.tools:
                    least = MIN_QUESTIONS[num_tools]
                    title = f"Right tool in % of held-out requests, {num_tools} tools, {512 * num_iterations:,} calls"
                    table(title, functools.partial(on_held_out_requests, least, num_iterations), seeds)
            case "added":
                table("Right tool in %, 24 tools added to 50", functools.partial(on_added_tools, num_iterations), seeds)
            case "no tool":
                table(
                    "Requests for which no tool is right",
                    functools.partial(on_irrelevant_requests, num_iterations),
                    seeds,
                )
            case "speed":
                table("CPU time over 1,000 tools", on_a_thousand_tools, range(1))
    return None


if __name__ == "__main__":
    main()
