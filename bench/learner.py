"""A packed training step beside a plain padded one: same model, groups, objective, core.

    taskset -c 0 python bench/learner.py [--model FOLDER] [--repeats 3] [--case NAME]

Padded: each group right-padded into one batch through the model's own forward pass
(`transformers`, sdpa), log-softmax over whole logits, one backward pass a group. Packed:
the learner's own `step.backward`. Bare: the model's own forward and backward pass of the
language-model loss over plain sequences as long as the packed rows; compared by input tokens a
second. All float32, one thread. Completions are random tokens that share nothing but their
group's prompt; a real job, whose prompts and answers begin alike, gains more.

Times are CPU seconds of this process, the three in turns, medians over repeats, so that other
work on the machine disturbs them less. Memory is what a step's peak adds to the loaded
model (gradients included), each in a process of its own; the padded batch there has as many
completions at once as the packed row. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from headway.jobspec import AlgorithmSpec
from headway.messages import Completion, Group, Ticket, VersionSpan
from services.learner.batch import Batch, label, make_batch
from services.learner.credit import credit
from services.learner.model import Policy, load_policy
from services.learner.objective import Objective
from services.learner.step import backward, make_share

CPU = torch.device("cpu")
N, VOCABULARY = 8, 49152


@dataclass(frozen=True, slots=True)
class Case:
    """A step of groups of N completions. Of groups that cost the same a part is timed."""

    groups: int
    timed: int
    prompt: int
    shortest: int
    longest: int
    target: float  # of the padded step's seconds over ours


CASES = {
    "8x8x16": Case(8, 8, 40, 16, 16, target=3.0),
    "8x8x128": Case(8, 2, 40, 128, 128, target=1.2),
    "8x8x16-128": Case(8, 4, 40, 16, 128, target=1.8),
    "4x8x32, prompts of 256": Case(4, 4, 256, 32, 32, target=5.0),
}
BARE_TARGET, MEMORY_TARGET = 0.85, 2.0
MEMORY_CASE = "8x8x16"


def shape_of_smollm2(folder: Path, layers: int) -> Path:
    """A folder with random weights in the shape of SmolLM2-135M."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_groups(case: Case, vocabulary: int) -> list[Group]:
    """Random prompts and completions, lengths drawn evenly; every group has a gradient."""
    rng = torch.Generator().manual_seed(case.longest)

    def ids(size: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocabulary, (size,), generator=rng).tolist())

    groups = []
    for number in range(case.timed):
        lengths = torch.randint(case.shortest, case.longest + 1, (N,), generator=rng).tolist()
        completions = tuple(
            Completion(
                ids(size), (-10.0,) * size, "length", (VersionSpan(0, 0, size),), "", i % 3 * 1.0
            )
            for i, size in enumerate(lengths)
        )
        ticket = Ticket(number, ids(case.prompt), "", {}, N, seed=0)
        groups.append(Group(ticket, completions, "bench", 1, 0, 0.0, 0.0))
    return groups


def batch_of(groups: Sequence[Group]) -> Batch:
    """Groups with their advantages, as the learner makes them."""
    labelled = label(groups, 0, frozenset(), max_policy_lag=0)
    return make_batch(labelled, credit(labelled, AlgorithmSpec(), list))


