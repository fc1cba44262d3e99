"""How a batch is cut changes nothing: rows, their order, and four Gloo processes beside one.

Float32: losses and norms agree to 1e-5, weights after two steps of two updates at lr 1e-3 to
2e-6.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fsdp_ranks import cut_run
from tests.support.rank_processes import largest_gap, run_ranks
from tests.support.tiny_model import build_tiny_model

WORK = {"training/packed_tokens", "perf/model_tflop"}  # a cut prefix is run again


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), seed=4)


@pytest.fixture(scope="module")
def one(model) -> dict[str, Any]:
    return cut_run("few rows", model, 0, 1)


def four(model: Path, folder: Path, cut: str) -> list[dict[str, Any]]:
    module = "tests.support.fsdp_ranks"
    return run_ranks(module, folder, str(model), str(folder), *cut.split(), world=4)


def alike(found: dict[str, Any], one: dict[str, Any]) -> None:
    for mine, other in zip(found["stats"], one["stats"], strict=True):
        assert mine.keys() == other.keys()
        for name in other.keys() - WORK:
            assert mine[name] == pytest.approx(other[name], abs=1e-5, rel=1e-4), name
    assert largest_gap(found["weights"], one["weights"]) < 2e-6


def test_rows_and_their_order_change_nothing(model, one):
    cut = cut_run("many rows", model, 0, 1)
    assert all(
        a["training/packed_tokens"] > b["training/packed_tokens"]
        for a, b in zip(cut["stats"], one["stats"], strict=True)
    )
    alike(cut, one)
    alike(cut_run("few rows", model, 0, 1, order=-1), one)
    alike(cut_run("many rows", model, 0, 1, order=-1), one)


def test_four_processes_train_as_one_does(model, one, tmp_path):
    ranks = four(model, tmp_path, "many rows")
    assert all(rank["stats"] == ranks[0]["stats"] for rank in ranks)
    assert [bool(rank["weights"]) for rank in ranks] == [True, False, False, False]
    alike(ranks[0], one)
