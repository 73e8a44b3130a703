"""Whether an engine's loader uses every tensor that the model has: vLLM against transformers, tensor by tensor.

A fresh vLLM, a traced layout and an attestation share vLLM's loader, and none of them can see a tensor that it drops
for everybody. Transformers has a loader and a forward pass of its own. So every checkpoint tensor is changed by itself,
and the log-probabilities of the two must move alike. Both compute in float32.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..inputs.checkpoints import Checkpoint, State, aliases, load, save
from .runner import START_TIMEOUT, Host, start_arguments

TOLERANCE = 1e-4
"""By how much the two may differ in a log-probability, and in how far it moves; they were seen to differ by 2e-5."""
MOVED = 5e-3
"""A change moves the model when some log-probability moves by more than this."""

PROMPT = 56
"""Tokens of the one prompt, all different: enough to pass every expert of the tiny models, and the sliding window."""

Change = tuple[str, ...]
"""Checkpoint tensors that change together."""
_TOWER = re.compile(r"_tower\.|\bembed_(vision|audio)\.")


@dataclass(frozen=True, slots=True)
class Effect:
    """How a change moves the log-probabilities of the prompts' tokens, in each implementation."""

    change: Change
    transformers: Tensor
    """[n] float64: log-probability after minus before."""
    vllm: Tensor
    """The same."""

    @property
    def moves(self) -> bool:
        """Whether it moves transformers' model."""
        return _largest(self.transformers) > MOVED

    @property
    def alike(self) -> bool:
        """Whether it moves the two alike."""
        return _largest(self.transformers - self.vllm) <= TOLERANCE

    @property
    def in_one_only(self) -> bool:
        """Whether it moves one and leaves the other where it was."""
        moves = sorted((_largest(self.transformers), _largest(self.vllm)))
        return moves[0] <= TOLERANCE and moves[1] > MOVED

    def __str__(self) -> str:
        theirs, ours = _largest(self.transformers), _largest(self.vllm)
        return f"{' and '.join(self.change)}: moves transformers by {theirs:.3g}, vLLM by {ours:.3g}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both implementations on one checkpoint."""

    before: float
    """The largest difference of a log-probability before any change."""
    effects: tuple[Effect, ...]

    @property
    def findings(self) -> list[str]:
        """What is wrong: tensors that move only one of the two, else every other difference."""
        if found := [str(effect) for effect in self.effects if effect.in_one_only]:
            return found
        if self.before > TOLERANCE:
            return [f"the two differ by {self.before:.3g} before any change"]
        return [str(effect) for effect in self.effects if not effect.alike]


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def changes(state: Iterable[str], pair: tuple[str, str] | None) -> list[Change]:
    """Every tensor by itself, but for the two names of one tied tensor (``pair``) and the towers.

    A tied tensor has no value for each name. Towers see no text, so that together they must move nothing.
    """
    towers = tuple(name for name in state if _TOWER.search(name))
    single = [name for name in state if name not in towers and not (pair and name == pair[1])]
    return [pair if pair and name == pair[0] else (name,) for name in single] + [towers] * bool(towers)


def changed(state: State, change: Change, pair: tuple[str, str] | None) -> State:
    """The new tensors of a change: every floating element times 1 + N(0, 1) / 2."""
    new = {name: _moved(name, state[name]) for name in change if state[name].is_floating_point()}
    return {**new, pair[1]: new[pair[0]].clone()} if pair and change == pair else new


def _moved(name: str, tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))
    return (tensor.float() * (1 + 0.5 * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)


def compare(checkpoint: Checkpoint, zygote: Host, scratch: Path) -> Comparison:
    """Every change of ``checkpoint`` in both; ``zygote`` is a warm host, ``scratch`` an empty directory."""
    state = load(checkpoint.directory)
    pair = aliases(state, tied=checkpoint.tied)
    wanted = changes(state, pair)
    news = [changed(state, change, pair) for change in wanted]
    asked = [[(3 + 37 * i) % checkpoint.vocab_size for i in range(PROMPT)]]
    here, *ours = vllm_logprobs(checkpoint, [{}, *news], asked, zygote, scratch)
    there, *theirs = transformers_logprobs(checkpoint, ({**state, **new} for new in [{}, *news]), asked)
    moves = zip(wanted, theirs, ours, strict=True)
    return Comparison(_largest(here - there), tuple(Effect(c, after - there, mine - here) for c, after, mine in moves))


def vllm_logprobs(
    checkpoint: Checkpoint, news: Sequence[State], asked: list[list[int]], zygote: Host, scratch: Path
) -> list[Tensor]:
    """[n] log-probabilities for each mapping of replaced tensors, from one unpatched engine that loads again and again.

    A load of the checkpoint as it is, last, must answer as the fresh start did, or loading again would be no loading.
    """
    files = [scratch / f"change{number}" for number in range(len(news) + 1)]
    for file, new in zip(files, [*news, {}], strict=True):
        save(new, file)
    job = {
        "start": start_arguments(checkpoint, dtype="float32"),
        "prompts": asked,
        "out": str(scratch),
        "changes": [str(file / "model.safetensors") for file in files],
    }
    limit_s = 2 * START_TIMEOUT
    zygote.call("forked_truths", timeout=limit_s + 30, jobs=[job], at_once=1, limit_s=limit_s)
    answers = [scratch / "outputs.json", *(scratch / f"changed{number}.json" for number in range(len(files)))]
    fresh, *found = (_logprobs(json.loads(answer.read_text()), asked) for answer in answers)
    assert torch.equal(found[-1], fresh), f"{checkpoint.name}: loading again does not give what a fresh start gave"
    return found[:-1]


def _logprobs(outputs: Iterable[Mapping[str, Any]], asked: Sequence[Sequence[int]]) -> Tensor:
    values = [
        dict(map(tuple, entry))[token]
        for output, prompt in zip(outputs, asked, strict=True)
        for entry, token in zip(output["prompt_logprobs"], prompt[1:], strict=True)
    ]
    return torch.tensor(values, dtype=torch.float64)


def transformers_logprobs(checkpoint: Checkpoint, states: Iterable[State], asked: list[list[int]]) -> Iterator[Tensor]:
    """[n] log-probabilities for each state, from a model that transformers loaded for it."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(checkpoint.directory)
    model_class = getattr(transformers, config.architectures[0])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only wait for more
    for state in states:
        model = model_class.from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            values = [model.eval()(torch.tensor([prompt])).logits[0].double().log_softmax(-1) for prompt in asked]
        yield torch.cat(
            [found[torch.arange(len(prompt) - 1), prompt[1:]] for found, prompt in zip(values, asked, strict=True)]
        )
    torch.set_num_threads(threads)
