"""The cost model of `examples.scale`, with numbers worked out by hand."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples.scale import costs
from examples.scale.costs import Machine, Model, Run, bytes_sent, memory, seconds
from examples.scale.model import make_model

ROOT = Path(__file__).parents[4]
MODEL = Model(num_parameters=1000, num_layers=2, hidden_size=10)
RUN = Run(num_ranks=4, num_prompts=2, group_size=3, prompt_length=5, new_tokens=7)


def test_sizes_of_a_model() -> None:
    assert MODEL.weight_bytes == 4000
    assert MODEL.gradient_bytes == 4000
    assert MODEL.activation_bytes == 2 * 10 * (11 + 4 * 3) * 4 == 1840
    assert MODEL.cache_bytes == 2 * 2 * 5 * 4 == 80
    half = replace(MODEL, bytes_per_weight=2, trained_fraction=0.1, key_value_fraction=0.25, mlp_fraction=4.0)
    assert (half.weight_bytes, half.gradient_bytes, half.activation_bytes, half.cache_bytes) == (2000, 200, 1080, 20)


def test_positions_of_a_run() -> None:
    assert RUN.num_rows == 6
    assert RUN.num_positions == 2 * (5 + 3 * 7) == 52
    assert RUN.positions_per_forward == 52
    assert replace(RUN, num_updates=2, forwards_per_update=13).positions_per_forward == 2


def test_memory_of_copies() -> None:
    """Weights 4000, gradients 4000, moments 8000; one forward of 52 positions keeps 95,680; the cache holds 72 positions."""
    assert memory(MODEL, RUN, "replicated") == {
        "weights": 4000, "gradients": 4000, "moments": 8000, "activations": 95_680, "update": 4000 + 8000 + 95_680,
        "sampling": 4000 + 8000 + 2 * 3 * 12 * 80,
    }  # fmt: skip


def test_the_exchange_of_copies_is_the_peak_where_activations_are_small() -> None:
    """Two positions per forward keep 3680. The exchange has three times the gradients."""
    for num_ranks, num_updates, forwards_per_update, peak in (
        (4, 2, 13, 3 * 4000), (1, 2, 13, 4000 + 3680), (1, 2, 2, 4000 + 13 * 1840), (1, 26, 1, max(3680, 4000)),
    ):  # fmt: skip
        run = replace(RUN, num_ranks=num_ranks, num_updates=num_updates, forwards_per_update=forwards_per_update)
        assert memory(MODEL, run, "replicated")["update"] == 4000 + 8000 + peak


def test_memory_of_parts() -> None:
    """A quarter of everything, and whole: weights and gradients of one of two layers, and all weights while sampling."""
    found = memory(MODEL, RUN, "sharded")
    assert (found["weights"], found["gradients"], found["moments"]) == (1000, 1000, 2000)
    assert found["update"] == 1000 + 2000 + 95_680 + 4000
    assert found["sampling"] == 1000 + 4000 + 2000 + 5760
    one, copies = (memory(MODEL, replace(RUN, num_ranks=1), engine) for engine in costs.ENGINES[::-1])
    assert one.pop("sampling") == copies.pop("sampling") + 4000
    assert one == copies
    short = replace(RUN, num_ranks=2, num_updates=52)  # its activations, 1840, are smaller than its gradients
    assert memory(MODEL, short, "sharded")["update"] == 2000 + 4000 + 2000 + 4000


def test_bytes_sent() -> None:
    """A ring of four sends 3/4 for a gather, and twice that for a sum."""
    twice = replace(RUN, num_updates=2, forwards_per_update=3)
    assert bytes_sent(MODEL, RUN, "replicated") == 1.5 * 4000
    assert bytes_sent(MODEL, twice, "replicated") == 2 * 1.5 * 4000
    assert bytes_sent(MODEL, RUN, "sharded") == 0.75 * (4000 + 2 * (2 * 4000 + 4000))
    assert bytes_sent(MODEL, replace(RUN, passes=1), "sharded") == 0.75 * (4000 + 2 * 4000 + 4000)
    assert bytes_sent(MODEL, twice, "sharded") == 0.75 * (4000 + 12 * 12_000)
    lora = replace(MODEL, trained_fraction=0.01)
    assert bytes_sent(lora, RUN, "replicated") == 1.5 * 40
    assert bytes_sent(lora, RUN, "sharded") == 0.75 * (4000 + 2 * (8000 + 40))
    for engine in costs.ENGINES:
        assert bytes_sent(MODEL, replace(RUN, num_ranks=1), engine) == 0


def test_seconds() -> None:
    """A token takes 2000 operations, 0.002 s. Sampling has 10 prompt tokens and 7 steps of 6 rows; an update, 52 positions."""
    machine = Machine(flops=1e6, latency=0.5, link=1e4)
    found = seconds(MODEL, RUN, machine, "replicated")
    assert found["sampling"] == pytest.approx(10 * 0.002 + 7 * (0.5 + 6 * 0.002))
    assert found["update"] == pytest.approx(2 * 3 * 0.5 + 52 * 3 * 0.002)
    assert found["exchange"] == pytest.approx(0.6)
    lora = seconds(replace(MODEL, trained_fraction=0.01), RUN, machine, "replicated")
    assert lora["update"] == pytest.approx(3 + 52 * 2.01 * 0.002)
    several = seconds(MODEL, replace(RUN, num_updates=2, forwards_per_update=3), machine, "sharded")
    assert several["update"] == pytest.approx(12 * 1.5 + 52 * 3 * 0.002)
    assert several["exchange"] == pytest.approx(11.1)


def test_the_defaults_are_the_shape_of_the_models_of_the_example() -> None:
    config = make_model(256, 1).config
    assert config.num_key_value_heads * config.head_dim == MODEL.key_value_fraction * config.hidden_size
    assert config.intermediate_size == MODEL.mlp_fraction * config.hidden_size


def test_the_script_prints_both_engines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["costs", "--billions", "1.073741824", "--ranks", "2"])
    costs.main()
    lines = {line[:22].strip(): line[22:].split() for line in capsys.readouterr().out.splitlines()}
    assert lines["weights"] == ["4.00", "2.00"]
    assert lines["moments"] == ["8.00", "4.00"]
    assert lines["sent per iteration"] == ["4.00", "98.00"]  # 1/2 of 4, and of 16 times 12


SHAPES = {"0.6B": (0.6e9, 1024, 28), "1.7B": (1.7e9, 2048, 28), "4B": (4e9, 2560, 36), "8B": (8.2e9, 4096, 36)}


def test_the_table_of_sizes_in_the_guide_is_what_the_estimates_give() -> None:
    guide = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d.]+B) ((?:\| \d+ )+)\|$", guide, re.MULTILINE)
    assert [name for name, _ in rows] == list(SHAPES)
    run = Run(num_ranks=8, num_prompts=4, group_size=8, prompt_length=256, new_tokens=512, forwards_per_update=8)
    sent = []
    for name, cells in rows:
        num_parameters, hidden_size, num_layers = SHAPES[name]
        whole = Model(num_parameters=round(num_parameters), num_layers=num_layers, hidden_size=hidden_size)
        expected = []
        for model in (whole, replace(whole, bytes_per_weight=2, trained_fraction=0.01)):
            for engine, num_ranks in (("replicated", 1), ("replicated", 8), ("sharded", 8)):
                found = memory(model, replace(run, num_ranks=num_ranks), engine)  # type: ignore[arg-type]
                expected.append(round(max(found["update"], found["sampling"]) / 2**30))
        assert [int(cell) for cell in cells.strip("| ").split(" | ")] == expected, name
        sent.append([bytes_sent(whole, run, engine) / 2**30 for engine in costs.ENGINES])
    assert [round(copies, 1) if copies < 10 else round(copies) for copies, _ in sent] == [3.9, 11, 26, 53]
    assert [round(parts) for _, parts in sent] == [96, 272, 639, 1310]
    assert "a rank sends 3.9, 11, 26 and 53 GiB" in guide
    assert "96, 272, 639 and 1,310 GiB" in guide.replace("\n", " ")


def test_the_predictions_in_the_results_are_those_of_the_code() -> None:
    results = (ROOT / "benchmarks" / "results" / "scale.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (replicated|sharded) \| (\d) ((?:\| [\d.]+ / [\d.]+ ){6})\|$", results, re.MULTILINE)
    assert len(rows) == 6
    model = Model(num_parameters=3_151_360, num_layers=4, hidden_size=256)
    for engine, num_ranks, cells in rows:
        run = Run(num_ranks=int(num_ranks), num_prompts=4, group_size=8, prompt_length=12, new_tokens=16)
        found = memory(model, run, engine)
        parts = [found[name] for name in ("weights", "moments", "update", "sampling")]
        parts += [max(found["update"], found["sampling"]), bytes_sent(model, run, engine)]
        predicted = [cell.split(" / ")[0] for cell in cells.strip("| ").split(" | ")]
        assert predicted == [f"{part / 1e6:.1f}" for part in parts], (engine, num_ranks)
