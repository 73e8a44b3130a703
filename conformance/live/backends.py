"""The backend that a live run is about: refdelta's own, or somebody else's by `--backend NAME --plugin MODULE`.

A plugin module states what its backend offers as a literal, which is read and not imported (it imports vLLM)::

    CAPABILITIES = {"rollback", "sharding"}

`--capabilities A,B` says it instead. With `fail_at` among them it states, likewise as a literal, the function that the
suite calls in every worker so that a write fails: ``FAIL_AT = "module:function"`` (`conformance.live.failing`).
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from ..driving.options import Options
from ..engines import capabilities
from ..engines.capabilities import LIVE
from ..engines.codecs import BadEngine
from . import probe
from .row import Backend
from .runner import environment

GROUP = "vllm.general_plugins"


def declared(options: Options, directory: Path) -> frozenset[str]:
    """What the backend of these options offers. Raises BadEngine.

    directory: searched last for the plugin, as the current directory is by `python -m`.
    """
    if options.plugin is None:
        names = frozenset(capabilities.of_kind(LIVE)) if options.capabilities is None else options.capabilities
        return capabilities.checked(names, LIVE, "--capabilities")
    source = _source(options.plugin, directory)
    label = f"Plugin {options.plugin!r}"
    if options.capabilities is not None:
        return capabilities.checked(options.capabilities, LIVE, "--capabilities")
    return capabilities.checked(_stated(source, label), LIVE, label)


def check_import(options: Options, directory: Path) -> None:
    """Import the plugin once, in a process like those of its engine. Raises BadEngine where that fails.

    An engine would say so only after the suite has made checkpoints and started fresh engines.
    """
    if options.plugin is None:
        return
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL, options.plugin],
            cwd=directory,
            env=environment(plugins=""),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BadEngine(f"Plugin {options.plugin!r} is not imported within {_TRIAL_S:g} s.") from error
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit {done.returncode}"]
        raise BadEngine(f"Plugin {options.plugin!r} cannot be imported: {said[-1]}")


_TRIAL = """
import importlib, sys
module, _, function = sys.argv[1].partition(":")
found = importlib.import_module(module)
if function:
    getattr(found, function)
"""
"""What `probe.load` does, but for the call of the function, which changes the process that it is made in."""
_TRIAL_S = 300.0


def backend_of(options: Options, offered: frozenset[str]) -> Backend:
    """The backend under test: somebody else's, or refdelta's with the fault of ``--mutant MODULE:FUNCTION``.

    A fault is carried by this process (which encodes) and by every worker.
    """
    if options.backend is not None and options.plugin is not None:
        plugins = ",".join(plugins_of(options.plugin))
        modules = (options.plugin,)
        hook = _hook(options.plugin) if "fail_at" in offered else ""
        how = (options.init_info, options.update_info)
        return Backend(options.backend, plugins, modules, False, *how, offered, hook)
    if options.mutant is None:
        return Backend(capabilities=offered)
    probe.load(options.mutant)
    return Backend(modules=(options.mutant,), capabilities=offered)


def plugins_of(plugin: str) -> tuple[str, ...]:
    """The names of vLLM's plugins (entry points) that this module registers; () for a module that registers none."""
    module = plugin.partition(":")[0]
    found = metadata.entry_points(group=GROUP)
    return tuple(sorted({point.name for point in found if point.module == module}))


def _source(plugin: str, directory: Path) -> Path:
    """The file of the plugin's module; its parent packages are imported, itself not."""
    module = plugin.partition(":")[0]
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise BadEngine(f"Plugin {plugin!r}: cannot import {module}: {error}.") from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise BadEngine(f"Plugin {plugin!r}: there is no module {module}.")
    return Path(spec.origin)


def _stated(source: Path, label: str) -> frozenset[str]:
    """The literal that a module assigns to CAPABILITIES."""
    try:
        module = ast.parse(source.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise BadEngine(f"{label} cannot be imported: {source}{line}: {error.args[0]}.") from error
    for value in _assigned(module, "CAPABILITIES"):
        if isinstance(value, ast.Call) and ast.unparse(value.func) in ("set", "frozenset") and len(value.args) < 2:
            value = value.args[0] if value.args else ast.Set([])
        try:
            return frozenset(map(str, ast.literal_eval(value)))
        except (ValueError, TypeError) as error:
            raise BadEngine(f"{label}: CAPABILITIES is to be a literal set of names, as it is read only.") from error
    raise BadEngine(f"{label} assigns no CAPABILITIES; an empty set will do, or --capabilities.")


def _hook(plugin: str) -> str:
    """The literal that a module assigns to FAIL_AT, which goes with the capability `fail_at`."""
    for value in _assigned(ast.parse(_source(plugin, Path.cwd()).read_text(encoding="utf-8")), "FAIL_AT"):
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
    raise BadEngine(f"Plugin {plugin!r} declares fail_at and assigns no FAIL_AT, the place `module:function` of it.")


def _assigned(module: ast.Module, name: str) -> Iterator[ast.expr]:
    for node in module.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(ast.unparse(target) == name for target in targets):
            yield node.value
