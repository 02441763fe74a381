"""The table between names in a file and parameters, and the plan that a table makes for one checkpoint.

A family is a list of rules. A plan holds only if it is a bijection: every parameter has one rule and one source, every
tensor of the file is consumed once or skipped for a written reason, and all shapes agree. Whatever is wrong is reported
together, and no tensor is read before the plan is clean.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from checkpoints import fp8
from checkpoints.errors import raise_if
from checkpoints.reader import Reader
from checkpoints.safetensors_file import Entry
from checkpoints.transforms import IDENTITY, Shape, Transform

PREFIXES = ("model.", "language_model.")
"""Left out of names in this order, so that text and multimodal files of a network read alike."""

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
MTP_REASON = "MTP layer: its index is not below num_hidden_layers"


@dataclass(frozen=True)
class Rule:
    """File tensors <-> one parameter, or one per expert.

    ``{i}`` stands for a layer in names and path, ``{e}`` for an expert. In the path alone: the tensors have a leading
    axis E and parameter e takes their e-th slices. In the names alone: every expert has tensors of its own and the
    parameter stacks them. Names may be found with or without a ``model.`` or ``model.language_model.`` prefix.
    """

    names: tuple[str, ...]
    path: str
    transform: Transform = IDENTITY
    expert: bool = False
    raw: bool = False
    """FP8 tensors are taken as they are, without their scales."""

    @cached_property
    def path_pattern(self) -> re.Pattern:
        """Matches a parameter's path; groups ``i`` and ``e`` are its layer and expert."""
        return _pattern(self.path)

    @property
    def sliced(self) -> bool:
        """Does every expert's parameter take a slice of the tensors?"""
        return "{e}" in self.path and "{e}" not in self.names[0]

    @property
    def stacked(self) -> bool:
        """Does the parameter stack tensors of single experts?"""
        return "{e}" in self.names[0] and "{e}" not in self.path

    def names_at(self, layer: str | None, expert: int | None = None) -> tuple[str, ...]:
        """The names of the tensors in a layer, of one expert."""
        places = {"{i}": layer, "{e}": expert}
        names = self.names
        for token, value in places.items():
            names = tuple(name if value is None else name.replace(token, str(value)) for name in names)
        return names


@dataclass(frozen=True)
class Skip:
    """Tensors that are left out on purpose: a name pattern with ``{i}`` or ``*``, and why."""

    pattern: str
    reason: str

    def matches(self, name: str) -> bool:
        """Is this tensor left out? ``name`` has no ``model.`` prefix."""
        return bool(_pattern(self.pattern).fullmatch(name))


@dataclass(frozen=True)
class Assignment:
    """One rule applied: file tensors ``names`` -> parameter ``paths`` (one, or one per slice), all of ``shape``. For a
    stacked parameter the names of expert 0 come first, then those of expert 1."""

    rule: Rule
    names: tuple[str, ...]
    paths: tuple[str, ...]
    shape: Shape

    @property
    def file_shapes(self) -> tuple[Shape, ...]:
        """The shape that each tensor must have in the file."""
        if self.rule.stacked:
            return self.rule.transform.file_shapes(self.shape[1:]) * self.shape[0]
        shapes = self.rule.transform.file_shapes(self.shape)
        return tuple((len(self.paths), *shape) for shape in shapes) if self.rule.sliced else shapes

    def by_expert(self, tensors: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """What a stacked parameter is made of: the tensors of each expert."""
        count = len(tensors) // self.shape[0]
        return [tensors[at : at + count] for at in range(0, len(tensors), count)]


@dataclass(frozen=True)
class Plan:
    """What to read for which parameter, in the order of the file, and what is left out for which reason."""

    assignments: tuple[Assignment, ...]
    skipped: dict[str, str] = field(default_factory=dict)


def _pattern(text: str) -> re.Pattern:
    escaped = re.escape(text)
    for token, group in (("{i}", r"(?P<i>\d+)"), ("{e}", r"(?P<e>\d+)"), ("*", ".*")):
        escaped = escaped.replace(re.escape(token), group)
    return re.compile(escaped)


def path_of(key_path: Sequence[Any]) -> str:
    """A parameter's place in its tree, e.g. ``moe_0/experts/3/gate_up``."""
    return "/".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in key_path)


