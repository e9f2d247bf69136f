"""The Hugging Face Hub: models that were downloaded from it, and uploads of exports to it."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from typer.testing import CliRunner

from cleave.errors import CleaveError, UsageError
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import JobSpec
from cleave.training.loop.run_folder import RunFolder
from cleave.training.loop.start import train
from cleave.training.results.trained import open_trained
from cleave.workload.build import resolve_model
from cleave_cli.main import app
from tests.training.runs import save_model
from tests.training.test_export import trained

pytestmark = pytest.mark.slow

NAME = "somebody/small-llama"
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which `hf download` stores models. It has one model, `NAME`."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    folder = cache / "models--somebody--small-llama"
    save_model(folder / "snapshots" / REVISION)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(REVISION)
    return cache


def test_a_downloaded_model_has_its_name_on_the_hub(downloads: Path) -> None:
    source = resolve_model(NAME)
    assert source.spec.name == "small-llama"
    assert source.folder is not None
    assert source.folder.name == REVISION
    shutil.rmtree(downloads)
    with pytest.raises(UsageError, match=rf"run `hf download {NAME}` and try again"):
        resolve_model(NAME)


@pytest.mark.usefixtures("downloads")
def test_a_downloaded_model_answers_by_its_name_on_the_hub() -> None:
    assert open_trained(Path(NAME)).title.endswith(REVISION)
    with pytest.raises(UsageError, match="run `hf download somebody/other`"):
        open_trained(Path("somebody/other"))


def test_a_mistyped_folder_is_not_taken_for_a_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no folder 'runs/frist' with a model; check the path"):
        open_trained(Path("runs/frist"))


@pytest.mark.parametrize("name", ["a b/c d", "../x", "~/y", "a/b/c", "/x"])
def test_what_is_no_name_on_the_hub_is_not_looked_up(downloads: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no folder"):
        resolve_model(name)


def adapted(tmp_path: Path, corpus_file: Path, model: str) -> RunFolder:
    run = RunFolder.create(tmp_path / "runs", "adapted")
    job = JobSpec(model, str(corpus_file), 1, batch=2, seq=16, method="local", lora="r=2")
    train(job, run, TrainContext(None, lambda record: None))
    return run


@pytest.mark.usefixtures("downloads")
def test_exported_adapters_name_their_model_on_the_hub(tmp_path: Path, corpus_file: Path) -> None:
    """`peft` then finds it on any machine. Here they load with the downloaded model."""
    run = adapted(tmp_path, corpus_file, NAME)
    command = ["export", str(run.path), str(tmp_path / "out")]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "public name" not in done.stderr  # nothing needs to be changed
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == NAME
    assert f"base_model: {NAME}\n" in (tmp_path / "out" / "README.md").read_text()
    opened: Any = open_trained(tmp_path / "out").model
    assert opened.config.vocab_size == 300


class Hub(ThreadingHTTPServer):
    """A Hub on this machine that takes uploads of small files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.refuses = 0  # status of all answers; 0: takes everything


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        hub = self.server
        assert isinstance(hub, Hub)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        lines = [json.loads(line) for line in body.splitlines()]
        hub.asked.append((self.path, lines))
        answer: dict[str, Any] = {"url": f"http://127.0.0.1:{hub.server_port}/{NAME}"}
        if self.path.endswith("/preupload/main"):
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for f in lines[0]["files"]]  # fmt: skip
            answer = {"files": files}
        elif self.path.endswith("/commit/main"):
            for line in lines:
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            address = f"http://127.0.0.1:{hub.server_port}/{NAME}/commit/{REVISION}"
            answer = {"success": True, "commitUrl": address, "commitOid": REVISION}
        self._answer(answer)

    def do_GET(self) -> None:
        self._answer({"id": NAME, "sha": REVISION, "siblings": [], "tags": []})

    def _answer(self, answer: dict[str, Any]) -> None:
        hub = self.server
        assert isinstance(hub, Hub)
        data = json.dumps(answer).encode()
        self.send_response(hub.refuses or 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        return


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("gguf", [False, True])
def test_an_export_is_uploaded_whole_to_a_private_repository(
    tmp_path: Path, corpus_file: Path, hub: Hub, gguf: bool
) -> None:
    run = trained(tmp_path, corpus_file, "llama-nano", steps=1)
    command = ["export", str(run.path), str(tmp_path / "out"), "--push-to-hub", NAME]
    done = CliRunner().invoke(app, command + ["--gguf"] * gguf, catch_exceptions=False)
    assert f"uploaded to: http://127.0.0.1:{hub.server_port}/{NAME}\n" in done.stdout
    path, (created,) = hub.asked[0]
    assert path == "/api/repos/create"
    assert (created["organization"], created["name"]) == tuple(NAME.split("/"))
    assert created.get("private") or created.get("visibility") == "private"
    folder = tmp_path / "out"
    assert hub.files == {file.name: file.read_bytes() for file in folder.iterdir()}
    library = "gguf" if gguf else "transformers"
    assert f"library_name: {library}\n".encode() in hub.files["README.md"]


@pytest.mark.usefixtures("downloads")
def test_adapters_are_uploaded_if_others_can_find_their_model(
    tmp_path: Path, corpus_file: Path, hub: Hub
) -> None:
    run = adapted(tmp_path / "named", corpus_file, NAME)
    command = ["export", str(run.path), "--push-to-hub", NAME, "--json"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert json.loads(done.stdout)["hub"].endswith(NAME)
    assert b"/hub/" not in hub.files["adapter_config.json"]
    hub.asked.clear()
    run = adapted(tmp_path / "folder", corpus_file, str(save_model(tmp_path / "model")))
    with pytest.raises(UsageError, match=r"which others do not have; add --merge"):
        CliRunner().invoke(
            app, ["export", str(run.path), "--push-to-hub", NAME], catch_exceptions=False
        )
    assert not hub.asked
    assert not (run.path / "export").exists()


@pytest.mark.parametrize("name", [NAME, "a/b/c"])
def test_a_hub_that_refuses_is_one_sentence_before_anything_is_written(
    tmp_path: Path, corpus_file: Path, hub: Hub, name: str
) -> None:
    hub.refuses = 401
    run = trained(tmp_path, corpus_file, "llama-nano", steps=1)
    command = ["export", str(run.path), str(tmp_path / "out"), "--push-to-hub", name]
    with pytest.raises(CleaveError, match=rf"--push-to-hub {name} failed \(.*\); check the name"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert not (tmp_path / "out").exists()
