"""vLLM's own loader, copied with one offset, shard id or name changed: the installed vLLM's text, run in its place.

`EDITS` says what is changed; `install` makes the copy and puts it into the classes of this process. Where the installed
vLLM's text is another one, nothing is guessed: `Moved` says which edit has to be written again.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

_LAYERS = "vllm.model_executor.layers"
_PARAMETER, _LINEAR = "vllm.model_executor.parameter", f"{_LAYERS}.linear"
_VOCABULARY, _QWEN2 = f"{_LAYERS}.vocab_parallel_embedding", "vllm.model_executor.models.qwen2"


class Moved(Exception):
    """The text to change is not in the installed vLLM, or is there more than once."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of vLLM's text."""

    name: str
    does: str
    """What goes wrong, in a line."""
    module: str
    place: str
    """``Class.method``, or ``Class.attribute`` of which the assignment is changed."""
    changes: tuple[tuple[str, str], ...]
    """(text, its replacement), each found once."""

    def source(self) -> tuple[str, str]:
        """vLLM's text, and the changed copy."""
        module = importlib.import_module(self.module)
        class_name, _, member = self.place.partition(".")
        owner = getattr(module, class_name)
        found = vars(owner)[member]
        text = inspect.getsource(found) if inspect.isfunction(found) else _assignment(owner, member)
        before = after = textwrap.dedent(text)
        marks = [f"\0{number}\0" for number in range(len(self.changes))]  # so that two texts can be exchanged
        for mark, (old, _) in zip(marks, self.changes, strict=True):
            if before.count(old) != 1:
                raise Moved(f"{self.name}: {old!r} stands {before.count(old)} times in {self.module}.{self.place}")
            after = after.replace(old, mark)
        for mark, (_, new) in zip(marks, self.changes, strict=True):
            after = after.replace(mark, new)
        return before, after


def _assignment(owner: type, name: str) -> str:
    """The text of ``name = ...`` in a class's body."""
    text = textwrap.dedent(inspect.getsource(owner))
    body = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.get_source_segment(text, node) or ""
    raise Moved(f"{owner.__name__} assigns no {name}")


def install(edit: Edit) -> None:
    """Run the changed copy instead of vLLM's own, in this process and those that it forks."""
    module = importlib.import_module(edit.module)
    class_name, _, member = edit.place.partition(".")
    owner = getattr(module, class_name)
    before = vars(owner)[member]
    local: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + edit.source()[1], f"<{edit.name}>", "exec")
    exec(code, vars(module), local)
    for known in list(sys.modules.values()):
        for cls in [value for value in vars(known).values() if inspect.isclass(value)]:
            if vars(cls).get(member) is before:
                setattr(cls, member, local[member])


def _edit(name: str, does: str, module: str, place: str, *changes: tuple[str, str]) -> Edit:
    return Edit(name, does, module, place, changes)


_K, _V = '"k": self.num_heads * self.head_size', '"v": (self.num_heads + self.num_kv_heads) * self.head_size'
_LOAD = "loader.load_weights(weights,"
_EXCHANGED = (
    'loader.load_weights(((n.replace("input_", "_in_").replace("post_attention_", "input_").replace("_in_", '
    '"post_attention_"), t) for n, t in weights),'
)

