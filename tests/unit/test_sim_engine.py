"""The imitation of an engine, to the token, in virtual time."""

import asyncio
import random
import statistics

import pytest

from headway.errors import EpochBroken, InvalidSpec, Unavailable
from headway.messages import TensorSpec, VersionSpan, WeightManifest
from services.rollout.engine import Sampling
from services.rollout.sim_engine import EOS_ID, Lengths, SimEngine, SimSettings
from tests.support.virtual_time import run_virtual

TEN_TOKENS = Lengths("constant", 10)


def manifest(version):
    return WeightManifest(version, (), 0)


async def started(version=0, **settings):
    engine = SimEngine(SimSettings(**settings))
    await engine.start()
    if version is not None:
        await engine.install(manifest(version), 1.0)
    return engine


def now():
    return asyncio.get_running_loop().time()


def test_a_completion_takes_its_tokens_over_its_rate():
    async def main():
        engine = await started(tokens_per_s=5.0, lengths=TEN_TOKENS)
        group = await engine.generate("r", (1, 2), 4, Sampling(max_tokens=100), 7)
        assert now() == pytest.approx(2.0)
        assert engine.busy_s == pytest.approx(2.0)
        assert engine.num_tokens_sampled == 40
        assert engine.num_completions_in_flight == 0
        assert [len(c.token_ids) for c in group] == [10] * 4

    run_virtual(main())


def test_a_shared_rate_is_divided_over_what_is_sampled():
    async def main():
        engine = await started(tokens_per_s=10.0, shared=True, lengths=TEN_TOKENS)
        ends = {}

        async def one(name, delay_s):
            await asyncio.sleep(delay_s)
            await engine.generate(name, (1,), 1, Sampling(max_tokens=100), 0)
            ends[name] = now()

        # a alone for 0.4 s: 4 tokens; both at 5/s: a's other 6 take 1.2 s, to 1.6 s, in
        # which b samples 6; b's last 4 alone at 10/s end at 2.0 s.
        await asyncio.gather(one("a", 0.0), one("b", 0.4))
        assert ends == {"a": pytest.approx(1.6), "b": pytest.approx(2.0)}
        assert engine.busy_s == pytest.approx(2.0)

    run_virtual(main())


def test_an_install_splits_the_span_at_the_token_being_sampled():
    async def main():
        engine = await started(version=3, tokens_per_s=10.0, lengths=TEN_TOKENS)
        task = asyncio.create_task(engine.generate("r", (1,), 2, Sampling(max_tokens=100), 0))
        await asyncio.sleep(0.35)  # tokens 0, 1, 2 are there; token 3 is being sampled
        await engine.install(manifest(4), 1.0)
        await asyncio.sleep(0.45)  # 0.8 s: token 7 is there to the moment
        await engine.install(manifest(5), 1.0)
        for completion in await task:
            assert completion.spans == (
                VersionSpan(3, 0, 3),
                VersionSpan(4, 3, 8),
                VersionSpan(5, 8, 10),
            )
            assert completion.oldest_version == 3
        assert now() == pytest.approx(1.0)

    run_virtual(main())


def test_installs_without_a_token_between_leave_no_empty_span():
    async def main():
        engine = await started(version=1, tokens_per_s=10.0, lengths=TEN_TOKENS)
        task = asyncio.create_task(engine.generate("r", (1,), 1, Sampling(max_tokens=100), 0))
        await asyncio.sleep(0)
        await engine.install(manifest(2), 1.0)
        await asyncio.sleep(0.5)
        await engine.install(manifest(3), 1.0)
        await engine.install(manifest(2), 1.0)
        [completion] = await task
        assert completion.spans == (VersionSpan(2, 0, 10),)

    run_virtual(main())


def test_sampling_stands_still_while_weights_are_installed():
    async def main():
        engine = await started(tokens_per_s=10.0, lengths=TEN_TOKENS, install_pause_s=0.25)
        begin = now()
        task = asyncio.create_task(engine.generate("r", (1,), 1, Sampling(max_tokens=100), 0))
        await asyncio.sleep(0.5)
        report = await engine.install(manifest(1), 1.0)
        assert report.pause_s == pytest.approx(0.25)
        await task
        assert now() - begin == pytest.approx(1.25)
        assert engine.busy_s == pytest.approx(1.0)

    run_virtual(main())


def test_nothing_is_sampled_before_the_first_install_and_after_a_failed_one():
    async def main():
        engine = await started(version=None, tokens_per_s=10.0, lengths=TEN_TOKENS)
        task = asyncio.create_task(engine.generate("r", (1,), 1, Sampling(max_tokens=100), 0))
        await asyncio.sleep(5)
        assert engine.version is None and engine.num_tokens_sampled == 0 and not task.done()
        await engine.install(manifest(0), 1.0)
        [completion] = await task
        assert now() == pytest.approx(6.0)
        assert completion.spans == (VersionSpan(0, 0, 10),)

        slow = await started(tokens_per_s=10.0, lengths=TEN_TOKENS, install_pause_s=0.5)
        task = asyncio.create_task(slow.generate("r", (1,), 1, Sampling(max_tokens=100), 0))
        with pytest.raises(EpochBroken, match="version 1"):
            await slow.install(manifest(1), 0.2)
        await asyncio.sleep(10)
        assert slow.version is None and slow.num_tokens_sampled == 0 and not task.done()
        await slow.install(manifest(2), 1.0)
        [completion] = await task
        assert completion.spans == (VersionSpan(2, 0, 10),)

    run_virtual(main())


