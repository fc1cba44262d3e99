"""Groups, jobs and a plain padded reference for tests of the learner's maths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.jobspec import AlgorithmSpec, JobSpec, parse_job
from headway.messages import Completion, Group, Ticket, VersionSpan
from services.learner.batch import Batch, label, make_batch
from services.learner.credit import credit


def job(model: Path, **changes: Any) -> JobSpec:
    """A small float32 job; `changes` replace dotted keys, dots written as `__`."""
    raw: dict[str, Any] = {
        "model": {"path": str(model), "max_model_len": 256},
        "data": {
            "source": "jsonl",
            "name": "none",
            "train_batch_size": 4,
            "max_prompt_length": 32,
        },
        "reward": {"grader": {"type": "none"}},
        "actor": {"compute_dtype": "float32", "optim": {"lr": 1e-2}},
        "rollout": {"n": 4, "max_tokens": 32, "dtype": "float32"},
        "trainer": {"total_training_steps": 10},
    }
    for key, value in changes.items():
        *path, leaf = key.split("__")
        section = raw
        for name in path:
            section = section.setdefault(name, {})
        section[leaf] = value
    return parse_job(raw)


def completion(
    ids: Sequence[int],
    reward: float | None,
    *,
    logprobs: Sequence[float] | None = None,
    versions: Sequence[int] | None = None,
) -> Completion:
    """A completion; `versions` has one entry a token (default: all 0)."""
    each = [0] * len(ids) if versions is None else list(versions)
    spans = tuple(VersionSpan(v, i, i + 1) for i, v in enumerate(each))
    sampled = [-2.0] * len(ids) if logprobs is None else logprobs
    return Completion(tuple(ids), tuple(sampled), "stop", spans, "", reward)


def group(ticket_id: int, prompt: Sequence[int], completions: Sequence[Completion]) -> Group:
    """A delivered group."""
    ticket = Ticket(ticket_id, tuple(prompt), "", {}, len(completions), seed=0)
    return Group(ticket, tuple(completions), "node", 1, 0, 0.0, 0.0)


def random_groups(
    count: int, n: int, *, vocabulary: int = 320, seed: int = 0, equal: Sequence[int] = ()
) -> list[Group]:
    """Groups with uneven lengths, shared beginnings and random log-probs and rewards.

    Groups in `equal` have equal rewards. Prompts begin alike; some answers begin alike.
    """
    rng = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=rng).tolist()

    system = ints(0, vocabulary, 4)
    made = []
    for ticket_id in range(count):
        prompt = system + ints(0, vocabulary, ints(1, 6, 1)[0])
        start = ints(0, vocabulary, 2)
        completions = []
        for i in range(n):
            ids = (start if i % 2 else []) + ints(0, vocabulary, ints(1, 9, 1)[0])
            logprobs = (-7 + 4 * torch.rand(len(ids), generator=rng)).tolist()
            reward = 0.5 if ticket_id in equal else float(torch.rand((), generator=rng))
            completions.append(completion(ids, reward, logprobs=logprobs))
        made.append(group(ticket_id, prompt, completions))
    return made


def batch_of(groups: Sequence[Group], step: int = 0, late: Sequence[int] = ()) -> Batch:
    """Groups as a trainer with the default algorithm makes them ready, at a lag of at most 2."""
    labelled = label(groups, step, frozenset(late), max_policy_lag=2)
    return make_batch(labelled, credit(labelled, AlgorithmSpec(), list))


def padded_logprobs(lm: Any, samples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    """log π of every completion token, concatenated, from a right-padded batch and whole logits.

    A plain forward pass with the model's own eager attention, padded with token 0.
    """
    width = max(len(p) + len(c) for p, c in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    attend = torch.zeros_like(ids)
    for i, (prompt, answer) in enumerate(samples):
        length = len(prompt) + len(answer)
        ids[i, :length] = torch.tensor([*prompt, *answer])
        attend[i, :length] = 1
    before = lm.config._attn_implementation
    lm.set_attn_implementation("eager")
    logits = lm(input_ids=ids, attention_mask=attend, use_cache=False).logits.float()
    lm.set_attn_implementation(before)
    logs = logits.log_softmax(dim=-1)
    return torch.cat(
        [
            logs[i, len(p) - 1 : len(p) + len(c) - 1].gather(1, torch.tensor(c)[:, None])[:, 0]
            for i, (p, c) in enumerate(samples)
        ]
    )
