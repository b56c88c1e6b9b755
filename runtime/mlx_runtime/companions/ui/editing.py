"""Edits of the text of a conf.yaml, checked against the code of its project. A `Workbench` calls these functions.

What a form sends is hostile: a value is a literal of its field's type, and a class is one of those offered.
"""

import contextlib
import importlib
import inspect
import itertools
import json
import pkgutil
import re
import shlex
import tempfile
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from mlx_runtime.companions.ui.structure import describe
from mlx_runtime.config import composition
from mlx_runtime.config.binding.conf_file import SCHEMA, bind
from mlx_runtime.config.binding.merging import commented_map, quote_strings, remove_key, yaml_text
from mlx_runtime.config.binding.nodes import BASES, RESERVED
from mlx_runtime.config.constructors.signatures import (
    MISSING,
    alternatives,
    argument_texts,
    convert,
    groups,
    parameters,
    plain,
    schema_type,
    settings_of,
    takes_any_keyword,
    type_name,
)
from mlx_runtime.config.constructors.targets import object_at, targets_of
from mlx_runtime.config.interpolation import parse_config
from mlx_runtime.config.projects import AN_EXPERIMENT, CONF, main_class
from mlx_runtime.driver.arguments import Request
from mlx_runtime.errors import USER_ERRORS, ConfigError, MlxError, UsageError, short_message, suggest
from mlx_runtime.storage.documents import AMBIGUOUS

LIBRARIES = (
    *("torch.nn", "torch.optim", "torch.optim.lr_scheduler", "torchmetrics.classification", "torchmetrics.regression"),
    *("torchvision.models", "torchvision.ops", "timm"),
)
"""Modules whose classes and factory functions are offered, besides those of the project, if they are installed."""

REFERENCE = re.compile(r"\$\{[\w.\[\]]+\}")
"""A reference to another value. Resolvers such as `oc.env` are refused."""

ARGS = "_args_"

IMPORT = "hydra_zen.funcs.get_obj"
"""Target of a node that imports what its `path` names, which a form must not change."""

PARAMS = re.compile(r"optimizers\.\w+\.params")
"""Keys of values that come from the models."""

View = dict[str, Any]


def view(text: str, schema: str) -> View:
    """Return a conf.yaml as `mlx train bind` leaves it, and what can be edited in it.

    The keys are `text`, `schema` (of conf.schema.json; the argument is the one of the last bind), and `nodes`. It maps
    the key of each node, or place for one, to `target`, `annotation`, `blocks` (their keys; None if the class takes
    none), `open` (it takes arguments with any name) and `fields`, which maps names to `type`, `value`, `default`,
    `choices`, `required` and `help`. Values are texts as a form shows them.
    """
    experiment = main_class(AN_EXPERIMENT, Path.cwd())
    commented_map(text, CONF)
    with tempfile.TemporaryDirectory(prefix="mlx-draft-") as folder:
        path = Path(folder, CONF.name)
        path.write_text(text)
        path.with_name(SCHEMA).write_text(schema)
        bound = bind(experiment, path)
    tree, places = commented_map(bound.after, CONF), _places(experiment, bound.after)
    nodes = {key: _describe(key, hint, _at(tree, key), places) for key, hint in places.items()}
    return {"text": bound.after, "schema": bound.schema, "nodes": nodes}


