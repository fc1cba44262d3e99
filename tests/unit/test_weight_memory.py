"""Weights that lie as they will be sent, in memory that serves one version after the other."""

from __future__ import annotations

import pytest
import torch

from headway.errors import TrainingDiverged
from headway.weights.manifest import bucket_layout, build_manifest
from headway.weights.packing import Room, lies_packed, packed
from services.learner.crew import checked_finite

SHAPES = {"a": (3, 5), "big": (9 << 20,), "b": (7,), "big2": (9 << 20, 1), "c": (1,)}


def test_what_was_laid_out_is_sent_without_a_copy() -> None:
    laid = Room().lay_out(SHAPES, torch.float32)
    for i, tensor in enumerate(laid.values()):
        tensor.fill_(float(i))
    loose = {name: tensor.clone() for name, tensor in laid.items()}
    manifest = build_manifest(3, laid)
    buckets = bucket_layout(manifest)
    assert len(buckets) == 2  # of 64 MiB
    for bucket in buckets:
        lying = packed(bucket, laid)
        assert lying.data_ptr() == laid[bucket.slots[0].spec.name].data_ptr()
        assert not lies_packed(bucket, loose)
        assert torch.equal(packed(bucket, loose, torch.zeros(80 << 20, dtype=torch.uint8)), lying)
    assert build_manifest(3, loose) == manifest


def test_a_room_serves_the_next_version_once_nobody_holds_the_last() -> None:
    room = Room()
    first = room.lay_out({"a": (4,), "b": (2,)}, torch.bfloat16)
    held, place = first["b"].fill_(1.0), first["a"].data_ptr()
    del first
    second = room.lay_out({"a": (4,), "b": (2,)}, torch.bfloat16)
    second["b"].fill_(2.0)
    assert second["a"].data_ptr() != place and held.tolist() == [1.0, 1.0]
    place = second["a"].data_ptr()
    del second
    assert room.lay_out({"a": (4,), "b": (2,)}, torch.bfloat16)["a"].data_ptr() == place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_found(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.randn(100).to(dtype)
    assert checked_finite([("w", tensor), ("empty", torch.zeros(0))], 1).keys() == {"w", "empty"}
    tensor[37] = bad
    with pytest.raises(TrainingDiverged, match=r"version 2 are not finite \(w\)"):
        checked_finite([("w", tensor)], 2)
