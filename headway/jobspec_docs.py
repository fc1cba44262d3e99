"""Writes docs/job-spec.md from the models: `python -m headway.jobspec_docs > docs/job-spec.md`."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from headway.jobspec import JobSpec
from headway.jobspec_errors import section_of

_HEAD = """\
# The job specification

A job is one YAML (or JSON) file. `headway plan JOB.yaml` shows it with every default
written out; unknown keys are refused with the nearest known one. Any key can be set from the
command line: `headway run JOB.yaml --set seed=1 --set algorithm.max_policy_lag=0`.

```yaml
model: {path: some/hugging-face-folder}
data: {source: reasoning_gym, name: chain_sum}
reward: {grader: {type: numeric}}
trainer: {total_training_steps: 30}
```

An eval job samples every prompt of its data sets once, grades the answers and trains nothing
([evaluation.md](evaluation.md)):

```yaml
kind: eval
model: {path: some/hugging-face-folder}
evaluation: {data: [{source: jsonl, name: heldout.jsonl}], n: 4, temperature: 0.6, max_tokens: 1024}
reward: {grader: {type: numeric, reference: "{{item.answer}}"}}
```

Graders are described in [graders.md](graders.md). Names follow verl and TRL where they have one.

This page is made from `headway/jobspec*.py` by `python -m headway.jobspec_docs`.
"""

_RULES = """\
## Rules between keys

- `actor.ppo_mini_batch_size` divides `data.train_batch_size`; `actor.num_ranks` divides the
  mini-batch, with `strategy: megatron` after division by `tensor_model_parallel_size`, which
  divides it and is 1 with any other strategy.
- `rollout.n` is at least 2 unless the advantage is `reinforce_plus_plus`, `gae` or `remax`: others
  compare completions of one prompt, and `dynamic_sampling` needs two that differ.
- `critic` and `trainer.critic_warmup`, which is below `total_training_steps`, are of
  `adv_estimator: gae`; `critic.ppo_mini_batch_size` fits the batch and the ranks as the actor's.
  `strategy: megatron` has no critic.
- `gspo`, `sapo` and `gmpo` are means over completions (`seq-mean-token-mean`);
  `seq-mean-token-sum-norm` and `loss_scale_factor` come together; `clip_ratio_c` is `ppo_clip`'s;
  `gamma` is `reinforce_plus_plus`'s and `gae`'s, `lam` `gae`'s; `norm_adv_by_std_in_grpo: false` is
  `grpo`'s.
- `rollout_correction`: `proximal: bypass` leaves nothing to weigh or reject, so it goes with
  `type: none` alone; `log_linear` goes with what is decided token by token; `rollout_rs` needs
  `rs_high` (`geometric`: 0.99 to 1.01), and `rs_low` belongs to k1 forms.
- `kl_ctrl.type: adaptive` needs `use_kl_in_reward`; `reward.overlong_buffer.len` is at most
  `rollout.max_tokens`.
- verl's `vanilla`, `geo_mean`, `low_var_kl`, `mse` and `kl` are taken for `ppo_clip`, `gmpo`, `k3`,
  `k2` and `k1`. With `custom`, names are checked by the learner, which loads the file.
- `data.max_prompt_length` + `rollout.max_tokens` is at most `model.max_model_len`, which is at
  most what the model was made for.
- `model.lora_alpha` and `model.target_modules` need a `model.lora_rank` above 0; a target that is
  no linear layer of the model is refused, and so is the output head. With it, `actor.strategy` is
  `fsdp` and `adv_estimator` is not `gae`.
- `actor.optim.betas` are at least 0 and below 1; whole numbers are below 2147483648.
- `evaluation.test_freq` above 0 needs `evaluation.data`; `evaluation.n` above 1 needs a temperature
  above 0. A held-out prompt has the room that its answer leaves it in `model.max_model_len`.
- `kind: eval` needs `evaluation.data` and has no `data`, `algorithm`, `actor`, `critic`, `trainer`,
  `reward.overlong_buffer`, `evaluation.test_freq`, `evaluation.val_before_train`, no LoRA keys and
  none of `rollout.n`, `temperature`, `top_p` and `top_k`, which `evaluation` has: they are refused.
- `icepop_low` is below `icepop_high`; `rollout.max_nodes` is not below `rollout.min_nodes`.
"""


def render() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_sections(JobSpec, ""), _RULES])


def _sections(model: type[BaseModel], path: str) -> Iterator[str]:
    rows, below = [], []
    for name, info in model.model_fields.items():
        inner, section = info.annotation, section_of(info.annotation)
        if section is not None:
            below.append((section, f"{path}.{name}" if path else name))
        if section is inner:
            continue
        cells = (f"`{name}`", _type(inner), _default(info), _limits(info), info.description or "")
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    title = f"## `{path}`" if path else "## Top level"
    text = (model.__doc__ or "").strip().splitlines()[0]
    table = ["| key | type | default | limits | |", "| --- | --- | --- | --- | --- |", *rows]
    yield "\n".join([title, "", text, "", *(table if rows else []), ""])
    for inner, inner_path in below:
        yield from _sections(inner, inner_path)


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if a is type(None) else _type(a) for a in arguments)
    if origin is tuple:
        kinds = [a for a in arguments if a is not ...]
        many = "list of " if ... in arguments else f"{len(kinds)} × "
        return many + ("mappings" if section_of(kinds[0]) else _type(kinds[0]))
    if origin is dict:
        return "mapping"
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(annotation, str(annotation))


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "**required**"
    value = info.default
    if value is PydanticUndefined and info.default_factory is not None:
        value = info.default_factory()  # type: ignore[call-arg]
    if value in ("", (), {}):
        return "empty"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"`{value}`".lower()
    if isinstance(value, tuple):
        return "`[" + ", ".join(str(item) for item in value) + "]`"
    return f"`{value}`"


def _limits(info: FieldInfo) -> str:
    signs = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"), ("pattern", ""))
    found = [
        f"{sign} {getattr(rule, name)}".strip()
        for rule in info.metadata
        for name, sign in signs
        if getattr(rule, name, None) is not None
    ]
    return ", ".join(f"`{limit}`" if limit.startswith("^") else limit for limit in found)


if __name__ == "__main__":
    print(render(), end="")
