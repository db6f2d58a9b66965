"""Weights for a sampler with its own copy of the model: adapters merged, under the checkpoint's names."""

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from grpo.errors import ConfigError


@torch.no_grad()
def merged_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model with its active adapters merged, one after another; the model itself does not change.

    W + scale B A is made when its turn comes, so that no second model is ever in memory, unless the checkpoint's names are not
    the model's own (mixtures of experts). Quantised weights are dequantised, as every forward does. Tied weights come under
    each of their names: an engine may have prepared each of them in its own way.

    Args:
        model: a `transformers` model, or a `PeftModel` of one.

    Raises:
        ConfigError: adapters that cannot be merged: on one of two tied weights, or not plain LoRA on a quantised layer.

    Source:
        Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    _require_equal_ties(plain)
    conversions = getattr(plain, "_weight_conversions", None)  # from_pretrained leaves them here
    if conversions is None:
        conversions = get_model_conversion_mapping(plain, add_legacy=False)
    if conversions:
        yield from revert_weight_conversion(plain, dict(_weights(plain, ""))).items()
    else:
        yield from _weights(plain, "")


def _weights(module: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers below a module, as if nothing were wrapped."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.integrations import dequantize_bnb_weight
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(module, ModulesToSaveWrapper):
        is_active = module.active_adapters and not module.disable_adapters
        chosen = module.modules_to_save[module.active_adapters[0]] if is_active else module.original_module
        yield from _weights(chosen, prefix)
    elif isinstance(module, TrainableTokensWrapper):
        yield from _weights(module.token_adapter, prefix)
    elif isinstance(module, BaseTunerLayer):
        yield from _merged(module, prefix)
    else:
        own = module.state_dict()
        for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
            if name in own:
                if _is_quantised(tensor):  # PEFT's function for modules would move an 8-bit weight, and lose its scales
                    tensor = dequantize_bnb_weight(tensor, state=getattr(module, "state", None))
                yield prefix + name, tensor
        for name, child in module.named_children():
            yield from _weights(child, f"{prefix}{name}.")


def _merged(layer: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """What a layer with adapters comes to."""
    adapters = [] if layer.disable_adapters else [a for a in layer.active_adapters if a not in layer.merged_adapters]
    if not adapters:
        yield from _weights(layer.base_layer, prefix)
    elif not any(map(_is_quantised, layer.get_base_layer().parameters(recurse=False))):
        layer = copy.deepcopy(layer)
        layer.merge(adapter_names=adapters)
        yield from _weights(layer.base_layer, prefix)
    else:  # where merging would quantise the sum again
        if type(layer).__module__.split(".")[:3] != ["peft", "tuners", "lora"] or any(
            name in layer.lora_variant or layer.lora_bias[name] for name in adapters
        ):
            raise ConfigError(
                f"An adapter of a quantised layer can be merged for the sampler if it is plain LoRA; that of {prefix[:-1]} is "
                "not. Leave out variants such as use_dora and lora_bias, or load the model without quantisation."
            )
        for name, weight in _weights(layer.base_layer, prefix):
            if name == prefix + "weight":
                for adapter in adapters:
                    weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
            yield name, weight


def _is_quantised(tensor: Tensor) -> bool:
    """A weight of bitsandbytes: bytes that mean numbers only together with their scales."""
    return type(tensor).__name__ in ("Params4bit", "Int8Params")


def _require_equal_ties(plain: Any) -> None:
    """Embedding and output head, where they are one weight, stay one: the sampler's model has one for both."""
    pair = plain.get_input_embeddings(), plain.get_output_embeddings()
    if None in pair or _original(pair[0]).weight is not _original(pair[1]).weight:
        return
    first, second = (dict(_weights(module, ""))["weight"] for module in pair)
    is_half_adapted = (_original(pair[0]) is pair[0]) != (_original(pair[1]) is pair[1])
    if first is not second and (is_half_adapted or not torch.equal(first, second)):
        raise ConfigError(
            f"{type(plain).__name__} has one weight for its input embeddings and its output head, and an adapter changes only "
            "one of them: the sampler, which has one weight too, could not follow. Leave both out of target_modules and "
            "modules_to_save, or set ensure_weight_tying=True in the LoraConfig."
        )


def _original(module: Any) -> nn.Module:
    """What an adapter is wrapped around; a plain module is itself."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(module, AuxiliaryTrainingWrapper):
        module = module.original_module
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
