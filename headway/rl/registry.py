"""Names of advantages and policy losses, and a place for a user's own.

A file named by `algorithm.custom` adds to it:

    from headway.rl.registry import register_advantage, register_policy_loss

    @register_advantage("best_or_nothing")
    def best(rewards, graded, lengths):            # all [groups, n]
        return (rewards == rewards.amax(dim=1, keepdim=True)) * graded * rewards

    @register_policy_loss("square")
    def square(logprobs, old_logprobs, advantages):   # all [T], no masks
        return PolicyLoss.unclipped(...)           # see headway.rl.losses

Advantages are one number a completion, zero where not graded; a completion with none but
zeros in its group is not run. `whiten=True` has them whitened over the tokens of the batch.
Losses are one number a token, with the gradient of `logprobs`, zero where the advantage is.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from headway.rl import names
from headway.rl.losses import PolicyLoss

GroupAdvantage = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rewards [groups, n], graded bool [groups, n], lengths int [groups, n]) -> [groups, n]."""
TokenLoss = Callable[[Tensor, Tensor, Tensor], PolicyLoss]
"""(log π, log π_prox, advantages), all [T] -> a loss a token."""
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Advantage:
    """How completions of a group are compared."""

    of: GroupAdvantage
    whiten: bool = False  # over the tokens of the whole batch


class Registry(Generic[E]):
    """A user's names of one kind of thing."""

    def __init__(self, kind: str, own: Sequence[str]) -> None:
        """`own` are the names that come with Headway and cannot be taken."""
        self._kind, self._own = kind, own
        self._entries: dict[str, tuple[str, E]] = {}  # name -> (file, entry)

    def get(self, name: str) -> E:
        """KeyError names the nearest known one."""
        if name not in self._entries:
            known = [*self._own, *self._entries]
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise KeyError(f"no {self._kind} is named {name}{hint}; there are {', '.join(known)}")
        return self._entries[name][1]

    def add(self, name: str, file: str, entry: E) -> None:
        """ValueError for a name that is taken. A file that is read again replaces its own."""
        if name in self._own or self._entries.get(name, (file,))[0] != file:
            raise ValueError(f"the {self._kind} name {name} is taken")
        self._entries[name] = (file, entry)


def _file_of(function: Callable[..., object]) -> str:
    return str(getattr(getattr(function, "__code__", None), "co_filename", function.__module__))


advantages: Registry[Advantage] = Registry("advantage", names.ADVANTAGES)
policy_losses: Registry[TokenLoss] = Registry("policy loss", names.POLICY_LOSSES)


def register_advantage(
    name: str, *, whiten: bool = False
) -> Callable[[GroupAdvantage], GroupAdvantage]:
    """Makes a function of groups an `algorithm.adv_estimator`. ValueError: the name is taken."""

    def decorate(of: GroupAdvantage) -> GroupAdvantage:
        advantages.add(name, _file_of(of), Advantage(of, whiten))
        return of

    return decorate


def register_policy_loss(name: str) -> Callable[[TokenLoss], TokenLoss]:
    """Makes a function of tokens an `algorithm.policy_loss`. ValueError: the name is taken."""

    def decorate(of: TokenLoss) -> TokenLoss:
        policy_losses.add(name, _file_of(of), of)
        return of

    return decorate
