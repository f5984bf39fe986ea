"""The house rules of docs/architecture.md, read from that page and checked on the source with `ast`.

`read_table` turns the page's layer table into a `Table`; `check` returns one line per violation, so an empty list
means the tree keeps every rule. Nothing of the checked tree is imported. The rules are controlled in test_layers.py:
for each of them a small tree that breaks it must be reported.

Modules are named by their path under the package, without `.py`: `restore/load`, `agent/__init__`, and `__init__`
for the package itself (the public names; the table may also call it `stepwell`).
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HEADER = ["package", "may import from stepwell", "third party"]
THREADS_LINE = "Threads and processes:"
MOST_LINES = 400
THREAD_MODULES = {"_thread", "concurrent", "multiprocessing", "subprocess", "threading"}
PROCESS_CALLS = re.compile(r"os\.(fork|forkpty|popen|posix_spawnp?|spawn\w+|system)")
CODE_CARRIERS = {"_pickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}

AT_IMPORT, IN_CALL, FOR_TYPES = "at import", "in a function", "under TYPE_CHECKING"


class TableError(ValueError):
    """docs/architecture.md does not have the form that can be checked."""


@dataclass(frozen=True)
class Permit:
    """One entry of a cell: `torch`, `numpy?` (lazily only), `torch@restore/load` (in that module only)."""

    name: str
    lazy_only: bool = False
    only_in: str | None = None

    def covers(self, target: str, importer: str, is_lazy: bool) -> bool:
        return (
            within(target, self.name)
            and (is_lazy or not self.lazy_only)
            and (self.only_in is None or within(importer, self.only_in))
        )


@dataclass(frozen=True)
class Row:
    own: tuple[Permit, ...]
    third_party: tuple[Permit, ...]


@dataclass(frozen=True)
class Table:
    rows: dict[str, Row]
    threads: frozenset[str]


@dataclass(frozen=True)
class Module:
    path: str
    dotted: str
    text: str
    tree: ast.Module


@dataclass(frozen=True)
class Import:
    """`target` is a dotted name; `names` what a from-import takes out of it; `when` the import happens."""

    target: str
    names: tuple[str, ...]
    line: int
    when: str


# The table


def read_table(page: str) -> Table:
    """Parse the layer table and the `Threads and processes:` paragraph; prose in a cell is an error, not ignored."""
    lines = page.splitlines()
    header = next((i for i, line in enumerate(lines) if [c.lower() for c in cells(line)] == HEADER), None)
    if header is None:
        raise TableError(f"no table with the columns | {' | '.join(HEADER)} |")
    rows: dict[str, Row] = {}
    for line in lines[header + 2 :]:
        if not line.lstrip().startswith("|"):
            break
        if len(cells(line)) != len(HEADER):
            raise TableError(f"expected {len(HEADER)} cells: {line}")
        packages, own, third_party = cells(line)
        row = Row(own=permits(own), third_party=permits(third_party))
        for package in names_in(packages.split("(")[0]):
            if package in rows:
                raise TableError(f"`{package}` has two rows")
            rows[package] = row
    named = {permit.name.split("/")[0] for row in rows.values() for permit in row.own}
    if unknown := sorted(named - {package.split("/")[0] for package in rows}):
        raise TableError(f"the table permits packages that have no row: {', '.join(unknown)}")
    return Table(rows=rows, threads=threads_in(lines))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def names_in(text: str) -> list[str]:
    return [module_path(name) for name in re.findall(r"`([^`]+)`", text)]


def module_path(name: str) -> str:
    """`stepwell.agent.process`, `agent/process.py` and `agent/process` name the same module."""
    path = name.removesuffix(".py").replace(".", "/")
    return "__init__" if path == "stepwell" else path.removeprefix("stepwell/")


def permits(cell: str) -> tuple[Permit, ...]:
    if cell.strip("`") == "none":
        return ()
    if left := re.sub(r"`[^`]+`|[,\s]", "", cell):
        raise TableError(f"a cell holds backticked names or none, found {left!r} in: {cell}")
    return tuple(permit(entry) for entry in re.findall(r"`([^`]+)`", cell))


def permit(entry: str) -> Permit:
    form = re.fullmatch(r"([\w./]+)(\?)?(?:@([\w./]+))?(\?)?", entry)
    if form is None:
        raise TableError(f"`{entry}` is not of the form name, name?, name@module or name?@module")
    name, lazy, only_in, lazy_too = form.groups()
    return Permit(module_path(name), bool(lazy or lazy_too), module_path(only_in) if only_in else None)


def threads_in(lines: list[str]) -> frozenset[str]:
    for i, line in enumerate(lines):
        if line.lstrip("-*# ").startswith(THREADS_LINE):
            paragraph = [line]
            for more in lines[i + 1 :]:
                if not more.strip() or more.lstrip().startswith(("#", "|", "- ")):
                    break
                paragraph.append(more)
            return frozenset(names_in(" ".join(paragraph)))
    raise TableError(f"no line starts with {THREADS_LINE!r}")


# The source


def read_modules(src_root: Path) -> list[Module]:
    modules = []
    for file in sorted(src_root.rglob("*.py")):
        path = file.relative_to(src_root).with_suffix("").as_posix()
        dotted = f"stepwell.{path.replace('/', '.')}".removesuffix(".__init__")
        text = file.read_text(encoding="utf-8")
        modules.append(Module(path, dotted, text, ast.parse(text, filename=str(file))))
    return modules


def imports_of(module: Module) -> Iterator[Import]:
    """Every import statement, and every `import_module`/`__import__` with a literal name."""

    def visit(node: ast.AST, when: str) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), node.lineno, when)
        elif isinstance(node, ast.ImportFrom):
            yield Import(origin(module, node), tuple(alias.name for alias in node.names), node.lineno, when)
        elif isinstance(node, ast.Call) and (name := dynamic_import(node)):
            yield Import(name, (), node.lineno, when)
        for child, when_child in children(node, when):
            yield from visit(child, when_child)

    return visit(module.tree, AT_IMPORT)


def children(node: ast.AST, when: str) -> Iterator[tuple[ast.AST, str]]:
    for name, value in ast.iter_fields(node):
        inner = when
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and name == "body":
            inner = IN_CALL if when == AT_IMPORT else when
        elif isinstance(node, ast.If) and name == "body" and dotted_name(node.test).endswith("TYPE_CHECKING"):
            inner = FOR_TYPES
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child, inner


def origin(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.dotted.split(".")
    keep = len(parts) - node.level + (1 if module.path.endswith("__init__") else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def dynamic_import(call: ast.Call) -> str | None:
    is_import = dotted_name(call.func).split(".")[-1] in {"import_module", "__import__"}
    first = call.args[0] if is_import and call.args else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def dotted_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def within(path: str, place: str) -> bool:
    """Whether a module path is the place itself or lies in that package."""
    return path == place or path.startswith(f"{place}/")


def place_of(module: str, rows: dict[str, Row]) -> str | None:
    """The package or module of the table that a module belongs to: the most specific one."""
    return max((place for place in rows if within(module, place)), key=len, default=None)


def own_targets(imported: Import, modules: dict[str, Module]) -> list[str]:
    """The dotted modules of the tree that one import statement names; a name that is no module means its package."""
    found = []
    for name in imported.names or ("",):
        candidate = f"{imported.target}.{name}" if name else imported.target
        found.append(candidate if candidate in modules else imported.target)
    return list(dict.fromkeys(found))


# The rules


def check(src_root: Path, table: Table) -> list[str]:
    """All violations in the package directory `src_root`, as `path.py:line: what`; empty when the rules hold."""
    modules = {module.dotted: module for module in read_modules(src_root)}
    if not modules:
        return [f"{src_root}: no modules found"]
    found = []
    for module in modules.values():
        for rule in (shape, carriers, torch_files):
            found += rule(module)
        found += layers(module, modules, table)
        found += threads(module, table)
    found += stale_threads(modules.values(), table)
    found += cycles(modules)
    return found


def shape(module: Module) -> list[str]:
    """A docstring, at most 400 lines, ASCII."""
    found = []
    if not ast.get_docstring(module.tree):
        found.append(f"{module.path}.py:1: no module docstring")
    lines = module.text.splitlines()
    if len(lines) > MOST_LINES:
        found.append(f"{module.path}.py: {len(lines)} lines, at most {MOST_LINES}: it has two ideas in it")
    found += [f"{module.path}.py:{n}: not ASCII" for n, line in enumerate(lines, 1) if not line.isascii()]
    return found


def layers(module: Module, modules: dict[str, Module], table: Table) -> list[str]:
    """Every import is permitted by the row of the module that makes it."""
    place = place_of(module.path, table.rows)
    if place is None:
        return [f"{module.path}.py:1: belongs to no row of the layer table"]
    row, found = table.rows[place], []
    for imported in imports_of(module):
        at = f"{module.path}.py:{imported.line}"
        top = imported.target.split(".")[0]
        is_lazy = imported.when != AT_IMPORT
        if top == "stepwell":
            for target in own_targets(imported, modules):
                if target not in modules:
                    found.append(f"{at}: imports {target}, which is not in the tree")
                    continue
                path = modules[target].path.removesuffix("/__init__")
                is_sibling = place_of(path, table.rows) == place
                if not is_sibling and not any(p.covers(path, module.path, is_lazy) for p in row.own):
                    found.append(f"{at}: imports {target} ({imported.when}), not permitted by its row")
        elif top not in sys.stdlib_module_names and not any(
            p.covers(top, module.path, is_lazy) for p in row.third_party
        ):
            found.append(f"{at}: imports third-party {top} ({imported.when}), not permitted by its row")
    return found


def uses_threads(module: Module) -> list[tuple[int, str]]:
    uses = [
        (imported.line, imported.target)
        for imported in imports_of(module)
        if imported.target.split(".")[0] in THREAD_MODULES and imported.when != FOR_TYPES
    ]
    for node, name in qualified_names(module):
        if PROCESS_CALLS.fullmatch(name):
            uses.append((node.lineno, name))
    return uses


def threads(module: Module, table: Table) -> list[str]:
    if module.path in table.threads:
        return []
    return [
        f"{module.path}.py:{line}: uses {name}, but is not listed under '{THREADS_LINE}'"
        for line, name in uses_threads(module)
    ]


def stale_threads(modules: Iterable[Module], table: Table) -> list[str]:
    """The list stays short: a module on it exists and needs to be on it."""
    users = {module.path for module in modules if uses_threads(module)}
    return [f"'{THREADS_LINE}' lists {path}, which starts none" for path in sorted(table.threads - users)]


def carriers(module: Module) -> list[str]:
    """No module that can run code from a file is imported, and numpy never unpickles."""
    found = [
        f"{module.path}.py:{imported.line}: imports {imported.target}, which can run code from a file"
        for imported in imports_of(module)
        if imported.target.split(".")[0] in CODE_CARRIERS
    ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append(f"{module.path}.py:{node.value.lineno}: allow_pickle is not False")
    return found


def torch_files(module: Module) -> list[str]:
    """`torch.load` nowhere, `torch.save` only in tools/interchange."""
    is_at_home = within(module.path, "tools/interchange")
    found = []
    for node, name in qualified_names(module):
        if name in {"torch.load", "torch.serialization.load"}:
            found.append(f"{module.path}.py:{node.lineno}: {name} unpickles")
        elif name in {"torch.save", "torch.serialization.save"} and not is_at_home:
            found.append(f"{module.path}.py:{node.lineno}: {name} belongs in tools/interchange")
    return found


def qualified_names(module: Module) -> Iterator[tuple[ast.Attribute | ast.ImportFrom, str]]:
    """Attribute chains with import aliases resolved (`t.save` is `torch.save`), and names taken by from-imports."""
    aliases: dict[str, str] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                aliases[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node, f"{node.module}.{alias.name}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and (name := dotted_name(node)):
            first, rest = name.split(".", 1)
            if first in aliases:
                yield node, f"{aliases[first]}.{rest}"


def cycles(modules: dict[str, Module]) -> list[str]:
    """No cycle of imports made at import time.

    Importing `a.b` also runs `a/__init__`, so that is an edge too, unless the importer lives in `a` itself: then `a`
    is already being imported, which Python allows.
    """
    graph: dict[str, set[str]] = {dotted: set() for dotted in modules}
    for dotted, module in modules.items():
        for imported in imports_of(module):
            if imported.when != AT_IMPORT or imported.target.split(".")[0] != "stepwell":
                continue
            for target in own_targets(imported, modules):
                graph[dotted].add(target)
                parts = target.split(".")
                parents = {".".join(parts[:n]) for n in range(1, len(parts))}
                graph[dotted] |= {p for p in parents if not f"{dotted}.".startswith(f"{p}.")}
        graph[dotted] = (graph[dotted] & modules.keys()) - {dotted}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [f"import cycle: {' <- '.join(error.args[1])}"]
    return []
