"""Loading models from a folder or the hub, and saving them: precision, quantisation and LoRA."""

import copy
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from grpo.arguments import install_command
from grpo.errors import ConfigError, ContractError

from .causal_lm import CausalLM, adapters_of, is_adapted
from .merged_weights import is_divided, merged_weights
from .parts import Part, language_layers, train_parts, vision_of
from .references import trained_outside

WITH_MAMBA = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Model types in which PEFT refuses an adapter of `out_proj`."""
PREFIX = "base_model.model."
"""What PEFT puts before the names of a model's weights."""
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
    pictures: bool = False,
    train: Sequence[Part] | None = None,
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer. A folder with a saved adapter gives its base model with the adapter.

    Args:
        name_or_folder: Name on the hub, or a local folder.
        dtype: Data type of the weights that are not quantised. "auto" uses the saved data type.
        attention: `attn_implementation` of transformers. None uses the model's default.
        lora: A `peft.LoraConfig`, or True for rank 16 and alpha 32 on all linear layers (Hu et al. 2021, arXiv:2106.09685),
            of a model with a vision tower on those of the language part. Only the adapter is trained.
        load_in_4bit: Whether to quantise to nf4 with double quantisation (Dettmers et al. 2023, arXiv:2305.14314).
        load_in_8bit: Whether to quantise with LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339).
        revision: Branch, tag or commit on the hub.
        device: Device of the model. None uses CUDA if it is available.
        trust_remote_code: Whether to run code that comes with the model. Trust its authors, and pin `revision`.
        pictures: Whether to load an image-text model with its processor, which takes the place of the tokenizer.
        train: Which parts of an image-text model are trained: "language", "projector", "vision". None trains all of them.

    Raises:
        ConfigError: Settings exclude each other.
        ImportError: A package is missing. The message names the extra to install.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

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
    if train is not None and (lora is not None or adapter is not None):
        raise ConfigError("load_model: an adapter trains itself alone; got train beside it. Leave out one of them.")
    device = torch.device(device or (own_gpu() if torch.cuda.is_available() else "cpu"))
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    base = str(name_or_folder) if adapter is None else adapter["base_model_name_or_path"]
    model = (AutoModelForImageTextToText if pictures else AutoModelForCausalLM).from_pretrained(
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
    tokenizer = (AutoProcessor if pictures else AutoTokenizer).from_pretrained(str(name_or_folder), **options)
    if pictures and not hasattr(tokenizer, "image_processor"):
        raise ConfigError(
            f"load_model: pictures=True needs a model with a processor; {name_or_folder} has a {type(tokenizer).__name__}. "
            "Leave out pictures, or add the processor's files."
        )
    if train is not None:
        train_parts(model, train)
    if adapter is not None:
        peft = _require_peft()
        size = _num_saved_tokens(model, folder)
        if size is not None:  # tokens were added before the adapter was trained
            model.resize_token_embeddings(size, mean_resizing=False)
        model = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    elif lora is not None:
        model = add_lora(model, None if lora is True else lora)
    return model, tokenizer


def add_lora(model: Any, config: Any = None) -> Any:
    """Add a new LoRA adapter to a model and freeze all other weights. At first, the adapter changes nothing.

    Args:
        model: A plain `PreTrainedModel`.
        config: A `peft.LoraConfig`. None uses rank 16 and alpha 32 on all linear layers except the output head, those of a
            vision tower and its projector, and except `out_proj` and `dt_proj` in models with Mamba's layers, which read these
            weights without calling the layers.
    """
    peft = _require_peft()
    if config is None:
        targets: Any = "all-linear"
        if getattr(model.config, "model_type", None) in WITH_MAMBA:
            head = model.get_output_embeddings()
            linear = {
                name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and part is not head
            }
            targets = sorted({name.rpartition(".")[2] for name in linear} - {"out_proj", "dt_proj"})
        elif vision_of(model):
            targets = language_layers(model)
        config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def own_gpu() -> str:
    """The GPU of this process: under torchrun, that of its local rank."""
    rank = os.environ.get("LOCAL_RANK")
    # asking for the current device would take memory of the first GPU on every rank
    return f"cuda:{torch.cuda.current_device() if rank is None else rank}"


def _num_saved_tokens(model: Any, folder: Path) -> int | None:
    """Number of token embeddings in a folder with an adapter, if it is not that of the model."""
    from safetensors import safe_open

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        return None
    pair = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    names = tuple(name for name, part in model.named_modules() if id(part) in pair)
    with safe_open(file, "pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - no dict
            if key.removesuffix(".weight").removesuffix(".base_layer").endswith(names) and key.endswith("weight"):
                size = tensors.get_slice(key).get_shape()[0]
                return None if size == len(model.get_input_embeddings().weight) else size
    return None


def keep_differentiable(model: Any) -> None:
    """Keep 4-bit weights in a form that has a gradient.

    On some CPUs, bitsandbytes packs 4-bit weights at their first evaluation, for a kernel without a gradient. Training would
    then continue without an error, although no gradient passes through these weights.
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
    """Save weights, configuration and tokenizer in Hugging Face's format. An adapted model saves only its adapter."""
    if merge and is_adapted(model):
        _save_merged(model, folder)
    else:
        _require_one_adapter(model)
        model.save_pretrained(folder)
        _lift(model, Path(folder))
        if is_adapted(model):
            _require_saved(model, Path(folder))
    tokenizer.save_pretrained(folder)


def _save_merged(model: Any, folder: str | Path) -> None:
    """Save a plain model with the adapter merged, and read it back."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    weights = {name: weight.contiguous() for name, weight in merged_weights(model, keeps_ties=False)}
    is_untied = _unties(plain, weights)
    is_plain_class = not (
        is_untied or getattr(plain, "is_quantized", False) or getattr(plain, "_hf_peft_config_loaded", False)
    )
    if is_plain_class:
        plain.save_pretrained(folder, state_dict=weights)
        _read_back(model, plain, folder)
        return
    # transformers would write the quantised tensors, or the adapter alone: a model without weights writes what it is given
    config = copy.deepcopy(plain.config)
    vars(config).pop("quantization_config", None)
    if is_untied:
        config.tie_word_embeddings = config.get_text_config(decoder=True).tie_word_embeddings = False
    with torch.device("meta"):
        shell = type(plain)(config)
    shell.generation_config = plain.generation_config
    # the names of a checkpoint: that of a mixture of experts has a tensor per expert
    wrong = sorted(dict(merged_weights(shell)).keys() ^ weights.keys())
    if wrong:
        raise ContractError(
            f"HFPolicy.save_pretrained: a merged model must have the weights of a plain model; {wrong[:4]} are missing or "
            "unknown. Save the adapter: merge=False."
        )
    shell.to(plain.dtype).save_pretrained(folder, state_dict=weights)
    _read_back(model, plain, folder)


def _unties(plain: Any, weights: Mapping[str, Tensor]) -> bool:
    """Whether one of two tied weights was trained apart from the other, so that a reader must not tie them."""
    head = next(iter(getattr(plain, "_tied_weights_keys", None) or ()), None)
    if head is None or head not in weights or not getattr(plain.config, "tie_word_embeddings", False):
        return False
    source = plain._tied_weights_keys[head]
    return source in weights and not torch.equal(weights[head], weights[source])


def _require_saved(model: Any, folder: Path) -> None:
    """Read back what was trained beside an adapter. PEFT leaves out what its configuration does not name."""
    file = folder / "adapter_model.safetensors"
    outside = trained_outside(model)
    if not outside or not file.is_file() or is_divided(model):
        return
    from safetensors.torch import load_file

    saved = {name.removeprefix(PREFIX): value for name, value in load_file(file).items()}
    lost = [
        name
        for name, value in outside.items()
        if (found := saved.get(name.removeprefix(PREFIX))) is None or not torch.equal(found, value.detach().cpu())
    ]
    if lost:
        raise ConfigError(
            f"HFPolicy.save_pretrained: an adapter's folder must have all that was trained; PEFT leaves out {len(lost)} "
            f"parameters ({', '.join(lost[:3])}{' ...' if len(lost) > 3 else ''}), which its configuration does not name. Save "
            "the merged model, merge=True. In the next run, name such parts in modules_to_save."
        )


def _read_back(model: Any, plain: Any, folder: str | Path) -> None:
    """Load a merged model on the CPU, and compare its log-probs of one row with those of the adapted model."""
    if is_divided(plain):
        return  # only one rank writes, and no rank can forward alone
    lm, again = (
        CausalLM(model),
        CausalLM(type(plain).from_pretrained(folder, dtype=plain.dtype, device_map={"": "cpu"})),
    )
    size = min(16, lm.max_positions or 16)
    row = [(7 * place + 1) % lm.vocabulary_size for place in range(size)]
    with lm.on_trial():
        expected = lm.log_probs_alone(row[:1], row[1:]).cpu()
        gap = (again.log_probs_alone(row[:1], row[1:]) - expected).abs().max().item()
    tolerance = 0.01 if lm.computes_in_float32 else 0.5
    if not gap < tolerance:
        raise ContractError(
            f"HFPolicy.save_pretrained: the merged model in {folder} must give the log-probs of the adapted model; read back, "
            f"they differ by {gap:.2g} (rounding explains {tolerance} at most), because the adapter does not act where it was "
            "merged, or quantisation rounds much. Save the adapter: merge=False."
        )


def _require_one_adapter(model: Any) -> None:
    """Refuse several active adapters, of which a reader would load the first alone."""
    if len(active := adapters_of(model)) > 1:
        raise ConfigError(
            f"HFPolicy.save_pretrained: only one adapter can be saved and loaded again; {sorted(active)} are active together. "
            "Save the merged model: merge=True."
        )


def _lift(model: Any, folder: Path) -> None:
    """Move an adapter with another name than "default" out of the folder of its name, to where it is looked for."""
    for name in adapters_of(model):
        if hasattr(model, "get_base_model") and name != "default" and (folder / name / ADAPTER_CONFIG).is_file():
            for file in (folder / name).iterdir():
                file.replace(folder / file.name)
            (folder / name).rmdir()


def _quantisation(in_4bit: bool, in_8bit: bool, dtype: torch.dtype | Literal["auto"]) -> Any:
    if in_4bit and in_8bit:
        raise ConfigError("load_model: load_in_4bit and load_in_8bit exclude each other; got both. Choose one.")
    if not in_4bit and not in_8bit:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(f"Quantised models need bitsandbytes: {install_command('llm-4bit')}")
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
        raise ImportError(f"LoRA needs PEFT: {install_command('llm')}") from error
    return peft
