"""Layout rules broken on purpose, each in one way that a framework has got or could get wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from refdelta.layout.families import Ranks, lay_out, table_of
from refdelta.layout.families.common import COLUMNS, ROWS, Cut, Row
from refdelta.layout_map import LayoutMap
from tests.layout.models import SMALL, Config, Engine

Rows = Sequence[Row]


@dataclass(frozen=True, slots=True)
class Broken:
    """An engine and the wrong rules for it."""

    engine: Engine
    rows: Callable[[Rows], Rows] = lambda rows: rows
    config: Callable[[Config], Config] = lambda config: config

    def rules(self, rank: int) -> LayoutMap:
        """The wrong map of one rank."""
        table = table_of(self.config(self.engine.config))
        tp, dealt = self.engine.tp_size, self.engine.dealt
        ranks = Ranks(tp, rank, *((tp, rank) if dealt else (1, 0)))
        return lay_out(replace(table, rows=self.rows(table.rows)), ranks)


def _exchanged(first: str, second: str) -> Callable[[Rows], Rows]:
    """The place of one tensor taken by another, everywhere."""

    def change(rows: Rows) -> Rows:
        order = list(rows)
        for i, row in enumerate(rows):
            for j in range(i + 1, min(i + 3, len(rows))):
                if first in row.source and second in rows[j].source and rows[j].param == row.param:
                    order[i], order[j] = rows[j], row
        return order

    return change


def _cut(source: str, cut: Cut) -> Callable[[Rows], Rows]:
    return lambda rows: [replace(row, cut=cut) if source in row.source else row for row in rows]


def _columns_of_both(rows: Rows) -> Rows:
    return _cut("up_proj", COLUMNS)(_cut("gate_proj", COLUMNS)(rows))


@dataclass(frozen=True, slots=True)
class _Interleaved(Cut):
    """kv head ``rank % heads`` instead of the one that the rank's queries attend to."""

    def of(self, size: int, ranks: Ranks, tensor: str) -> tuple[int, int]:
        units = self.units or size
        head = ranks.tp_rank % units
        return head * size // units, (head + 1) * size // units


def _interleaved(rows: Rows) -> Rows:
    return [replace(row, cut=_Interleaved(0, row.cut.units)) if row.cut.replicated else row for row in rows]


def _shifted(rows: Rows) -> Rows:
    return [row if row.expert is None else replace(row, expert=(row.expert + 1) % row.experts) for row in rows]


def _halves(rows: Rows) -> Rows:
    return [row if row.half is None else replace(row, half=1 - row.half) for row in rows]


def _first_expert_late(rows: Rows) -> Rows:
    """One expert fewer than there are, so that runs begin elsewhere."""
    return [replace(row, experts=row.experts - 1) if row.experts else row for row in rows]


def _without(source: str) -> Callable[[Rows], Rows]:
    return lambda rows: [row for row in rows if source not in row.source]


def _entry(**entries: Any) -> Callable[[Config], Config]:
    return lambda config: {**config, **entries}


_GLOBAL = SMALL["gemma4"].config["global_head_dim"]

BROKEN = {
    "k before q": Broken(SMALL["qwen3"], _exchanged("q_proj.weight", "k_proj.weight")),
    "v before k": Broken(SMALL["qwen3"], _exchanged("k_proj.weight", "v_proj.weight")),
    "up before gate": Broken(SMALL["qwen3"], _exchanged("gate_proj", "up_proj")),
    "up before gate, experts": Broken(SMALL["qwen3-moe"], _exchanged("gate_proj", "up_proj")),
    "up before gate, one tensor": Broken(SMALL["gemma4-moe"], _halves),
    "rows of o": Broken(SMALL["qwen3"], _cut("o_proj.weight", ROWS)),
    "rows of down": Broken(SMALL["qwen3"], _cut("mlp.down_proj", ROWS)),
    "columns of gate and up": Broken(SMALL["qwen3"], _columns_of_both),
    "rows of experts' down": Broken(SMALL["qwen3-moe"], _cut("down_proj", ROWS)),
    "wrong kv replica": Broken(SMALL["qwen3 replicated"], _interleaved),
    "vocabulary not padded": Broken(SMALL["qwen3"], _cut("embed_tokens.weight", ROWS)),
    "second vocabulary not padded": Broken(SMALL["gemma4"], _cut("embed_tokens_per_layer", ROWS)),
    "global head_dim for sliding layers": Broken(SMALL["gemma4"], config=_entry(head_dim=_GLOBAL)),
    "sliding head_dim for global layers": Broken(SMALL["gemma4"], config=_entry(global_head_dim=8)),
    "k is not v": Broken(SMALL["gemma4-moe"], config=_entry(attention_k_eq_v=False)),
    "kv heads of sliding layers": Broken(SMALL["gemma4-moe"], config=_entry(num_global_key_value_heads=4)),
    "shared layers have k and v": Broken(SMALL["gemma4"], config=_entry(num_kv_shared_layers=0)),
    "shared layers not wide": Broken(SMALL["gemma4"], config=_entry(use_double_wide_mlp=False)),
    "experts off by one": Broken(SMALL["qwen3-moe"], _shifted),
    "dealt experts off by one": Broken(SMALL["qwen3-moe dealt"], _shifted),
    "dealt experts cut elsewhere": Broken(SMALL["gemma4-moe dealt"], _first_expert_late),
    "a norm cut": Broken(SMALL["qwen3"], _cut("input_layernorm", ROWS)),
    "a tensor forgotten": Broken(SMALL["gemma4"], _without("layer_scalar")),
}
