"""Adapters where they arrive: added to a base, which must be the learner's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.codec import manifest_from_pb, manifest_to_pb
from headway.errors import InvalidSpec, WeightMismatch
from headway.messages import AdapterBase, WeightManifest
from headway.weights.adapter import AdaptedModel, check_landed, merged
from headway.weights.base import BaseTensors, base_digest
from headway.weights.manifest import build_manifest

Q, NORM = "model.layers.0.q_proj.weight", "model.norm.weight"
A, B = "model.layers.0.q_proj.lora_A.weight", "model.layers.0.q_proj.lora_B.weight"
BASE: dict[str, Tensor] = {
    Q: torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
    NORM: torch.tensor([1.0, 1.5]),
    "model.embed_tokens.weight": torch.arange(6.0).reshape(2, 3),
}
PAIR = {A: torch.tensor([[1.0, 0.0, -1.0]]), B: torch.tensor([[2.0], [10.0]])}
SUM = [[2.0, 2.0, 2.0], [9.0, 5.0, 1.0]]  # scale 0.5


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))


def folder(path: Path, *files: dict[str, Tensor], tied: bool = False) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    for number, tensors in enumerate(files or (BASE,)):
        save_file(tensors, path / f"model-{number}.safetensors")
    return path


def publish(base: Path, pair: dict[str, Tensor] = PAIR, scale: float = 0.5) -> WeightManifest:
    return build_manifest(7, pair, base=AdapterBase(base_digest(base), scale))


def test_a_sum_by_hand(tmp_path):
    home = folder(tmp_path / "base")
    model = AdaptedModel(home, torch.float32)
    tensors = model.merge(publish(home), PAIR)
    assert dict(tensors).keys() == BASE.keys()
    assert tensors[Q].tolist() == SUM
    for name in (NORM, "model.embed_tokens.weight"):
        assert torch.equal(tensors[name], BASE[name])
    # the next version is added to the base, not to the version before
    doubled = model.merge(publish(home, {**PAIR, B: 2 * PAIR[B]}), {**PAIR, B: 2 * PAIR[B]})
    assert doubled[Q].tolist() == [[3.0, 2.0, 1.0], [14.0, 5.0, -4.0]]
    assert tensors[Q].tolist() == SUM  # whoever holds the older version keeps it
    half = AdaptedModel(home, torch.bfloat16).merge(publish(home), PAIR)
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    assert torch.equal(load_file(home / "model-0.safetensors")[Q], BASE[Q])


def test_sums_are_made_in_float32():
    w = torch.tensor([[256.0]], dtype=torch.bfloat16)
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    assert merged(w, one, one, 1.0).tolist() == [[257.0]]  # no bfloat16


def test_a_base_is_known_by_its_tensors_alone(tmp_path):
    whole = folder(tmp_path / "whole")
    parts = [{name: tensor} for name, tensor in BASE.items()]
    assert base_digest(folder(tmp_path / "cut", *parts)) == base_digest(whole)
    head = {"lm_head.weight": BASE["model.embed_tokens.weight"].clone()}
    untied = base_digest(folder(tmp_path / "untied", {**BASE, **head}))
    assert untied != base_digest(whole)
    assert base_digest(folder(tmp_path / "tied", {**BASE, **head}, tied=True)) == base_digest(whole)
    found = {base_digest(whole), untied}
    for number, (name, value) in enumerate(
        [
            (NORM, torch.tensor([1.0, 1.5000001])),
            (NORM, torch.tensor([[1.0, 1.5]])),
            (NORM, torch.tensor([1.0, 1.5], dtype=torch.float64)),
            ("model.norm.bias", torch.zeros(1)),
        ]
    ):
        found.add(base_digest(folder(tmp_path / str(number), {**BASE, name: value})))
    assert len(found) == 6


def test_a_changed_file_is_read_again(tmp_path):
    home = folder(tmp_path / "base")
    first = base_digest(home)
    save_file({**BASE, "more": torch.zeros(3)}, home / "model-0.safetensors")
    assert base_digest(home) != first


def test_another_base_is_refused(tmp_path):
    theirs = folder(tmp_path / "theirs")
    ours = folder(tmp_path / "ours", {**BASE, NORM: torch.tensor([1.0, 1.25])})
    with pytest.raises(WeightMismatch, match=r"base model in .*ours has digest .* the learner's"):
        AdaptedModel(ours, torch.float32).merge(publish(theirs), PAIR)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ({A: PAIR[A]}, "no set of pairs"),
        ({}, "no set of pairs"),
        ({**PAIR, NORM: BASE[NORM]}, "no set of pairs"),
        ({A: PAIR[A], B.replace("q_", "k_"): PAIR[B]}, "sends .*q_proj.lora_A.weight without it"),
        (
            {A.replace("q_", "k_"): PAIR[A], B.replace("q_", "k_"): PAIR[B]},
            r"tensor model.layers.0.k_proj.weight: .* has no such weight",
        ),
        ({A: torch.zeros(1, 2), B: PAIR[B]}, r"\[2, 1\] times \[1, 2\] is sent, .* \[2, 3\]"),
        ({A: torch.zeros(2, 3), B: PAIR[B]}, r"\[2, 1\] times \[2, 3\] is sent"),
    ],
)
def test_adapters_that_do_not_fit_are_named(tmp_path, pair: dict[str, Any], words: str):
    home = folder(tmp_path / "base")
    with pytest.raises(WeightMismatch, match=words):
        AdaptedModel(home, torch.float32).merge(publish(home, pair), pair)


def test_a_weight_that_nobody_found_is_not_taken_on_trust(tmp_path):
    manifest = publish(folder(tmp_path / "base"))
    check_landed(manifest, {Q, NORM})
    with pytest.raises(WeightMismatch, match=f"tensor {Q}: cannot be found in the running model"):
        check_landed(manifest, {NORM})
    check_landed(build_manifest(7, BASE), set())  # whole weights: what was received counts


def test_the_base_travels_in_the_manifest(tmp_path):
    manifest = publish(folder(tmp_path / "base"))
    assert manifest_from_pb(manifest_to_pb(manifest)) == manifest
    assert manifest_from_pb(manifest_to_pb(replace(manifest, base=None))).base is None
    for bad in (AdapterBase("xyz", 1.0), AdapterBase("0" * 32, float("nan"))):
        with pytest.raises(InvalidSpec, match=r"no digest|scale"):
            manifest_from_pb(manifest_to_pb(replace(manifest, base=bad)))


def test_tensors_are_read_only_when_asked_for(tmp_path, monkeypatch):
    home = folder(tmp_path / "base")
    tensors, read = BaseTensors(home, torch.float32), []
    stored = BaseTensors.stored
    monkeypatch.setattr(BaseTensors, "stored", lambda s, n: read.append(n) or stored(s, n))
    assert (
        Q in tensors
        and "nothing" not in tensors
        and len(tensors) == 3
        and set(tensors) == set(BASE)
    )
    assert read == []
    assert torch.equal(tensors[NORM], BASE[NORM]) and read == [NORM]
