"""python -m services.rollout: parse and choose cores first, then the heavy imports."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from typing import Any, get_args

from headway.errors import InvalidSpec
from headway.precision import DtypeOrAuto
from headway.settings import add_service_flags, parse_cores, service_settings

_BESIDE_A_JOB, _ALONE = 8, 64


def main(argv: list[str] | None = None) -> int:
    """Runs a rollout node; returns its exit code (2: bad settings)."""
    namespace = _parser().parse_args(argv)
    try:
        settings = service_settings(namespace)
        if not settings.coordinator and not namespace.model:
            raise InvalidSpec(
                "--coordinator HOST:PORT is missing: a node serves a fleet (or --model alone)"
            )
        cores = parse_cores(namespace.cores)
        _bind(cores)
        sim = _sim_settings(namespace)
    except InvalidSpec as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from headway.lifecycle import run
    from headway.telemetry import configure_logging
    from services.rollout import serve
    from services.rollout.engines import EngineSettings

    configure_logging("rollout", settings.log_level)
    max_visits, drain_s = namespace.max_visits, namespace.drain_s
    visitors = namespace.visitors or (_ALONE if namespace.model else _BESIDE_A_JOB)
    engine = EngineSettings(namespace.engine, cores, sim, visitors)
    if not namespace.model:
        return run(lambda lifecycle: serve.main(settings, engine, max_visits, drain_s, lifecycle))

    from services.rollout import standing

    model = standing.StandingModel(
        path=namespace.model,
        name=namespace.model_name or namespace.model,
        version=namespace.weight_version,
        max_model_len=namespace.max_model_len,
        dtype=namespace.dtype,
        kv_cache_gib=namespace.kv_cache_gib,
    )
    return run(
        lambda lifecycle: standing.main(settings, engine, model, max_visits, drain_s, lifecycle)
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rollout", description="Headway's rollout node")
    add_service_flags(parser, "rollout")
    add = parser.add_argument
    add("--engine", choices=("vllm", "sim"), default="vllm")
    add("--cores", default="", help="CPU cores to use, such as 0,2-3; default: all it may use")
    add("--drain-s", type=float, default=20.0, help="at most so long for what is under way")
    door = parser.add_argument_group("the OpenAI-compatible door").add_argument
    text = f"completions for others at once; default: {_BESIDE_A_JOB}, with --model {_ALONE}"
    door("--visitors", type=_at_least(1), default=0, help=text)
    door("--max-visits", type=_at_least(0), default=64, help="requests at once; beyond: 429")
    alone = parser.add_argument_group("a model served alone, without fleet or job").add_argument
    alone("--model", default="", help="folder, hub name or wheel:<name>==<version>")
    alone("--model-name", default="", help="what its callers name it; default: as --model")
    alone("--weight-version", type=_at_least(0), default=0, help="which answers name")
    alone("--max-model-len", type=_at_least(16), help="longest prompt plus completion")
    alone("--dtype", choices=get_args(DtypeOrAuto), default="auto")
    alone("--kv-cache-gib", type=_gib, default=1.0, help="on CPUs")
    sim = parser.add_argument_group("the sim engine, for tests and benchmarks").add_argument
    sim("--sim-tokens-per-s", type=float, default=1000.0, help="of one completion")
    sim("--sim-shared", action="store_true", help="the rate is that of all completions together")
    sim(
        "--sim-lengths",
        default="constant:32",
        metavar="KIND:MEAN[:SIGMA]",
        help="constant, uniform, lognormal or geometric, in tokens",
    )
    sim("--sim-vocab-size", type=int, default=256)
    sim("--sim-seed", type=int, default=0)
    sim("--sim-start-s", type=float, default=0.0, help="what loading the model takes")
    sim("--sim-install-pause-s", type=float, default=0.0, help="what installing weights takes")
    sim("--sim-broadcast", action="store_true", help="receive weights over a real weight group")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return int(text)

    return number


def _gib(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of GiB")
    return float(text)


def _bind(cores: tuple[int, ...]) -> None:
    """Keeps this process and its children on the cores; before any library counts them."""
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        there = sorted(os.sched_getaffinity(0))
        raise InvalidSpec(f"--cores {cores} are not all among this machine's {there}") from None
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(len(cores)))


def _sim_settings(namespace: argparse.Namespace) -> Any:
    from services.rollout.sim_engine import Lengths, SimSettings

    kind, _, rest = namespace.sim_lengths.partition(":")
    try:
        numbers = [float(part) for part in rest.split(":")] if rest else []
    except ValueError:
        numbers = [0.0, 0.0, 0.0]
    if kind not in ("constant", "uniform", "lognormal", "geometric") or len(numbers) > 2:
        raise InvalidSpec(
            f"--sim-lengths {namespace.sim_lengths!r} is not of the form KIND:MEAN[:SIGMA]"
        )
    return SimSettings(
        tokens_per_s=namespace.sim_tokens_per_s,
        shared=namespace.sim_shared,
        lengths=Lengths(kind, *numbers),
        vocab_size=namespace.sim_vocab_size,
        seed=namespace.sim_seed,
        start_s=namespace.sim_start_s,
        install_pause_s=namespace.sim_install_pause_s,
        broadcast=namespace.sim_broadcast,
    )


if __name__ == "__main__":
    sys.exit(main())