class Steps:
    """The three ways through one case's groups; each returns (loss, input tokens)."""

    def __init__(self, policy: Policy, groups: Sequence[Group], row_tokens: int | None) -> None:
        self.policy, self.groups, self.row_tokens = policy, groups, row_tokens
        self.share = make_share(batch_of(groups), CPU, row_tokens)
        self.count = sum(len(c.token_ids) for g in groups for c in g.completions)

    def packed(self) -> tuple[float, int]:
        """The learner's forward and backward pass, packing included."""
        share = make_share(batch_of(self.groups), CPU, self.row_tokens)
        objective = Objective(AlgorithmSpec())
        found = backward(self.policy, share, len(share.rows), self.count, 1.0, objective, CPU)
        return found.loss, sum(len(row.tokens) for row in share.rows)

    def bare(self) -> tuple[float, int]:
        """The model's own loss of sequences as long as the packed rows."""
        total, tokens = 0.0, 0
        for row in self.share.rows:
            ids = row.tokens[None]
            loss = self.policy.lm(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            total, tokens = total + float(loss.detach()), tokens + ids.numel()
        return total, tokens

    def padded(self, at_once: int = 1) -> tuple[float, int]:
        """The packed step's loss from padded batches of `at_once` groups; on-policy clip."""
        total, tokens = 0.0, 0
        for start in range(0, len(self.groups), at_once):
            loss, size = self._padded_loss(batch_of(self.groups[start : start + at_once]))
            loss.backward()
            total, tokens = total + float(loss.detach()), tokens + size
        return total, tokens

    def _padded_loss(self, batch: Batch) -> tuple[Tensor, int]:
        samples, prompt = batch.samples, len(batch.samples[0].prompt)
        rows = [torch.tensor(s.prompt + s.completion) for s in samples]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        attend = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        logits = self.policy.lm(input_ids=ids, attention_mask=attend, use_cache=False).logits
        logprobs = logits[:, prompt - 1 : -1].float().log_softmax(dim=-1)
        logprobs = logprobs.gather(2, ids[:, prompt:, None])[..., 0][attend[:, prompt:].bool()]
        weight = (logprobs.detach() - batch.rollout_logprobs).exp().clamp(max=2.0)
        ratio = (logprobs - logprobs.detach()).exp()
        return -(weight * ratio * batch.advantages).sum() / self.count, ids.numel()


def cpu_seconds(steps: Steps, step: Callable[[], tuple[float, int]], *, own: bool) -> list[float]:
    """CPU seconds of one step, its loss, its input tokens; `own`: by the learner's attention."""
    lm, before = steps.policy.lm, steps.policy.lm.config._attn_implementation
    if not own:
        lm.set_attn_implementation("sdpa")
    steps.policy.zero_grad(set_to_none=True)
    began = time.process_time()
    loss, tokens = step()
    seconds = time.process_time() - began
    lm.set_attn_implementation(before)
    return [seconds, loss, tokens]


def run_case(policy: Policy, name: str, repeats: int, row_tokens: int | None) -> dict[str, Any]:
    """All three steps of one case, and how they compare. AssertionError when losses differ."""
    case = CASES[name]
    vocabulary = min(VOCABULARY, policy.lm.config.vocab_size)
    steps = Steps(policy, make_groups(case, vocabulary), row_tokens)
    made = [
        (
            cpu_seconds(steps, steps.packed, own=True),
            cpu_seconds(steps, steps.padded, own=False),
            cpu_seconds(steps, steps.bare, own=False),
        )
        for _ in range(repeats)
    ]
    (ours, our_loss, tokens), (padded, padded_loss, padded_tokens), (bare, _, bare_tokens) = (
        [statistics.median(column) for column in zip(*runs, strict=True)]
        for runs in zip(*made, strict=True)
    )
    assert abs(our_loss - padded_loss) < 1e-4 * (1 + abs(padded_loss)), (our_loss, padded_loss)
    scale = case.groups / case.timed
    result = {
        "step_s": round(ours * scale, 3),
        "padded_step_s": round(padded * scale, 3),
        "ratio": round(padded / ours, 3),
        "target": case.target,
        "bare_ratio": round((tokens / ours) / (bare_tokens / bare), 3),
        "bare_target": BARE_TARGET,
        "input_tokens": round(tokens * scale),
        "padded_input_tokens": round(padded_tokens * scale),
        "input_tokens_per_s": round(tokens / ours, 1),
        "longest_row": max(len(row.tokens) for row in steps.share.rows),
        "groups_timed": case.timed,
        "repeats": repeats,
    }
    print(name, json.dumps(result), flush=True)
    return result


def added_memory(policy: Policy, kind: str, row_tokens: int | None) -> int:
    """Bytes that the peak of one step of the memory case adds to this process."""
    groups = make_groups(CASES[MEMORY_CASE], VOCABULARY)
    steps = Steps(policy, groups, row_tokens)
    at_once = max(1, len(groups) // len(steps.share.rows))
    if kind == "padded":
        policy.lm.set_attn_implementation("sdpa")
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    if kind == "padded":
        steps.padded(at_once)
    else:
        steps.packed()
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return (peak << 10) - before


def memory(model: Path, row_tokens: int | None) -> dict[str, Any]:
    """Both steps' memory, measured in processes of their own."""
    found = {}
    for kind in ("packed", "padded"):
        command = [sys.executable, __file__, "--model", str(model), "--memory-of", kind]
        if row_tokens is not None:
            command += ["--row-tokens", str(row_tokens)]
        found[kind] = int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    result = {
        "case": MEMORY_CASE,
        "packed_gib": round(found["packed"] / 2**30, 2),
        "padded_gib": round(found["padded"] / 2**30, 2),
        "ratio": round(found["padded"] / found["packed"], 3),
        "target": MEMORY_TARGET,
    }
    print("memory", json.dumps(result), flush=True)
    return result


def main(arguments: Sequence[str]) -> int:
    """Runs every case and prints one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face folder (default: random weights)")
    parser.add_argument("--layers", type=int, default=30, help="of the random model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--row-tokens", type=int, help="input tokens a row (learner's default)")
    parser.add_argument("--case", choices=[*CASES, "memory"], action="append")
    parser.add_argument("--memory-of", choices=["packed", "padded"], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or shape_of_smollm2(Path(scratch), options.layers)
        policy = load_policy(model)
        if options.memory_of:
            print(added_memory(policy, options.memory_of, options.row_tokens))
            return 0
        chosen = options.case or [*CASES, "memory"]
        Steps(policy, make_groups(Case(1, 1, 4, 2, 2, 0.0), 1000), None).packed()  # warm up
        figures = {
            name: run_case(policy, name, options.repeats, options.row_tokens)
            for name in chosen
            if name != "memory"
        }
        del policy
        if "memory" in chosen:
            figures["memory"] = memory(model, options.row_tokens)
    print(json.dumps({"bench": "learner", "compute_dtype": "float32", **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
