"""The examples of language models run as a user runs them, with tiny models."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from matplotlib import image
from transformers import AutoModelForCausalLM

from adapters.llm import HFPolicy, SamplingConfig
from examples import arithmetic_llm, counting, gsm8k_qwen
from grpo import GRPOWarning
from tests.support.agents import chat_tokenizer
from tests.support.llm_models import tiny_model

CHAT_TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message['content'] }}<|im_end|>{% endfor %}<|assistant|>"
    "{% if enable_thinking %}I think: {% endif %}"
)
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Calls an example's `main` as `python -m` would, in a folder of its own, and returns what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run_main(example: ModuleType, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [str(example.__file__), *map(str, arguments)])
        capsys.readouterr()
        example.main()
        return capsys.readouterr().out

    return run_main


# examples/arithmetic_llm.py


def arithmetic(run: Run, *arguments: object) -> tuple[dict[str, tuple[float, float]], str]:
    """The shares of right held-out sums before and after GRPO, by kind of answer, and the printed text."""
    printed = run(arithmetic_llm, *arguments)
    found = re.findall(r"^held-out sums right, (\w+): ([\d.]+)% -> ([\d.]+)%$", printed, re.MULTILINE)
    assert len(found) == 2, printed
    return {kind: (float(before) / 100, float(after) / 100) for kind, before, after in found}, printed


@pytest.mark.slow
def test_arithmetic_writes_metrics_a_comparison_a_plot_and_the_model(run: Run, tmp_path: Path) -> None:
    """A few steps of each phase teach the model to end its answers. The test below learns the sums."""
    shares, _ = arithmetic(run, "--warmup-steps", "20", "--iterations", "2", "--seed", "3")
    before, after = shares["sampled"]
    folder = tmp_path / "runs" / "arithmetic_llm" / "seed-3"
    assert {path.name for path in folder.iterdir()} == {
        "metrics.jsonl",
        "samples.jsonl",
        "settings.json",
        "comparison.json",
        "report.html",
        "learning_curve.png",
        "model",
    }
    iterations = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(iterations) == 2
    for metrics in iterations:
        assert metrics["train/num_updates"] > 0
        assert metrics["completions/truncated"] < 0.65 * 32 * 16, (
            "an untrained model truncates three completions in four"
        )
    comparison = json.loads((folder / "comparison.json").read_text())
    assert comparison["mean_reward_before"] == pytest.approx(before, abs=6e-4)
    assert comparison["mean_reward_after"] == pytest.approx(after, abs=6e-4)
    assert "Answers side by side" in (folder / "report.html").read_text(encoding="utf-8")
    pixels = image.imread(folder / "learning_curve.png")[..., :3]
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 100, "an empty canvas has one colour"
    saved = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert saved.num_parameters() == pytest.approx(8e5, rel=0.05)
    sampling = SamplingConfig(max_new_tokens=arithmetic_llm.MAX_NEW_TOKENS)
    again = HFPolicy(saved, arithmetic_llm.make_tokenizer(), sampling=sampling)
    _, _, held_out = arithmetic_llm.make_sums(seed=3)
    assert arithmetic_llm.accuracy(again, held_out) == pytest.approx(shares["likeliest"][1], abs=6e-4)


@pytest.mark.faults  # four minutes
@pytest.mark.timeout(1600)
def test_arithmetic_improves_from_below_40_to_above_90_per_cent(run: Run) -> None:
    shares, printed = arithmetic(run)
    for before, after in shares.values():
        assert before < 0.4, printed
        assert after > 0.9, printed


def test_arithmetic_holds_out_sums_that_are_not_trained_on() -> None:
    """No sum is in two of the three parts, with its numbers in either order. Together the parts are all 90 x 90 sums."""
    parts = [{row["prompt"].rstrip("=") for row in rows} for rows in arithmetic_llm.make_sums(seed=0)]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 90 * 90
    for prompts in parts:
        assert {"+".join(reversed(prompt.split("+"))) for prompt in prompts} == prompts
    [row] = [row for rows in arithmetic_llm.make_sums(seed=0) for row in rows if row["prompt"] == "17+25="]
    assert row["answer"] == "24", "42, with the ones first"


# examples/gsm8k_qwen.py

PROBLEMS = [
    ("Ann has 3 bags with 4 apples each. She eats 2. How many are left?", "3 * 4 = 12 apples, 12 - 2 = 10.\n#### 10"),
    ("A train goes 60 miles an hour. How far does it get in 3 hours?", "60 * 3 = <<60*3=180>>180 miles.\n#### 180"),
    ("A book costs $12, a pen $3. What do a book and two pens cost?", "2 * 3 = 6, and 12 + 6 = 18.\n#### 18"),
    ("Tom reads 20 pages a day. How many in a week?", "20 * 7 = 140 pages.\n#### 140"),
    ("Half of the 30 children are girls. How many boys are there?", "30 / 2 = 15.\n#### 15"),
    ("A farm sells 1,000 eggs and then 234 more. How many is that?", "1000 + 234 = 1234.\n#### 1,234"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tiny model, which has a chat template, and with six problems in the format of GSM8K."""
    tokenizer = chat_tokenizer(CHAT_TEMPLATE)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 512}  # 4 bits need multiples of 64
    model = tiny_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
    model.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in PROBLEMS]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


