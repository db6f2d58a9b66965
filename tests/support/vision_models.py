"""Tiny image-text models of several families with random weights, and the processors of their families."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.support.llm_models import CHARACTERS, one_token_each

TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
MARKS = {
    "image_token": "<image>", "video_token": "<video>", "boi_token": "<boi>", "eoi_token": "<eoi>",
    "start_image_token": "<begin>", "end_image_token": "<stop>", "context_image_token": "<image>",
    "image_start_token": "<start>", "image_end_token": "<end>", "image_thumbnail": "<thumbnail>",
    "image_boundary_token": "<fake_token_around_image>",
}  # fmt: skip
MORE = (
    "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<bos>",
    "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL",
    *(f"TILE_{i}" for i in range(1, 13)),
    "<IMG_START>", "<IMG_ATOM>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>",
    "<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>",
)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ message.role[:1] }}={% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<start><image><end>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}a={% endif %}"
)


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """One token per character, and the marks of all families as special tokens."""
    marks = dict.fromkeys([*MARKS.values(), *MORE])
    backend = one_token_each(["<pad>", "<eos>", *CHARACTERS, *marks])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", extra_special_tokens={**MARKS, **special}
    )
    made.add_special_tokens({"additional_special_tokens": list(MORE)}, replace_extra_special_tokens=False)
    return made


TOKENIZER = tokenizer()
IDS = TOKENIZER.get_vocab()
SIZE = len(TOKENIZER)
IMAGE = IDS["<image>"]


def images_only(cls: Any) -> Any:
    """A processor class without its video processor, which needs torchvision."""

    class ImagesOnly(cls):
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: Any = None, **options: Any) -> None:
            cls.__init__(self, image_processor, tokenizer, None, chat_template=chat_template, **options)

    return ImagesOnly


def _pil(name: str, **options: Any) -> Any:
    return getattr(transformers, f"{name}ImageProcessorPil")(**options)


def _text(**changes: Any) -> dict[str, Any]:
    return {**TEXT, "vocab_size": SIZE, **changes}


class Rows(transformers.ProcessorMixin):
    """As Pixtral's processor, which needs torchvision: a token per patch, and one behind each row of patches."""

    image_token = "[IMG]"

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: Any = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template.replace("<image>", "[IMG]"))

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **options: Any) -> str:
        size = self.image_processor.patch_size["height"]
        height, width = (int(side) // size for side in image_inputs["image_sizes"][image_idx])
        return "[IMG_BREAK]".join(["[IMG]" * width] * height) + "[IMG_END]"


GLM_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
SIGLIP = {**VISION, "image_size": 32, "patch_size": 8, "model_type": "siglip_vision_model"}
CLIP = {**VISION, "image_size": 32, "patch_size": 8, "model_type": "clip_vision_model", "projection_dim": 16}
QWEN_PIXELS = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 512}
QWEN_VISION = {
    "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32,
}  # fmt: skip
QWEN_IDS = {
    "image_token_id": IMAGE, "video_token_id": IDS["<video>"], "vision_start_token_id": IDS["<start>"],
    "vision_end_token_id": IDS["<end>"],
}  # fmt: skip
PIXTRAL = {**VISION, "image_size": 32, "patch_size": 4, "model_type": "pixtral", "head_dim": 8}
PATCH = {"patch_size": {"height": 4, "width": 4}}
SQUARE = {"size": {"height": 32, "width": 32}}


def _qwen_processor(name: str, **options: Any) -> Any:
    pixels = QWEN_PIXELS | options
    cls = images_only(getattr(transformers, f"{name}Processor"))
    return lambda tokenizer, template: cls(_pil("Qwen2VL", **pixels), tokenizer, template)


def _qwen(name: str, vision: dict[str, Any], **text: Any) -> Any:
    config = getattr(transformers, f"{name}Config")
    return lambda: config(
        text_config=_text(rope_parameters=MROPE, **text), vision_config=QWEN_VISION | vision, **QWEN_IDS
    )


def _llava(name: str, **options: Any) -> Any:
    config = getattr(transformers, f"{name}Config")
    return lambda: config(text_config=_text(model_type="llama"), vision_config=CLIP, image_token_index=IMAGE, **options)


def _llava_processor(tokenizer: Any, template: Any) -> Any:
    return transformers.LlavaProcessor(
        _pil("CLIP", size={"shortest_edge": 32}, crop_size=SQUARE["size"]), tokenizer, patch_size=8,
        vision_feature_select_strategy="default", num_additional_image_tokens=1, chat_template=template,
    )  # fmt: skip


def _idefics3(name: str) -> tuple[str, Any, Any]:
    """SmolVLM's own processor needs num2words, for videos."""
    vision = SIGLIP | {"model_type": f"{name.lower()}_vision"}
    config = getattr(transformers, f"{name}Config")
    return (
        f"{name}ForConditionalGeneration",
        lambda: config(text_config=_text(model_type="llama"), vision_config=vision, image_token_id=IMAGE, scale_factor=2),
        lambda tokenizer, template: transformers.Idefics3Processor(
            _pil(name, size={"longest_edge": 64}, max_image_size={"longest_edge": 32}), tokenizer, image_seq_len=4,
            chat_template=template,
        ),
    )  # fmt: skip


