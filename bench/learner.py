"""A packed training step beside a plain padded one: same model, groups, objective, core.

    taskset -c 0 python bench/learner.py [--model FOLDER] [--repeats 3]

Baseline: each group right-padded into one batch through the model's own forward pass
(`transformers`, sdpa), log-softmax over whole logits, one backward pass a group. Ours:
the learner's own `step.backward`. Both float32, one thread.
Completions are random tokens that share nothing but their group's prompt; a
real job, whose prompts and answers begin alike, gains more.

Times are CPU seconds of this process, medians over repeats, so that other work on the
machine disturbs them less. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from headway.jobspec import AlgorithmSpec
from headway.messages import Completion, Group, Ticket, VersionSpan
from services.learner.batch import Batch, label, make_batch
from services.learner.credit import credit
from services.learner.model import Policy, load_policy
from services.learner.objective import Objective
from services.learner.step import backward, make_share

CPU = torch.device("cpu")
N, PROMPT, VOCABULARY = 8, 40, 49152
STEP_GROUPS = 8
# name -> completion length, groups timed: the long case's groups cost the same each,
# so a part of them is timed and scaled to the step's eight
CASES = {"8x8x16": (16, 8), "8x8x128": (128, 1)}


def shape_of_smollm2(folder: Path) -> Path:
    """A folder with random weights in the shape of SmolLM2-135M."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_groups(count: int, length: int, vocabulary: int) -> list[Group]:
    """Random prompts and completions of fixed lengths, every group with a gradient."""
    rng = torch.Generator().manual_seed(length)

    def ids(size: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocabulary, (size,), generator=rng).tolist())

    span = (VersionSpan(0, 0, length),)
    groups = []
    for number in range(count):
        completions = tuple(
            Completion(ids(length), (-10.0,) * length, "length", span, "", float(i % 3))
            for i in range(N)
        )
        ticket = Ticket(number, ids(PROMPT), "", {}, N, seed=0)
        groups.append(Group(ticket, completions, "bench", 1, 0, 0.0, 0.0))
    return groups


def batch_of(groups: Sequence[Group]) -> Batch:
    """Groups with their advantages, as the learner makes them."""
    labelled = label(groups, 0, frozenset(), max_policy_lag=0)
    return make_batch(labelled, credit(labelled, AlgorithmSpec(), list))


def packed_step(policy: Policy, groups: Sequence[Group]) -> tuple[float, int]:
    """The learner's forward and backward pass; loss and input tokens run."""
    share = make_share(batch_of(groups), CPU)
    count = share.batch.num_tokens
    objective = Objective(AlgorithmSpec())
    recorded = backward(policy, share, len(share.rows), count, 1.0, objective, CPU)
    return recorded.loss, sum(len(row.tokens) for row in share.rows)


def padded_step(policy: Policy, groups: Sequence[Group]) -> tuple[float, int]:
    """The same loss from padded batches; truncated importance weights, on-policy clip."""
    total, tokens = 0.0, 0
    count = sum(len(c.token_ids) for g in groups for c in g.completions)
    for group in groups:
        batch = batch_of([group])
        ids = torch.tensor([s.prompt + s.completion for s in batch.samples])
        logits = policy.lm(
            input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False
        ).logits[:, PROMPT - 1 : -1]
        logprobs = logits.float().log_softmax(dim=-1).gather(2, ids[:, PROMPT:, None])[..., 0]
        logprobs = logprobs.reshape(-1)
        weight = (logprobs.detach() - batch.rollout_logprobs).exp().clamp(max=2.0)
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -(weight * ratio * batch.advantages).sum() / count
        loss.backward()
        total += float(loss.detach())
        tokens += ids.numel()
    return total, tokens


def cpu_seconds(
    step: Callable[[Policy, Sequence[Group]], tuple[float, int]],
    policy: Policy,
    groups: Sequence[Group],
    repeats: int,
) -> tuple[float, float, int]:
    """Median CPU seconds of a step, its loss and its input tokens."""
    times = []
    for _ in range(repeats):
        policy.zero_grad(set_to_none=True)
        began = time.process_time()
        loss, tokens = step(policy, groups)
        times.append(time.process_time() - began)
    return statistics.median(times), loss, tokens


def run_case(policy: Policy, name: str, repeats: int) -> dict[str, Any]:
    """Both steps of one case, and how they compare. AssertionError when losses differ."""
    length, timed = CASES[name]
    groups = make_groups(timed, length, min(VOCABULARY, policy.lm.config.vocab_size))
    own = policy.lm.config._attn_implementation
    ours, our_loss, our_tokens = cpu_seconds(packed_step, policy, groups, repeats)
    policy.lm.set_attn_implementation("sdpa")
    theirs, their_loss, their_tokens = cpu_seconds(padded_step, policy, groups, repeats)
    policy.lm.set_attn_implementation(own)
    assert abs(our_loss - their_loss) < 1e-4 * (1 + abs(their_loss)), (our_loss, their_loss)
    scale = STEP_GROUPS / timed
    result = {
        "step_s": round(ours * scale, 3),
        "padded_step_s": round(theirs * scale, 3),
        "ratio": round(theirs / ours, 3),
        "completion_tokens_per_s": round(timed * N * length / ours, 1),
        "input_tokens": round(our_tokens * scale),
        "padded_input_tokens": round(their_tokens * scale),
        "groups_timed": timed,
        "repeats": repeats,
    }
    print(name, json.dumps(result), flush=True)
    return result


def main(arguments: Sequence[str]) -> int:
    """Runs every case and prints one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face folder (default: random weights)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", choices=CASES, action="append")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        policy = load_policy(options.model or shape_of_smollm2(Path(scratch)))
    packed_step(policy, make_groups(1, 2, 1000))  # warm up
    figures = {
        name: run_case(policy, name, options.repeats) for name in options.case or list(CASES)
    }
    print(json.dumps({"bench": "learner", "compute_dtype": "float32", **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
