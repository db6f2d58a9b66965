"""Using a checkpoint without a trainer, and opening one with a check of one's own."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import CheckpointError, GRPOConfig, GRPOTrainer, load_weights
from grpo._storage import opening
from grpo.checkpoint import Checkpoint, open_checkpoint, write_checkpoint
from grpo.errors import DamagedCheckpointError
from tests.support.checkpoint_runs import built, small
from tests.support.imitated_ranks import on_ranks
from tests.support.policies import DuckPolicy, TablePolicy, digest, weights_of

pytestmark = pytest.mark.usefixtures("without_type_checks")


class Holder:
    """A policy that holds weights, and perhaps a state."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        self.parameters = parameters

    def get_parameters(self) -> dict[str, torch.Tensor]:
        return self.parameters


class Stateful(Holder):
    fails = False

    def __init__(self, counter: list[int], **parameters: torch.Tensor) -> None:
        super().__init__(**parameters)
        self.counter = counter

    def state_dict(self) -> dict[str, Any]:
        return {"counter": self.counter}

    def load_state_dict(self, state: Any) -> None:
        self.counter = list(state["counter"])
        if self.fails and self.counter == [5]:
            raise ValueError("not mine")


def saved(path: Path, weights: dict[str, Any], own: Any = None, **others: Any) -> Path:
    parts = {} if own is None else {"policy": own}
    return write_checkpoint(path, {"parameters": weights, "parts": parts, **others}, iteration=1)


def test_a_policy_gets_the_weights_and_the_state_of_a_run(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for case in ("plain", "duck-typed with a state", "dropout"):
        with subtests.test(case=case):
            trainer, states, options = built(case, seed=1)
            trainer.train(states, num_iterations=2, checkpoint_dir=tmp_path / case, **options)
            fresh = built(case, seed=2)[0].policy
            identities = {name: id(value) for name, value in fresh.get_parameters().items()}
            before = random.getstate(), torch.get_rng_state()
            load_weights(tmp_path / case, fresh)
            assert digest(weights_of(fresh)) == digest(weights_of(trainer.policy))
            assert identities == {name: id(value) for name, value in fresh.get_parameters().items()}
            assert digest(random.getstate(), torch.get_rng_state()) == digest(*before)
            if isinstance(fresh, DuckPolicy):
                assert digest(fresh.state_dict()) == digest(trainer.policy.state_dict())


def test_only_the_tensors_of_the_policy_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "x", {"w": torch.ones(2)}, own={"counter": [5]}, optimizer=torch.ones(9))
    read: list[str] = []
    real = opening.TensorFile.read
    monkeypatch.setattr(opening.TensorFile, "read", lambda self, name: (read.append(name), real(self, name))[1])
    policy = Stateful([1], w=torch.zeros(2, requires_grad=True))
    load_weights(path, policy)
    assert read == ["parameters.w"]
    assert (policy.parameters["w"].tolist(), policy.counter) == ([1.0, 1.0], [5])
    assert policy.parameters["w"].requires_grad


def test_the_number_of_ranks_does_not_matter(tmp_path: Path) -> None:
    on_ranks(
        3,
        lambda engine: write_checkpoint(
            tmp_path / "x", {"parameters": {"w": torch.full((2,), 1.0 + engine.rank)}}, iteration=1, engine=engine
        ),
    )
    policy = Holder(w=torch.zeros(2))
    load_weights(tmp_path, policy)
    assert policy.parameters["w"].tolist() == [1.0, 1.0]


def test_weights_that_do_not_fit_change_nothing(subtests: pytest.Subtests, tmp_path: Path) -> None:
    two, three = torch.ones(2), torch.ones(3)
    for case, (weights, own, policy, message) in {
        "name": ({"v": two}, None, Holder(w=two * 0), r"missing: \['w'\], unexpected: \['v'\]"),
        "missing": ({"w": two}, None, Holder(w=two * 0, v=two * 0), r"missing: \['v'\], unexpected: nothing"),
        "extra": ({"w": two, "v": two}, None, Holder(w=two * 0), r"missing: nothing, unexpected: \['v'\]"),
        "shape": ({"w": two, "v": three}, None, Holder(w=two * 0, v=two * 0), r"v has shape \[2\], but \[3\]"),
        "same size": ({"w": torch.ones(2, 1)}, None, Holder(w=two * 0), r"w has shape \[2\], but \[2, 1\]"),
        "no tensor": ({"w": 3.0}, None, Holder(w=two * 0), r"w has shape \[2\], but None"),
        "no state": ({"w": two}, None, Stateful([1], w=two * 0), "Stateful has a state .* the checkpoint has none"),
        "state": ({"w": two}, {"counter": [5]}, Holder(w=two * 0), "the checkpoint has a state .* Holder has none"),
    }.items():
        with subtests.test(case=case):
            path = saved(tmp_path / case, weights, own)
            with pytest.raises(CheckpointError, match=message):
                load_weights(path, policy)
            assert all(value.sum() == 0 for value in policy.get_parameters().values())
    path = write_checkpoint(tmp_path / "by hand", small(1), iteration=1)
    with pytest.raises(CheckpointError, match="must have been written by a trainer"):
        load_weights(path, Holder(w=two))


