"""Time of one GRPO iteration of an image-text model, compared with TRL's `GRPOTrainer`.

Both sides train copies of the same random LLaVA on the same pictures and questions, of 256 image tokens each, with the same
reward function: sample a group per question, compute rewards, one optimizer update. TRL's own `train()` runs, and after each of
its steps our trainer runs one, so that both sides are timed in turn in one process. Times are CPU seconds. TRL has its best
settings (`benchmarks/_trl.py`), and ours computes the exact entropy, because TRL does. The pictures that the vision tower
computes are counted on both sides.

    python -m benchmarks.vision_vs_trl
    python -m benchmarks.vision_vs_trl --pairs 3 --rows 8
"""

import argparse
import copy
import os
import platform
import statistics
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.utils import logging

from adapters.llm import HFOptions, HFPolicy, SamplingConfig
from benchmarks._trl import LEARNING_RATE, PASSES, now, run_trl
from benchmarks.llm_vs_trl import share_of_even_tokens
from grpo import GRPOConfig, GRPOTrainer

SIDE, PATCH, GROUP, COMPLETION, VOCABULARY = 128, 8, 8, 32, 8_000
"""Pixels of a picture and of a patch in each direction, completions per question, tokens of a completion, and of the model."""
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "extra_special_tokens": {"image_token": "<image>"}}
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ '<image> ' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{% endfor %}"
)


def make_processor() -> LlavaProcessor:
    """A tokenizer with one word per token, and pictures of 256 patches."""
    words = {"<pad>": 0, "<eos>": 1, "<image>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **SPECIAL)
    pixels = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return LlavaProcessor(
        pixels,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def make_model() -> LlavaForConditionalGeneration:
    """A LLaVA of 4 + 4 layers with random weights, whose completions have full length."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 4}
    text = {"model_type": "llama", "vocab_size": VOCABULARY, "max_position_embeddings": 1024, "pad_token_id": 0}
    config = LlavaConfig(
        text_config=text | sizes | {"bos_token_id": None, "eos_token_id": 1},
        vision_config={"model_type": "clip_vision_model", "image_size": SIDE, "patch_size": PATCH} | sizes,
        image_token_index=2,
        vision_feature_layer=-1,
    )
    model = LlavaForConditionalGeneration(config)
    head = nn.Linear(256, VOCABULARY)
    head.weight.data.copy_(model.lm_head.weight.data)
    head.bias.data.zero_()
    head.bias.data[:3] = -1e4  # neither the end, nor padding or a picture
    model.lm_head = head
    return model


def make_rows(count: int) -> list[dict[str, Any]]:
    """Questions of 16 words about pictures of random pixels."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        text = " ".join(f"w{word}" for word in random.integers(3, VOCABULARY, 16))
        picture = Image.fromarray(random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
        rows.append({"prompt": [{"role": "user", "content": text}], "image": picture})
    return rows


def counted(model: Any) -> list[int]:
    """The number of pictures of each pass of the vision tower, from now on."""
    seen: list[int] = []
    model.model.vision_tower.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    return seen


def main() -> None:
    """Read the command line, run both sides in turn and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--rows", type=int, default=16, help=f"completions of an iteration, {GROUP} per question")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.set_verbosity_error()
    rows, model, processor = make_rows(options.rows // GROUP), make_model(), make_processor()
    policy = HFPolicy(
        copy.deepcopy(model),
        processor,
        sampling=SamplingConfig(max_new_tokens=COMPLETION),
        options=HFOptions(exact_entropy=True),
    )
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=GROUP, learning_rate=LEARNING_RATE, seed=0),
        policy=policy,
        reward_model=lambda _, actions: share_of_even_tokens([action.token_ids for action in actions]),
    )
    theirs, ours = [], []
    seen = {"TRL": counted(model), "ours": counted(policy.model)}

    def run_ours(seconds_of_trl: float) -> None:
        begin = now("cpu")
        trainer.step(rows)
        ours.append(now("cpu") - begin)
        theirs.append(seconds_of_trl)
        print(f"  TRL {theirs[-1]:.2f} s, ours {ours[-1]:.2f} s", flush=True)

    print(
        f"torch {torch.__version__}, transformers {version('transformers')}, TRL {version('trl')}, Python "
        f"{platform.python_version()}, 1 thread; {options.rows} rows, groups of {GROUP}, {(SIDE // PATCH) ** 2} image tokens, "
        f"completions of {COMPLETION}; {options.pairs} pairs after a warm-up"
    )
    run_trl(
        model,
        processor,
        rows,
        options.pairs + 1,
        run_ours,
        group=GROUP,
        passes=min(PASSES, options.rows // GROUP),
        arguments={"max_completion_length": COMPLETION},
        reward_funcs=share_of_even_tokens,
    )
    ratios = [a / b for a, b in zip(theirs[1:], ours[1:], strict=True)]
    print(f"  median seconds: TRL {statistics.median(theirs[1:]):.2f}, ours {statistics.median(ours[1:]):.2f}")
    print(f"  speed against TRL {statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})")
    for side, pictures in seen.items():
        print(
            f"  pictures that the vision tower computes per iteration: {side} {sum(pictures) / (options.pairs + 1):g}"
        )


if __name__ == "__main__":
    main()
