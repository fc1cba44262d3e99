"""ReMax: the greedy completion of a group, from the node to the advantage. By hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import torch

from headway.errors import InvalidSpec
from headway.jobspec import parse_job
from headway.messages import Baseline, Score
from headway.payloads import pack_group, unpack_group
from headway.plan import batch_of
from services.learner.metrics import group_metrics
from services.learner.run_folder import sample_row
from services.rollout.engines import greedy_of
from services.rollout.sim_engine import Lengths, SimEngine, SimSettings
from tests.support.learning import completion, group, job, random_groups
from tests.support.rollout_stand import Graders, digits_sum, stand
from tests.support.rollout_stand import job as rollout_job
from tests.support.tiny_model import build_tiny_model
from tests.support.trainers import trainer
from tests.support.virtual_time import run_virtual

REMAX = {"algorithm__adv_estimator": "remax"}


def remax_job(n=4, dynamic=False, **settings):
    raw = rollout_job(**settings).model_dump(mode="json")
    raw["rollout"]["n"] = n
    raw["algorithm"] |= {"adv_estimator": "remax", "dynamic_sampling": dynamic}
    return parse_job(raw)


# -- on the wire


def test_a_group_without_a_baseline_is_what_it_always_was():
    plain = group(3, [1, 2], [completion([5, 6], 1.0), completion([7], None)])
    _, fields = msgpack.unpackb(pack_group(plain))
    assert len(fields) == 7
    assert unpack_group(pack_group(plain)).baseline is None
    compared = replace(plain, baseline=Baseline(0.25, 9))
    _, fields = msgpack.unpackb(pack_group(compared))
    assert fields[7] == [0.25, 9]
    assert unpack_group(pack_group(compared)) == compared


@pytest.mark.parametrize(
    "bad", [None, [], [0.5], [0.5, -1], [float("nan"), 1], ["1", 1], [1, 2, 3]]
)
def test_a_damaged_baseline_is_refused(bad):
    whole = group(3, [1, 2], [completion([5, 6], 1.0), completion([7], None)])
    form, fields = msgpack.unpackb(pack_group(whole))
    with pytest.raises(InvalidSpec, match="baseline"):
        unpack_group(msgpack.packb([form, [*fields, bad]]))
    with pytest.raises(InvalidSpec, match="a group is no list of 7"):
        unpack_group(msgpack.packb([form, [*fields, [0.5, 1], [0.5, 1]]]))


# -- on the node


def test_a_ticket_has_its_greedy_completion_scored_with_it_and_not_among_the_n():
    async def main():
        graders = Graders(lambda item, call: Score(float(len(item.completion) % 7)))
        spec = remax_job(max_num_seqs=10)  # 2 tickets of 4 + 1
        async with stand(spec, graders=graders, lengths=Lengths("uniform", 8)) as it:
            await asyncio.sleep(0.05)
            assert it.engine.num_completions_in_flight == 10
            groups = await it.train(0)
            greedy = greedy_of(spec)
            assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, 0)
            for made in groups:
                assert len(made.completions) == made.ticket.n == 4
                assert made.baseline is not None
                texts = [c.text for c in made.completions]
                asked = next(c for _, c in graders.calls if c[:4] == texts)
                assert len(asked) == 5  # the greedy one last
                assert made.baseline.reward == float(len(asked[4]) % 7)
                assert made.baseline.num_tokens in (len(asked[4]), len(asked[4]) + 1)

    run_virtual(main())


def test_greedy_completions_of_the_sim_engine_are_the_prompt_s():
    async def main():
        async with stand(remax_job(), num_tickets=2) as it:
            sampling = greedy_of(it.spec)
            one = await it.engine.generate("a", (1, 2), 1, sampling, 5)
            two = await it.engine.generate("b", (1, 2), 2, sampling, 6)
            other = await it.engine.generate("c", (1, 3), 1, sampling, 5)
            assert one[0].token_ids == two[0].token_ids == two[1].token_ids
            assert one[0].token_ids != other[0].token_ids

    run_virtual(main())


def test_a_greedy_completion_without_a_reward_filters_the_group():
    async def main():
        def rule(item, call):
            return digits_sum(item)

        class LastFails(Graders):
            async def score(self, request_id, job_id, grader, items, timeout_s):
                scores = await super().score(request_id, job_id, grader, items, timeout_s)
                if len(items) != 5:
                    return scores
                return (*scores[:4], Score(None, error_kind="timeout", error_message="slow"))

        async with stand(remax_job(), num_tickets=2, graders=LastFails(rule)) as it:
            await it.reaches("filtered", 2)
            assert await it.count("reasons") == {"reward_error:timeout": 2}
        spec, graders = remax_job(on_error="rescore", max_rescores=1), LastFails(rule)
        async with stand(spec, num_tickets=1, graders=graders) as it:
            await it.reaches("delivered", 1)
            assert [len(items) for _, items in graders.calls] == [5, 1]  # it alone again

    run_virtual(main())


def test_dynamic_sampling_looks_at_the_greedy_one_too():
    async def main():
        class GreedyDiffers(Graders):
            async def score(self, request_id, job_id, grader, items, timeout_s):
                return (*[Score(0.5)] * (len(items) - 1), Score(1.0))

        spec = remax_job(n=1, dynamic=True)
        async with stand(spec, num_tickets=2, graders=GreedyDiffers()) as it:
            await it.reaches("delivered", 2)
        equal = Graders(lambda item, call: Score(0.5))
        async with stand(spec, num_tickets=2, graders=equal) as it:
            await it.reaches("filtered", 2)
            assert await it.count("reasons") == {"zero_variance": 2}

    run_virtual(main())


class GreedyFlawed(SimEngine):
    """Its greedy completions have a flaw, told by the seed."""

    def __init__(self, spoil):
        super().__init__(SimSettings(tokens_per_s=10.0, lengths=Lengths("constant", 10)))
        self.spoil = spoil

    async def generate(self, request_id, prompt_ids, n, sampling, seed):
        made = await super().generate(request_id, prompt_ids, n, sampling, seed)
        return self.spoil(made) if sampling.temperature == 0 and seed == 100 else made


def fails(made):
    raise ValueError("no greedy today")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda made: (), "short_group"),
        (lambda made: (replace(made[0], finish_reason="aborted"),), "aborted"),
        (fails, "ValueError"),
    ],
    ids=["none", "aborted", "failed"],
)
def test_a_group_without_its_greedy_completion_is_never_delivered(spoil, reason):
    async def main():
        async with stand(remax_job(), num_tickets=2, engine=GreedyFlawed(spoil)) as it:
            await it.reaches("abandoned", 1)
            await it.reaches("delivered", 1)
            assert (await it.ledger.counts()).reasons == {f"generate:{reason}": 1}
            assert it.engine.num_completions_in_flight == 0

    run_virtual(main())


def test_jobs_say_so_by_name():
    spec = job(Path("m"), **REMAX)
    assert spec.completions_a_ticket == 5 and job(Path("m")).completions_a_ticket == 4
    assert batch_of(spec).max_new_tokens == 4 * 5 * 32
    assert job(Path("m"), **REMAX, rollout__n=1, algorithm__dynamic_sampling=True).rollout.n == 1


# -- in the learner


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), seed=3, num_layers=1)


def test_advantages_are_above_the_greedy_reward(model):
    answers = [completion([5, 6], 1.0), completion([7], 0.0), completion([8], None)]
    made = replace(group(0, [1, 2], answers), baseline=Baseline(0.75, 4))
    stats = trainer(model, **REMAX, data__train_batch_size=1).train_step(0, [made])
    assert stats["critic/advantages/max"] == 0.25
    assert stats["critic/advantages/min"] == -0.75
    assert stats["critic/advantages/mean"] == -0.25
    # π_old is π: the loss is -A a token, and the weights min(π/μ, 2)
    assert stats["training/num_tokens"] == 3
    alone = replace(group(0, [1, 2], answers[:1]), baseline=Baseline(0.75, 4))
    one = trainer(model, **REMAX, data__train_batch_size=1, rollout__n=1).train_step(0, [alone])
    assert one["critic/advantages/mean"] == 0.25 and one["actor/grad_norm"] > 0
    equal = replace(group(0, [1, 2], answers[:1]), baseline=Baseline(1.0, 4))
    flat = trainer(model, **REMAX, data__train_batch_size=1, rollout__n=1).train_step(0, [equal])
    assert flat["actor/grad_norm"] == 0.0 and flat["training/packed_tokens"] == 0


def test_the_greedy_one_pays_for_its_length_as_the_others_do(model):
    settings = {
        **REMAX, "data__train_batch_size": 1, "rollout__max_tokens": 10,
        "reward__overlong_buffer": {"enable": True, "len": 4},
    }  # fmt: skip
    answers = [completion([5] * 8, 1.0), completion([7], 0.0)]  # -(8 - 6) / 4 for the first
    made = replace(group(0, [1, 2], answers), baseline=Baseline(0.75, 9))  # -3 / 4
    stats = trainer(model, **settings).train_step(0, [made])
    assert (stats["critic/advantages/max"], stats["critic/advantages/min"]) == (0.5, 0.0)


def test_a_group_that_was_sampled_without_one_is_an_error(model):
    with pytest.raises(InvalidSpec, match="ticket 0 was sampled without the greedy completion"):
        trainer(model, **REMAX).train_step(0, random_groups(4, 4))


def test_rows_and_samples_have_the_baseline():
    made = replace(random_groups(1, 2)[0], baseline=Baseline(0.75, 4))
    row = group_metrics([made, replace(made, baseline=Baseline(0.25, 4))])
    assert row["critic/baseline/mean"] == 0.5
    assert (row["critic/baseline/max"], row["critic/baseline/min"]) == (0.75, 0.25)
    assert sample_row(1, made)["baseline"] == 0.75
    plain = random_groups(1, 2)
    assert "baseline" not in sample_row(1, plain[0])
    assert not any(name.startswith("critic/baseline") for name in group_metrics(plain))
    assert torch.isfinite(torch.tensor(list(row.values()))).all()
