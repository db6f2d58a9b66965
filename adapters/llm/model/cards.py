"""Saving a model with its model card, and uploading it to the Hugging Face Hub."""

import json
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grpo import WeightedRewards
from grpo.arguments import describe, reward_name
from grpo.errors import ConfigError

CARD = "README.md"
"""Name of the file with the card. The Hub shows it on the model's page."""
MARK = "<!-- Written when the model was saved. Remove this line, and the next save keeps your text. -->"
"""Line of a card that may be replaced."""
PACKAGES = ("model-agnostic-grpo", "torch", "transformers", "peft")
"""Packages whose versions are in the card."""


def save_with_card(
    save: Callable[[], None],
    folder: str | Path,
    *,
    model: Any,
    sampling: Mapping[str, Any],
    trainer: Any,
    is_adapter: bool,
    push_to_hub: str | None,
    private: bool | None,
    token: str | None,
) -> None:
    """Save a model and write its card, and upload what was written if `push_to_hub` names a repository.

    Args:
        save: Writes everything but the card to the folder.
        folder: The folder.
        model: The model, whose configuration names the model that it was trained from.
        sampling: The sampling settings.
        trainer: The `GRPOTrainer` of the run, whose settings and results the card has. None: they are not known.
        is_adapter: Whether only an adapter is saved.
        push_to_hub: Repository, `user/name`. None uploads nothing.
        private: Whether a new repository is private. None uses the default of the account.
        token: Token of the account. None uses the token of `hf auth login`.

    Raises:
        ConfigError: `push_to_hub` is no text, or `trainer` has no settings.
    """
    repository: Any = push_to_hub
    if repository is not None and not (isinstance(repository, str) and repository):
        raise ConfigError(
            "HFPolicy.save_pretrained: push_to_hub must be the name of a repository, 'user/name', or None; got "
            f"{describe(repository)}."
        )
    if trainer is not None and not hasattr(trainer, "config"):
        raise ConfigError(
            f"HFPolicy.save_pretrained: trainer must be the run's GRPOTrainer, or None; got {describe(trainer)}."
        )
    folder = Path(folder)
    card = folder / CARD
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()} if folder.is_dir() else {}
    text = card.read_text(encoding="utf-8") if card.is_file() else MARK
    if MARK in text:
        text = model_card(model, sampling, trainer, is_adapter=is_adapter, repository=push_to_hub)
    save()
    card.write_text(text, encoding="utf-8")  # last, because PEFT writes a card, too
    if push_to_hub is not None:
        written = [path for path in folder.iterdir() if path.is_file() and before.get(path) != path.stat().st_mtime_ns]
        upload(folder, sorted({CARD, *(path.name for path in written)}), push_to_hub, private=private, token=token)


def model_card(
    model: Any, sampling: Mapping[str, Any], trainer: Any, *, is_adapter: bool, repository: str | None
) -> str:
    """A model card in Markdown: what was trained from what, the run's settings and results, and how to load it."""
    from huggingface_hub import ModelCardData

    base = str(getattr(model.config, "_name_or_path", "") or "")
    is_public = base != "" and not Path(base).exists()
    data = ModelCardData(
        base_model=base if is_public else None,  # the Hub refuses the names of local folders
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["grpo", "reinforcement-learning", *(["lora"] if is_adapter else [])],
    )
    name = repository or "FOLDER"
    what = "An adapter" if is_adapter else "A language model"
    source = f" of [{base}](https://huggingface.co/{base})" if is_public else ""
    parts = [
        f"---\n{data.to_yaml()}\n---\n{MARK}\n# {name.rpartition('/')[2] if repository else 'Model card'}\n",
        f"{what}{source}, trained by Group Relative Policy Optimization with model-agnostic-grpo.\n",
        f'```python\nfrom adapters.llm import HFPolicy\n\npolicy = HFPolicy.from_pretrained("{name}")\n```\n',
        *([] if trainer is None else [_run(trainer)]),
        f"## Sampling in training\n\n{_as_json(sampling)}\n",
        f"## Versions\n\n{_table(('package', 'version'), _versions())}\n",
    ]
    return "\n".join(parts)


def upload(folder: Path, names: list[str], repository: str, *, private: bool | None, token: str | None) -> None:
    """Upload files of a folder to a repository of the Hub, as one commit. The repository is created if it does not exist."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=names,
            commit_message="Upload a model trained by GRPO",
        )
    except Exception as error:
        error.add_note(
            f"HFPolicy.save_pretrained: the model is saved in {folder}, and it is not uploaded to {repository!r}. Log in with "
            f"`hf auth login`, or pass token=..., and upload it with `hf upload {repository} {folder}`."
        )
        raise


def _run(trainer: Any) -> str:
    """The sections of the run's results and settings."""
    latest = trainer.history[-1] if trainer.history else {}
    metrics = [
        (f"`{name}`", f"{value:.4g}")
        for name, value in sorted(latest.items())
        if name.startswith(("eval/", "completions/"))
        or (name.startswith("rewards/") and name.endswith(("/mean", "/std")))
    ]
    weights = trainer.reward_model.weights if isinstance(trainer.reward_model, WeightedRewards) else {}
    parts = ", ".join(f"`{name}` (weight {weight:g})" for name, weight in weights.items())
    facts = [
        ("iterations", str(trainer.iteration)),
        ("reward", parts or f"`{reward_name(trainer.reward_model)}`"),
        ("processes", str(trainer.engine.num_ranks)),
    ]
    return (
        f"## Training\n\n{_table(('fact', 'value'), facts)}\n\n"
        + (f"The last iteration's metrics:\n\n{_table(('metric', 'value'), metrics)}\n\n" if metrics else "")
        + f"The settings, for `GRPOConfig.from_dict`:\n\n{_as_json(trainer.config.to_dict())}\n"
    )


def _versions() -> list[tuple[str, str]]:
    found = []
    for name in PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:  # recovery: it runs from a checkout, or is not installed
            continue
    return found


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"| {left} | {right} |" for left, right in [head, ("---", "---"), *rows])


def _as_json(values: Mapping[str, Any]) -> str:
    return f"```json\n{json.dumps(values, indent=2)}\n```"
