"""What a replay may change, and how it is compared with its run."""

import pytest

from headway.errors import InvalidSpec
from headway.jobspec import parse_job
from headway.replay import Comparison, as_text, changes, compare

RAW = {
    "model": {"path": "m"},
    "data": {"source": "jsonl", "name": "d", "train_batch_size": 4},
    "reward": {"grader": {"type": "numeric"}},
    "trainer": {"total_training_steps": 3},
}


def spec(**sections):
    return parse_job({**RAW, **sections})


def test_what_decides_how_groups_are_trained_on_may_change():
    other = spec(
        algorithm={"clip_ratio_c": None, "rollout_correction": {"type": "none"}},
        actor={"optim": {"lr": 1e-5}, "ppo_epochs": 2},
    )
    assert changes(spec(), spec()) == {}
    assert changes(spec(), other) == {
        "actor.optim.lr": (1e-6, 1e-5),
        "actor.ppo_epochs": (1, 2),
        "algorithm.clip_ratio_c": (3.0, None),
        "algorithm.rollout_correction.proximal": ("recompute", "bypass"),  # follows from type
        "algorithm.rollout_correction.type": ("tis", "none"),
    }


@pytest.mark.parametrize(
    "sections",
    [
        {"seed": 1},
        {"algorithm": {"max_policy_lag": 3}},
        {"algorithm": {"on_late": "mask"}},
        {"rollout": {"temperature": 0.5}},
        {"reward": {"grader": {"type": "numeric", "extract": "last"}}},
        {"trainer": {"total_training_steps": 2}},
        {"actor": {"num_ranks": 2}},
    ],
)
def test_what_decided_which_groups_there_are_may_not(sections):
    with pytest.raises(InvalidSpec, match=r"cannot be set in a replay: the recorded groups"):
        changes(spec(), spec(**sections))


def row(step, digest, loss):
    return {"step": step, "actor/weights_digest": digest, "actor/pg_loss": loss}


RUN = [row(1, "a", 1.0), row(2, "b", 2.0), row(3, "c", 6.0)]


def test_equal_digests_after_each_step_are_equal_bits():
    found = compare(RUN, RUN[:2], {})
    assert (found.verdict, found.first_difference) == ("equal", None)
    assert (found.run_steps, found.replay_steps) == (3, 2)
    assert as_text(found, None)[-1] == (
        "replayed 2 of 3 steps: the weights are equal, bit for bit, after each"
    )


def test_the_first_difference_is_named_and_the_figures_stand_side_by_side():
    found = compare(RUN, [row(1, "a", 1.0), row(2, "x", 4.0), row(3, "y", 7.0)], {"k": (1, 2)})
    assert (found.verdict, found.first_difference) == ("differs", 2)
    (loss,) = found.figures
    assert (loss.run_mean, loss.replay_mean) == (3.0, 4.0)
    assert (loss.run_last, loss.replay_last) == (6.0, 7.0)
    text = as_text(found, {"run_moved": 2.0, "replay_moved": 3.0, "apart": 0.5})
    assert text[0] == "k: 1 in the run, 2 here"
    assert text[2].split() == ["actor/pg_loss", "3", "4", "6", "7"]
    assert text[-2] == "weights moved by 2 in the run, by 3 here, and lie 0.5 apart"
    assert text[-1] == "replayed 3 of 3 steps: the weights first differ after step 2"


@pytest.mark.parametrize(
    ("run", "again", "verdict"),
    [
        ([{"step": 1}], [{"step": 1}], "unknown"),
        ([row(1, "a", 0.0), {"step": 2}], [row(1, "a", 0.0), {"step": 2}], "unknown"),
        ([row(1, "a", 0.0), {"step": 2}], [row(1, "b", 0.0), {"step": 2}], "differs"),
        ([], [], "unknown"),
        ([row(1, "old", 0.0), *RUN], RUN, "equal"),  # a retraced step: the later row counts
    ],
)
def test_what_is_not_known_is_not_called_equal(run, again, verdict):
    found = compare(run, again, {})
    assert isinstance(found, Comparison)
    assert found.verdict == verdict
