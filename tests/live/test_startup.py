"""What the backend refuses when the engine starts, and how the plugin registers."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from conformance import checkpoints
from conformance.live.runner import START_TIMEOUT, Host, HostError, environment
from refdelta.spec import DeltaError
from refdelta.vllm.options import options_of

REGISTER = """
import os
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as factory
class Theirs: pass
for taken in (False, True):
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        continue
    if taken:
        factory.register_engine("delta_snapshot", Theirs)
    from refdelta.vllm.plugin import register
    print(f"<{taken}>", flush=True)
    register(); register()
    for name in ("delta_snapshot", "refdelta"):
        print(name, factory._registry[name]().__name__, flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untied Qwen3."""
    return checkpoints.make("qwen3-untied", tmp_path_factory.mktemp("base")).directory


def refusal(checkpoint: Path, log: Path, modules: tuple[str, ...] = (), **arguments: object) -> str:
    """The text with which an engine refuses to start."""
    with Host(environment(plugins="refdelta", modules=modules), log) as host, pytest.raises(HostError) as caught:
        host.call(
            "start",
            timeout=START_TIMEOUT,
            checkpoint=str(checkpoint),
            tp=1,
            backend="delta_snapshot",
            arguments=arguments,
        )
    return str(caught.value)


def test_packed_weights_are_refused_with_a_sentence(checkpoint: Path, tmp_path: Path) -> None:
    """Stale logits are the alternative: parameters would equal a fresh load and the GEMM would read a packed copy."""
    text = refusal(checkpoint, tmp_path / "log", modules=("tests.live.repacked",))
    assert "refdelta[unsupported_engine]: cpu_gemm=packed: vLLM" in text
    assert "would serve stale logits" in text


def test_an_engine_that_was_not_proven_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """The allow-list reads the fields of a real engine's config, and names all that it refuses."""
    settings = {"inductor_compile_config": {"freezing": True}}
    text = refusal(checkpoint, tmp_path / "log", load_format="dummy", enforce_eager=False, compilation_config=settings)
    assert "refdelta[unsupported_engine]: load_format=dummy, inductor_compile_config.freezing=True:" in text


@pytest.mark.parametrize(
    ("config", "refused"),
    [({}, False), (None, False), ({"other": {"x": 1}}, False), ({"refdelta": {"x": 1}}, True)],
)
def test_unknown_options_are_refused(config: object, refused: bool) -> None:
    """Only the backend's own part of ``additional_config`` is judged."""
    with pytest.raises(DeltaError, match=r"knows \[.*not \['x'\]") if refused else nullcontext():
        options_of(config)


@pytest.fixture(scope="module")
def registered() -> dict[bool, str]:
    """What is printed where the name is free, and where it is taken: two forks of one process that imported vLLM."""
    done = subprocess.run(
        [sys.executable, "-c", REGISTER],
        env={**os.environ, "VLLM_PLUGINS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=True,
    )
    free, found = done.stdout.partition("<True>")[::2]
    return {False: free.partition("<False>")[2], True: found}


@pytest.mark.parametrize("taken", [False, True])
def test_the_name_may_be_taken(registered: dict[bool, str], taken: bool) -> None:
    """Somebody else's ``delta_snapshot`` stays theirs; ours is ``refdelta`` then, and the log says so."""
    said = registered[taken]
    owner = "Theirs" if taken else "DeltaSnapshotEngine"
    names = [line for line in said.splitlines() if line.startswith(("delta_snapshot ", "refdelta "))]
    assert names == [f"delta_snapshot {owner}", "refdelta DeltaSnapshotEngine"]
    assert ("use backend='refdelta'" in said) == taken
