"""The parts of an image-text model: the language model, the vision tower, and the projector between them."""

import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch import nn

from grpo.errors import ConfigError

Part = Literal["language", "projector", "vision"]
"""A part of an image-text model. "language" has the embeddings, the layers and the output head. "vision" computes features of
pictures. "projector" is all between them, and in a tower whatever is called a merger or a projector."""
BETWEEN = re.compile(r"(^|[._])(merger|projector)")


def parts_of(model: Any) -> dict[str, Part]:
    """The part of each parameter, by its name. A language model has one part."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    towers = vision_of(plain)
    if not towers:
        return dict.fromkeys((name for name, _ in model.named_parameters()), "language")
    of_towers = {id(parameter): name for name, parameter in towers[0].named_parameters()}
    words = [plain.get_decoder(), plain.get_input_embeddings(), plain.get_output_embeddings()]
    of_words = {id(parameter) for part in words if part is not plain for parameter in part.parameters()}
    found: dict[str, Part] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in of_towers:
            found[name] = "projector" if BETWEEN.search(of_towers[id(parameter)]) else "vision"
        else:
            found[name] = "language" if id(parameter) in of_words else "projector"
    return found


def vision_of(plain: Any) -> list[nn.Module]:
    """The vision tower of an image-text model. Empty if it has none under the names that transformers gives towers."""
    tower = plain.get_encoder(modality="image") if hasattr(plain, "get_encoder") else plain
    return [] if tower in (plain, plain.base_model) else [tower]


def train_parts(model: Any, parts: Sequence[Part]) -> Any:
    """Train some parts of an image-text model, and freeze the others.

    Args:
        model: A plain `PreTrainedModel` that reads pictures.
        parts: Names of parts. Few parts need less memory, and a frozen vision tower keeps what it has learned.

    Returns:
        The model.

    Raises:
        ConfigError: A name is unknown, or the model has no such part.
    """
    of_model = parts_of(model)
    wrong = [part for part in parts if part not in set(of_model.values())]
    if isinstance(parts, str) or not parts or wrong:
        raise ConfigError(
            f"train_parts: parts must be names out of {', '.join(map(repr, get_args(Part)))}; got {parts!r}, and "
            f"{type(model).__name__} has {sorted(set(of_model.values()))}. Pass a tuple of these."
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(of_model[name] in parts)
    return model


def language_layers(plain: Any) -> list[str]:
    """The names of the linear layers of an image-text model's language part, without the output head."""
    inside = {id(part) for part in plain.get_decoder().modules()}
    head = plain.get_output_embeddings()
    return [
        name
        for name, part in plain.named_modules()
        if isinstance(part, nn.Linear) and id(part) in inside and part is not head
    ]