GRID = [[32, 64], [64, 32]]
FAMILIES: dict[str, tuple[str, Callable[[], Any], Callable[[Any, Any], Any]]] = {
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        _qwen("Qwen2VL", {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}),
        _qwen_processor("Qwen2VL"),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        _qwen("Qwen2_5_VL", {"window_size": 16, "fullatt_block_indexes": [1]}),
        _qwen_processor("Qwen2_5_VL"),
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        # a third layer, because what the second one gets of the tower must reach the answers
        _qwen("Qwen3VL", {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}, num_hidden_layers=3),
        _qwen_processor("Qwen3VL"),
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        _qwen(
            "Qwen3_5", {"num_position_embeddings": 16}, num_hidden_layers=4, linear_key_head_dim=8, linear_value_head_dim=8,
            linear_num_key_heads=2, linear_num_value_heads=4,
        ),
        _qwen_processor("Qwen3VL"),
    ),
    "glm4v": (
        "Glm4vForConditionalGeneration",
        lambda: transformers.Glm4vConfig(
            text_config=_text(rope_parameters=GLM_MROPE), vision_config=QWEN_VISION | {"image_size": 32},
            image_token_id=IMAGE, video_token_id=IDS["<video>"], image_start_token_id=IDS["<start>"],
            image_end_token_id=IDS["<end>"],
        ),
        lambda tokenizer, template: images_only(transformers.Glm4vProcessor)(
            _pil("Glm4v", patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 1024}),
            tokenizer, template,
        ),
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        _llava("Llava"),
        _llava_processor,
    ),
    "vipllava": (
        "VipLlavaForConditionalGeneration",
        _llava("VipLlava", vision_feature_layers=[-2, -1]),
        _llava_processor,
    ),
    "llava_next": (
        "LlavaNextForConditionalGeneration",
        _llava("LlavaNext", image_grid_pinpoints=GRID),
        lambda tokenizer, template: transformers.LlavaNextProcessor(
            _pil("LlavaNext", size={"shortest_edge": 32}, crop_size=SQUARE["size"], image_grid_pinpoints=GRID), tokenizer,
            patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1, chat_template=template,
        ),
    ),
    "llava_onevision": (
        "LlavaOnevisionForConditionalGeneration",
        lambda: transformers.LlavaOnevisionConfig(
            text_config=_text(model_type="qwen2"), vision_config=SIGLIP, image_token_index=IMAGE,
            video_token_index=IDS["<video>"], image_grid_pinpoints=GRID,
        ),
        lambda tokenizer, template: images_only(transformers.LlavaOnevisionProcessor)(
            _pil("LlavaOnevision", size=SQUARE["size"], image_grid_pinpoints=GRID), tokenizer, template, num_image_tokens=16,
            vision_feature_select_strategy="full",
        ),
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        lambda: transformers.Gemma3Config(
            text_config=_text(sliding_window=8, query_pre_attn_scalar=8, num_hidden_layers=2, sliding_window_pattern=2,
                layer_types=["sliding_attention", "full_attention"]),
            vision_config=SIGLIP, mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=IDS["<boi>"],
            eoi_token_index=IDS["<eoi>"],
        ),
        lambda tokenizer, template: transformers.Gemma3Processor(
            _pil("Gemma3", size=SQUARE["size"], image_seq_length=4), tokenizer,
            chat_template=template and template.replace("<image>", "<boi>"), image_seq_length=4,
        ),
    ),
    "idefics2": (
        "Idefics2ForConditionalGeneration",
        lambda: transformers.Idefics2Config(
            text_config=_text(model_type="mistral"), vision_config=SIGLIP | {"model_type": "idefics2_vision"},
            image_token_id=IMAGE,
            perceiver_config={"hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
                "resampler_head_dim": 8, "num_key_value_heads": 1, "model_type": "idefics2_perceiver"},
        ),
        lambda tokenizer, template: transformers.Idefics2Processor(
            _pil("Idefics2", size={"shortest_edge": 16, "longest_edge": 32}, do_image_splitting=False), tokenizer,
            image_seq_len=4, chat_template=template,
        ),
    ),
    "idefics3": _idefics3("Idefics3"),
    "smolvlm": _idefics3("SmolVLM"),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        lambda: transformers.Mistral3Config(
            text_config=_text(model_type="mistral"), vision_config=PIXTRAL,
            image_token_index=IDS["[IMG]"], spatial_merge_size=1,
        ),
        lambda tokenizer, template: Rows(_pil("Pixtral", size={"longest_edge": 32}, **PATCH), tokenizer, template),
    ),
    "pixtral": (
        "LlavaForConditionalGeneration",
        lambda: transformers.LlavaConfig(
            text_config=_text(model_type="mistral"), vision_config=PIXTRAL,
            image_token_index=IDS["[IMG]"], vision_feature_layer=-1, vision_feature_select_strategy="full",
        ),
        lambda tokenizer, template: Rows(_pil("Pixtral", size={"longest_edge": 16}, **PATCH), tokenizer, template),
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        lambda: transformers.InternVLConfig(
            text_config=_text(model_type="qwen2"),
            vision_config=VISION | {"image_size": [32, 32], "patch_size": [8, 8], "model_type": "internvl_vision"},
            image_token_id=IMAGE, downsample_ratio=0.5,
        ),
        lambda tokenizer, template: images_only(transformers.InternVLProcessor)(
            _pil("GotOcr2", size=SQUARE["size"], crop_to_patches=True, max_patches=2), tokenizer, template, image_seq_length=4,
        ),
    ),
    "aya_vision": (
        "AyaVisionForConditionalGeneration",
        lambda: transformers.AyaVisionConfig(
            text_config=_text(model_type="cohere2", sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
            vision_config=SIGLIP, image_token_index=IDS["<|IMG_PATCH|>"], downsample_factor=2, adapter_layer_norm_eps=1e-6,
            alignment_intermediate_size=32,
        ),
        lambda tokenizer, template: transformers.AyaVisionProcessor(
            _pil("GotOcr2", size=SQUARE["size"], crop_to_patches=False), tokenizer, patch_size=8, img_size=32,
            downsample_factor=2, chat_template=template,
        ),
    ),
    "paddleocr_vl": (
        "PaddleOCRVLForConditionalGeneration",
        lambda: transformers.PaddleOCRVLConfig(
            text_config=_text(rope_parameters=MROPE),
            vision_config=VISION | {"image_size": 32, "patch_size": 4, "spatial_merge_size": 2}, **QWEN_IDS,
        ),
        lambda tokenizer, template: transformers.PaddleOCRVLProcessor(
            _pil("PaddleOCRVL", patch_size=4, merge_size=2, temporal_patch_size=1, min_pixels=64, max_pixels=512),
            tokenizer, chat_template=template,
        ),
    ),
    "deepseek_vl": (
        "DeepseekVLForConditionalGeneration",
        lambda: transformers.DeepseekVLConfig(
            text_config=_text(model_type="llama"), vision_config=SIGLIP, image_token_id=IMAGE,
        ),
        lambda tokenizer, template: transformers.DeepseekVLProcessor(
            _pil("DeepseekVL", size=SQUARE["size"]), tokenizer, chat_template=template, num_image_tokens=16
        ),
    ),
    "video_llama_3": (
        "VideoLlama3ForConditionalGeneration",
        lambda: transformers.VideoLlama3Config(
            text_config=_text(model_type="qwen2"), vision_config=VISION | {"patch_size": 4, "num_channels": 3},
            image_token_id=IMAGE, video_token_id=IDS["<video>"],
        ),
        lambda tokenizer, template: images_only(transformers.VideoLlama3Processor)(
            _pil("VideoLlama3", patch_size=4, merge_size=2, min_pixels=64, max_pixels=512), tokenizer, template
        ),
    ),
}  # fmt: skip


