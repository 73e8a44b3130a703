"""What a ledger says of states that have no version, or no known digest."""

from __future__ import annotations

import pytest
import torch

from refdelta.spec import Delta, DeltaError, Lineage, Reason, TensorPatch
from refdelta.vllm.update.ledger import Account, Ledger
from refdelta.vllm.update.options import Options

DIGEST = f"rd1:{7:016x}"


@pytest.mark.parametrize(
    ("ledger", "lineage", "options"),
    [
        (Ledger({"w": 1}, {}, "r", 1), Lineage("r", 2, base_digest=DIGEST), Options()),
        (Ledger({"w": None}, {}), Lineage("r", 2, 1, DIGEST, DIGEST), Options(lineage="required")),
        (Ledger({"w": None}, {}), None, Options(lineage="required")),
        (Ledger({"w": None}, {}, "r", 1), Lineage("s", 2, 1), Options()),
    ],
)
def test_no_message_says_none(ledger: Ledger, lineage: Lineage | None, options: Options) -> None:
    with pytest.raises(DeltaError) as caught:
        ledger.check_base(lineage, options)
    assert caught.value.reason is Reason.BASE_MISMATCH
    assert "None" not in caught.value.detail


def test_a_base_and_a_state_by_name() -> None:
    with pytest.raises(DeltaError) as caught:
        Ledger({"w": None}, {}, "r", 3).check_base(Lineage("s", 2), Options())
    expected = (
        "the delta is based on no stated version of run s, no stated digest; the engine holds version 3 of run r, of "
    )
    assert caught.value.detail == expected + "unknown digest"


def test_a_change_without_lineage_is_unverified() -> None:
    """S14.2-1: the digest is known, and nobody has said what it should be."""
    patch = TensorPatch("w", (2, 3), torch.tensor([4], dtype=torch.int32), torch.ones(1))
    account = [Account({"w": 1}, {"w": 9})]
    here = Ledger({"w": 7}, {}, "r", 1)
    after = here.after(Delta((patch,), 6), account, repeated=False)
    assert (after.run_id, after.version, after.verified) == (None, None, False)
    known = here.after(Delta((patch,), 6, Lineage("r", 2, 1, here.digest, after.digest)), account, repeated=False)
    assert (known.version, known.verified) == (2, True)
