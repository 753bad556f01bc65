"""`push_to_hub`: whole runs upload to a stand-in of the Hub's HTTP API."""

import base64
import json
import os
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest
from kit.sft_runs import WITH_CHECKPOINTS, are_equal, make_config, weights_of
from safetensors.torch import load

import vectorlm
from vectorlm.errors import RankFailed
from vectorlm.runs.fine_tuning import finetune
from vectorlm.runs.preflight.files import package_problems
from vectorlm.train.checkpoint.hub import HubUploads
from vectorlm.train.settings import PushSettings


class Hub(ThreadingHTTPServer):
    """A server with the Hub's routes for repositories, branches and commits; `files` are by revision and path."""

    def __init__(self, *, refuses=False):
        self.refuses, self.asked, self.tokens = refuses, [], set()
        self.files = {"main": {"model-00001-of-00002.safetensors": b"stale"}}
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if "/tree/" in self.path:
            files = self.server.files[self.path.partition("/tree/")[2].partition("?")[0].strip("/")]
            self._answer([{"type": "file", "path": path, "size": 1, "oid": "0"} for path in files])
        else:
            self._answer({"error": "unknown"}, 404)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        path = unquote(self.path.partition("?")[0])
        self.server.tokens.add(self.headers.get("Authorization"))
        self.server.asked.append((path, body))
        *_, kind, revision = path.split("/")
        if self.server.refuses:
            self._answer({"error": "no room"}, 507)
        elif path == "/api/repos/create":
            self._answer({"url": f"http://{self.headers['Host']}/me/mine"})
        elif kind == "branch":
            self.server.files[revision] = dict(self.server.files["main"])
            self._answer({})
        elif kind == "preupload":
            files = json.loads(body)["files"]
            self._answer(
                {
                    "files": [
                        {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for file in files
                    ]
                }
            )
        elif kind == "commit":
            for line in map(json.loads, body.splitlines()):
                value, held = line["value"], self.server.files[revision]
                if line["key"] == "file":
                    held[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "deletedFile":
                    del held[value["path"]]
            self._answer(
                {
                    "commitUrl": f"http://{self.headers['Host']}/me/mine/commit/0",
                    "commitOid": "0" * 40,
                    "success": True,
                }
            )
        else:
            self._answer({})

    def _answer(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_): ...


def run_with(inputs, tmp_path, monkeypatch, hub, world_size, train=finetune, **push):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    config = make_config(inputs, tmp_path / "run", text=WITH_CHECKPOINTS)
    config = replace(config, push_to_hub=PushSettings(repo_id="me/mine", **push))
    vectorlm.launch(train, config, world_size=world_size)
    return tmp_path / "run"


@pytest.mark.slow
def test_main_gets_the_final_model_and_revisions_get_checkpoints(inputs, tmp_path, monkeypatch):
    hub = Hub()
    run = run_with(inputs, tmp_path, monkeypatch, hub, 2, private=True, checkpoints=True)
    created = [json.loads(body) for path, body in hub.asked if path == "/api/repos/create"]
    assert created[0]["name"] == "mine"
    assert created[0]["organization"] == "me"
    assert created[0]["visibility"] == "private"
    assert hub.tokens == {"Bearer hf_secret"}
    assert set(hub.files["main"]) == {path.name for path in (run / "final-model").iterdir()}
    assert are_equal(load(hub.files["main"]["model.safetensors"]), weights_of(run))
    steps = sorted(revision for revision in hub.files if revision.startswith("step-"))
    assert len(steps) > 1
    assert not are_equal(load(hub.files[steps[0]]["model.safetensors"]), weights_of(run))
    assert not list(run.glob("step-*-model"))


def killed_in(revision, until):
    """Return a `finetune` whose process dies in the upload of `revision`, after the file `until` exists or 2 s."""

    def train(config):
        upload = HubUploads._upload

        def upload_or_die(self, folder, name, deletes_folder):
            if name == revision:
                deadline = time.monotonic() + 2
                while not until.exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
                os._exit(1)
            upload(self, folder, name, deletes_folder)

        HubUploads._upload = upload_or_die
        finetune(config)

    return train


@pytest.mark.slow
def test_a_run_that_was_killed_in_an_upload_uploads_the_rest_when_it_resumes(inputs, tmp_path, monkeypatch):
    hub, last = Hub(), tmp_path / "run/checkpoints/step-00000003"
    for revision, until in (("step-2", last), ("main", last / "finished")):
        with pytest.raises(RankFailed):
            run_with(inputs, tmp_path, monkeypatch, hub, 2, killed_in(revision, until), checkpoints=True)
        assert last.is_dir()
        assert not (last / "finished").exists()
    assert hub.files.keys() == {"main", "step-2", "step-3"}
    assert hub.files["main"].keys() == {"model-00001-of-00002.safetensors"}, "nothing is uploaded yet"
    run = run_with(inputs, tmp_path, monkeypatch, hub, 2, checkpoints=True)
    assert are_equal(load(hub.files["main"]["model.safetensors"]), weights_of(run))
    assert (last / "finished").exists()
    assert not list(run.glob("*step-*-model*"))


@pytest.mark.slow
def test_a_refused_upload_leaves_the_final_model_and_says_so(inputs, tmp_path, monkeypatch, capfd):
    run = run_with(inputs, tmp_path, monkeypatch, Hub(refuses=True), 1)
    assert (run / "final-model/model.safetensors").is_file()
    assert "push_to_hub.repo_id='me/mine'" in capfd.readouterr().err


def test_a_push_without_a_token_is_refused_before_the_run(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    config = make_config(inputs, tmp_path / "run")
    asked = replace(config, push_to_hub=PushSettings(repo_id="me/mine", checkpoints=True))
    problems = list(package_problems(asked))
    assert [problem.partition("=")[0] for problem in problems] == ["push_to_hub", "push_to_hub.checkpoints"]


@pytest.mark.parametrize("repo_id", ["mine", "a/b/c", ""])
def test_a_name_without_an_owner_is_refused(inputs, tmp_path, repo_id):
    from vectorlm.errors import ConfigError
    from vectorlm.runs.config.load import load_config

    make_config(inputs, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"push_to_hub\.repo_id"):
        load_config(tmp_path / "run.yaml", [f"push_to_hub={{repo_id: '{repo_id}'}}"])
