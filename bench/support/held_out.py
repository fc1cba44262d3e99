"""Mean reward of a model's greedy answers to problems that its job did not draw.

    python bench/support/held_out.py JOB.yaml MODEL --engine transformers|vllm

The prompts are the job's, with another data seed; the grader is the job's own. Prints one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from headway.data import open_source
from headway.data.stream import PromptStream
from headway.graders import validate_grader
from headway.jobspec import JobSpec, load_job
from headway.messages import Ticket
from headway.precision import resolve_dtype


def held_out_tickets(job: JobSpec, model: Path, problems: int, seed: int) -> list[Ticket]:
    """The job's prompts from a data seed of their own."""
    from transformers import AutoTokenizer

    data = job.data.model_copy(update={"seed": seed, "size": problems, "shuffle": False})
    held_out = job.model_copy(update={"data": data})
    tokenizer = AutoTokenizer.from_pretrained(model)
    stream = PromptStream(open_source(data), held_out, tokenizer)
    return [stream.ticket(i) for i in range(problems)]


def answers_by_transformers(model: Path, tickets: Sequence[Ticket], max_tokens: int) -> list[str]:
    """Greedy answers of the plain Hugging Face model, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    by_length: dict[int, list[int]] = defaultdict(list)
    for place, ticket in enumerate(tickets):
        by_length[len(ticket.prompt_ids)].append(place)
    texts = [""] * len(tickets)
    for length, places in by_length.items():  # equal lengths: a batch without padding
        ids = torch.tensor([tickets[place].prompt_ids for place in places])
        out = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
        answers = tokenizer.batch_decode(out[:, length:], skip_special_tokens=True)
        for place, answer in zip(places, answers, strict=True):
            texts[place] = answer
    return texts


def answers_by_vllm(model: Path, tickets: Sequence[Ticket], max_tokens: int) -> list[str]:
    """Greedy answers of vLLM."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    dtype = resolve_dtype("auto", on_gpu=not current_platform.is_cpu())
    llm = LLM(str(model), dtype=dtype, enforce_eager=True, max_model_len=512)
    prompts = [{"prompt_token_ids": list(ticket.prompt_ids)} for ticket in tickets]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))
    return [output.outputs[0].text for output in outputs]


def main() -> None:
    """Prints one JSON object as its last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--seed", type=int, default=987_654_321)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    job = load_job(args.job)
    tickets = held_out_tickets(job, args.model, args.problems, args.seed)
    answer = answers_by_vllm if args.engine == "vllm" else answers_by_transformers
    texts = answer(args.model, tickets, job.rollout.max_tokens)
    rewards = grade(job, tickets, texts)
    print(json.dumps({"mean_reward": round(statistics.mean(rewards), 4), "problems": len(rewards)}))


def grade(job: JobSpec, tickets: Sequence[Ticket], texts: Sequence[str]) -> list[float]:
    """Rewards by the job's grader; an item that cannot be graded is an error."""
    from services.reward.grading.evaluate import build
    from services.reward.grading.sample import Sample

    one = build(validate_grader(dict(job.reward.grader)).model_dump())
    samples = [
        Sample(text, ticket.item, ticket.prompt)
        for ticket, text in zip(tickets, texts, strict=True)
    ]
    return [one(sample).reward for sample in samples]


if __name__ == "__main__":
    main()