SMALL = ["--model", "tiny", "--data", "train.jsonl", "--samples", "4", "--batch-size", "2", "--max-new-tokens", "12"]


def written(folder: Path) -> Path:
    """The folder of the run, which must have exactly these files."""
    found = folder / "runs" / "gsm8k_qwen"
    names = {"metrics.jsonl", "config.json", "checkpoints", "model", "comparison.json"}
    assert {path.name for path in found.iterdir()} == names
    return found


def iterations_of(folder: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_gsm8k_trains_an_adapter_and_compares_it_on_held_out_problems(run: Run, folder: Path) -> None:
    printed = run(gsm8k_qwen, *SMALL, "--no-load-in-4bit", "--learning-rate", "0.01")
    runs = written(folder)
    assert iterations_of(runs) == [1, 2], "4 problems, 2 in each iteration"
    metrics = json.loads((runs / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["group_stats/avg_group_size"] == 4
    assert {f"rewards/{part}/mean" for part in ("correct", "answered", "marked")} <= metrics.keys()

    comparison = json.loads((runs / "comparison.json").read_text())
    assert [state["label"] for state in comparison["states"]] == [question for question, _ in PROBLEMS[4:]], (
        "not trained on"
    )
    assert "Mean reward: " in printed
    assert PROBLEMS[4][0] + "\n--> " in printed

    config = json.loads((runs / "model" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (16, 32)
    assert '"group_size": ' in (runs / "model" / "README.md").read_text(), "the card has the run's settings"
    policy = HFPolicy.from_pretrained(runs / "model")
    learned = [part for name, part in policy.get_parameters().items() if "lora_B" in name]
    assert len(learned) == 2 * 7, "of all linear layers"
    assert any(part.any() for part in learned), "B is 0 before any update"
    assert policy.tokenizer.chat_template == CHAT_TEMPLATE

    settings = json.loads((runs / "config.json").read_text())
    assert settings["reward"] == "correctness_first"
    assert settings["grpo"]["group_size"] == 4
    assert settings["sampling"]["max_new_tokens"] == 12


@pytest.mark.slow
def test_gsm8k_resumes_from_its_checkpoint_and_logs_to_wandb_on_request(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    plain = [*SMALL, "--no-load-in-4bit", "--reward", "hybrid", "--kl-coef", "0.1"]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "wandb", None)  # an import fails, and without --wandb there is none
        run(gsm8k_qwen, *plain, "--iterations", "1")
    assert iterations_of(written(folder)) == [1]
    with pytest.warns(GRPOWarning, match="num_iterations was 1 and is 3"):  # the learning rate falls over the total
        run(gsm8k_qwen, *plain, "--iterations", "3", "--resume", "--wandb", "sums")
    runs = folder / "runs" / "gsm8k_qwen"
    assert iterations_of(runs) == [1, 2, 3]
    last = json.loads((runs / "metrics.jsonl").read_text().splitlines()[-1])
    assert "rewards/mathematics/mean" in last
    assert "train/kl_mean" in last
    assert json.loads((runs / "wandb.json").read_text())["iteration"] == 3


@pytest.mark.slow
def test_gsm8k_trains_on_four_bits(run: Run, folder: Path) -> None:
    pytest.importorskip("bitsandbytes")
    run(gsm8k_qwen, *SMALL, "--learning-rate", "0.01")
    learned = HFPolicy.from_pretrained(written(folder) / "model").get_parameters()
    assert any(part.any() for name, part in learned.items() if "lora_B" in name)


def test_gsm8k_needs_problems_that_are_not_trained_on(run: Run, folder: Path) -> None:
    with pytest.raises(SystemExit, match=r"train\.jsonl has 6 problems, .*--samples than 6"):
        run(gsm8k_qwen, *SMALL, "--samples", "6")


# examples/counting.py


def test_counting_answers_questions_about_pictures_and_plots_them(run: Run, tmp_path: Path) -> None:
    printed = run(counting, "--pictures", "64", "--warmup-steps", "5", "--iterations", "2", "--seed", "3")
    shares = re.search(r"held-out pictures counted right: ([\d.]+)% -> ([\d.]+)%", printed)
    assert shares is not None
    folder = tmp_path / "runs" / "counting" / "seed-3"
    assert image.imread(folder / "questions.png").shape[:2] == (704, 1100)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any("rewards/mean" in line for line in metrics)


def test_the_pictures_of_counting_have_as_many_squares_as_their_answers_say() -> None:
    for row in counting.make_questions(50, seed=7):
        number, colour, _ = row["answer"].split()
        pixels = row["image"] == counting.COLOURS[colour]
        assert pixels.all(2).sum() == 36 * counting.NUMBERS.index(number)  # a square has 6 x 6 pixels
        assert row["prompt"] == f"<image> how many {colour} squares ?"
