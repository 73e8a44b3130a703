"""What the backend refuses when the engine starts, and how the plugin registers."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from conformance.inputs import checkpoints
from conformance.live.runner import Host, HostError, environment
from refdelta import diff, write_delta
from refdelta.digest import state_digest
from refdelta.spec import DeltaError
from refdelta.vllm.update.options import options_of

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


def start(host: Host, checkpoint: str, **arguments: Any) -> None:
    """Start an engine of one rank."""
    host.start(checkpoint, backend="delta_snapshot", **arguments)


def refusal(checkpoint: Path, log: Path, modules: tuple[str, ...] = (), **arguments: object) -> str:
    """The text with which an engine refuses to start."""
    with Host(environment(plugins="refdelta", modules=modules), log) as host, pytest.raises(HostError) as caught:
        start(host, str(checkpoint), **arguments)
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


def test_files_of_another_dtype(checkpoint: Path, tmp_path: Path) -> None:
    """fp32 files in a bf16 engine are refused with what to do; done, the engine takes a delta."""
    state = {name: tensor.float() for name, tensor in checkpoints.load(checkpoint).items()}
    files = checkpoints.with_state(checkpoint, state, tmp_path / "fp32")
    text = refusal(files, tmp_path / "refused", dtype="bfloat16")
    assert (
        "refdelta[unsupported_engine]: dtype=bfloat16: the engine holds bfloat16, the checkpoint's files float32,"
        in text
    )
    assert "; start the engine with --dtype float32, or save the checkpoint in bfloat16" in text
    changed = state | {"model.norm.weight": -state["model.norm.weight"]}
    with Host(environment(plugins="refdelta"), tmp_path / "log") as host:
        start(host, str(files), dtype="float32")
        delta = write_delta(diff(state, changed), tmp_path / "delta")
        assert host.call("sync", info={"target_weights_path": str(delta)}) is None
        (status,) = host.call("rpc", method="refdelta_status")
        assert (status["digest"], status["refused"]) == (state_digest(changed), {})


def hub_cache(cache: Path, made: Path, files: tuple[str, ...], revision: str) -> None:
    """A snapshot of ``files`` as the hub's client keeps it."""
    commit = hashlib.sha1(revision.encode()).hexdigest()
    snapshot = cache / "models--org--tiny" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (ref := cache / "models--org--tiny" / "refs" / revision).parent.mkdir(exist_ok=True)
    ref.write_text(commit)
    for name in files:
        shutil.copy(made / name, snapshot / name)


def test_a_hub_id_a_download_directory_and_a_revision(checkpoint: Path, tmp_path: Path) -> None:
    """vLLM keeps configs in the default cache, weights in ``--download-dir``; another revision lies there, too."""
    state = checkpoints.load(checkpoint)
    other = {name: -tensor for name, tensor in state.items()}
    made = checkpoints.with_state(checkpoint, other, tmp_path / "other")
    for revision in ("main", "v2"):
        hub_cache(tmp_path / "home" / "hub", checkpoint, ("config.json",), revision)
    hub_cache(tmp_path / "weights", checkpoint, ("model.safetensors",), "main")
    hub_cache(tmp_path / "weights", made, ("model.safetensors",), "v2")
    online = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    env = environment(plugins="refdelta", modules=("tests.live.no_hub",)) | online
    env.pop("HF_HUB_CACHE", None)
    with Host(env, tmp_path / "log") as host:
        arguments = {"download_dir": str(tmp_path / "weights"), "revision": "v2"}
        start(host, "org/tiny", **arguments)
        (status,) = host.call("rpc", method="refdelta_status")
        assert (status["digest"], status["unproven"]) == (state_digest(other), []), "live tests run what they prove"
        delta = write_delta(diff(other, {**other, "model.norm.weight": state["model.norm.weight"]}), tmp_path / "delta")
        assert host.call("sync", info={"target_weights_path": str(delta)}) is None


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
