"""refdelta's client, broken in what it does around the write: pause, cache, answers, recovery. Caught by its tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from refdelta.vllm.calls.client import Client

from .registry import own_mutants

caught_by = own_mutants("client", "tests/client/test_client.py")


@caught_by("test_the_cache_is_reset_after_the_write", fault=32)
def cache_reset_before_the_write(patch: pytest.MonkeyPatch) -> None:
    """The prefix cache is emptied, then the weights are written: what is computed in between is of the old ones."""
    pause, apply = Client._pause, Client._apply

    def early(self: Client, kv: Any) -> None:
        pause(self, kv)
        apply(self, kv)

    patch.setattr(Client, "_pause", early)
    patch.setattr(Client, "_apply", lambda self, kv: None)


@caught_by("test_the_cache_is_reset_after_the_write", fault=32)
def cache_never_reset(patch: pytest.MonkeyPatch) -> None:
    """The prefix cache serves keys and values of the old weights."""
    patch.setattr(Client, "_apply", lambda self, kv: None)


@caught_by("test_the_cache_is_reset_after_the_write", fault=32)
def running_requests_keep_their_keys(patch: pytest.MonkeyPatch) -> None:
    """`reset_prefix` empties the cache of later prompts alone."""

    def apply(self: Client, kv: Any) -> None:
        if kv != "keep":
            self.engine.reset_prefix_cache(running=False)

    patch.setattr(Client, "_apply", apply)


@caught_by("test_keep", fault=33)
def updates_without_a_pause(patch: pytest.MonkeyPatch) -> None:
    """Weights are written while the engine computes with them."""
    patch.setattr(Client, "_pause", lambda self, kv: None)


@caught_by("test_a_pause_that_does_not_pause", fault=37)
def pause_taken_for_granted(patch: pytest.MonkeyPatch) -> None:
    """Whether the engine paused is not asked."""
    patch.setattr(Client, "_pause", lambda self, kv: self.engine.pause("abort" if kv == "abort" else "keep"))


@caught_by("test_a_resume_that_does_not_resume", fault=37)
def resume_taken_for_granted(patch: pytest.MonkeyPatch) -> None:
    """Whether the engine goes on is not asked."""
    patch.setattr(Client, "_resume", lambda self: self.engine.resume())


@caught_by("test_a_cache_that_is_not_reset", fault=37)
def success_false_not_read(patch: pytest.MonkeyPatch) -> None:
    """An answer 200 that says `"success": false` counts as success."""

    def apply(self: Client, kv: Any) -> None:
        if kv != "keep":
            self.engine.reset_prefix_cache(running=kv == "reset_prefix")

    patch.setattr(Client, "_apply", apply)


@caught_by("test_the_backends_reason_comes_back", fault=36)
def paused_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    """An update that fails leaves the engine paused."""
    patch.setattr(Client, "_settle", lambda self, failure, before, kv, resume: None)


@caught_by("test_a_fence_that_an_update_brings_leaves_it_paused", fault=34)
def fenced_engine_resumed(patch: pytest.MonkeyPatch) -> None:
    """An engine whose weights nobody knows any more serves on."""

    def settle(self: Client, *arguments: object) -> None:
        self._abort()
        self._resume()

    patch.setattr(Client, "_settle", settle)


@caught_by("test_another_client_starts_meanwhile", fault=36)
def anothers_update_taken_for_its_own(patch: pytest.MonkeyPatch) -> None:
    """Which update the engine took last is not compared."""

    def committed(self: Client, infos: Sequence[Mapping[str, object]]) -> Any:
        return self.status()

    patch.setattr(Client, "_committed", committed)
