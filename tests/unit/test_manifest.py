from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import xxhash

from headway.errors import InvalidSpec, WeightMismatch
from headway.messages import TensorSpec, WeightManifest
from headway.weights.checkpoint import checkpoint_shapes, ties_embeddings
from headway.weights.manifest import (
    Slot,
    bucket_layout,
    build_manifest,
    check_covers,
    check_digests,
    combined_digest,
)


def spec(name: str, num_bytes: int, digest: str = "") -> TensorSpec:
    return TensorSpec(name, "uint8", (num_bytes,), digest)


def test_digests_are_of_the_bytes_in_memory() -> None:
    # 1.0, -2.0 in bfloat16 are 0x3f80, 0xc000: little-endian bytes 80 3f 00 c0
    manifest = build_manifest(3, {"a": torch.tensor([1.0, -2.0], dtype=torch.bfloat16)}, 100)
    expected = xxhash.xxh3_128_hexdigest(bytes.fromhex("803f00c0"))
    assert manifest == WeightManifest(3, (TensorSpec("a", "bfloat16", (2,), expected),), 100)


def test_a_transposed_view_is_digested_as_it_is_sent() -> None:
    plain = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    sent = build_manifest(0, {"a": plain.t()}).tensors[0]
    assert sent.shape == (3, 2)
    assert sent.digest == build_manifest(0, {"a": plain.t().contiguous()}).tensors[0].digest
    assert sent.digest != build_manifest(0, {"a": plain}).tensors[0].digest


def test_a_scalar_and_an_empty_tensor_have_digests() -> None:
    manifest = build_manifest(0, {"s": torch.tensor(1.0), "e": torch.empty(0, 4)})
    assert manifest.tensors[0].digest == xxhash.xxh3_128_hexdigest(bytes.fromhex("0000803f"))
    assert manifest.tensors[1].digest == xxhash.xxh3_128_hexdigest(b"")
    assert [b.num_bytes for b in bucket_layout(manifest)] == [64]


def test_buckets_are_filled_in_order_and_aligned() -> None:
    a, b, c, d = spec("a", 10), spec("b", 100), spec("c", 500), spec("d", 1)
    buckets = bucket_layout(WeightManifest(0, (a, b, c, d), bucket_bytes=200))
    # a at 0, b at the next multiple of 64; c alone is larger than a bucket; d begins a new one
    assert [bucket.slots for bucket in buckets] == [
        (Slot(a, 0, 10), Slot(b, 64, 100)),
        (Slot(c, 0, 500),),
        (Slot(d, 0, 1),),
    ]
    assert [bucket.num_bytes for bucket in buckets] == [164, 500, 1]


def test_a_bucket_may_be_filled_to_its_last_byte() -> None:
    manifest = WeightManifest(0, (spec("a", 64), spec("b", 64), spec("c", 1)), bucket_bytes=128)
    assert [b.num_bytes for b in bucket_layout(manifest)] == [128, 1]


def test_no_tensors_make_no_buckets() -> None:
    assert bucket_layout(WeightManifest(0, (), 1)) == ()


def test_a_dtype_that_cannot_travel_is_named() -> None:
    manifest = WeightManifest(0, (TensorSpec("w", "complex64", (1,), ""),), 1)
    with pytest.raises(WeightMismatch, match="tensor w: dtype complex64"):
        bucket_layout(manifest)


EXPECTED = {"model.embed_tokens.weight": (320, 64), "model.norm.weight": (64,)}


def sent(**shapes: tuple[int, ...]) -> WeightManifest:
    names = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight"}
    names["head"] = "lm_head.weight"
    tensors = tuple(TensorSpec(names.get(k, k), "bfloat16", s, k) for k, s in shapes.items())
    return WeightManifest(7, tensors, 100)


def test_s015_a_padded_vocabulary_is_named_with_both_shapes() -> None:
    with pytest.raises(WeightMismatch) as error:
        check_covers(sent(embed=(384, 64), norm=(64,)), EXPECTED, True, "the node")
    assert "tensor model.embed_tokens.weight" in str(error.value)
    assert "[384, 64]" in str(error.value) and "[320, 64]" in str(error.value)


def test_a_missing_and_an_unknown_tensor_are_named() -> None:
    with pytest.raises(WeightMismatch, match=r"tensor model\.norm\.weight: the node needs it"):
        check_covers(sent(embed=(320, 64)), EXPECTED, True, "the node")
    with pytest.raises(WeightMismatch, match="tensor extra: the learner sends it"):
        check_covers(sent(embed=(320, 64), norm=(64,), extra=(1,)), EXPECTED, True, "the node")


def test_a_tied_head_may_be_absent_or_equal_but_not_different() -> None:
    both = sent(embed=(320, 64), norm=(64,), head=(320, 64))
    check_covers(sent(embed=(320, 64), norm=(64,)), EXPECTED, True, "the node")
    check_covers(
        sent(embed=(320, 64), norm=(64,)), {**EXPECTED, "lm_head.weight": (320, 64)}, True, "x"
    )
    with pytest.raises(WeightMismatch, match=r"lm_head\.weight: differs from"):
        check_covers(both, EXPECTED, True, "the node")
    with pytest.raises(WeightMismatch, match=r"lm_head\.weight: the learner sends it"):
        check_covers(both, EXPECTED, False, "the node")


def test_a_digest_that_differs_names_its_tensor_and_the_rest_combine() -> None:
    manifest = WeightManifest(7, (spec("a", 1, "d1"), spec("b", 1, "d2")), 100)
    assert check_digests(manifest, ["d1", "d2"], "here") == combined_digest(["d1", "d2"])
    assert combined_digest(["d1", "d2"]) == xxhash.xxh3_128_hexdigest(b"d1d2")
    with pytest.raises(WeightMismatch, match="tensor b: sent d2, here has d9"):
        check_digests(manifest, ["d1", "d9"], "here")


def test_shapes_come_from_all_files_of_a_folder(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model-1.safetensors", metadata={"x": "y"})
    save_file({"b": torch.zeros(5)}, tmp_path / "model-2.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    assert checkpoint_shapes(tmp_path) == {"a": (2, 3), "b": (5,)}
    assert ties_embeddings(tmp_path)


def test_a_folder_without_or_with_damaged_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match=r"no \*\.safetensors"):
        checkpoint_shapes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 16)
    with pytest.raises(InvalidSpec, match="not a safetensors file"):
        checkpoint_shapes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"oops")
    with pytest.raises(InvalidSpec, match="damaged"):
        checkpoint_shapes(tmp_path)
