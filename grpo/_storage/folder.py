"""The folder of a run's checkpoints: which are kept, who may write, and saving in a second thread."""

import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from grpo._common.checks import require_count
from grpo._common.conversion import describe
from grpo.engine import Engine, OneProcess
from grpo.errors import CheckpointError, ConfigError, DamagedCheckpointError, warn_user

from .commit import Encode, commit, require_equal, require_finite, temporary_name, typed_errors
from .encoding import encode
from .files import as_path, make_folder, remove_tree
from .lock import FolderLock
from .manifest import RUN_CHECKPOINT, Manifest, read_manifest, without_files
from .opening import checkpoints_in, manifests_of, read_again, require_intact
from .tensor_file import Stored


class CheckpointFolder:
    """Keeps the newest `keep_last` checkpoints of a run, and the checkpoint with the best score, in `folder`.

    A checkpoint's name is its iteration, such as `iteration-00000010`, or `iteration-00000010-update-0003` after three updates
    of the next iteration. Other files in `folder` are not changed. As a context manager, the object locks the folder for this
    run; without it, each save takes the lock. Where there are several ranks, all of them call each method.

    Args:
        folder: Where the checkpoints go. It is created if it is missing.
        keep_last: Number of newest checkpoints to keep. Checkpoints that cannot be read are not counted and never deleted.
        engine: Joins the ranks. None: one process.
        asynchronous: `save` copies the tensors and returns, and a second thread writes. The next call waits for it.

    Raises:
        ConfigError: `keep_last` is below 1, or `asynchronous` is set on several ranks.
        CheckpointError: On entering, another process writes to the folder; on leaving, an asynchronous save has failed.
    """

    def __init__(
        self, folder: str | Path, keep_last: int, engine: Engine | None = None, *, asynchronous: bool = False
    ) -> None:
        self._engine: Engine = engine or OneProcess()
        keep_last = require_count("keep_last", keep_last)
        if not isinstance(asynchronous, bool):
            raise ConfigError(f"checkpoint_async must be True or False; got {describe(asynchronous)}.")
        if asynchronous and self._engine.num_ranks > 1:
            raise ConfigError(
                f"Asynchronous saving needs a single process; there are {self._engine.num_ranks} ranks. Save synchronously."
            )
        self.folder = as_path(folder)
        self.keep_last = keep_last
        self._asynchronous = asynchronous
        self._held = ExitStack()
        self._is_entered = False
        self._pending: Future[None] | None = None
        self._has_warned = False

    def __enter__(self) -> "CheckpointFolder":
        """Create the folder and lock it for this run. Rank 0 holds the lock."""
        with self._engine.together(), typed_errors(self.folder):
            if self._engine.rank == 0:
                make_folder(self.folder)
                self._held.enter_context(FolderLock(self.folder / ".lock", self.folder))
        self._engine.gather_objects(None)  # no rank goes on before the folder is locked
        self._is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for an asynchronous save, and release the lock."""
        try:
            self._wait()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(str(failure))
        finally:
            self._is_entered = False
            self._held.close()

    def save(self, state: Mapping[str, Any], *, iteration: int, update: int | None = None, score: float | None) -> Path:
        """Write one checkpoint. Once it is written, delete the checkpoints that are neither among the newest nor the best.

        Args:
            state: What this rank saves.
            iteration: The number of completed iterations.
            update: The number of finished updates of an iteration that is not finished. None: the last iteration is finished.
            score: Decides which checkpoint is the best. A NaN or infinite score counts as no score.

        Raises:
            CheckpointError: The checkpoint cannot be written, or an earlier asynchronous save has failed.
        """
        self._wait()
        manifest = without_files(iteration=iteration, update=update, score=score, num_ranks=self._engine.num_ranks)
        with ExitStack() as held:
            if not self._is_entered:
                held.enter_context(self)
            with self._engine.together():
                require_finite(state)
                require_equal(state, self._engine)
            path = self._path(iteration, update)
            if self._asynchronous:
                self._start(path, _snapshot(state), manifest)
            else:
                self._write(path, lambda sink: encode(state, sink), manifest)
        return path

    def _start(self, path: Path, copied: Encode, manifest: Manifest) -> None:
        """Write a checkpoint in a second thread."""
        writer = ThreadPoolExecutor(max_workers=1)
        self._pending = writer.submit(self._write, path, copied, manifest)
        writer.shutdown(wait=False)

    def _wait(self) -> None:
        """Wait for an asynchronous save, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, path: Path, encode_state: Encode, manifest: Manifest) -> None:
        commit(path, encode_state, manifest, self._engine)
        if self._engine.rank == 0:
            self._prune(path)

    # What is in the folder

    def has(self, iteration: int, update: int | None = None) -> bool:
        """Whether the folder has a checkpoint of that iteration and update, with an intact manifest."""
        self._wait()
        found: bool = self._of_first_rank(lambda: bool(manifests_of([self._path(iteration, update)])[0]))
        return found

    def newest(self) -> Path | None:
        """Return the path of the newest checkpoint with an intact manifest. None: there is no checkpoint.

        Raises:
            CheckpointError: There are checkpoints, and the manifests of all of them are damaged.
        """
        self._wait()
        newest: Path | None = self._of_first_rank(self._newest)
        return newest

    def require_at_most(self, iteration: int, update: int | None = None) -> None:
        """Require that no intact checkpoint in the folder is ahead of a trainer. A run may replace damaged ones.

        Args:
            iteration: The number of iterations that the trainer has completed.
            update: The number of finished updates of an iteration that is not finished. None: the last iteration is finished.

        Raises:
            CheckpointError: Names the newest checkpoint that is ahead, or a checkpoint that the disk does not give.
        """
        self._wait()
        self._of_first_rank(lambda: self._require_at_most(iteration, update))

    def _of_first_rank(self, ask: Callable[[], Any]) -> Any:
        """Return rank 0's answer on all ranks: the others may not see the newest state of a shared file system."""
        with self._engine.together():
            answer = ask() if self._engine.rank == 0 else None
        return self._engine.gather_objects(answer)[0]

    def _newest(self) -> Path | None:
        manifests, problems = manifests_of(self._own())
        if problems and not manifests:
            raise CheckpointError(
                f"No checkpoint in {self.folder} has an intact manifest. {problems[0]} Delete them, or choose another "
                "checkpoint_dir."
            )
        # by the manifests, because the times of files change when a folder is copied
        return max(manifests, key=lambda path: manifests[path].position, default=None)

    def _require_at_most(self, iteration: int, update: int | None) -> None:
        own = without_files(iteration=iteration, update=update, score=None, num_ranks=1)
        ahead: dict[Path, Manifest] = {}
        for path in self._own():
            with suppress(DamagedCheckpointError):
                manifest = self._readable(path)
                if manifest.position > own.position:
                    ahead[path] = manifest
        for path in sorted(ahead, key=lambda path: ahead[path].position, reverse=True):
            # the first intact one ends the search, so that no other checkpoint is read as a whole
            with suppress(DamagedCheckpointError):
                require_intact(path, ahead[path])
                updates = "" if ahead[path].update is None else f" and {ahead[path].update} updates"
                raise CheckpointError(
                    f"{path} is of iteration {ahead[path].iteration}{updates}, and this trainer is at {iteration}. Continue "
                    'from it with train(..., resume="auto"), delete it, or choose another checkpoint_dir.'
                )

    def _readable(self, path: Path) -> Manifest:
        """Read a manifest. Raise an error that is not about damage if the disk, and not the contents, is the reason."""
        try:
            return read_again(partial(read_manifest, path))
        except DamagedCheckpointError as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                raise CheckpointError(f"{error} To replace it, delete it first.") from error
            raise

    def _path(self, iteration: int, update: int | None) -> Path:
        name = f"iteration-{iteration:08d}"
        return self.folder / (name if update is None else f"{name}-update-{update:04d}")

    def _own(self) -> list[Path]:
        return [path for path in checkpoints_in(self.folder) if re.fullmatch(RUN_CHECKPOINT, path.name)]

    # What leaves the folder

    def _prune(self, written: Path) -> None:
        """Delete old checkpoints. The new one is safe, so that a failure is only told."""
        try:
            manifests, _ = manifests_of(self._own())
            kept = sorted(manifests, key=lambda path: manifests[path].position)[-self.keep_last :]
            for old in manifests.keys() - {written, best_of(manifests), *kept}:
                old.rename(self.folder / temporary_name(old.name))  # one step, which cannot be left half done
            for entry in self.folder.iterdir():
                if re.fullmatch(rf"\.{RUN_CHECKPOINT}\.[0-9a-f]{{32}}\.tmp", entry.name):
                    remove_tree(entry)
                    if os.path.lexists(entry):
                        raise CheckpointError(f"{entry} could be renamed, and cannot be removed")
        except (OSError, CheckpointError) as error:
            if not self._has_warned:
                self._has_warned = True
                warn_user(
                    f"Old checkpoints in {self.folder} could not be deleted: {error}. All newer checkpoints are intact. Watch "
                    "the space on the disk."
                )


def best_of(manifests: Mapping[Path, Manifest]) -> Path | None:
    """Return the path of the checkpoint with the highest score, the newest of equal ones. None: none has a score."""
    scored = [
        ((manifest.score, *manifest.position), path)
        for path, manifest in manifests.items()
        if manifest.score is not None
    ]
    return max(scored)[1] if scored else None


def _snapshot(state: Mapping[str, Any]) -> Encode:
    """Copy a state to the host's memory, so that training may change it while the copy is written."""
    text: list[bytes] = []
    tensors: dict[str, Stored] = {
        name: value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else np.array(value)
        for name, value in encode(state, text.append).items()
    }

    def encode_copy(sink: Callable[[bytes], object]) -> Mapping[str, Stored]:
        for part in text:
            sink(part)
        return tensors

    return encode_copy
