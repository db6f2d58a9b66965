"""Weights with the adapters merged, for samplers that have their own copy of the model."""

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from grpo.errors import ConfigError


@torch.no_grad()
def merged_weights(model: Any, *, keeps_ties: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of each weight, with the active adapters merged. The model does not change.

    Weights that `Sharded` divides among the ranks are gathered layer by layer, if they are not gathered already: all ranks
    iterate together, and a weight is gone when the next one is yielded.

    The names are those of the model's checkpoint. Each W + scale B A is computed when it is yielded, so the memory never holds
    a second model. Mixtures of experts are an exception, because their checkpoints divide the weights in another way.
    Quantised weights are dequantised. Tied weights are yielded under each of their names, because engines may store each of
    them in another form.

    Args:
        model: A `transformers` model, or a `PeftModel` around one.
        keeps_ties: Whether tied weights must be equal, because the reader has one weight for both.

    Raises:
        ConfigError: An adapter cannot be merged: it changes one of two tied weights, or is not plain LoRA on a quantised
            layer.

    Source:
        Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    _require_mergeable(model, plain)
    if keeps_ties:
        _require_equal_ties(plain)
    conversions = getattr(plain, "_weight_conversions", None)  # set by from_pretrained
    if conversions is None:
        conversions = get_model_conversion_mapping(plain, add_legacy=False)
    if conversions:
        # copies of gathered weights, which are dropped when the next layer is gathered
        kept = {name: weight.clone() if is_divided(plain) else weight for name, weight in _weights(plain, "")}
        yield from revert_weight_conversion(plain, kept).items()
    else:
        yield from _weights(plain, "")


def is_divided(module: nn.Module) -> bool:
    """Whether this rank has only some rows of a module's weights."""
    return any(hasattr(value, "device_mesh") for value in module.parameters())


def _weights(module: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of a module and its submodules, under the names of the model without an adapter."""
    is_divided_unit = hasattr(module, "unshard") and all(
        hasattr(value, "device_mesh") for value in module.parameters() if value.dim()
    )
    if not is_divided_unit:
        yield from _gathered_weights(module, prefix)
        return
    module.unshard()
    try:
        yield from _gathered_weights(module, prefix)
    finally:
        module.reshard()


def _gathered_weights(module: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
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
                if _is_quantised(tensor):  # PEFT's function for modules would move 8-bit weights and lose their scales
                    tensor = dequantize_bnb_weight(tensor, state=getattr(module, "state", None))
                yield prefix + name, tensor
        for name, child in module.named_children():
            yield from _weights(child, f"{prefix}{name}.")


def _merged(layer: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The weights of one layer with its adapters merged."""
    adapters = [] if layer.disable_adapters else [a for a in layer.active_adapters if a not in layer.merged_adapters]
    if not adapters:
        yield from _weights(layer.base_layer, prefix)
    elif not any(map(_is_quantised, layer.get_base_layer().parameters(recurse=False))):
        layer = copy.deepcopy(layer)
        try:
            layer.merge(adapter_names=adapters)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"merged_weights: PEFT cannot merge the adapter of {prefix[:-1]}: {str(error).strip()[:200]} Save the adapter "
                "alone, or leave out what this error names (a bias of the adapter needs a bias in the layer)."
            ) from error
        yield from _weights(layer.base_layer, prefix)
    else:  # PEFT would quantise the sum again
        if type(layer).__module__.split(".")[:3] != ["peft", "tuners", "lora"] or any(
            name in layer.lora_variant or layer.lora_bias[name] for name in adapters
        ):
            raise ConfigError(
                f"merged_weights: an adapter of a quantised layer must be plain LoRA; the adapter of {prefix[:-1]} is not. "
                "Leave out variants such as use_dora and lora_bias, or load the model without quantisation."
            )
        for name, weight in _weights(layer.base_layer, prefix):
            if name == prefix + "weight":
                for adapter in adapters:
                    weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
            yield name, weight


def _is_quantised(tensor: Tensor) -> bool:
    """Whether a tensor is a quantised weight of bitsandbytes."""
    return type(tensor).__name__ in ("Params4bit", "Int8Params")


def _require_mergeable(model: Any, plain: Any) -> None:
    """Refuse adapters that are no change of weights, and quantised weights that nobody has read back."""
    kinds = {getattr(config, "peft_type", None) for config in (getattr(model, "peft_config", None) or {}).values()}
    if "ADAPTION_PROMPT" in kinds:
        raise ConfigError(
            "merged_weights: adaption prompts change no weights, so they cannot be merged. Save the adapter alone."
        )
    quantiser = getattr(plain, "hf_quantizer", None)
    method = getattr(getattr(quantiser, "quantization_config", None), "quant_method", None)
    if method is not None and "bitsandbytes" not in str(getattr(method, "value", method)):
        raise ConfigError(
            f"merged_weights: only weights that bitsandbytes has quantised can be dequantised and merged; these are quantised "
            f"by {getattr(method, 'value', method)}. Save the adapter alone, or load the model without quantisation."
        )


def _require_equal_ties(plain: Any) -> None:
    """Check that tied weights stay equal after merging, because the sampler's model has only one weight for both."""
    pair = plain.get_input_embeddings(), plain.get_output_embeddings()
    if None in pair or _original(pair[0]).weight is not _original(pair[1]).weight:
        return
    first, second = (dict(_weights(module, ""))["weight"] for module in pair)
    is_half_adapted = (_original(pair[0]) is pair[0]) != (_original(pair[1]) is pair[1])
    if first is not second and (is_half_adapted or not torch.equal(first, second)):
        raise ConfigError(
            f"merged_weights: {type(plain).__name__} has one weight for its input embeddings and its output head, and an "
            "adapter changes only one of them, so the merged weights would differ. Leave both out of target_modules and "
            "modules_to_save, or set ensure_weight_tying=True in the LoraConfig."
        )


def _original(module: Any) -> nn.Module:
    """The module without its adapter. A plain module is returned unchanged."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(module, AuxiliaryTrainingWrapper):
        module = module.original_module
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
