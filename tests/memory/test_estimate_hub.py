"""A model of the hub by its name: with a connection, without one, and if the hub refuses."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import transformers as hf
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from hf_actcompress.errors import ModelConfigError
from hf_actcompress.memory import estimate
from tests.families import BY_NAME

SIZES = {"batch_size": 2, "seq_len": 16, "device": "cpu"}
NAME = "someone/some-model"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a hub whose offline mode is off."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path


def answers(monkeypatch, error: Exception | None) -> list[dict[str, Any]]:
    """Let the hub raise `error`, or answer if that is None. Returns a list that gets every attempt."""
    asked: list[dict[str, Any]] = []

    def metadata(url: str, **options: Any) -> object:
        asked.append({"url": url, **options})
        if error is not None:
            raise error
        return object()

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    return asked


def refusal(kind: Any, said: str) -> Exception:
    request = SimpleNamespace(method="HEAD", url="", headers={})
    return kind(said, response=SimpleNamespace(headers={}, request=request, status_code=401))


def save_in(cache: Any) -> Any:
    """A config as an earlier download leaves it."""
    config = BY_NAME["bert"].make_config()
    folder = cache / f"models--{NAME.replace('/', '--')}"
    revision = "0" * 40
    config.save_pretrained(folder / "snapshots" / revision)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    return config


def test_without_a_connection_it_is_said_at_once(cache, monkeypatch):
    """Any error of the attempt counts, whatever its type, because libraries raise different ones."""
    asked = answers(monkeypatch, RuntimeError("Name or service not known"))
    start = time.monotonic()
    with pytest.raises(ModelConfigError, match="path to a config.json"):
        estimate(NAME, **SIZES)
    # the retries of transformers take 23 s
    assert time.monotonic() - start < 10
    assert len(asked) == 1 and NAME in asked[0]["url"] and 0 < asked[0]["timeout"] <= 5


def test_without_a_connection_the_cache_is_read(cache, monkeypatch):
    config = save_in(cache)
    answers(monkeypatch, RuntimeError("Name or service not known"))
    assert estimate(NAME, **SIZES) == estimate(config, **SIZES)


def test_offline_mode_makes_no_attempt(cache, monkeypatch):
    config = save_in(cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = answers(monkeypatch, None)
    assert estimate(NAME, **SIZES) == estimate(config, **SIZES)
    assert asked == []


def test_nothing_of_the_process_is_changed(cache, monkeypatch):
    before = {name: getattr(constants, name) for name in dir(constants)}
    answers(monkeypatch, RuntimeError("Name or service not known"))
    with pytest.raises(ModelConfigError):
        estimate(NAME, **SIZES)
    assert {name: getattr(constants, name) for name in dir(constants)} == before


@pytest.mark.parametrize(
    ("answer", "said", "advice"),
    [
        (refusal(GatedRepoError, "401"), "You are trying to access a gated repo.", "auth login"),
        (refusal(RepositoryNotFoundError, "404"), f"{NAME} is not a valid model identifier", "Check the spelling"),
        (None, "There was a specific connection error when trying to load it", "Check the spelling"),
    ],
)
def test_what_the_hub_says_is_left_to_transformers(cache, monkeypatch, answer, said, advice):
    answers(monkeypatch, answer)

    def refuse(name: str, **options: Any) -> Any:
        # False must be passed explicitly: without it transformers asks the user on the console
        assert (name, options) == (NAME, {"trust_remote_code": False})
        raise OSError(said)

    monkeypatch.setattr(hf.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(ModelConfigError, match=advice) as caught:
        estimate(NAME, **SIZES)
    assert said in str(caught.value)


def test_a_name_that_can_be_none(cache):
    with pytest.raises(ModelConfigError, match="no such file or folder"):
        estimate("some one/some/model", **SIZES)