def tiny_vision(family: str) -> tuple[Any, Any]:
    """A model with the same random weights in every call, and its processor. Distributions are neither flat nor peaked."""
    name, config, processor = FAMILIES[family]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = getattr(transformers, name)(config())
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.2)  # the projector of Gemma 3 begins at 0
            elif parameter.dim() > 1:
                parameter.mul_(4.0)
        model.get_output_embeddings().weight.mul_(3.0)
    return model.eval(), processor(tokenizer(), TEMPLATE)


def picture(height: int = 32, width: int = 32, seed: int = 0) -> Any:
    """A picture of random colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def chat(text: str, *pictures: Any) -> list[dict[str, Any]]:
    """A message of the user with pictures before its text."""
    parts = [{"type": "image", "image": each} for each in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def plain_inputs(processor: Any, state: Any) -> dict[str, Tensor]:
    """What the processor's own call makes of a chat."""
    pictures = [part["image"] for part in state[0]["content"] if part["type"] == "image"]
    text = processor.apply_chat_template(state, add_generation_prompt=True, tokenize=False)
    return dict(
        processor(text=[text], images=[pictures] if pictures else None, return_tensors="pt", add_special_tokens=False)
    )


def plain_log_probs(policy: Any, state: Any, tokens: Sequence[int]) -> Tensor:
    """[T]: log-probs of the tokens, from a forward pass of the whole model on this row alone, without cache or padding."""
    inputs = plain_inputs(policy.processor, state)
    length, own = inputs["input_ids"].shape[1], torch.tensor([list(tokens)])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], own], 1)
    inputs.pop("attention_mask")
    for name in inputs:
        if name.endswith("token_type_ids"):
            inputs[name] = torch.cat([inputs[name], torch.zeros_like(own)], 1)
    logits = policy.model(**inputs, use_cache=False).logits[0, length - 1 : -1]
    logits = logits.index_fill(1, torch.tensor(policy.picture_token_ids), -torch.inf)
    return logits.log_softmax(1).gather(1, own[0, :, None]).squeeze(1)
