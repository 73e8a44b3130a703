"""`RankGroup.run_on_all_ranks`: every rank learns of every failure, and nobody is left waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from refdelta.spec import DeltaError, Reason
from refdelta.vllm.update.ranks import AgreedValue, RankGroup, StepFailed


def run(size: int, action: Callable[[int], AgreedValue]) -> list[StepFailed | None]:
    """What each of ``size`` ranks, in threads of their own, saw of one step."""
    barrier, texts = threading.Barrier(size, timeout=10), [""] * size
    seen: list[StepFailed | None] = [None] * size

    def rank_thread(rank: int) -> None:
        def gather(text: str) -> list[str]:
            texts[rank] = text
            barrier.wait()
            return list(texts)

        try:
            RankGroup(rank, size, gather).run_on_all_ranks("step", lambda: action(rank))
        except StepFailed as failure:
            seen[rank] = failure

    threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    return seen


def raise_on(failing: set[int], error: Exception) -> Callable[[int], AgreedValue]:
    def action(rank: int) -> None:
        if rank in failing:
            raise error

    return action


@pytest.mark.parametrize("failing", [{0}, {1}, {2}, {0, 2}, {0, 1, 2}])
def test_every_rank_sees_the_same_failure(failing: set[int]) -> None:
    """Whichever ranks fail, all raise the first one's reason, tensor and rank."""
    seen = run(3, raise_on(failing, DeltaError(Reason.INDEX_ORDER, "position 4 after 4", "q_proj")))
    texts = {str(failure) for failure in seen}
    assert len(texts) == 1
    failure = seen[0]
    assert failure is not None
    assert (failure.reason, failure.tensor) == (Reason.INDEX_ORDER, "q_proj")
    assert failure.detail == f"rank {min(failing)}: position 4 after 4"


def test_foreign_errors_become_rank_failed() -> None:
    """An exception that is no DeltaError still reaches the agreement."""
    seen = run(2, raise_on({0}, MemoryError("out of memory")))
    assert [failure and failure.reason for failure in seen] == [Reason.RANK_FAILED] * 2
    assert "MemoryError: out of memory" in str(seen[1])


def test_disagreement_is_a_failure_on_every_rank() -> None:
    """Ranks that read different payloads must not go on."""
    seen = run(2, lambda rank: ["session 1", f"payload {rank}"])
    assert [failure and failure.reason for failure in seen] == [Reason.RANK_DISAGREEMENT] * 2
    assert run(2, lambda rank: ["session 1", "payload"]) == [None, None]


def test_only_the_highest_rank_speaks() -> None:
    """vLLM stops reading replies at the first rank that raised."""
    assert [RankGroup(rank, 3).is_reporting_rank for rank in range(3)] == [False, False, True]
    assert RankGroup().is_reporting_rank


def test_one_rank_names_no_rank() -> None:
    """At TP=1 the text is the error itself."""
    with pytest.raises(StepFailed) as caught:
        RankGroup().run_on_all_ranks("step", lambda: raise_on({0}, DeltaError(Reason.INDEX_RANGE, "7 of 7"))(0))
    assert str(caught.value) == "refdelta[index_range]: 7 of 7"