EDITS = (
    _edit(
        "q_of_the_first_rank",
        "every rank loads the first one's query heads",
        _PARAMETER,
        "_ColumnvLLMParameter.load_qkv_weight",
        ('self.tp_rank if shard_id == "q"', '0 if shard_id == "q"'),
    ),
    _edit(
        "kv_of_the_first_rank",
        "every rank loads the first one's key and value heads",
        _PARAMETER,
        "_ColumnvLLMParameter.load_qkv_weight",
        ("self.tp_rank // num_heads", "0 // num_heads"),
    ),
    _edit(
        "merged_of_the_first_rank",
        "every rank loads the first one's rows of gate and up",
        _PARAMETER,
        "_ColumnvLLMParameter.load_merged_column_weight",
        ("self.tp_rank * shard_size", "0 * shard_size"),
    ),
    _edit(
        "columns_of_the_other_rank",
        "ranks exchange their columns of o and down",
        _PARAMETER,
        "RowvLLMParameter.load_row_parallel_weight",
        ("self.tp_rank * shard_size", "(self.tp_rank ^ 1) * shard_size"),
    ),
    _edit(
        "q_one_head_on",
        "q begins one head late, over the first of k",
        _LINEAR,
        "QKVParallelLinear._get_shard_offset_mapping",
        ('"q": 0', '"q": self.head_size'),
    ),
    _edit(
        "k_over_v",
        "k is loaded where v belongs, then v over it",
        _LINEAR,
        "QKVParallelLinear._get_shard_offset_mapping",
        (_K, '"k": (self.num_heads + self.num_kv_heads) * self.head_size'),
    ),
    _edit(
        "k_and_v_offsets_exchanged",
        "k and v stand in each other's place",
        _LINEAR,
        "QKVParallelLinear._get_shard_offset_mapping",
        (_K, '"k": (self.num_heads + self.num_kv_heads) * self.head_size'),
        (_V, '"v": self.num_heads * self.head_size'),
    ),
    _edit(
        "gate_and_up_offsets_exchanged",
        "gate and up stand in each other's half",
        _LINEAR,
        "MergedColumnParallelLinear.weight_loader_v2",
        ("sum(self.output_sizes[:loaded_shard_id])", "sum(self.output_sizes[loaded_shard_id + 1 :])"),
    ),
    _edit(
        "vocabulary_one_row_back",
        "from the second rank on, the vocabulary begins one row early",
        _VOCABULARY,
        "VocabParallelEmbedding.weight_loader",
        (
            "start_idx = self.shard_indices.org_vocab_start_index",
            "start_idx = max(0, self.shard_indices.org_vocab_start_index - 1)",
        ),
    ),
    _edit(
        "first_row_left_out",
        "the first row of a rank's vocabulary is not loaded",
        _VOCABULARY,
        "VocabParallelEmbedding.weight_loader",
        (
            "param[: loaded_weight.shape[0]].data.copy_(loaded_weight)",
            "param[1 : loaded_weight.shape[0]].data.copy_(loaded_weight[1:])",
        ),
    ),
    _edit(
        "padding_of_ones",
        "the padded rows of the vocabulary are ones",
        _VOCABULARY,
        "VocabParallelEmbedding.weight_loader",
        (".data.fill_(0)", ".data.fill_(1)"),
    ),
    _edit(
        "k_and_v_ids_exchanged",
        "the stacked mapping calls k v, and v k",
        _QWEN2,
        "Qwen2Model.hf_to_vllm_mapper",
        ('(".qkv_proj", "k")', '(".qkv_proj", "v")'),
        ('(".qkv_proj", "v")', '(".qkv_proj", "k")'),
    ),
    _edit(
        "gate_and_up_ids_exchanged",
        "the stacked mapping gives gate the number of up, and the reverse",
        _QWEN2,
        "Qwen2Model.hf_to_vllm_mapper",
        ('(".gate_up_proj", 0)', '(".gate_up_proj", 1)'),
        ('(".gate_up_proj", 1)', '(".gate_up_proj", 0)'),
    ),
    _edit(
        "norms_exchanged",
        "input and post-attention norms go by each other's name",
        _QWEN2,
        "Qwen2Model.load_weights",
        (_LOAD, _EXCHANGED),
    ),
    _edit(
        "k_norm_dropped",
        "one layer's k_norm is not loaded, for anybody",
        _QWEN2,
        "Qwen2Model.load_weights",
        (_LOAD, 'loader.load_weights(((n, t) for n, t in weights if "1.self_attn.k_norm" not in n),'),
    ),
)
"""Every change; each makes one copy."""
BY_NAME = {edit.name: edit for edit in EDITS}
