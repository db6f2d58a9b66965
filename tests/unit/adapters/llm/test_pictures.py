"""Prompts with pictures: where pictures come from, what is refused, how often the vision tower runs, and what vLLM is asked."""

import base64
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig
from PIL import Image
from torch import Tensor

from adapters.llm import (
    CompletionRewards,
    HFPolicy,
    Picture,
    SamplingConfig,
    VLLMSampler,
    VLLMServerSampler,
    add_lora,
    train_parts,
)
from adapters.llm.picture_prompts import PicturePrompt
from adapters.llm.sampling.continuous import ContinuousSampler
from adapters.llm.sampling.samplers import SamplerError
from adapters.llm.sampling.vllm_worker import VLLMWorker
from grpo import ObjectiveConfig
from grpo.errors import CheckpointError, ConfigError, ContractError
from tests.support.llm_models import assert_rows, completion, gradients, hf_policy, relative_difference, trainer_of
from tests.support.vision_models import (
    FAMILIES,
    IDS,
    IMAGE,
    SIGLIP,
    SIZE,
    TEXT,
    chat,
    picture,
    plain_inputs,
    plain_log_probs,
    tiny_vision,
)


def tiny_policy(family: str = "qwen2_5_vl", *, max_new_tokens: int = 5, **options: Any) -> HFPolicy:
    return hf_policy(*tiny_vision(family), sampling=SamplingConfig(max_new_tokens=max_new_tokens), **options)


@pytest.fixture(scope="module", name="policy")
def fixture_policy() -> HFPolicy:
    return tiny_policy()


def encoded(policy: HFPolicy, state: Any) -> Any:
    [prompt] = policy._encode([state])
    return prompt