def edit(text: str, schema: str, action: str, key: str, arguments: Sequence[Any]) -> View:
    """Change the node at a key, and return the new view. The actions, with their arguments:

    set        name of an argument, text typed into its field; an empty text restores the default
    replace    path of a class that `offered` lists
    add        path of a class that `offered` lists for blocks
    move       number of a block, and its new number
    remove     number of a block
    """
    tree, places = commented_map(text, CONF), _places(main_class(AN_EXPERIMENT, Path.cwd()), text)
    if key not in places:
        raise UsageError(f"there is no node {key!r} in {CONF}.{suggest(key, places)}")
    node = _at(tree, key)
    order = [*range(len(node.get(ARGS, [])))] if isinstance(node, dict) else []
    added = []
    match action, *arguments:
        case "set", name, typed if isinstance(node, dict):
            _set(node, key, name, typed)
        case "replace", path:
            _replace(tree, key, path, _chosen(path, _offers(places[key], node), key))
        case "add", path if isinstance(node, dict):
            hint = _block_hint(object_at(node["_target_"]))
            added = [_new_node(path, _chosen(path, _offers(hint, None), key))]
        case "move", int(index), int(to) if {index, to} <= {*order}:
            order.insert(to, order.pop(index))
        case "remove", int(index) if index in order:
            order.remove(index)
        case _:
            raise UsageError(f"{key} cannot {action} {', '.join(map(repr, arguments))}")
    edited = yaml_text(tree) if action in ("set", "replace") else _arranged(text, tree, node, order, added)
    return view(edited, schema)


def _arranged(text: str, tree: Any, node: Any, order: Sequence[int], added: Sequence[Any]) -> str:
    """Return the conf.yaml with the blocks of a node in another order, and further blocks.

    Lines are moved as they are, with the comments above them: ruamel would leave comments where they were.
    """
    blocks = node.get(ARGS)
    if not blocks or blocks.fa.flow_style():
        node[ARGS] = quote_strings([*(_plain(blocks[index]) for index in order), *added])
        return yaml_text(tree)
    if not order:
        remove_key(node, ARGS)  # keeps the comments below
        return yaml_text(tree)
    lines, column = text.splitlines(keepends=True), blocks.lc.item(0)[1] - 2
    starts = [blocks.lc.item(index)[0] for index in range(len(blocks))]
    beyond = re.compile(rf" {{0,{column - 1}}}\S| {{{column}}}[^\s#-]")
    end = next((number for number in range(starts[-1], len(lines)) if beyond.match(lines[number])), len(lines))
    for number, start in enumerate(starts):
        while lines[start - 1].lstrip().startswith("#"):
            start -= 1
        starts[number] = start
    chunks = [lines[start:stop] for start, stop in itertools.pairwise([*starts, end])]
    new = textwrap.indent(textwrap.dedent(yaml_text(added)), " " * column) if added else ""
    return "".join([*lines[: starts[0]], *(line for index in order for line in chunks[index]), new, *lines[end:]])


def offered(text: str, key: str) -> list[list[str]]:
    """Return the paths of the classes and functions that fit the node at a key, and of those that fit a block of it."""
    hint, node = _places(main_class(AN_EXPERIMENT, Path.cwd()), text)[key], _at(commented_map(text, CONF), key)
    blocks = _block_hint(object_at(node["_target_"])) if isinstance(node, dict) else None
    return [list(_offers(hint, node)), list(_offers(blocks, None))]


def variant(before: str, after: str) -> str:
    """Return a variant that changes one conf.yaml into another, "" if they do not differ."""
    changes = _changes(commented_map(before, CONF), commented_map(after, CONF))
    return yaml_text(changes) if changes else ""


def _changes(old: Any, new: Any) -> dict[str, Any]:
    changes = {}
    for name, value in new.items():
        was = old.get(name)
        if json.dumps(was, default=str) == json.dumps(value, default=str):
            continue
        mappings = isinstance(was, dict) and isinstance(value, dict) and was.get("_target_") == value.get("_target_")
        changes[name] = _changes(was, value) if mappings and was.keys() <= value.keys() else _plain(value)
    return changes


def _plain(value: Any) -> Any:
    """Return a value of ruamel without its comments."""
    return json.loads(json.dumps(value, default=str))


