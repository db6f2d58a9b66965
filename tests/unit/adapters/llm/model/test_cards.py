"""Model cards of saved policies, and uploads by the real huggingface_hub to a server in this process."""

import base64
import html
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from peft import LoraConfig

from adapters.llm import CompletionRewards, HFPolicy, SamplingConfig, add_lora
from grpo import ConfigError, GRPOConfig
from tests.support.llm_models import character_tokenizer, saved_model, tiny_model, trainer_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def policy(**options: Any) -> HFPolicy:
    model = add_lora(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    return HFPolicy(model, character_tokenizer(), sampling=SamplingConfig(max_new_tokens=3, temperature=0.7), **options)


def short(completion: str) -> float:
    return float(len(completion) < 3)


def section(card: str, title: str) -> str:
    return card.split(f"\n## {title}\n")[1].split("\n## ")[0]


def settings_in(text: str) -> Any:
    return json.loads(text.split("```json\n")[1].split("```")[0])


NAMES = ["short", "a|b", "`a`", "*a*_b_", "a: #b", "{{ a }}", "<b>a</b>", "a\\", "[a](b)", "---", '"a"']
"""Names of rewards. A card shows them as they are."""


def test_the_card_has_the_run_and_its_settings_can_be_loaded(tmp_path: Path, subtests: pytest.Subtests) -> None:
    trained = policy()
    rewards = CompletionRewards(dict.fromkeys(NAMES, short), weights=dict.fromkeys(NAMES, 0.5))
    trainer = trainer_of(trained, rewards, learning_rate=3e-4)
    trainer.train(["1+1="], num_iterations=2, progress=False)
    card = card_of(trained, tmp_path / "adapter", trainer=trainer)
    config = GRPOConfig(group_size=4, learning_rate=3e-4, seed=0)
    assert GRPOConfig.from_dict(settings_in(section(card.text, "Training"))) == config
    assert settings_in(section(card.text, "Sampling in training"))["temperature"] == 0.7
    assert "| iterations | 2 |" in card.text
    assert f"| torch | {torch.__version__} |" in card.text
    assert (card.data.library_name, card.data.pipeline_tag) == ("peft", "text-generation")
    assert {"grpo", "lora"} <= set(card.data.tags)
    assert card.data.base_model is None
    assert card_of(trained, tmp_path / "merged", merge=True).data.library_name == "transformers"
    page = rendered(card)
    parts = ", ".join(f"<code>{html.escape(name)}</code> (weight 0.5)" for name in NAMES)
    assert f"<td>reward</td>\n<td>{parts}</td>" in page
    for name in NAMES:
        with subtests.test(name=name):
            metric, mean = f"rewards/{name}/mean", trainer.history[-1][f"rewards/{name}/mean"]
            assert f"<td><code>{html.escape(metric)}</code></td>\n<td>{mean:.4g}</td>" in page


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a model in the Hub's cache on this machine. Nothing is downloaded."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # PEFT reads it
    cached = tmp_path / "cache" / "models--some_one--a_base_"
    saved_model(cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    return "some_one/a_base_"


def card_of(trained: HFPolicy, folder: Path, **options: Any) -> ModelCard:
    trained.save_pretrained(folder, **options)
    return ModelCard.load(folder / "README.md")


def rendered(card: ModelCard) -> str:
    return MarkdownIt("commonmark").enable("table").render(card.text)


@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")  # PEFT looks for it on the Hub
@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, target_modules=["q_proj"])], ids=["whole", "adapter"])
def test_a_model_of_the_hub_is_the_base_model(base: str, tmp_path: Path, lora: Any) -> None:
    trained = HFPolicy.from_pretrained(base, lora=lora, device="cpu")
    card = card_of(trained, tmp_path / "trained")
    assert card.data.base_model == base
    expected = ("transformers", "reinforcement-learning") if lora is None else ("peft", "lora")
    assert (card.data.library_name, card.data.tags[-1]) == expected
    assert f'of <a href="https://huggingface.co/{base}">{base}</a>, trained by' in rendered(card)
    assert "\n## Training\n" not in card.text
    again = HFPolicy.from_pretrained(tmp_path / "trained", device="cpu")
    assert card_of(again, tmp_path / "again").data.base_model == (None if lora is None else base)


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize(
    "name", ["outputs/model", "some_one/a_base_", "./a_base", "{tmp_path}/model", "a: b # c's/model"]
)
def test_a_local_folder_is_never_the_base_model(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_gone: bool
) -> None:
    """Some of these folders have names that are valid on the Hub, and one has the name of a model that is in the cache."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    name = name.format(tmp_path=tmp_path)
    saved_model(Path(name))
    trained = HFPolicy.from_pretrained(name, device="cpu")
    if is_gone:
        shutil.rmtree(name)
    card = card_of(trained, tmp_path / "trained")
    assert card.data.base_model is None
    assert "A language model, trained by" in card.text
    assert name not in card.content


def test_a_card_that_somebody_has_changed_is_kept(tmp_path: Path) -> None:
    trained = policy()
    trained.save_pretrained(tmp_path)
    card = tmp_path / "README.md"
    first = card.read_text()
    card.write_text(first + "added")
    trained.save_pretrained(tmp_path)
    assert card.read_text() == first
    marked, mark, rest = first.partition("<!-- Written when the model was saved.")
    assert mark
    own = marked + rest.partition("\n")[2] + "\nWhat this model is for."
    card.write_text(own)
    trained.save_pretrained(tmp_path)
    assert card.read_text() == own


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub's API that an upload uses. The token "wrong" is refused."""

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length")
        body = self.rfile.read(int(length)) if length else self._chunks()
        self.server.asked.append((self.path, body))  # type: ignore[attr-defined]
        if self.headers.get("Authorization") == "Bearer wrong":
            return self._answer(401, {"error": "Invalid credentials"})
        page = f"http://{self.headers['Host']}/someone/name"
        answer: dict[str, Any] = {
            "url": page, "commitUrl": f"{page}/commit/1", "commitOid": "1", "name": "someone/name",
        }  # fmt: skip
        if self.path.startswith("/api/models/someone/name/preupload"):
            files = [file["path"] for file in json.loads(body)["files"]]
            answer["files"] = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in files]
        return self._answer(200, answer | {"warnings": [], "errors": []})

    def _chunks(self) -> bytes:
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _answer(self, status: int, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bytes]]]:
    """The requests that a server got. huggingface_hub uploads to it, and reaches nothing else."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server.asked  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_saved_files_are_uploaded_in_one_commit(hub: list[tuple[str, bytes]], tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("not of the model")
    (tmp_path / "iteration-00000001").mkdir()
    (tmp_path / "iteration-00000001" / "state.safetensors").write_text("a checkpoint")
    policy(value_head=True).save_pretrained(tmp_path, push_to_hub="someone/name", private=True, token="right")
    path, body = hub[0]
    assert path == "/api/repos/create"
    assert json.loads(body)["name"] == "name"
    assert "private" in body.decode()
    (commit,) = [body for path, body in hub if path.startswith("/api/models/someone/name/commit/main")]
    files = {}
    for line in map(json.loads, commit.splitlines()):
        if line["key"] == "file":
            files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
    assert {"README.md", "adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} < set(files)
    assert any("value_head" in name for name in files)
    assert not any("other" in name or "iteration" in name for name in files)
    for name, content in files.items():
        assert content == (tmp_path / name).read_bytes()
    assert b'HFPolicy.from_pretrained("someone/name")' in files["README.md"]


def test_a_refusal_is_passed_on_and_says_that_the_files_are_saved(hub: list[tuple[str, bytes]], tmp_path: Path) -> None:
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="401") as caught:
        policy().save_pretrained(tmp_path, push_to_hub="someone/name", token="wrong")
    assert len(hub) == 1
    (note,) = caught.value.__notes__
    assert f"the model is saved in {tmp_path}, and it is not uploaded to 'someone/name'" in note
    assert "hf auth login" in note
    assert (tmp_path / "adapter_model.safetensors").is_file()


NO_NAME = "push_to_hub must be the name of a repository, 'user/name', or None; got "


@pytest.mark.parametrize(("options", "message"), [
    ({"push_to_hub": True}, f"{NO_NAME}bool"), ({"push_to_hub": ""}, f"{NO_NAME}str ''"),
    ({"push_to_hub": "a/b/c"}, f"{NO_NAME}str 'a/b/c'"), ({"push_to_hub": "a/b c"}, f"{NO_NAME}str 'a/b c'"),
    ({"push_to_hub": "a/`b`"}, f"{NO_NAME}str"), ({"trainer": 3}, "trainer must be the run's GRPOTrainer, or None; got int 3"),
])  # fmt: skip
def test_wrong_arguments_are_refused_before_anything_is_written(options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        policy().save_pretrained(tmp_path / "x", **options)
    assert not (tmp_path / "x").exists()
