"""Tiny checkpoints that the suite makes itself, and new checkpoints with the same files and another state.

A *state* is a mapping of checkpoint tensor name to ``torch.Tensor``. Shapes and names come from transformers' own model
classes and ``save_pretrained``; every value comes from this module, because transformers' initialisation leaves many
tensors constant, and two constant tensors that were swapped look alike. Nothing here needs the network.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

State = dict[str, torch.Tensor]

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
BUFFERS = ".layer_scalar"
"""How the names of checkpoint tensors end that become buffers of the model."""
INDEX_FILE = "model.safetensors.index.json"
_HOME = Path("model.safetensors")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint directory and how vLLM is to serve it."""

    name: str
    """Row label in the matrix: one of `MODELS`, or the path or hub id that the user gave."""
    directory: Path
    """Local directory with ``config.json`` and the safetensors shards."""
    hf_overrides: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """vLLM's ``hf_overrides``."""

    @property
    def config(self) -> dict[str, Any]:
        """``config.json``, parsed."""
        parsed: dict[str, Any] = json.loads((self.directory / "config.json").read_text())
        return parsed

    @property
    def tied(self) -> bool:
        """Whether the config ties lm_head to the embedding."""
        text = self.config.get("text_config", {})
        return bool(self.config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, before vLLM pads them."""
        return int(self.config.get("text_config", self.config)["vocab_size"])


def load(directory: Path) -> State:
    """Read every tensor of every ``*.safetensors`` file of ``directory``, in name order."""
    state: State = {}
    for shard in sorted(directory.glob("*.safetensors")):
        state.update(load_file(shard))
    return dict(sorted(state.items()))


def save(state: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write ``state`` as one ``model.safetensors``; equal states give equal bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    _save_shard(state, directory / _HOME)


def with_state(base: Path, state: Mapping[str, torch.Tensor], out: Path) -> Path:
    """Make ``out``, a checkpoint like ``base`` (same shards, index, config) that holds ``state``; return ``out``.

    A tensor that ``base`` lacks (an lm_head added to a tied model) goes into the last shard.
    """
    shutil.copytree(base, out, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "*.pth", "*.gguf", ".git"))
    homes = {name: shard.name for shard in sorted(base.glob("*.safetensors")) for name in _names(shard)}
    last = max(homes.values())
    for shard in sorted(set(homes.values())):
        _save_shard({k: v for k, v in state.items() if homes.get(k, last) == shard}, out / shard)
    added = {name: last for name in state if name not in homes}
    if added and (out / INDEX_FILE).exists():
        index = json.loads((out / INDEX_FILE).read_text())
        index["weight_map"].update(added)
        (out / INDEX_FILE).write_text(json.dumps(index))
    return out


def content_digest(directory: Path) -> str:
    """SHA-256 over the names and bytes of the checkpoint's config and safetensors files, as hexadecimal digits."""
    total = hashlib.sha256()
    for path in sorted([directory / "config.json", *directory.glob("*.safetensors")]):
        with path.open("rb") as file:
            total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def clone(state: Mapping[str, torch.Tensor]) -> State:
    """A copy that shares no storage with ``state``."""
    return {name: tensor.clone() for name, tensor in state.items()}


def aliases(state: Mapping[str, torch.Tensor], *, tied: bool) -> tuple[str, str] | None:
    """The (embedding, lm_head) names when both are in the files, tied and equal in their bits; else None."""
    embedding = next((name for name in state if name.endswith(EMBEDDING)), None)
    if not tied or embedding is None or HEAD not in state:
        return None
    same = torch.equal(state[embedding].view(torch.int16), state[HEAD].view(torch.int16))
    return (embedding, HEAD) if same else None


def _names(shard: Path) -> list[str]:
    with safe_open(shard, framework="pt") as file:
        return list(file.keys())


def _save_shard(state: Mapping[str, torch.Tensor], path: Path) -> None:
    save_file({name: state[name].contiguous() for name in sorted(state)}, path, metadata={"format": "pt"})


# --- the models ------------------------------------------------------------------------------------------------------
#
# No dimension equals another one that it could be mistaken for, all divide by two, and the vocabularies are no multiple
# of 64, so that vLLM pads them. vLLM's CPU kernel for experts wants hidden sizes that 32 divides; it pads the experts'
# intermediate size to the next multiple, which 80 is not, whole or halved.


def _qwen3(*, tied: bool) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=203,
        hidden_size=80,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        dtype=torch.bfloat16,
    )
    return Qwen3ForCausalLM(config)


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=197,
        hidden_size=96,
        intermediate_size=112,
        moe_intermediate_size=80,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        dtype=torch.bfloat16,
    )
    return Qwen3MoeForCausalLM(config)


def _gemma4_moe() -> Any:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        vocab_size=199,
        vocab_size_per_layer_input=199,
        hidden_size=96,
        hidden_size_per_layer_input=0,
        intermediate_size=104,
        enable_moe_block=True,
        moe_intermediate_size=80,
        num_experts=6,
        top_k_experts=2,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=4,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        head_dim=32,
        global_head_dim=64,
        sliding_window=8,
        max_position_embeddings=256,
        final_logit_softcapping=30.0,
        dtype=torch.bfloat16,
    )
    return Gemma4ForCausalLM(config)


