"""The cost model of `examples.scale`, with numbers worked out by hand."""

import sys
from dataclasses import replace

import pytest

from examples.scale import costs
from examples.scale.costs import Machine, Model, Run, bytes_sent, memory, seconds
from examples.scale.model import make_model

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
        "weights": 4000,
        "gradients": 4000,
        "moments": 8000,
        "activations": 95_680,
        "update": 4000 + 8000 + 95_680,
        "sampling": 4000 + 8000 + 2 * 3 * 12 * 80,
    }


def test_the_exchange_of_copies_is_the_peak_where_activations_are_small() -> None:
    """Two positions per forward keep 3680. The exchange has three times the gradients."""
    small = replace(RUN, num_updates=2, forwards_per_update=13)
    assert memory(MODEL, small, "replicated")["update"] == 4000 + 8000 + 3 * 4000
    alone = replace(small, num_ranks=1)
    assert memory(MODEL, alone, "replicated")["update"] == 4000 + 8000 + 4000 + 3680
    first = replace(alone, forwards_per_update=1, num_updates=26)
    assert memory(MODEL, first, "replicated")["update"] == 4000 + 8000 + max(3680, 4000)


def test_memory_of_parts() -> None:
    """A quarter of everything, and whole: the weights and gradients of one of two layers, and all weights while sampling."""
    found = memory(MODEL, RUN, "sharded")
    assert (found["weights"], found["gradients"], found["moments"]) == (1000, 1000, 2000)
    assert found["update"] == 1000 + 2000 + 95_680 + 4000
    assert found["sampling"] == 4000 + 2000 + 5760
    one = memory(MODEL, replace(RUN, num_ranks=1), "sharded")
    assert one == memory(MODEL, replace(RUN, num_ranks=1), "replicated")


def test_bytes_sent() -> None:
    """A ring of four sends 3/4 for a gather, and twice that for a sum."""
    twice = replace(RUN, num_updates=2, forwards_per_update=3)
    assert bytes_sent(MODEL, RUN, "replicated") == 1.5 * 4000
    assert bytes_sent(MODEL, twice, "replicated") == 2 * 1.5 * 4000
    assert bytes_sent(MODEL, RUN, "sharded") == 0.75 * (4000 + 2 * 4000 + 4000)
    assert bytes_sent(MODEL, twice, "sharded") == 0.75 * (4000 + 6 * 12_000)
    lora = replace(MODEL, trained_fraction=0.01)
    assert bytes_sent(lora, RUN, "replicated") == 1.5 * 40
    assert bytes_sent(lora, RUN, "sharded") == 0.75 * (4000 + 8000 + 40)
    for engine in costs.ENGINES:
        assert bytes_sent(MODEL, replace(RUN, num_ranks=1), engine) == 0


def test_seconds() -> None:
    """A token takes 2000 operations, 0.002 s. Sampling has 10 prompt tokens and 7 steps of 6 rows; an update, 52 positions."""
    machine = Machine(flops=1e6, latency=0.5, link=1e4)
    found = seconds(MODEL, RUN, machine, "replicated")
    assert found["sampling"] == pytest.approx(10 * 0.002 + 7 * (0.5 + 6 * 0.002))
    assert found["update"] == pytest.approx(3 * 0.5 + 52 * 3 * 0.002)
    assert found["exchange"] == pytest.approx(0.6)
    lora = seconds(replace(MODEL, trained_fraction=0.01), RUN, machine, "replicated")
    assert lora["update"] == pytest.approx(1.5 + 52 * 2.01 * 0.002)
    several = seconds(MODEL, replace(RUN, num_updates=2, forwards_per_update=3), machine, "sharded")
    assert several["update"] == pytest.approx(6 * 1.5 + 52 * 3 * 0.002)
    assert several["exchange"] == pytest.approx(5.7)


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
    assert lines["sent per iteration"] == ["4.00", "50.00"]  # 1/2 of 4, and of 8 times 12
