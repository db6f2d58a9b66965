"""Loading models from a folder or the hub, and saving them: precision, quantisation and LoRA."""

import importlib.util
import json
from pathlib import Path
from typing import Any, Literal

import torch

from grpo.errors import ConfigError

from .merged_weights import merged_weights

ADAPTER_CONFIG = "adapter_config.json"
"""Name of the file with the configuration of a saved adapter. PEFT writes it."""


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
    """Load a causal language model and its tokenizer. A folder with a saved adapter gives its base model with the adapter.

    Args:
        name_or_folder: Name on the hub, or a local folder.
        dtype: Data type of the weights that are not quantised. "auto" uses the saved data type.
        attention: `attn_implementation` of transformers. None uses the model's default.
        lora: A `peft.LoraConfig`, or True for rank 16 and alpha 32 on all linear layers (Hu et al. 2021, arXiv:2106.09685).
            Only the adapter is trained.
        load_in_4bit: Whether to quantise to nf4 with double quantisation (Dettmers et al. 2023, arXiv:2305.14314).
        load_in_8bit: Whether to quantise with LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339).
        revision: Branch, tag or commit on the hub.
        device: Device of the model. None uses CUDA if it is available.
        trust_remote_code: Whether to run code that comes with the model. Trust its authors, and pin `revision`.

    Raises:
        ConfigError: Settings exclude each other.
        ImportError: A package is missing. The message names the extra to install.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lora = None if lora is False else lora
    folder = Path(name_or_folder)
    adapter = json.loads((folder / ADAPTER_CONFIG).read_text()) if (folder / ADAPTER_CONFIG).is_file() else None
    if adapter is not None and lora is not None:
        raise ConfigError(
            f"load_model: {folder} already has an adapter, and training continues with it. Leave out lora, or load the "
            "base model."
        )
    if (load_in_4bit or load_in_8bit) and lora is None and adapter is None:
        raise ConfigError(
            "load_model: quantised weights cannot be trained. Pass lora=True, or a peft.LoraConfig, to train an adapter."
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
    """Add a new LoRA adapter to a model and freeze all other weights. At first, the adapter changes nothing.

    Args:
        model: A plain `PreTrainedModel`.
        config: A `peft.LoraConfig`. None uses rank 16 and alpha 32 on all linear layers except the output head.
    """
    peft = _require_peft()
    config = config or peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def keep_differentiable(model: Any) -> None:
    """Keep 4-bit weights in a form that has a gradient.

    On some CPUs, bitsandbytes packs 4-bit weights at their first evaluation, for a kernel without a gradient. Training would
    then continue without an error, although no gradient passes through these weights.

    Raises:
        ConfigError: An adapter is trained, and the weights are packed already. Unpacking would lose precision.
    """
    linears = [module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    for linear in linears:
        linear.support_avx512bf16_for_cpu = False
    states = [getattr(linear.weight, "quant_state", None) for linear in linears]
    is_packed = any(getattr(state, "packing_format_for_cpu", False) for state in states)
    if is_packed and any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "HFPolicy: 4-bit weights must not be evaluated before training; bitsandbytes has packed these for a kernel of this "
            "CPU that has no gradient. Load the model again, and make the HFPolicy before anything is evaluated; or load it "
            "with adapters.llm.load_model, which prevents the packing."
        )


def save_model(model: Any, tokenizer: Any, folder: str | Path, *, merge: bool = False) -> None:
    """Save weights, configuration and tokenizer in Hugging Face's format. An adapted model saves only its adapter.

    Args:
        model: A plain or adapted model.
        tokenizer: The model's tokenizer.
        folder: Folder to write to. It is created if it does not exist.
        merge: Whether to save the whole model with the adapter merged into its weights.
    """
    if merge and hasattr(model, "get_base_model"):
        plain = model.get_base_model()
        plain.save_pretrained(folder, state_dict={name: weight.contiguous() for name, weight in merged_weights(model)})
    else:
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _quantisation(in_4bit: bool, in_8bit: bool, dtype: torch.dtype | Literal["auto"]) -> Any:
    if in_4bit and in_8bit:
        raise ConfigError("load_model: load_in_4bit and load_in_8bit exclude each other; got both. Choose one.")
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
