"""A step's work, by hand and as torch counts it."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headway.jobspec import AlgorithmSpec
from headway.rl.flops import DecoderShape, training_flops
from headway.rl.packing import Sample, pack
from services.learner import machine
from services.learner.machine import memory_metrics, peak_flops
from services.learner.metrics import mfu
from services.learner.model import decoder_shape, load_policy
from services.learner.objective import Objective
from services.learner.step import backward, make_share
from tests.support.learning import batch_of, random_groups
from tests.support.tiny_model import build_tiny_model

CPU = torch.device("cpu")


def test_a_row_worked_out_by_hand():
    # inputs 1 2 3 of depths 0 1 2; 2 predicts 3 and 5, 3 predicts 4
    rows = pack([Sample((1, 2), (3, 4)), Sample((1, 2), (5,))], row_tokens=10)
    shape = DecoderShape(
        body_params=10, num_layers=2, attention_width=3, hidden_size=4, vocab_size=5
    )
    body, attention, head = 2 * 10 * 3, 4 * 2 * 3 * (1 + 2 + 3), 2 * 5 * 4 * 2
    assert training_flops(shape, rows) == 3 * (body + attention + head)
    # a gradient of a frozen weight is a product less
    frozen = replace(shape, frozen_params=8, frozen_head=True)
    assert training_flops(frozen, rows) == 3 * (body + attention) - 2 * 8 * 3 + 2 * head


def test_products_are_as_many_as_torch_counts(tmp_path):
    policy = load_policy(build_tiny_model(tmp_path / "model", seed=3))
    share = make_share(batch_of(random_groups(3, 4, seed=1)), CPU, 40)
    objective = Objective(AlgorithmSpec())
    assert len(share.rows) > 1
    with FlopCounterMode(display=False) as counter:
        backward(policy, share, len(share.rows), share.batch.num_tokens, 1.0, objective, CPU)
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counted.items() if str(op) in ("aten.mm", "aten.addmm"))
    shape = decoder_shape(policy)
    bare = DecoderShape(shape.body_params, 0, 0, shape.hidden_size, shape.vocab_size)
    # torch's counter does not see the head's addmm_, which adds up its weight's gradient
    positions = sum(len(row.sources) for row in share.rows)
    products += 2 * shape.vocab_size * shape.hidden_size * positions
    assert products == training_flops(bare, share.rows)


def test_utilisation_is_work_over_what_the_time_could_hold():
    row = {"perf/model_tflop": 3.0, "timing_s/train": 2.0}
    assert mfu(row, 6e12) == {"perf/mfu/actor": pytest.approx(0.25)}
    assert mfu(row, 0.0) == {} == mfu({"timing_s/train": 2.0}, 6e12)


def test_the_machine_is_measured():
    assert peak_flops(CPU, torch.float32) > 1e8


@pytest.mark.parametrize("rate, largest", [(1e9, 256), (1e12, 4096), (1e15, 8192)])
def test_a_slow_product_is_not_tried_larger(monkeypatch, rate, largest):
    tried = []

    def product_s(size, *_):
        tried.append(size)
        return 2 * size**3 / rate

    monkeypatch.setattr(machine, "_product_s", product_s)
    assert peak_flops(CPU, torch.bfloat16) == pytest.approx(rate)
    assert max(tried) == largest


def test_memory_is_in_gib():
    assert memory_metrics()["perf/cpu_memory_used_gb"] > 0.1