def _places(experiment: type, text: str) -> dict[str, Any]:
    """Return the annotation of each node of a conf.yaml, and of each argument that could be one, by its key."""
    found: dict[str, Any] = {}
    raw, tree = commented_map(text, CONF), parse_config(text, environment=False)

    def visit(value: Any, hint: Any, key: str) -> None:
        if not isinstance(value, dict):
            found.update({key: hint} if _takes_node(hint) else {})
        elif isinstance(_at(raw, key), dict):  # not a reference to another node
            found[key], target = hint, object_at(value["_target_"])
            hints = {name: item.annotation for name, item in _arguments(target).items()}
            hints |= {ARGS: list[_block_hint(target)]}  # type: ignore[misc]
            for name, item in value.items():
                here, wanted = f"{key}.{name}", hints.get(name, Any)
                if item is None:
                    visit(item, wanted, here)
                with contextlib.suppress(TypeError):
                    convert(item, wanted if not PARAMS.fullmatch(here) else str, here, visit)

    for name, cls in groups(experiment).items():
        if isinstance(tree.get(name), dict) and "_target_" in tree[name]:
            visit(tree[name], cls, name)
    return found


def _at(tree: Any, key: str) -> Any:
    """Return the value at a key like `models.net._args_[0]`, or None."""
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(tree, list):
            tree = tree[int(part)]
        elif isinstance(tree, dict):
            tree = tree.get(part)
        else:
            return None
    return tree


def _takes_node(hint: Any) -> bool:
    """Return True if an annotation names a class whose objects a node describes."""
    kinds = [kind for kind in alternatives(hint) if isinstance(kind, type) and not typing.get_args(kind)]
    return any(kind not in (object, MISSING) and not schema_type(kind) for kind in kinds)


def _arguments(target: Any, node: Iterable[str] = ()) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class that conf.yaml names, and those that a node has for its `**kwargs`."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    items = parameters(target) or []
    extra = {*node} - RESERVED if takes_any_keyword(items) else ()
    more = {name: inspect.Parameter(name, named[1], default=object()) for name in extra if name.isidentifier()}
    return more | {item.name: item for item in items if item.kind in named}


def _block_hint(target: Any) -> Any:
    """Return the annotation of the blocks of a class, like the modules of `nn.Sequential`; None if it takes none."""
    star = next((item for item in parameters(target) or [] if item.kind is item.VAR_POSITIONAL), None)
    if star is None or star.annotation is not MISSING:
        return star and star.annotation
    return nn.Module if isinstance(target, type) and issubclass(target, nn.Module) else Any


def _describe(key: str, hint: Any, node: Any, places: dict[str, Any]) -> View:
    if not isinstance(node, dict):
        return {"target": None, "annotation": type_name(hint), "blocks": None, "open": False, "fields": {}}
    target, fields = object_at(node["_target_"]), {}
    texts, blocks = argument_texts(target), range(len(node.get(ARGS, [])))
    for name, item in _arguments(target, node).items():
        here, default = f"{key}.{name}", plain(item.default)
        if _is_fixed(node, here) or any(place == here or place.startswith(f"{here}[") for place in places):
            continue
        shown = "" if default is MISSING else _as_typed(default)
        fields[name] = {
            "type": "" if item.annotation in (Any, MISSING) else type_name(item.annotation),
            "value": _as_typed(node[name]) if name in node else shown,
            "default": shown,
            "choices": _choices(item.annotation),
            "required": item.default is MISSING and not node.get("_partial_"),
            "help": texts.get(name, ""),
        }
    return {
        "target": node["_target_"],
        "annotation": type_name(hint),
        "blocks": None if _block_hint(target) is None else [f"{key}.{ARGS}[{index}]" for index in blocks],
        "open": takes_any_keyword(parameters(target) or []),
        "fields": fields,
    }


def _is_fixed(node: Any, key: str) -> bool:
    """Return True if no text can be typed for a value: a mapping, what a node imports, or `params` of an optimizer."""
    is_mapping = isinstance(node.get(key.rpartition(".")[2]), dict)
    return is_mapping or node["_target_"] == IMPORT or PARAMS.fullmatch(key) is not None


def _choices(hint: Any) -> list[str] | None:
    """Return the texts of all values of a type, if they are few: of a bool, a Literal, an enum, or None."""
    schema = schema_type(hint)
    words = {"boolean": ["true", "false"], "null": ["null"]}
    kinds = schema.get("anyOf", [schema])
    found = [words.get(kind.get("type"), [_as_typed(item) for item in kind.get("enum", ())]) for kind in kinds]
    return [word for texts in found for word in texts] if all(found) else None