def flatten(params: Any) -> tuple[dict[str, Any], Any]:
    """``(path -> leaf, treedef)``."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    return {path_of(key_path): leaf for key_path, leaf in leaves}, treedef


def assign(rules: Sequence[Rule | Skip], shapes: dict[str, Shape]) -> tuple[list[Assignment], list[str]]:
    """Give every parameter its rule: assignments by the rules' own names, and what is wrong with the table."""
    groups: dict[tuple[int, str | None, int | None], list[tuple[int, str]]] = defaultdict(list)
    problems = []
    table = [rule for rule in rules if isinstance(rule, Rule)]
    for path in shapes:
        found = [(index, match) for index, rule in enumerate(table) if (match := rule.path_pattern.fullmatch(path))]
        if len(found) != 1:
            said = " and ".join(repr(table[index].names[0]) for index, _ in found)
            twice = f"is assigned twice, by {said}; a rule is doubled"
            problems.append(f"parameter {path} {twice if found else 'has no rule'}")
            continue
        index, match = found[0]
        places = match.groupdict()
        expert = int(places.get("e") or 0)
        own = expert if "e" in places and not table[index].sliced else None
        groups[index, places.get("i"), own].append((expert, path))
    assignments = []
    for (index, layer, expert), members in groups.items():
        paths, rule = tuple(path for _, path in sorted(members)), table[index]
        shape = tuple(shapes[paths[0]])
        experts = range(shape[0]) if rule.stacked else (expert,)
        names = tuple(name for each in experts for name in rule.names_at(layer, each))
        assignments.append(Assignment(rule, names, paths, shape))
    claims: dict[str, list[str]] = defaultdict(list)
    for assignment in assignments:
        for name in assignment.names:
            claims[name].append(assignment.paths[0])
    doubled = {name: " and ".join(paths) for name, paths in claims.items() if len(paths) > 1}
    return assignments, problems + [f"tensor {name!r} is used twice, for {paths}" for name, paths in doubled.items()]


def plan(
    reader: Reader,
    rules: Sequence[Rule | Skip],
    abstract_params: Any,
    *,
    layers: int | None = None,
    tied: bool = False,
    head: str = "lm_head.weight",
    embed: str = "model.embed_tokens.weight",
) -> Plan:
    """Match a checkpoint with a table and a tree of parameters. Reads no tensor.

    Args:
        layers: ``num_hidden_layers``; tensors of layers from this index on are skipped, under any prefix. None: there
            are no such layers, and one is an error.
        tied: ``tie_word_embeddings``; a ``head`` that is stored all the same is skipped if it is shaped like ``embed``.

    Raises:
        CheckpointError: with every missing, unexpected, misshapen or doubly used tensor or parameter.
    """
    shapes = {path: leaf.shape for path, leaf in flatten(abstract_params)[0].items()}
    assignments, problems = assign(rules, shapes)
    found, clashes = _by_canonical_name(reader.entries)
    problems += clashes
    named, used = [], set()
    for assignment in (_with_scales(assignment, found) for assignment in assignments):
        entries = [found.get(_canonical(name)) for name in assignment.names]
        problems += _check_sources(assignment, entries, tied_hint=head)
        if all(entries):
            names = tuple(entry.name for entry in entries)
            used.update(names)
            named.append(Assignment(assignment.rule, names, assignment.paths, assignment.shape))
    skipped, unexpected = _skip(reader, rules, used, layers, _tied_reason(found, head, embed) if tied else {})
    raise_if(reader.folder, problems + unexpected)
    place = {name: (str(entry.file), entry.start) for name, entry in reader.entries.items()}
    return Plan(tuple(sorted(named, key=lambda a: place[a.names[0]])), skipped)


