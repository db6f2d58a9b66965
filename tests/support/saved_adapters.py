"""Adapters of every type that PEFT has. `python -m tests.support.saved_adapters FOLDER ...` prints log-probs of folders."""

import json
import sys
from typing import Any

import peft

from adapters.llm import HFPolicy, SamplingConfig
from tests.support.llm_models import completion

SAMPLING = SamplingConfig(max_new_tokens=4)
OWN: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "OFT": {"r": 0, "oft_block_size": 8},
    "HRA": {"r": 4},
    "VBLORA": {"num_vectors": 16, "vector_length": 16},
    "FOURIERFT": {"n_frequency": 20},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [3, 4]},
    "BOFT": {"boft_block_size": 8},
    "RANDLORA": {"r": 4},
    "C3A": {"block_size": 16},
    "ROAD": {"group_size": 8},
}
"""Settings of PEFT's types of adapters, where the defaults do not fit a tiny model."""


def configs() -> dict[str, Any]:
    """A configuration of every type of adapter that PEFT has, by name, for a tiny Qwen 3."""
    found = {}
    for kind, config in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items():
        name = getattr(kind, "value", kind)
        if name == "ADAPTION_PROMPT":  # it knows only some architectures
            continue
        settings = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"} | OWN.get(name, {})
        try:
            found[name] = config(**settings)
        except (TypeError, ValueError):  # it takes no target modules
            continue
    return found


def log_probs_of(policy: HFPolicy) -> list[float]:
    """Log-probs of one completion."""
    return policy.score_actions(["1+1="], [completion(5, 6, 7)]).log_probs[0].tolist()


if __name__ == "__main__":
    print(json.dumps([log_probs_of(HFPolicy.from_pretrained(folder, sampling=SAMPLING)) for folder in sys.argv[1:]]))