def _as_typed(value: Any) -> str:
    """Return a value of conf.yaml as one would type it into a field."""
    if isinstance(value, str):
        return "" if value == "???" else json.dumps(value) if AMBIGUOUS.match(value) else str(value)
    return yaml_text({"value": _plain(value)})[7:-1] if isinstance(value, float) else json.dumps(_plain(value))


def _literal(typed: str, hint: Any, key: str) -> Any:
    """Return the value of a text typed into a field; ConfigError if it is no literal of this type."""
    if REFERENCE.fullmatch(typed):
        return typed
    values: list[Any] = [typed]
    with contextlib.suppress(ValueError):  # not YAML, but perhaps a text
        parsed = parse_config(f"value: {typed}", environment=False) if "${" not in typed else {}
        value = parsed["value"] if len(parsed) == 1 else typed
        values = [typed] if isinstance(value, str) and typed[:1] not in ("'", '"') else [value, typed]
    for value in values:
        with contextlib.suppress(TypeError):
            convert(value, hint, key, _refuse_node)
            if "${" in json.dumps(value):
                raise ConfigError(f"{key} is {typed!r:.100}, which resolves something; only ${{KEY}} may, as a whole")
            return value
    raise ConfigError(f"{key} is {typed!r:.100}, not of type {type_name(hint)}")


def _refuse_node(node: Any, hint: Any, key: str) -> None:
    """Refuse a node within a typed value: it would call what it names."""
    raise ConfigError(f"{key} is {node!r:.100}, which is no literal; choose a class in the list of classes instead")


def _set(node: Any, key: str, name: str, typed: str) -> None:
    items, here = _arguments(object_at(node["_target_"]), [*node, name]), f"{key}.{name}"
    if name not in items or _is_fixed(node, here):
        raise UsageError(f"{here} is no value of {node['_target_']} that can be typed here.{suggest(name, items)}")
    item = items[name]
    default = "???" if item.default is MISSING else plain(item.default)
    value = default if typed == "" and item.annotation is not str else _literal(typed, item.annotation, here)
    if value is MISSING or (key.endswith("]") and value == default != "???"):  # bind lists defaults outside of blocks
        if name in node:
            remove_key(node, name)
    else:
        written = commented_map(f"value: {json.dumps(value)}", CONF)["value"]  # lists in one line
        node[name] = written if isinstance(value, list | dict) else quote_strings(value)


def _replace(tree: Any, key: str, path: str, target: Any) -> None:
    node, new = _at(tree, key), _new_node(path, target)
    if node in (None, "???"):
        above, name, index = re.fullmatch(r"(.*)(?:\.(\w+)|\[(\d+)\])", key).groups()  # type: ignore[union-attr]
        _at(tree, above)[name or int(index)] = quote_strings(new)
    elif object_at(node["_target_"]) is not target:
        node["_target_"] = path
        kept = {*_arguments(target), "_target_", "_partial_", ARGS if _block_hint(target) is not None else ""}
        for name in [name for name in node if name not in kept]:
            remove_key(node, name)
        if not node.get("_partial_"):
            node.update({name: value for name, value in new.items() if name not in node})


def _new_node(path: str, target: Any) -> Any:
    """Return a node with only the arguments that have no default, to be filled in."""
    return {"_target_": path} | {name: "???" for name, item in _arguments(target).items() if item.default is MISSING}


def _chosen(path: str, offers: dict[str, Any], key: str) -> Any:
    if path not in offers:
        raise UsageError(f"{key} cannot be {path!r:.100}, which is not one of the {len(offers)} classes offered for it")
    return offers[path]


def _offers(hint: Any, node: Any) -> dict[str, Any]:
    """Return the classes and functions that fit an annotation, by their paths: the present one, then the others."""
    present = node.get("_target_") if isinstance(node, dict) else None
    offers = {present: object_at(present)} if present else {}
    fits = _fitting(hint, next(iter(offers.values()), None))
    for path, thing in _known():
        if fits(thing) and all(thing is not other for other in offers.values()):
            offers[path] = thing
    return offers


