"""Saving a model with its model card, and uploading it to the Hugging Face Hub."""

import json
import re
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
TEMPLATE = """\
---
{{ card_data }}
---
{{ mark }}
# {{ title }}

{{ "An adapter" if library_name == "peft" else "A language model" }}
{%- if base_model %} of [{{ base_title }}](https://huggingface.co/{{ base_model }}){% endif %}, trained by Group Relative \
Policy Optimization with model-agnostic-grpo.

```python
from adapters.llm import HFPolicy

policy = HFPolicy.from_pretrained({{ source }})
```
{% if run %}
## Training

| fact | value |
| --- | --- |
| iterations | {{ run.iterations }} |
| reward | {{ run.reward }} |
| processes | {{ run.processes }} |
{% if run.metrics %}
The last iteration's metrics:

| metric | value |
| --- | --- |
{% for name, value in run.metrics %}| {{ name }} | {{ value }} |
{% endfor %}{% endif %}
The settings, for `GRPOConfig.from_dict`:

```json
{{ run.settings }}
```
{% endif %}
## Sampling in training

```json
{{ sampling }}
```

## Versions

| package | version |
| --- | --- |
{% for name, value in versions %}| {{ name }} | {{ value }} |
{% endfor %}"""
"""The card, as a Jinja template of `ModelCard.from_template`."""


def base_on_hub(model: Any) -> str | None:
    """Name of the model on the Hub that a model was loaded from, or None if it came from a local folder or is new.

    A relative folder, such as `outputs/model`, can look like a name on the Hub, and can be gone when the model is saved.
    Therefore, call this soon after loading. The name must be valid on the Hub and must not be a folder; and the Hub's cache
    must have the model, because transformers loads each model of the Hub through the cache.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    name = str(getattr(model.config, "_name_or_path", None) or "")
    if not _is_repository(name) or Path(name).exists():
        return None
    cached = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "snapshots"
    return name if cached.is_dir() else None


def save_with_card(
    save: Callable[[], None],
    folder: str | Path,
    *,
    base_model: str | None,
    sampling: Mapping[str, Any],
    trainer: Any,
    is_adapter: bool,
    push_to_hub: str | None,
    private: bool | None,
    token: str | None,
) -> None:
    """Save a model and write its card, and upload what was written if `push_to_hub` names a repository."""
    if push_to_hub is not None and not _is_repository(push_to_hub):
        raise ConfigError(
            "HFPolicy.save_pretrained: push_to_hub must be the name of a repository, 'user/name', or None; got "
            f"{describe(push_to_hub)}."
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
        text = str(model_card(base_model, sampling, trainer, is_adapter=is_adapter, repository=push_to_hub))
    save()
    card.write_text(text, encoding="utf-8")  # last, because PEFT writes a card, too
    if push_to_hub is not None:
        written = [path for path in folder.iterdir() if path.is_file() and before.get(path) != path.stat().st_mtime_ns]
        upload(folder, sorted({CARD, *(path.name for path in written)}), push_to_hub, private=private, token=token)


def model_card(
    base_model: str | None, sampling: Mapping[str, Any], trainer: Any, *, is_adapter: bool, repository: str | None
) -> Any:
    """The `ModelCard`: what was trained from what, the run's settings and results, and how to load the model."""
    from huggingface_hub import ModelCard, ModelCardData

    data = ModelCardData(
        base_model=base_model,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["grpo", "reinforcement-learning", *(["lora"] if is_adapter else [])],
    )
    return ModelCard.from_template(
        data,
        template_str=TEMPLATE,
        mark=MARK,
        title=repository.rpartition("/")[2].replace("_", r"\_") if repository else "Model card",  # `_` is emphasis
        base_title=(base_model or "").replace("_", r"\_"),
        source=json.dumps(repository or "FOLDER"),
        run=None if trainer is None else _run(trainer),
        sampling=json.dumps(sampling, indent=2),
        versions=_versions(),
    )


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


def _is_repository(name: Any) -> bool:
    """Whether the Hub accepts a name. An absolute path, a path of three or more parts and "" are not accepted."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # its table of lazy imports has it

    try:
        validate_repo_id(name)
    except HFValidationError:  # recovery: the caller decides what an invalid name means
        return False
    return True


def _run(trainer: Any) -> dict[str, Any]:
    """The run's results and settings."""
    latest = trainer.history[-1] if trainer.history else {}
    weights = trainer.reward_model.weights if isinstance(trainer.reward_model, WeightedRewards) else {}
    parts = ", ".join(f"{_code(name)} (weight {weight:g})" for name, weight in weights.items())
    return {
        "iterations": trainer.iteration,
        "reward": parts or _code(reward_name(trainer.reward_model)),
        "processes": trainer.engine.num_ranks,
        "metrics": [
            (_code(name), f"{value:.4g}")
            for name, value in sorted(latest.items())
            if name.startswith(("eval/", "completions/"))
            or (name.startswith("rewards/") and name.endswith(("/mean", "/std")))
        ],
        "settings": json.dumps(trainer.config.to_dict(), indent=2),
    }


def _versions() -> list[tuple[str, str]]:
    found = []
    for name in PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:  # recovery: it runs from a checkout, or is not installed
            continue
    return found


def _code(text: str) -> str:
    """Text as it is, in monospace, in a cell of a Markdown table."""
    fence = "`" * (1 + max((len(ticks) for ticks in re.findall("`+", text)), default=0))
    space = " " if text[:1] in "` " or text[-1:] in "` " else ""  # Markdown removes one space at each end
    return fence + space + " ".join(text.splitlines()).replace("|", r"\|") + space + fence