def test_tokens_depend_on_seed_and_index_alone():
    async def main():
        lengths = Lengths("geometric", 20)
        one = await started(tokens_per_s=10.0, lengths=lengths)
        two = await started(version=8, tokens_per_s=999.0, shared=True, lengths=lengths)
        sampling = Sampling(max_tokens=30)
        first = await one.generate("a", (1,), 8, sampling, 5)
        await two.generate("x", (9,), 3, sampling, 4)
        again = await two.generate("b", (1,), 8, sampling, 5)
        other = await one.generate("c", (1,), 8, sampling, 6)
        content = [(c.token_ids, c.logprobs, c.text, c.finish_reason) for c in first]
        assert content == [(c.token_ids, c.logprobs, c.text, c.finish_reason) for c in again]
        assert content != [(c.token_ids, c.logprobs, c.text, c.finish_reason) for c in other]
        assert len({c.token_ids for c in first}) == 8

    run_virtual(main())


def test_ends_and_texts_are_those_of_a_language_model():
    async def main():
        engine = await started(tokens_per_s=1e6, vocab_size=50, lengths=Lengths("uniform", 20))
        sampling = Sampling(max_tokens=15, min_tokens=4)
        for completion in await engine.generate("r", (1,), 64, sampling, 3):
            assert 4 <= len(completion.token_ids) <= 15
            assert len(completion.logprobs) == len(completion.token_ids)
            assert all(value <= 0 for value in completion.logprobs)
            body = completion.token_ids
            if completion.finish_reason == "stop":
                assert body[-1] == EOS_ID
                body = body[:-1]
            else:
                assert len(body) == 15
            assert all(0 < token < 50 for token in body)
            assert completion.text == "".join("0123456789 "[(t - 1) % 11] for t in body)

        plain = await engine.generate("r", (1,), 1, Sampling(max_tokens=15), 3)
        stop = plain[0].text[2:4]
        cut = await engine.generate("r", (1,), 1, Sampling(max_tokens=15, stop=(stop,)), 3)
        found = plain[0].text.find(stop)
        assert cut[0].text == plain[0].text[:found]
        assert cut[0].token_ids == plain[0].token_ids[: found + 2]
        assert cut[0].finish_reason == "stop"

    run_virtual(main())


@pytest.mark.parametrize("kind", ["constant", "uniform", "lognormal", "geometric"])
def test_every_length_distribution_has_its_mean(kind):
    rng = random.Random(0)
    drawn = [Lengths(kind, 40).draw(rng) for _ in range(20_000)]
    assert min(drawn) >= 1
    assert statistics.fmean(drawn) == pytest.approx(40, rel=0.03)
    assert Lengths(kind, 1, sigma=0.0).draw(rng) == 1


def test_cancelling_a_call_frees_its_completions():
    async def main():
        engine = await started(tokens_per_s=10.0, shared=True, lengths=TEN_TOKENS)
        doomed = asyncio.create_task(engine.generate("d", (1,), 3, Sampling(max_tokens=100), 0))
        kept = asyncio.create_task(engine.generate("k", (1,), 1, Sampling(max_tokens=100), 1))
        await asyncio.sleep(1.0)  # 2.5 tokens each
        assert engine.num_completions_in_flight == 4
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        assert engine.num_completions_in_flight == 1
        await kept  # 7.5 tokens, alone at 10/s
        assert now() == pytest.approx(1.75)
        assert engine.num_tokens_sampled == 3 * 2 + 10

    run_virtual(main())


def test_closing_fails_what_is_open_and_refuses_the_rest():
    async def main():
        engine = await started(tokens_per_s=10.0, lengths=TEN_TOKENS)
        task = asyncio.create_task(engine.generate("r", (1,), 2, Sampling(max_tokens=100), 0))
        await asyncio.sleep(0.1)
        await engine.close()
        with pytest.raises(Unavailable, match="closed"):
            await task
        with pytest.raises(Unavailable, match="not running"):
            await engine.generate("r", (1,), 2, Sampling(max_tokens=100), 0)

    run_virtual(main())


def test_the_report_carries_the_digest_over_the_tensor_digests():
    async def main():
        engine = await started()
        tensors = (TensorSpec("w", "float32", (2,), "aa"), TensorSpec("b", "float32", (1,), "bb"))
        report = await engine.install(WeightManifest(7, tensors, 0), 1.0)
        assert (report.version, engine.version) == (7, 7)
        assert report.digest == "361b2daa13afc519a998d19c146aa4de"

    run_virtual(main())


@pytest.mark.parametrize(
    "make",
    [
        lambda: SimSettings(tokens_per_s=0),
        lambda: SimSettings(vocab_size=1),
        lambda: SimSettings(install_pause_s=-1),
        lambda: Lengths("constant", 0),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(InvalidSpec):
        make()
