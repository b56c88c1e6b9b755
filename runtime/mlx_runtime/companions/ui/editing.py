"""Edits of the text of a conf.yaml, checked against the code of its project. `workbench.call` calls these.

What a form sends is hostile: a value is a literal of its field's type, and a class is one of those offered.
"""

import contextlib
import importlib
import inspect
import json
import pkgutil
import re
import tempfile
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from mlx_runtime.companions.ui.structure import describe
from mlx_runtime.config.binding.conf_file import bind, check_written
from mlx_runtime.config.binding.merging import commented_map, comments_behind, quote_strings, remove_key, yaml_text
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
    takes_any_keyword,
    type_name,
)
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.config.interpolation import parse_config
from mlx_runtime.config.projects import AN_EXPERIMENT, CONF, SCHEMA, main_class
from mlx_runtime.errors import USER_ERRORS, BindError, ConfigError, MlxError, UsageError, short_message, suggest
from mlx_runtime.storage.documents import AMBIGUOUS

LIBRARIES = (
    "torch.nn",
    "torch.optim",
    "torch.optim.lr_scheduler",
    "torchmetrics.classification",
    "torchmetrics.regression",
    "torchvision.models",
    "timm",
)
"""Modules whose classes and functions are offered, besides those of the project, if they can be imported."""

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
    the key of each node to `target`, `blocks` (their keys; None if the class takes none), `open` (it takes arguments
    with any name) and `fields`, which maps names to `type`, `value`, `default` ("" if there is none) and `help`. Values
    are texts as a form shows them.
    """
    experiment = main_class(AN_EXPERIMENT, Path.cwd())
    commented_map(text, CONF)
    with tempfile.TemporaryDirectory(prefix="mlx-draft-") as folder:
        path = Path(folder, CONF.name)
        path.write_text(text)
        path.with_name(SCHEMA).write_text(schema)
        bound = bind(experiment, path)
    tree, places = commented_map(bound.after, CONF), _places(experiment, bound.after)
    nodes = {key: _describe(key, _at(tree, key), places) for key in places}
    return {"text": bound.after, "schema": bound.schema, "nodes": nodes}


def edit(text: str, schema: str, action: str, key: str, arguments: Sequence[Any]) -> View:
    """Change the node at a key, and return the new view. The actions, with their arguments:

    set        texts typed into fields, by the names of the arguments; an empty text restores the default
    replace    path of a class that `offered` lists
    add        number of the new block, and the path of a class that `offered` lists for blocks
    remove     number of a block
    """
    tree, places = commented_map(text, CONF), _places(main_class(AN_EXPERIMENT, Path.cwd()), text)
    if key not in places:
        raise UsageError(f"there is no node {key!r} in {CONF}.{suggest(key, places)}")
    node = _at(tree, key)
    count = len(node.get(ARGS, []))
    match action, *arguments:
        case "set", dict(values):
            for name, typed in values.items():
                _set(node, key, name, typed)
            edited = yaml_text(tree)
        case "replace", path:
            _choose(node, path, _offers(places[key], node), key)
            edited = yaml_text(tree)
        case "add", int(index), path if 0 <= index <= count:
            block = quote_strings({})
            _choose(block, path, _offers(_block_hint(object_at(node["_target_"])), None), key)
            edited = _splice(text, tree, node, index, index, [block])
        case "remove", int(index) if 0 <= index < count:
            edited = _splice(text, tree, node, index, index + 1, [])
        case _:
            raise UsageError(f"{key} cannot {action} {', '.join(map(repr, arguments))}")
    try:
        check_written(edited, tree, CONF)
    except BindError:
        raise UsageError(f"{key} cannot be changed here, as {CONF} is written; edit the file") from None
    return view(edited, schema)


def _splice(text: str, tree: Any, node: Any, start: int, stop: int, added: Sequence[Any]) -> str:
    """Replace blocks of a node in its tree, and return conf.yaml: the other lines as they are, with their comments.

    ruamel would leave the comments where they were. Lines that are laid out in another way than `bind` does may give a
    text that does not contain the tree.
    """
    old = node.get(ARGS, [])
    new = [*old[:start], *added, *old[stop:]]
    if not new:
        remove_key(node, ARGS)  # keeps the comments below
    else:
        node[ARGS] = new
    if not (old and new):
        return yaml_text(tree)
    lines, column = text.splitlines(keepends=True), old.lc.item(0)[1] - 2
    starts = [old.lc.item(index)[0] for index in range(len(old))]
    beyond = re.compile(rf" {{0,{column - 1}}}[^\s#]| {{{column}}}[^\s#-]")
    end = next((number for number in range(starts[-1], len(lines)) if beyond.match(lines[number])), len(lines))
    while not lines[end - 1].partition("#")[0].strip():  # comments below the last block stay
        end -= 1
    for number, line in enumerate(starts):
        while lines[line - 1].lstrip().startswith("#"):
            line -= 1
        starts[number] = line
    block = textwrap.indent(textwrap.dedent(yaml_text(added)), " " * column) if added else ""
    starts.append(end)
    return "".join([*lines[: starts[start]], block, *lines[starts[stop] :]])


def offered(text: str, key: str) -> list[list[str]]:
    """Return the paths of the classes and functions that fit the node at a key, and of those that fit a block of it."""
    hint, node = _places(main_class(AN_EXPERIMENT, Path.cwd()), text)[key], _at(commented_map(text, CONF), key)
    return [[*_offers(hint, node)], [*_offers(_block_hint(object_at(node["_target_"])), None)]]


def variant(before: str, after: str) -> str:
    """Return a variant that changes one conf.yaml into another, "" if they do not differ."""
    changes = _changes(commented_map(before, CONF), commented_map(after, CONF))
    return yaml_text(changes) if changes else ""


def _changes(old: Any, new: Any) -> dict[str, Any]:
    changes = {}
    for name, value in new.items():
        was = old.get(name)
        if _json(was) == _json(value):
            continue
        mappings = isinstance(was, dict) and isinstance(value, dict) and was.get("_target_") == value.get("_target_")
        changes[name] = _changes(was, value) if mappings and was.keys() <= value.keys() else _plain(value)
    return changes


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def _plain(value: Any) -> Any:
    """Return a value of ruamel without its comments."""
    return json.loads(_json(value))


def _places(experiment: type, text: str) -> dict[str, Any]:
    """Return the annotation of each node of a conf.yaml, by its key."""
    found: dict[str, Any] = {}
    raw, tree = commented_map(text, CONF), parse_config(text, environment=False)

    def visit(value: Any, hint: Any, key: str) -> None:
        if isinstance(value, dict) and isinstance(_at(raw, key), dict):  # not a reference to another node
            found[key], target = hint, object_at(value["_target_"])
            hints = {name: item.annotation for name, item in _arguments(target).items()}
            hints |= {ARGS: list[_block_hint(target)]}  # type: ignore[misc]
            for name, item in value.items():
                here = f"{key}.{name}"
                with contextlib.suppress(TypeError):
                    convert(item, hints.get(name, Any) if not PARAMS.fullmatch(here) else str, here, visit)

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


def _describe(key: str, node: Any, places: Mapping[str, Any]) -> View:
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
            "help": texts.get(name, ""),
        }
    return {
        "target": node["_target_"],
        "blocks": None if _block_hint(target) is None else [f"{key}.{ARGS}[{index}]" for index in blocks],
        "open": takes_any_keyword(parameters(target) or []),
        "fields": fields,
    }


def _is_fixed(node: Any, key: str) -> bool:
    """Return True if no text can be typed for a value: a mapping, what a node imports, or `params` of an optimizer."""
    is_mapping = isinstance(node.get(key.rpartition(".")[2]), dict)
    return is_mapping or node["_target_"] == IMPORT or PARAMS.fullmatch(key) is not None


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
            if isinstance(value, dict):
                _refuse_node(value, hint, key)
            if "${" in json.dumps(value):
                raise ConfigError(
                    f"{key} is {typed!r:.100}, which has an interpolation; only ${{KEY}} alone is allowed"
                )
            return value
    raise ConfigError(f"{key} is {typed!r:.100}, not of type {type_name(hint)}")


def _refuse_node(node: Any, hint: Any, key: str) -> None:
    """Refuse a node within a typed value: it would call what it names."""
    raise ConfigError(f"{key} is {node!r:.100}, which is not a literal; choose from the list of classes instead")


def _set(node: Any, key: str, name: str, typed: str) -> None:
    items, here = _arguments(object_at(node["_target_"]), [*node, name]), f"{key}.{name}"
    if name not in items or _is_fixed(node, here):
        raise UsageError(f"{here} is no argument of {node['_target_']} that can be typed here.{suggest(name, items)}")
    item = items[name]
    default = "???" if item.default is MISSING else plain(item.default)
    value = _literal(typed, item.annotation, here) if typed else default
    if value is MISSING or (key.endswith("]") and value == default != "???"):  # bind lists defaults outside of blocks
        if name in node:
            remove_key(node, name)
        return
    comments, slot = comments_behind(node, name) if name in node else ([None], 0)
    below, comments[slot] = comments[slot], None
    node[name] = quote_strings(value)
    if isinstance(value, list):
        node[name] = commented_map("list: []", CONF)["list"]
        node[name].extend(quote_strings(value))
        node[name].fa.set_flow_style()  # in one line
    comments = node.ca.items.setdefault(name, [None] * 4)
    comments[2:] = below or comments[2], None


def _choose(node: Any, path: str, offers: Mapping[str, Any], key: str) -> None:
    """Give a node, or an empty one, a class. It keeps the arguments that this one has, too; others must be given."""
    if path not in offers:
        raise UsageError(f"{key} cannot be {path!r:.100}, which is not one of the {len(offers)} classes offered for it")
    target = offers[path]
    if "_target_" in node and object_at(node["_target_"]) is target:
        return
    node["_target_"] = path
    items = _arguments(target)
    kept = {*items, "_target_", "_partial_", ARGS if _block_hint(target) is not None else ""}
    for name in [name for name in node if name not in kept]:
        remove_key(node, name)
    for name, item in items.items():
        if item.default is MISSING and not node.get("_partial_"):
            node.setdefault(name, "???")


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
    """Return the `problems` of a conf.yaml, lines with their keys, and its `models`, as `structure.describe` does."""
    with tempfile.TemporaryDirectory(prefix="mlx-draft-") as folder:
        path = Path(folder, CONF.name)
        path.write_text(text)
        try:
            found = describe(conf=path)
        except MlxError as error:
            return {"problems": [*(getattr(error, "problems", ()) or [short_message(error)])], "models": []}
    node, line = found["failure"]
    return {"problems": [f"{node}: {line}"] if node and line else [], "models": found["models"]}
