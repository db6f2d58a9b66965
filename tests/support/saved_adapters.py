"""Adapters of every type that PEFT has. `python -m tests.support.saved_adapters ARGUMENTS` prints log-probs of folders.

ARGUMENTS is a JSON list of the arguments of `HFPolicy.from_pretrained`, folder by folder.
"""

import json
import sys
from typing import Any

import peft
import torch
from torch import nn

from adapters.llm import HFPolicy, SamplingConfig
from tests.support.llm_models import completion

SAMPLING = SamplingConfig(max_new_tokens=4)
OWN: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10}, "IA3": {"feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]}, "OFT": {"r": 0, "oft_block_size": 8}, "HRA": {"r": 4},
    "VBLORA": {"num_vectors": 16, "vector_length": 16}, "FOURIERFT": {"n_frequency": 20}, "BOFT": {"boft_block_size": 8},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [3, 4]}, "RANDLORA": {"r": 4},
    "CPT": {"cpt_token_ids": [3, 4, 5], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 1, 1]},
    "C3A": {"block_size": 16}, "ROAD": {"group_size": 8}, "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 1},
}  # fmt: skip
"""Settings of PEFT's types of adapters, where the defaults do not fit a tiny model."""
PROMPTS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "CARTRIDGE")
"""Types that add virtual tokens and have no target modules. CPT is one, too, with settings of its own."""


def configs() -> dict[str, Any]:
    """A configuration of every type of adapter that PEFT has, by name, for a tiny Llama. X-LoRA needs trained adapters."""
    found = {}
    for kind, config in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items():
        name = getattr(kind, "value", kind)
        settings = OWN.get(name, {})
        if name in PROMPTS:
            settings = {"num_virtual_tokens": 4}
        elif name not in ("CPT", "ADAPTION_PROMPT"):
            settings = {"target_modules": ["q_proj", "down_proj"]} | settings
        if name != "XLORA":
            found[name] = config(**settings, task_type="CAUSAL_LM")
    return found


def with_float_layers(model: Any) -> Any:
    """The model with float layers of the same weights in place of its 8-bit layers, which also round what comes in."""
    from bitsandbytes.nn import Linear8bitLt

    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, Linear8bitLt):
                plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
                scale = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
                plain.weight.data = layer.weight.data.float() * scale.float()[:, None] / 127
                setattr(module, name, plain)
    return model


@torch.no_grad()  # PEFT's C3A has no gradient around 8-bit weights
def log_probs_of(policy: HFPolicy) -> list[float]:
    """Log-probs of one completion."""
    return policy.score_actions(["1+1="], [completion(5, 6, 7)]).log_probs[0].tolist()


if __name__ == "__main__":
    policies = (
        HFPolicy.from_pretrained(sampling=SAMPLING, dtype=torch.float32, **arguments)
        for arguments in json.loads(sys.argv[1])
    )
    print(json.dumps([log_probs_of(policy) for policy in policies]))