def as_png(image: Any, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def part(**source: Any) -> list[dict[str, Any]]:
    """A chat with one part of this kind before its text."""
    return [{"role": "user", "content": [source, {"type": "text", "text": "how many?"}]}]


def test_a_picture_has_many_forms_and_one_meaning(policy: HFPolicy, tmp_path: Path, subtests: pytest.Subtests) -> None:
    image = picture(24, 40)
    file = tmp_path / "picture.png"
    file.write_bytes(as_png(image))
    link = "data:image/png;base64," + base64.b64encode(as_png(image)).decode()
    expected = encoded(policy, chat("how many?", image))
    inputs = plain_inputs(policy.processor, chat("how many?", image))
    assert list(expected) == inputs.pop("input_ids")[0].tolist()
    inputs.pop("attention_mask")
    assert inputs.keys() == expected.fields.keys()
    assert all(torch.equal(inputs[name], expected.fields[name]) for name in inputs)
    text = [{"role": "user", "content": "how many?"}]
    forms: dict[str, Any] = {
        "an array": part(type="image", image=np.asarray(image)), "a path": part(type="image", path=str(file)),
        "a Path": part(type="image", image=file),
        "base64": part(type="image", base64=base64.b64encode(as_png(image)).decode()),
        "OpenAI's chat completions": part(type="image_url", image_url={"url": link}),
        "OpenAI's responses": part(type="input_image", image_url=link),
        "a datasets.Image": part(type="image", image={"bytes": as_png(image), "path": None}),
        "an opaque picture with an alpha channel": part(type="image", image=image.convert("RGBA")),
        "a column of pictures": {"prompt": text, "images": [image]},
        "a column with one picture": {"prompt": text, "image": image},
        "a column and a part": {"prompt": part(type="image"), "images": [image]},
    }  # fmt: skip
    for name, state in forms.items():
        with subtests.test(name):
            found = encoded(policy, state)
            assert found == expected
            assert hash(found) == hash(expected)
    grey = encoded(policy, part(type="image", image=np.asarray(image.convert("L"))))
    assert list(grey) == list(expected)
    assert grey != expected


def test_a_picture_is_read_as_viewers_show_it() -> None:
    """Orientation 6 of EXIF: what is stored on the left belongs to the top."""
    stored, orientation = Image.fromarray(np.array([[[255, 0, 0], [0, 255, 0]]], np.uint8)), Image.Exif()
    orientation[0x0112] = 6
    shown = Picture.of(as_png(stored, exif=orientation)).image
    assert np.asarray(shown).tolist() == [[[255, 0, 0]], [[0, 255, 0]]]
    damaged = as_png(stored, exif=b"Exif\0\0no fields")
    assert np.asarray(Picture.of(damaged).image).tolist() == [[[255, 0, 0], [0, 255, 0]]]
    ink = Image.new("CMYK", (1, 1), (0, 255, 255, 0))
    assert Picture.of(ink).image.getpixel((0, 0)) == (255, 0, 0)
    grey = Image.new("L", (1, 1), 7)
    assert [Picture.of(grey.convert(mode)).image.getpixel((0, 0)) for mode in ("L", "P", "LA")] == [(7, 7, 7)] * 3


def test_a_text_has_marks_where_its_pictures_belong() -> None:
    policy = tiny_policy("llava")
    found = encoded(policy, {"prompt": "a<image>b", "images": [picture()]})
    assert list(found) == [16, *[IMAGE] * 16, 17]  # 16 patches of 8 x 8 pixels
    assert found.fields["pixel_values"].shape == (1, 3, 32, 32)


OPAQUE = picture(8, 8)
CLEAR = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
FILM = as_png(OPAQUE, save_all=True, append_images=[OPAQUE.rotate(90)])
with Image.open(BytesIO(as_png(OPAQUE))) as CLOSED:
    pass
REFUSED: list[tuple[str, Any, str]] = [
    ("a mark without a picture", "a <image> b", r"state 1 has 1 tokens that stand for pictures, and no picture\. Pass"),
    ("a part without a picture", part(type="image"), r"Part 0 of message 0 of the chat of state 1 has no picture"),
    ("a picture without a mark", {"prompt": "a", "images": [OPAQUE]}, r"prompt of state 1 must fit .* 1 pictures and 0 marks"),
    ("more pictures than parts", {"prompt": part(type="image"), "images": [OPAQUE] * 2},
        r"state 1 has 2 pictures in its columns, and parts of type 'image' for 1\. Give"),
    ("more marks than pictures", {"prompt": "<image><image>", "images": [OPAQUE]},
        r"state 1 must fit .* 1 pictures and 2 marks"),
    ("token ids with pictures", {"prompt": [5, IMAGE], "images": [OPAQUE]}, r"state 1 must be a text or a chat"),
    ("a picture without pixels", part(type="image", image=np.zeros((0, 4, 3), np.uint8)),
        r"state 1 must have pixels; its shape"),
    ("a picture of size 0", part(type="image", image=Image.new("RGB", (0, 4))), r"state 1 must have pixels; its size is 0 x 4"),
    ("transparency", part(type="image", image=CLEAR), r"Part 0 .* of state 1 must be opaque; .*alpha_composite"),
    ("16 bits", part(type="image", image=Image.fromarray(np.ones((4, 4), np.uint16))), r"state 1 must have 8 bits per channel"),
    ("an array of floats", part(type="image", image=np.ones((4, 4, 3))), r"state 1 must be an array of uint8, .* got float64"),
    ("an array from 0 to 1", part(type="image", image=np.ones((4, 4), np.float32)), r"\(array \* 255\)\.round\(\)"),
    ("pictures in one array", {"prompt": part(type="image"), "images": np.ones((1, 4, 4, 3), np.uint8)},
        r"Picture 0 of the column 'images' of state 1 must .* list\(array\), which has one picture per entry"),
    ("a film", part(type="image", image=FILM), r"state 1 must be one picture; it has 2\. Pass frames as pictures: PIL\."),
    ("a damaged file that is not read yet", part(type="image", image=Image.open(BytesIO(as_png(OPAQUE)[:60]))),
        r"state 1 must be a picture that Pillow reads; the PngImageFile given: .* truncated"),
    ("a picture whose file is closed", part(type="image", image=CLOSED),
        r"state 1 must be a picture that Pillow reads; the PngImageFile given"),
    ("channels first", part(type="image", image=np.ones((3, 5, 6), np.uint8)), r"state 1 .* np\.moveaxis\(array, 0, -1\)"),
    ("a damaged file", part(type="image", image=as_png(OPAQUE)[:60]),
        r"state 1 must be a picture that Pillow reads; the bytes given"),
    ("a file that is none", part(type="image", path="nowhere.png"), r"state 1 must be a picture .* 'nowhere\.png'"),
    ("a damaged link", part(type="image_url", image_url="data:image/png;base64,!"), r"state 1 must be data:image"),
    ("a link to the network", part(type="image_url", image_url={"url": "https://host/a.png"}), r"state 1 .* the network"),
    ("a number", part(type="image", image=7), r"Part 0 of message 0 of the chat of state 1 must be a PIL image"),
    ("a number in a column", {"prompt": part(type="image"), "images": [7]},
        r"Picture 0 of the column 'images' of state 1 must be"),
    ("sound", part(type="audio", audio="a.wav"), r"chat of state 1 has a part of type 'audio'\. Pass frames"),
    ("a video", part(type="video", video=[]),
        r"chat of state 1 has a part of type 'video'\. Pass frames of a video as pictures"),
    ("pictures and no user", {"prompt": [{"role": "system", "content": "a"}], "images": [OPAQUE]}, r"no message of the user"),
    ("more pictures than the model takes", chat("a", *[picture(32, 32)] * 60),
        r"must fit into the model's 256 positions; those at"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("state", "message"), [pytest.param(state, message, id=name) for name, state, message in REFUSED]
)
def test_what_cannot_be_read_is_refused_with_its_row(policy: HFPolicy, state: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        policy.generate_actions(["a", state], 1)


def test_pictures_need_a_processor(subtests: pytest.Subtests) -> None:
    model, processor = tiny_vision("qwen2_5_vl")
    policy = HFPolicy(model, processor.tokenizer, sampling=SamplingConfig(max_new_tokens=2))
    policy.tokenizer.chat_template = processor.chat_template
    message = r"state 1 has a part of type 'image'\. For pictures, pass the processor of an"
    with pytest.raises(ContractError, match=message):
        policy.generate_actions(["a", chat("a", OPAQUE)], 1)
    message = r"the column 'images' of state 0 has no effect, because the policy has a tokenizer"
    with pytest.warns(UserWarning, match=message):
        policy.generate_actions([{"prompt": "a", "images": [OPAQUE]}], 1)


def test_a_picture_in_the_text_of_a_message_is_text(policy: HFPolicy) -> None:
    """A tool's result or a data set could otherwise put a picture's place into a prompt, or move another picture."""
    spelled = encoded(policy, chat("is <image> a tag?", picture()))
    plain = encoded(policy, chat("is a tag?", picture()))
    assert list(spelled).count(IMAGE) == list(plain).count(IMAGE) == 4
    assert spelled.fields["mm_token_type_ids"].sum() == 4
    assert spelled.fields["mm_token_type_ids"].shape == (1, len(spelled))


def test_a_model_that_ignores_its_pictures_is_refused() -> None:
    """The fields of a processor of another family may have names that the model swallows."""
    model, processor = tiny_vision("gemma3")
    with torch.no_grad():
        model.model.multi_modal_projector.mm_input_projection_weight.zero_()
    message = r"must read its pictures; Gemma3.* a picture and its mirror image equal log-probs"
    with pytest.raises(ContractError, match=message):
        HFPolicy(model, processor)


def test_a_model_that_reads_its_prompt_in_both_directions_is_refused() -> None:
    sizes = {"vocab_size": SIZE, "model_type": "gemma"}
    config = transformers.PaliGemmaConfig(
        text_config=TEXT | sizes, vision_config=SIGLIP, image_token_index=IMAGE, projection_dim=32
    )
    model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    _, processor = tiny_vision("llava")
    message = r"must be causal; the logits of PaliGemma.* depend on later tokens\. .* in both directions"
    with pytest.raises(ContractError, match=message):
        HFPolicy(model, processor)


def test_the_vision_tower_runs_once_per_prompt_in_sampling_and_in_an_update() -> None:
    """Others run it for each of the 8 completions. Pictures of a pass are in one call, so their patches are counted."""
    policy = tiny_policy()
    patches: list[int] = []
    policy.model.model.visual.register_forward_pre_hook(
        lambda module, args, options: patches.append(len(args[0])), with_kwargs=True
    )
    trainer = trainer_of(policy, group_size=8, learning_rate=1e-3)
    states = [chat("how many?", picture(16, 16)), chat("a?", picture(16, 16, 1)), chat("b")]
    batch = trainer.collect(states)
    assert sum(patches) == 2 * 16  # two pictures of 4 x 4 patches
    patches.clear()
    trainer.update(batch)
    assert sum(patches) == 2 * 16


def test_equal_ids_with_other_pictures_are_other_prompts() -> None:
    policy = tiny_policy()
    states = [chat("how many?", picture(16, 16, seed)) for seed in (0, 1, 0)]
    first, other, again = policy._encode(states)
    assert list(first) == list(other)
    assert first != other
    assert first == again
    [[action]] = policy.generate_actions(states[:1], 1)
    scores = policy.score_actions(states, [action] * 3).log_probs
    assert_rows(scores, [plain_log_probs(policy, state, action.token_ids) for state in states], 2e-5)
    assert (scores[0] - scores[1]).abs().max() > 1e-3
    assert torch.equal(scores[0], scores[2])
    plans = policy.plan_micro_batches(states, [action] * 3)
    assert sorted(row for plan in plans for row in plan) == [0, 1, 2]


def test_max_tokens_per_forward_counts_the_tokens_of_pictures() -> None:
    """Two texts fit into a pass, and two pictures do not."""
    policy = tiny_policy("llava", max_tokens_per_forward=40)
    texts = [{"prompt": text} for text in ("ab", "ac")]
    seen = [{"prompt": f"<image>{row['prompt']}", "images": [picture(seed=seed)]} for seed, row in enumerate(texts)]
    assert [len(prompt) for prompt in policy._encode([*texts, *seen])] == [2, 2, 18, 18]  # 16 patches
    actions = [completion(5, 6, 7), completion(8, 9, 4)]
    assert sorted(map(list, policy.plan_micro_batches(texts, actions))) == [[0, 1]]
    assert sorted(map(list, policy.plan_micro_batches(seen, actions))) == [[0], [1]]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
@pytest.mark.parametrize("sampler", ["generate", "recorded"])
def test_every_sampler_of_this_package_draws_the_same_tokens(family: str, sampler: Any) -> None:
    states = [chat("how many?", picture(32, 48)), chat("a?", picture(56, 24, 1), picture(20, 36, 2)), chat("12+34=?")]
    found = []
    for options in ({}, {"sampler": sampler}, {"max_rows_per_decode": 3}):
        policy = tiny_policy(family, **options)
        torch.manual_seed(0)
        found.append([action for group in policy.generate_actions(states, 2) for action in group])
        # transformers has no cache of fixed shape for Idefics 3
        assert getattr(policy._sampler, "records", True) == (
            (family, options.get("sampler")) != ("idefics3", "recorded")
        )
    for actions in found[1:]:
        assert [action.token_ids for action in actions] == [action.token_ids for action in found[0]]
        for action, expected in zip(actions, found[0], strict=True):
            np.testing.assert_allclose(action.behaviour_log_probs, expected.behaviour_log_probs, atol=2e-5)


def test_continuous_batching_refuses_pictures() -> None:
    policy = tiny_policy("llava", max_new_tokens=2, sampler="decoding")
    policy._sampler = ContinuousSampler(policy._lm)
    message = r"reads token ids only; the prompts at \[1\] have pictures\. Use sampler='decoding'"
    with pytest.raises(ContractError, match=message):
        policy.generate_actions(["a", chat("a", OPAQUE)], 1)


def test_no_completion_has_a_token_that_stands_for_a_picture() -> None:
    """The head is made to prefer the token by far."""
    policy = tiny_policy(max_new_tokens=20, exact_entropy=True)
    with torch.no_grad():
        policy.model.lm_head.weight[IMAGE] *= 100
    states = [chat("a?", picture()), "b"]
    groups = policy.generate_actions(states, 4)
    assert all(IMAGE not in action.token_ids for group in groups for action in group)
    scores = policy.score_groups(states, groups)
    assert bool(scores.entropy.isfinite().all())
    slopes = gradients(policy.model, scores.log_probs.sum() + scores.entropy.sum())
    assert all(bool(slope.isfinite().all()) for slope in slopes.values())
    assert not slopes["lm_head.weight"][IMAGE].any()


def test_conversations_that_fork_share_pictures() -> None:
    """A tree of token ids behind a prompt with a picture: positions behind it count on from the picture's."""
    policy = tiny_policy()
    state = chat("how many?", picture(16, 48))
    actions = [completion(5, 6, 7, 8), completion(5, 6, 9), completion(4)]
    forked = [replace(action, forks=(2,)) if len(action) > 2 else action for action in actions]
    scores = policy.score_actions([state] * 3, forked).log_probs
    assert_rows(scores, [plain_log_probs(policy, state, action.token_ids) for action in actions], 2e-5)


def test_text_alone_is_scored_as_without_a_processor_but_for_the_excluded_tokens() -> None:
    """The positions that a model keeps of the last picture do not reach prompts without one."""
    policy = tiny_policy()
    [[action]] = policy.generate_actions(["what is 12+34?"], 1)
    before = policy.score_actions(["what is 12+34?"], [action]).log_probs
    policy.generate_actions([chat("a", picture(64, 16))], 2)
    policy.model(**plain_inputs(policy.processor, chat("a", picture(64, 16))))  # somebody else's pass
    after = policy.score_actions(["what is 12+34?"], [action]).log_probs
    assert torch.equal(before, after)


def test_a_reference_reads_pictures_too() -> None:
    policy = tiny_policy(max_new_tokens=4, reference_model=tiny_vision("qwen2_5_vl")[0])
    state = chat("how many?", picture())
    [[action]] = policy.generate_actions([state], 1)
    found = policy.reference_log_probabilities([state], [action])
    torch.testing.assert_close(found, policy.score_actions([state], [action]).log_probs.detach(), atol=2e-5, rtol=0)


PARTS = {
    "qwen2_5_vl": {"language": "model.language_model.layers.0.mlp.up_proj.weight",
        "projector": "model.visual.merger.mlp.0.weight", "vision": "model.visual.blocks.0.attn.qkv.weight"},
    "llava": {"language": "lm_head.weight", "projector": "model.multi_modal_projector.linear_1.weight",
        "vision": "model.vision_tower.embeddings.patch_embedding.weight"},
    "idefics3": {"language": "model.text_model.embed_tokens.weight",
        "projector": "model.connector.modality_projection.proj.weight",
        "vision": "model.vision_model.embeddings.patch_embedding.weight"},
}  # fmt: skip


@pytest.mark.parametrize("family", PARTS)
def test_parts_are_trained_and_frozen_by_name(family: str) -> None:
    model, _ = tiny_vision(family)
    trained = []
    for part_name, parameter in PARTS[family].items():
        train_parts(model, [part_name])  # type: ignore[list-item]
        trained.append({name for name, value in model.named_parameters() if value.requires_grad})
        assert trained[-1] & set(PARTS[family].values()) == {parameter}
    assert sum(map(len, trained)) == len(set.union(*trained)) == len(list(model.parameters()))
    train_parts(model, ("language", "projector", "vision"))
    assert all(parameter.requires_grad for parameter in model.parameters())
    for wrong in ((), ("tower",), "vision"):
        with pytest.raises(ConfigError, match="parts must be names out of 'language', 'projector', 'vision'"):
            train_parts(model, wrong)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # PEFT uses the old name
def test_lora_adapts_the_language_part() -> None:
    model, processor = tiny_vision("qwen2_5_vl")
    adapted = add_lora(model)
    names = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert names
    assert all(".language_model." in name and "lora" in name for name in names)
    assert any("q_proj" in name for name in names)
    assert any("down_proj" in name for name in names)
    policy = HFPolicy(adapted, processor, sampling=SamplingConfig(max_new_tokens=4))
    trainer = trainer_of(policy, learning_rate=1e-2, objective=ObjectiveConfig(kl_coef=0.1))
    trainer.step([chat("how many?", picture())])


def test_a_policy_is_saved_with_its_processor_and_loaded_again_with_settings_that_fit(tmp_path: Path) -> None:
    policy = tiny_policy("llava")
    state = chat("how many?", picture())
    [[action]] = policy.generate_actions([state], 1)
    policy.save_pretrained(tmp_path)
    again = HFPolicy.from_pretrained(
        tmp_path, pictures=True, train=("projector",), sampling=SamplingConfig(max_new_tokens=5)
    )
    expected = policy.score_actions([state], [action]).log_probs
    torch.testing.assert_close(again.score_actions([state], [action]).log_probs, expected, atol=2e-5, rtol=0)
    assert all("projector" in name for name in again.get_parameters())
    with pytest.raises(ConfigError, match="an adapter trains itself alone; got train beside it"):
        HFPolicy.from_pretrained(tmp_path, pictures=True, lora=LoraConfig(), train=("language",))
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises((ConfigError, OSError, ValueError), match="processor"):
        HFPolicy.from_pretrained(tmp_path, pictures=True)


@pytest.mark.parametrize(
    ("form", "num_links", "num_arrays"),
    [pytest.param(Picture.of, 2, 0, id="Picture"), pytest.param(np.asarray, 0, 3, id="array")],  # equal arrays are two
)
def test_a_checkpoint_holds_the_picture_of_a_group_once(
    form: Any, num_links: int, num_arrays: int, tmp_path: Path
) -> None:
    """The replay buffer has the states of 12 rows, with two different pictures in three states."""

    def bright(completions: Any, image: Any, **columns: Any) -> list[float]:
        return [len(text) * np.mean(Picture.of(own).image) / 255 for text, own in zip(completions, image, strict=True)]

    text = [{"role": "user", "content": "how many?"}]
    rows = [{"prompt": text, "image": form(picture(seed=seed))} for seed in (0, 1, 0)]
    settings: dict[str, Any] = {"learning_rate": 1e-3, "replay_iterations": 1}
    first, second = (trainer_of(tiny_policy(), CompletionRewards(bright), **settings) for _ in range(2))
    first.step(rows)
    first.save_checkpoint(tmp_path / "run")
    held = "".join(file.read_text(encoding="utf-8") for file in (tmp_path / "run").rglob("*.json"))
    assert held.count("data:image/png;base64,") == num_links
    assert len(set(re.findall(r'"\$array": "([^"]*image[^"]*)"', held))) == num_arrays
    second.load_checkpoint(tmp_path / "run")
    torch.manual_seed(0)
    first.step(rows)
    torch.manual_seed(0)
    second.step(rows)
    for name, value in first.policy.get_parameters().items():
        assert torch.equal(value, second.policy.get_parameters()[name]), name


@pytest.mark.parametrize("value", [OPAQUE, as_png(OPAQUE)], ids=["a PIL image", "the content of a file"])
def test_a_run_refuses_what_its_checkpoints_cannot_hold(policy: HFPolicy, value: Any, tmp_path: Path) -> None:
    trainer = trainer_of(policy, CompletionRewards(lambda completions: [0.0]))
    message = (
        r"states\[0\]\['image'\] is a .* cannot hold\. If it is a picture, pass adapters\.llm\.Picture\.of\(picture\)"
    )
    with pytest.raises(CheckpointError, match=message):
        trainer.train([{"prompt": "a", "image": value}], num_iterations=1, checkpoint_dir=tmp_path)


def test_a_policy_with_pictures_is_not_divided(policy: HFPolicy) -> None:
    with pytest.raises(ConfigError, match="a model that reads pictures cannot be divided among ranks"):
        policy.shard_units()


# --- families: what is sampled and scored is what a plain forward pass of each row gives


MIXED_STATES = [
    chat("how many?", picture(32, 48)), chat("a?", picture(56, 24, 1), picture(20, 36, 2)), chat("what is 12+34=?"),
]  # fmt: skip
"""One picture, two pictures of other sizes, and none. The prompts have different lengths."""
DAILY = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava_next", "idefics3")
"""Families with positions of their own, with features in several layers, with attention in both directions, with several parts
of a picture, and with padded pictures."""
UNUSED = {
    "llava": ("model.vision_tower.encoder.layers.1.", "model.vision_tower.post_layernorm."),  # vision_feature_layer is -2
    "llava_next": ("model.vision_tower.encoder.layers.1.", "model.vision_tower.post_layernorm."),
    "vipllava": ("model.vision_tower.post_layernorm.",),  # its last layer is read, as with vision_feature_layer=-1
    "llava_onevision": ("model.vision_tower.head.", "model.vision_tower.post_layernorm."),
    "aya_vision": ("model.vision_tower.head.", "model.vision_tower.post_layernorm."),
    "gemma3": ("model.vision_tower.head.",), "deepseek_vl": ("model.vision_model.head.",),
}  # fmt: skip
"""Parameters that the answers of a family do not depend on, by the beginnings of their names. They have no gradient."""


def assert_as_alone(policy: HFPolicy, unused: tuple[str, ...]) -> None:
    """Sampled and scored log-probs and the gradients of all parameters are those of plain forward passes, row by row. All
    parameters have one but the unused."""
    torch.manual_seed(0)
    groups = policy.generate_actions(MIXED_STATES, 2)
    rows = [(state, action) for state, group in zip(MIXED_STATES, groups, strict=True) for action in group]
    alone = [plain_log_probs(policy, state, action.token_ids) for state, action in rows]
    assert torch.cat(alone).std() > 0.5  # the distributions are not flat
    scores = policy.train().score_groups(MIXED_STATES, groups).log_probs
    policy.eval()
    for scored, (_, action), expected in zip(scores, rows, alone, strict=True):
        torch.testing.assert_close(scored[: len(action)], expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(action.behaviour_log_probs), expected.detach(), atol=2e-5, rtol=0)
    weights = torch.arange(scores.numel()).sin().view(scores.shape)
    found = gradients(policy.model, (scores * weights).sum())
    plain = sum((row * weight[: len(row)]).sum() for row, weight in zip(alone, weights, strict=True))
    expected_slopes = gradients(policy.model, plain)  # type: ignore[arg-type]
    for of_vision in (True, False):  # apart, because the gradients of a vision tower are small
        some = [name for name in expected_slopes if ("vis" in name) is of_vision]
        assert relative_difference(_of(found, some), _of(expected_slopes, some)) < 1e-5
    without = {name for name in found if name.startswith(unused)}
    assert without == {name for name, slope in expected_slopes.items() if not slope.any()}
    assert without == {name for name, slope in found.items() if not slope.any()}


def _of(slopes: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    return {name: slopes[name] for name in names}


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of the processor of GLM-4V
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in FAMILIES]
)
def test_a_family_is_sampled_and_scored_as_in_plain_forward_passes(family: str) -> None:
    assert_as_alone(tiny_policy(family, max_new_tokens=7), UNUSED.get(family, ()))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_rows_are_computed_as_wholes_with_gradient_checkpointing(family: str) -> None:
    policy = tiny_policy(family, max_new_tokens=7)
    policy.model.activation_checkpointing_enable()
    assert_as_alone(policy, UNUSED.get(family, ()))


# --- vLLM gets what the policy scores. It is imitated: it replaces each mark by as many tokens as its own processor says, as
# vLLM 0.32 does.


SHOWN = [chat("how many?", picture(32, 48)), chat("a?", picture(56, 24, 1), picture(20, 36, 2)), chat("12+34=?")]
ANSWER = [7, 8, 1]


def expanded(processor: Any, token_ids: Sequence[int], pictures: Sequence[Any]) -> list[int]:
    """The token ids with the tokens of each picture in place of its mark, four patches a token."""
    left = iter(pictures)
    found: list[int] = []
    for token in token_ids:
        count = 1
        if token == IMAGE:
            patches = processor.image_processor(images=[next(left)], return_tensors="pt")["image_grid_thw"].prod()
            count = int(patches) // 4
        found += [token] * count
    assert next(left, None) is None
    return found


def engine(asked: list[Any], processor: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> VLLMSampler:
    class LLM:
        llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(max_model_len=256)))

        def __init__(self, *args: Any, **options: Any) -> None: ...

        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> Any:
            answers = []
            for prompt, settings in zip(prompts, params, strict=True):
                ids, pictures = prompt["prompt_token_ids"], prompt.get("multi_modal_data", {}).get("image", [])
                asked.append((ids, pictures, settings))
                log_probs = [{token: SimpleNamespace(logprob=-1.0)} for token in ANSWER]
                said = {"token_ids": ANSWER, "logprobs": log_probs, "finish_reason": "stop", "stop_reason": 1}
                read = expanded(processor, ids, pictures)
                answers.append(SimpleNamespace(outputs=[SimpleNamespace(**said)], prompt_token_ids=read))
            return answers

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=dict))
    return VLLMSampler("any")