def test_a_policy_that_refuses_its_state_is_unchanged(tmp_path: Path) -> None:
    path = saved(tmp_path / "x", {"w": torch.ones(2)}, {"counter": [5]})
    policy = Stateful([1], w=torch.zeros(2))
    policy.fails = True
    with pytest.raises(CheckpointError, match=r"Stateful\.load_state_dict must accept .*not mine.*unchanged"):
        load_weights(path, policy)
    assert (policy.counter, policy.parameters["w"].tolist()) == ([1], [0.0, 0.0])


def test_a_damaged_checkpoint_changes_no_weight(tmp_path: Path) -> None:
    """The newest is damaged, and the older one is loaded; alone, the damaged one is an error."""
    trainer = GRPOTrainer(config=GRPOConfig(), policy=TablePolicy(), reward_model=lambda s, a: [0.0])
    trainer.save_checkpoint(tmp_path / "older")
    newest = saved(tmp_path / "newest", {"logits": torch.full((2, 2), 7.0)}, {"logits": torch.full((2, 2), 7.0)})
    file = newest / "rank-0" / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    policy = TablePolicy()
    with torch.no_grad():
        policy.get_parameters()["logits"].fill_(3.0)
    with pytest.raises(CheckpointError, match=r"tensors\.safetensors is damaged"):
        load_weights(newest, policy)
    assert bool((policy.get_parameters()["logits"] == 3.0).all())


# open_checkpoint


def test_a_changed_name_in_the_header_of_the_tensors_names_their_file(tmp_path: Path) -> None:
    """The state's text, which is intact, then names a tensor that is not there."""
    path = write_checkpoint(tmp_path / "x", small(1), iteration=1)
    file = path / "rank-0" / "tensors.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"tensor"', b'"tensos"'))
    with pytest.raises(DamagedCheckpointError, match=r"tensors\.safetensors is damaged: its hash"):
        open_checkpoint(path, None)


def test_a_check_sees_the_state_before_the_tensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    real = opening.require_hash
    monkeypatch.setattr(opening, "require_hash", lambda f, name, r: (hashed.append(name), real(f, name, r))[1])
    path = write_checkpoint(tmp_path / "x", small(3), iteration=3, update=2, score=0.5)

    def check(checkpoint: Checkpoint) -> None:
        hashed.append("check")
        assert checkpoint.state["n"] == 3
        assert (checkpoint.path, checkpoint.iteration, checkpoint.update, checkpoint.score) == (path, 3, 2, 0.5)

    open_checkpoint(path, None, check)
    assert [Path(name).name for name in hashed] == ["state.json", "check", "tensors.safetensors"]


def test_a_check_skips_a_checkpoint_by_damage_and_stops_by_any_other_error(tmp_path: Path) -> None:
    for n in (1, 2, 3):
        write_checkpoint(tmp_path / str(n), small(n), iteration=n)

    def refuse(error: type[CheckpointError]) -> Any:
        def check(checkpoint: Checkpoint) -> None:
            if checkpoint.iteration > 1:
                raise error(f"no {checkpoint.iteration}")

        return check

    found = open_checkpoint(tmp_path, None, refuse(DamagedCheckpointError))
    assert (found.iteration, found.skipped) == (1, ("no 3", "no 2"))
    with pytest.raises(CheckpointError, match="no 3"):
        open_checkpoint(tmp_path, None, refuse(CheckpointError))
    with pytest.raises(CheckpointError, match="no 3"):
        open_checkpoint(tmp_path / "3", None, refuse(DamagedCheckpointError))


def test_links_inside_a_folder_of_checkpoints_are_not_followed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "outside" / "newer", small(9), iteration=9)
    write_checkpoint(tmp_path / "run" / "older", small(1), iteration=1)
    (tmp_path / "run" / "link").symlink_to(tmp_path / "outside" / "newer")
    assert open_checkpoint(tmp_path / "run", None).iteration == 1
    write_checkpoint(tmp_path / "run" / "mixed", small(2), iteration=2)
    (tmp_path / "run" / "mixed" / "rank-0").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "mixed" / "rank-0").symlink_to(tmp_path / "elsewhere")
    assert open_checkpoint(tmp_path / "run", None).iteration == 1
    with pytest.raises(CheckpointError, match="it is a link or another kind of file"):
        open_checkpoint(tmp_path / "run" / "mixed", None)
    (tmp_path / "run" / "mixed" / "rank-0").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "run" / "mixed" / "rank-0")
    (tmp_path / "run" / "mixed" / "rank-0" / "state.json").unlink()
    os.mkfifo(tmp_path / "run" / "mixed" / "rank-0" / "state.json")  # a reader of a pipe would wait for ever
    with pytest.raises(CheckpointError, match="it is a link or another kind of file"):
        open_checkpoint(tmp_path / "run" / "mixed", None)


def test_without_a_file_descriptor_no_older_checkpoint_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of the process says nothing about the newest checkpoint."""
    for n in (1, 2):
        write_checkpoint(tmp_path / str(n), small(n), iteration=n)
    real = os.open

    def limited(path: Any, flags: int, *arguments: Any) -> int:
        if str(path).endswith("2/rank-0/tensors.safetensors"):
            raise OSError(24, os.strerror(24))
        return real(path, flags, *arguments)

    monkeypatch.setattr(os, "open", limited)
    with pytest.raises(CheckpointError, match=r"Cannot read .*Too many open files") as caught:
        open_checkpoint(tmp_path, None)
    assert type(caught.value) is CheckpointError