def _with_scales(assignment: Assignment, found: dict[str, Entry]) -> Assignment:
    """The assignment with the scales of its FP8 tensors among its tensors, or as it is if it has none."""
    if assignment.rule.raw:
        return assignment
    scales = {name: fp8.scale_of(_canonical(name), found) for name in assignment.names}
    if not any(scales.values()):
        return assignment
    names = tuple(part for name, scale in scales.items() for part in (name, scale) if part)
    each = tuple(scales.values())[: len(assignment.rule.names)]
    rule = replace(assignment.rule, transform=fp8.scaled(assignment.rule.transform, each))
    return replace(assignment, rule=rule, names=names)


def _canonical(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _by_canonical_name(entries: dict[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
    """Entries by their name without prefix, and those that two names of the file agree on."""
    found: dict[str, Entry] = {}
    problems = []
    for name, entry in entries.items():
        other = found.setdefault(_canonical(name), entry)
        if other is not entry:
            problems.append(f"tensors {other.name!r} and {name!r} are the same parameter; keep one")
    return found, problems


def _check_sources(assignment: Assignment, entries: list[Entry | None], tied_hint: str) -> list[str]:
    """Are all tensors of an assignment there, in a dtype its transform reads, in the shape it needs?"""
    problems = []
    for name, entry, shape in zip(assignment.names, entries, assignment.file_shapes, strict=True):
        wanted = f"{name!r} (parameter {assignment.paths[0]}, {list(shape)})"
        codes = assignment.rule.transform.codes
        if entry is None:
            hint = "; tie_word_embeddings is false: set it if the head is the embedding" if name == tied_hint else ""
            problems.append(f"tensor {wanted} is missing{hint}")
        elif entry.shape != shape:
            problems.append(f"tensor {wanted} has shape {list(entry.shape)} in {entry.file.name}")
        elif entry.code not in codes:
            known = ", ".join(codes)
            problems.append(f"tensor {wanted} is stored as {entry.code} in {entry.file.name}; can read {known}")
    return problems


def _tied_reason(found: dict[str, Entry], head: str, embed: str) -> dict[str, str]:
    """Reason to leave out a stored head, by its name in the file, when it is shaped like the embedding."""
    entries = [found.get(_canonical(name)) for name in (head, embed)]
    if not all(entries) or entries[0].shape != entries[1].shape:
        return {}
    return {entries[0].name: f"tie_word_embeddings: the head is {embed}"}


def _skip(
    reader: Reader, rules: Sequence[Rule | Skip], used: set[str], layers: int | None, reasons: dict[str, str]
) -> tuple[dict[str, str], list[str]]:
    """``(name -> reason, problems)`` for the tensors that no parameter uses."""
    skips = [rule for rule in rules if isinstance(rule, Skip)]
    skipped, problems = dict(reasons), []
    for name, entry in reader.entries.items():
        if name in used or name in skipped:
            continue
        layer = LAYER.search(name)
        if layer and layers is not None and int(layer[1]) >= layers:
            skipped[name] = MTP_REASON
        elif reason := next((skip.reason for skip in skips if skip.matches(_canonical(name))), None):
            skipped[name] = reason
        else:
            problems.append(f"tensor {name!r} {list(entry.shape)} in {entry.file.name} is unexpected: no rule uses it")
    return skipped, problems


def invert(rules: Sequence[Rule | Skip], params: Any, folder: Path | str) -> list[Assignment]:
    """The assignments of a tree of parameters, with the rules' own names: a plan read backwards, for export.

    Raises:
        CheckpointError: if the table is not a bijection on these parameters.
    """
    assignments, problems = assign(rules, {path: leaf.shape for path, leaf in flatten(params)[0].items()})
    raise_if(folder, problems)
    return assignments