def _gemma4_text_config() -> Any:
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        vocab_size=211,
        vocab_size_per_layer_input=211,
        hidden_size=72,
        hidden_size_per_layer_input=16,
        intermediate_size=104,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        global_head_dim=64,
        sliding_window=8,
        max_position_embeddings=256,
        final_logit_softcapping=30.0,
        dtype=torch.bfloat16,
    )


def _gemma4_text() -> Any:
    from transformers import Gemma4ForCausalLM

    return Gemma4ForCausalLM(_gemma4_text_config())


def _gemma4_multimodal() -> Any:
    from transformers import Gemma4AudioConfig, Gemma4Config, Gemma4ForConditionalGeneration, Gemma4VisionConfig

    vision = Gemma4VisionConfig(
        hidden_size=48,
        intermediate_size=56,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=16,
        position_embedding_size=40,
        patch_size=4,
    )
    audio = Gemma4AudioConfig(
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        subsampling_conv_channels=[8, 4],
        output_proj_dims=40,
    )
    config = Gemma4Config(
        text_config=_gemma4_text_config(), vision_config=vision, audio_config=audio, dtype=torch.bfloat16
    )
    return Gemma4ForConditionalGeneration(config)


def _shared_kv(state: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Size]]:
    """The k_proj, v_proj and k_norm that Google's files hold for KV-shared layers and transformers does not save."""
    for shared, like in ((4, 3), (5, 2)):
        for part in ("k_proj", "v_proj", "k_norm"):
            name = f"model.layers.{{}}.self_attn.{part}.weight"
            yield name.format(shared), state[name.format(like)]


_BUILDERS: Mapping[str, Callable[[], Any]] = {
    "qwen3-tied": lambda: _qwen3(tied=True),
    "qwen3-untied": lambda: _qwen3(tied=False),
    "qwen3-tied-both": lambda: _qwen3(tied=True),
    "gemma4-text": _gemma4_text,
    "gemma4-multimodal": _gemma4_multimodal,
    "qwen3-moe": _qwen3_moe,
    "gemma4-moe": _gemma4_moe,
}
MODELS = tuple(_BUILDERS)
_OVERRIDES: Mapping[str, Mapping[str, object]] = {"gemma4-multimodal": {"architectures": ["Gemma4ForCausalLM"]}}


def make(model: str, directory: Path) -> Checkpoint:
    """Write the suite's checkpoint ``model`` (one of `MODELS`) to ``directory``, the same bytes every time."""
    with tempfile.TemporaryDirectory() as scratch:
        _BUILDERS[model]().to(torch.bfloat16).save_pretrained(scratch)
        shapes = {name: tensor.shape for name, tensor in load(Path(scratch)).items()}
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(scratch) / "config.json", directory / "config.json")
    if model == "gemma4-text":
        shapes.update(_shared_kv(shapes))
    state = {name: random_tensor(name, shape) for name, shape in shapes.items()}
    if model == "qwen3-tied-both":
        state[HEAD] = state[f"model.{EMBEDDING}"].clone()
    save(state, directory)
    return Checkpoint(model, directory, _OVERRIDES.get(model, MappingProxyType({})))


class NoCheckpoint(ValueError):
    """What the user gave is no checkpoint; the text is one sentence that says why."""


def given(path_or_id: str) -> Checkpoint:
    """The checkpoint of the user: a directory as it is, else a hub id in the local cache. Raises `NoCheckpoint`.

    Nothing is fetched: a run that judges an engine is no place to find out that a download is slow.
    """
    directory = Path(path_or_id).resolve() if Path(path_or_id).is_dir() else _cached(path_or_id)
    missing = [name for name in _files_of(directory) if not (directory / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise NoCheckpoint(f"{path_or_id}: not a whole checkpoint, {directory} has no {missing[0]}{more}")
    return Checkpoint(path_or_id, directory)


def _cached(hub_id: str) -> Path:
    """The snapshot of a hub id in the local cache."""
    if not _HUB_ID.fullmatch(hub_id):
        raise NoCheckpoint(f"{hub_id}: no such directory")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, local_files_only=True))
    except Exception as error:  # the hub client raises many kinds; each means that there is no snapshot
        missing = "no such directory, and no such hub id in the local cache"
        raise NoCheckpoint(f"{hub_id}: {missing} (to fetch it: hf download {hub_id})") from error


def _files_of(directory: Path) -> list[str]:
    """What a checkpoint directory must hold: its config and every shard."""
    index = directory / INDEX_FILE
    try:
        shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values()) if index.is_file() else set()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise NoCheckpoint(f"{index}: not an index of safetensors shards ({type(error).__name__})") from error
    found = sorted(map(str, shards)) or sorted(path.name for path in directory.glob("*.safetensors"))
    return ["config.json", *(found or [str(_HOME)])]


def random_tensor(name: str, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """A bf16 tensor whose values depend on ``name`` only: vectors near 1, matrices N(0, 1 / fan in)."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))
    noise = torch.randn(tuple(shape), generator=generator)
    if len(shape) < 2:
        return (1 + 0.15 * noise).to(torch.bfloat16)
    scale = 0.1 if "embed_tokens" in name else 1 / math.sqrt(shape[-1])
    return (scale * noise).to(torch.bfloat16)
