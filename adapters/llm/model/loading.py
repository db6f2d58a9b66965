"""Models from a folder or the hub, and back: precision, quantisation, LoRA."""

import importlib.util
import json
from pathlib import Path
from typing import Any, Literal

import torch

from grpo.errors import ConfigError

ADAPTER_CONFIG = "adapter_config.json"
"""What PEFT saves beside an adapter's weights."""


def load_model(
    name_or_folder: str | Path,
    *,
    dtype: torch.dtype | Literal["auto"] = "auto",
    attention: str | None = None,
    lora: Any = None,
    load_in_4bit: bool = False,
    load_in_8bit: bool = False,
    revision: str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """A causal language model and its tokenizer. A folder with a saved adapter gives the model it was made for, adapted.

    Args:
        name_or_folder: on the hub, or a local folder.
        dtype: of weights that are not quantised; "auto": as they were saved.
        attention: transformers' `attn_implementation`; None: the model's default.
        lora: a `peft.LoraConfig`, or True for rank 16, alpha 32, on all linear layers (Hu et al. 2021, arXiv:2106.09685). Only
            the adapter is trained.
        load_in_4bit: nf4 with double quantisation (Dettmers et al. 2023, arXiv:2305.14314).
        load_in_8bit: LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339).
        revision: a branch, tag or commit of the hub.
        device: where the model goes; None: CUDA where there is any.
        trust_remote_code: run code that comes with the model. Only for authors you trust, with `revision` pinned.

    Raises:
        ConfigError: settings that exclude each other.
        ImportError: an extra is missing; it is named.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lora = None if lora is False else lora
    folder = Path(name_or_folder)
    adapter = json.loads((folder / ADAPTER_CONFIG).read_text()) if (folder / ADAPTER_CONFIG).is_file() else None
    if adapter is not None and lora is not None:
        raise ConfigError(f"{folder} holds an adapter, which is trained on: leave out lora, or load the base model.")
    if (load_in_4bit or load_in_8bit) and lora is None and adapter is None:
        raise ConfigError(
            "Quantised weights cannot be trained: pass lora=True, or a peft.LoraConfig, to train an adapter."
        )
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    base = str(name_or_folder) if adapter is None else adapter["base_model_name_or_path"]
    model = AutoModelForCausalLM.from_pretrained(
        base,
        dtype=dtype,
        attn_implementation=attention,
        quantization_config=_quantisation(load_in_4bit, load_in_8bit, dtype),
        device_map={"": device},
        **(
            options
            if adapter is None
            else {"trust_remote_code": trust_remote_code, "revision": adapter.get("revision")}
        ),
    )
    keep_differentiable(model)
    tokenizer = AutoTokenizer.from_pretrained(str(name_or_folder), **options)
    if adapter is not None:
        peft = _require_peft()
        model = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    elif lora is not None:
        model = add_lora(model, None if lora is True else lora)
    return model, tokenizer


def add_lora(model: Any, config: Any = None) -> Any:
    """`model` with a new, still neutral LoRA adapter, everything else frozen.

    Args:
        model: a plain `PreTrainedModel`.
        config: a `peft.LoraConfig`; None: rank 16, alpha 32, on all linear layers but the output head.
    """
    peft = _require_peft()
    config = config or peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def keep_differentiable(model: Any) -> None:
    """Keep 4-bit weights in a form that gradients pass through: on some CPUs, bitsandbytes packs them when they are first
    evaluated, for a kernel that has no gradient and says nothing that stops training.

    Raises:
        ConfigError: an adapter is to be trained, and the weights below it are packed already, which loses digits of theirs.
    """
    linears = [module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    for linear in linears:
        linear.support_avx512bf16_for_cpu = False
    states = [getattr(linear.weight, "quant_state", None) for linear in linears]
    is_packed = any(getattr(state, "packing_format_for_cpu", False) for state in states)
    if is_packed and any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "The 4-bit weights of this model have been evaluated before, and bitsandbytes has packed them for a kernel of this "
            "CPU that no gradient passes through. Load the model again, and make the HFPolicy before anything is evaluated; "
            "or load it with adapters.llm.load_model, which keeps them as they are."
        )


def save_model(model: Any, tokenizer: Any, folder: str | Path, *, merge: bool = False) -> None:
    """Write weights (of an adapter, its own only), configuration and tokenizer in Hugging Face's format.

    Args:
        model: plain or adapted.
        tokenizer: of the model.
        folder: made where it is not there.
        merge: write the whole model with the adapter merged into it.
    """
    if merge and hasattr(model, "get_base_model"):
        from .merged_weights import merged_weights

        plain = model.get_base_model()
        plain.save_pretrained(folder, state_dict={name: weight.contiguous() for name, weight in merged_weights(model)})
    else:
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _quantisation(in_4bit: bool, in_8bit: bool, dtype: torch.dtype | Literal["auto"]) -> Any:
    if in_4bit and in_8bit:
        raise ConfigError("load_in_4bit and load_in_8bit exclude each other: choose one.")
    if not in_4bit and not in_8bit:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError('Quantised models need bitsandbytes: pip install "model-agnostic-grpo[llm-4bit]"')
    from transformers import BitsAndBytesConfig

    if in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if dtype == "auto" else dtype,
    )


def _require_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError('LoRA needs PEFT: pip install "model-agnostic-grpo[llm]"') from error
    return peft