def _fitting(hint: Any, present: Any) -> Callable[[Any], bool]:
    """Return a function that tells whether a class, or what a function returns, fits an annotation."""
    if typing.get_origin(hint) is Callable:  # of a `_partial_` node: what it returns
        hint = typing.get_args(hint)[-1]
    kinds = tuple(kind for kind in alternatives(hint) if isinstance(kind, type) and _takes_node(kind))
    if not kinds and isinstance(present, type):  # any type: what has the same base class of torch
        kinds = tuple(base for base in BASES if base is not object and issubclass(present, base))[:1]

    def fits(thing: Any) -> bool:
        made = thing
        if not isinstance(thing, type):
            try:
                made = typing.get_type_hints(thing).get("return")
            except Exception:  # annotations are arbitrary expressions
                return False
        with contextlib.suppress(TypeError):  # a Protocol
            return bool(kinds) and isinstance(made, type) and issubclass(made, kinds) and thing not in BASES
        return False

    return fits


def _known() -> Iterator[tuple[str, Any]]:
    """Yield the classes and functions of the project and of libraries, with the shortest path to each."""
    package = importlib.import_module(AN_EXPERIMENT.module.partition(".")[0])
    own = [f"{package.__name__}.{item.name}" for item in pkgutil.iter_modules(package.__path__)]
    for name in (*own, *LIBRARIES):
        module = None
        with contextlib.suppress(*USER_ERRORS):  # not installed, or a file of the project that cannot be imported yet
            module = importlib.import_module(name)
        for word, thing in sorted(vars(module).items()) if module else ():
            makes = inspect.isfunction(thing) or (isinstance(thing, type) and not inspect.isabstract(thing))
            if makes and not word.startswith("_") and (name in LIBRARIES or thing.__module__ == name):
                yield f"{name}.{word}", thing


def check(text: str) -> View:
    """Return the problems of a conf.yaml, and its models as `structure.describe` finds them.

    `problems` has the key of the node, or "", and a line for each.
    """
    with tempfile.TemporaryDirectory(prefix="mlx-draft-") as folder:
        path = Path(folder, CONF.name)
        path.write_text(text)
        try:
            found = describe(conf=path)
        except MlxError as error:
            keys = sorted(_places(main_class(AN_EXPERIMENT, Path.cwd()), text), key=len, reverse=True)
            lines = getattr(error, "problems", ()) or [short_message(error)]
            at = ((next((key for key in keys if line.startswith((f"{key}.", f"{key}:"))), ""), line) for line in lines)
            return {"problems": [*at], "models": []}
    node, line = found["failure"]
    return {"problems": [[node, f"{node}: {line}"]] if node else [], "models": found["models"]}


def words_of(arguments: str) -> list[str]:
    """Return the words after `mlx train run` for typed arguments, which start a new run and name no other classes."""
    try:
        request = Request.parse(words := shlex.split(arguments))
    except ValueError as error:
        raise UsageError(f"{arguments!r:.100} is not understood: {error}") from None
    if request.resume or request.origin or request.claimed or request.checkpoint:
        raise UsageError("only new runs start here; to continue one, type: mlx train run --resume RUN")
    experiment = main_class(AN_EXPERIMENT, Path.cwd())
    variants = [item for item in request.overrides if item.startswith(composition.OPTION)]
    before, after = (composition.read(CONF, given, settings_of(experiment)) for given in (variants, request.overrides))
    if others := [name for name in _imports(after.tree) if name not in {*_imports(before.tree)}]:
        raise UsageError(f"the overrides name {others[0]!r:.100}; choose classes in the form, and save")
    composition.check(experiment, after)  # after that, because it builds cfg
    return words


def _imports(tree: Any) -> Iterator[str]:
    """Yield what a config imports: the targets of its nodes, and what their `path` names."""
    yield from targets_of(tree)
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    if isinstance(tree, dict) and tree.get("_target_") == IMPORT:
        yield str(tree.get("path"))
    for value in values:
        yield from _imports(value)