def server(asked: list[Any], processor: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> VLLMServerSampler:
    def post(self: VLLMWorker, path: str, body: Any, **options: Any) -> Any:
        pictures = [Picture.of(part["url"]).image for part in body.get("content_parts", [])]
        assert all(part["type"] == "image_url" for part in body.get("content_parts", []))
        asked.append((body["token_ids"], pictures, body["sampling_params"]))
        steps = [{"token_id": token, "logprob": -1.0} for token in ANSWER]
        choice = {"token_ids": ANSWER, "logprobs": {"content": steps}, "finish_reason": "stop", "stop_reason": 1}
        read = expanded(processor, body["token_ids"], pictures)
        told = {"prompt_token_ids": read} if body.get("return_token_ids") else {}
        return {"choices": [choice | {"weight_versions": None}], **told}

    monkeypatch.setattr(VLLMWorker, "post", post)
    monkeypatch.setattr(VLLMWorker, "version", lambda self: "default")
    monkeypatch.setattr(VLLMWorker, "max_length", lambda self: 256)
    return VLLMServerSampler("http://localhost", weights_folder=tmp_path, max_concurrency=1)


@pytest.mark.parametrize("make_sampler", [engine, server])
def test_vllm_gets_pictures_and_their_marks(make_sampler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With other sizes of pictures, vLLM would sample behind a prompt that the policy does not score."""
    model, processor = tiny_vision("qwen2_5_vl")
    _, its_own = tiny_vision("qwen2_5_vl")
    asked: list[Any] = []
    sampler = make_sampler(asked, its_own, monkeypatch, tmp_path)
    policy = HFPolicy(model, processor, sampler=sampler, sampling=SamplingConfig(max_new_tokens=6))
    groups = policy.generate_actions(SHOWN, 2)
    assert [[action.token_ids for action in group] for group in groups] == [[tuple(ANSWER)] * 2] * 3
    shown = [[part["image"] for part in state[0]["content"] if part["type"] == "image"] for state in SHOWN]
    for (ids, pictures, settings), given in zip(asked, [each for each in shown for _ in range(2)], strict=True):
        assert ids.count(IMAGE) == len(pictures) == len(given)
        assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(pictures, given, strict=True))
        # the head of the policy excludes these tokens, and vLLM has a head of its own
        assert settings["logit_bias"] == {IMAGE: -100.0, IDS["<video>"]: -100.0}
    scores = policy.score_groups(SHOWN, groups)
    assert torch.equal(scores.log_probs[0], scores.log_probs[1])
    its_own.image_processor.size = {"shortest_edge": 64, "longest_edge": 256}
    assert len(policy.generate_actions(SHOWN[2:], 1)) == 1
    message = r"vLLM must read a prompt with pictures as the policy's processor does; of row 0"
    with pytest.raises(SamplerError, match=message):
        policy.generate_actions(SHOWN[:1], 1)
    with pytest.raises(ContractError, match="for another engine needs its pictures"):
        _ = PicturePrompt([5, IMAGE], {}).marked


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)  # GLM-4V
@pytest.mark.parametrize("family", FAMILIES)
def test_marks_are_found_again_in_the_tokens_of_a_context(family: str) -> None:
    """Prompts of conversations have token ids and pictures only. Two of the pictures are equal."""
    model, processor = tiny_vision(family)
    policy = HFPolicy(model, processor)
    pictures = [picture(32, 48), picture(24, 40, 1), picture(32, 48)]
    text = processor.apply_chat_template(chat("how many?", *pictures), tokenize=False)
    reader = policy.picture_reader
    token_ids = reader.encoded([text], [Picture.of(one) for one in pictures], "A test")
    marked, images = reader.prompt(token_ids, [Picture.of(one) for one in pictures]).marked
    assert marked == policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [image.size for image in images] == [(48, 32), (40, 24), (48, 32)]
