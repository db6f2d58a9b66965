"""What ranks that divide the weights of a policy make of it, and what they refuse. One launch plays all cases.

`test_sharded.py` has language models and more ranks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo import load_weights
from grpo.engine import OneProcess
from tests.support.launches import printed_by
from tests.support.layered import Layered
from tests.support.sharded_extras import DAILY
from tests.support.sharded_ranks import CASES, NUM_UPDATES, loaded
from tests.support.sharded_results import assert_right
from tests.support.tensor_hashes import hash_of

pytestmark = pytest.mark.slow


def launched(folder: Path, *arguments: str) -> None:
    printed_by("-m", "tests.support.sharded_extras", folder, *arguments, seconds=200)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("extras")
    launched(folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_ranks_with_divided_weights_make_the_updates_of_one_process(
    ranks: list[dict[str, Any]], subtests: pytest.Subtests
) -> None:
    assert_right([found["cases"] for found in ranks], DAILY, subtests)


def test_one_process_loads_the_weights_and_moments_of_two_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["cases"] for found in ranks)
    folder = Path(ranks[0]["folder"])
    found = loaded(CASES[DAILY[0]], OneProcess(), folder / DAILY[0])
    assert found["hashes"] == first[DAILY[0], "saved"] == second[DAILY[0], "saved"]
    assert found["iteration"] == NUM_UPDATES
    (said,) = found["said"]
    assert said.startswith(
        f"{folder / DAILY[0]} was written by 2 ranks, and 1 load it. Exact: weights, optimizer, learning"
    )
    assert "states of policy and reward model of the ranks from 1 on are left out" in said
    policy = Layered()
    load_weights(folder / DAILY[0], policy)
    of_weights = {name: hash_of(value) for name, value in policy.get_parameters().items()}
    assert of_weights.items() <= found["hashes"].items()


def test_what_cannot_be_divided_or_fails_on_one_rank_is_the_same_error_on_all_ranks(
    ranks: list[dict[str, Any]],
) -> None:
    beginnings = {
        "optimizer": "ConfigError: optimizer must be a function with Sharded, which replaces the policy's parameters",
        "float16": "ConfigError: config.autocast_dtype='float16' cannot be used with Sharded, because torch's loss scale",
        "no module": "ConfigError: Sharded divides the weights of modules, and Holder is no torch.nn.Module.",
        "precision": "ConfigError: Sharded.mixed_precision must be a torch.distributed.fsdp.MixedPrecisionPolicy",
        "function": "ProtocolError: optimizer must implement torch.optim.Optimizer; int lacks step()",
        "words": "ContractError: Bad.shard_units must return a list of modules; got str 'layers'.",
        "shared": "ConfigError: Sharded needs each weight in one unit; weight of Bad is in two of its shard_units().",
        "quantised": "ConfigError: Sharded cannot divide quantised weights; codes of Bad is torch.uint8.",
        "dtypes": "ConfigError: Sharded needs trained weights of one dtype in each unit of Bad; one unit has torch.float32,",
    }
    for found in ranks:
        assert found["refused"].keys() == beginnings.keys()
        for name, beginning in beginnings.items():
            assert found["refused"][name].startswith(beginning), found["refused"][name]
        assert found["out of memory"] == "RankError: Rank 1 raised OutOfMemoryError: no memory today"
        assert found["other calls"].startswith(
            "RankError: All ranks must make the same calls in the same order; rank 0 is at"
        )
        assert "gather_weights()" in found["other calls"]


def test_a_function_builds_the_scheduler_from_the_optimizer(ranks: list[dict[str, Any]]) -> None:
    assert [found["scheduled"] for found in ranks] == [[1.0, 0.1], [1.0, 0.1]]


def test_sampling_gathers_nothing_if_the_sampler_has_weights_of_its_own(ranks: list[dict[str, Any]]) -> None:
    assert [found["elsewhere"]["seen"] for found in ranks] == ["DTensor", "DTensor"]
    assert [found["elsewhere"]["copied"] for found in ranks] == [[7, 5], [7, 5]]  # but its copy is of all weights
    assert [found["elsewhere"]["parts"] for found in ranks] == [[4, 5], [3, 5]]


def test_a_state_dict_has_all_weights_inside_whole_and_parts_outside(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["whole"]["inside"]["layers.0.weight"] == [7, 5]
        assert found["whole"]["kinds"] == ["Tensor"]
        assert found["whole"]["outside"] == ["DTensor", "Tensor"]  # the scalar is whole


def test_offloaded_parts_make_the_same_updates_and_half_precision_similar_ones(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for name, value in found["replicated"].items():
            assert torch.allclose(found["plain"]["weights"][name], value, rtol=0, atol=5e-5), name
            assert torch.equal(found["offloaded"]["weights"][name], found["plain"]["weights"][name]), name
            assert torch.allclose(found["half"]["weights"][name].float(), value, rtol=0.02, atol=0.02), name
        assert found["half"]["weights"]["layers.0.weight"].dtype == torch.bfloat16  # as it computes
        assert not torch.allclose(
            found["half"]["weights"]["layers.0.weight"].float(), found["plain"]["weights"]["layers.0.weight"]
        )


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llm")
    launched(folder, "llm")
    return folder


def test_a_sampler_that_reads_layer_by_layer_gets_all_weights_and_never_has_two_layers(language_model: Path) -> None:
    for rank in range(2):
        for found in torch.load(language_model / f"read {rank}.pt", weights_only=True).values():
            assert found["is equal"]
            assert found["most whole"] == 1
            assert found["norm"] > 0


def test_a_language_model_is_saved_from_parts(language_model: Path) -> None:
    tmp_path = language_model
    first, second = (torch.load(tmp_path / f"llama {rank}.pt", weights_only=True) for rank in range(2))
    saved = load_file(tmp_path / "llama" / "model.safetensors")
    assert saved.keys() == first.keys()
    for name, value in saved.items():
        assert torch.equal(value, first[name])
        assert torch.equal(value, second[name])
    adapter = load_file(tmp_path / "llama lora" / "adapter_model.safetensors")
    trained = torch.load(tmp_path / "llama lora 0.pt", weights_only=True)
    assert adapter
    for name, value in adapter.items():
        assert torch.equal(value, trained[name.replace(".weight", ".default.weight")]), name
    merged = load_file(tmp_path / "llama lora merged" / "model.safetensors")
    layer = "model.layers.0.mlp.up_proj"
    path = f"base_model.model.{layer}"
    low_rank = trained[f"{path}.lora_B.default.weight"] @ trained[f"{path}.lora_A.default.weight"]
    assert torch.allclose(merged[f"{layer}.weight"], trained[f"{path}.base_layer.weight"] + 2.0 * low_rank, atol=1e-6)
