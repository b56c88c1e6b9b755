"""The tab that composes an experiment: forms for the nodes of conf.yaml, problems and shapes at once, and the diff.

All state is on this side. What the browser sends is a text, the number of a choice, or a click.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import marimo as mo

from mlx_runtime.companions.ui import composing
from mlx_runtime.companions.ui.drawing import to_tables
from mlx_runtime.errors import MlxError


class Composer:
    """What the tab of one browser shows.

    Args:
        project: folder of the experiment.
        storage: of the runs that are started here, instead of the one in conf.yaml.
    """

    def __init__(self, project: Path, storage: str | None) -> None:
        self.project, self.storage = project, storage
        self.draft: composing.Draft | None = None
        self.key = ""  # of the node that is shown
        self.message = ""
        self.report: dict[str, Any] | None = None  # of `composing.check`, None until it is needed
        self.offers: dict[tuple[str, str | None], tuple[list[str], list[str]]] = {}  # of nodes, by key and class
        self.start: composing.Start | None = None
        self.show: Callable[[Any], None] = lambda _: None  # shows the tab again
        self.elements: list[Any] = []  # kept alive: marimo drops events of elements that no variable holds

    def act(self, action: Callable[..., Any], *given: Any) -> None:
        """Do what a click or an input asks for, and show the result: another draft, a message, or an error."""
        self.message = ""
        try:
            done = None if None in given else action(*given)  # a choice that was taken back
        except MlxError as error:
            self.message = str(error)
        else:
            if isinstance(done, composing.Draft):
                self.draft, self.report = done, None
            elif isinstance(done, str):
                self.message = done
        self.show(self)

    def open(self) -> composing.Draft:
        """Read conf.yaml again, and drop the draft."""
        self.draft, self.report, self.offers = composing.open_config(self.project), None, {}
        return self.draft

    def begin(self, arguments: str) -> str:
        """Start a run of the saved conf.yaml."""
        assert self.draft is not None
        if composing.diff(self.draft):
            raise MlxError("the draft is not saved, and a run reads conf.yaml; save it first")
        self.start = composing.start(self.project, arguments, self.storage)
        return f"{self.start.command}: started; the run appears in the list of runs"

    def button(self, label: str, action: Callable[[], Any], **options: Any) -> Any:
        return self._keep(mo.ui.button(label=label, on_change=lambda _: self.act(action), **options))

    def dropdown(self, label: str, options: Any, value: Any, action: Callable[[Any], Any], **more: Any) -> Any:
        return self._keep(mo.ui.dropdown(options, value, label=label, on_change=partial(self.act, action), **more))

    def text(self, label: str, value: str = "", action: Callable[[str], Any] | None = None) -> Any:
        """Return a field that acts when it is left; without an action, its text is read when a button is clicked."""
        return self._keep(mo.ui.text(value, label=label, on_change=partial(self.act, action) if action else None))

    def _keep(self, element: Any) -> Any:
        self.elements.append(element)
        return element


def composer(project: Path, storage: str | None = None) -> Any:
    """Return the state of the tab. Assign it to a variable, in another cell than the one of `composer_tab`."""
    state = Composer(project, storage)
    get, state.show = mo.state(state, allow_self_loops=True)
    return get


def composer_tab(composing_state: Any) -> Any:
    """Return the tab, from the variable that holds what `composer` returned."""
    state: Composer = composing_state()
    state.elements.clear()
    try:
        with mo.status.spinner("Reading conf.yaml", remove_on_exit=True):
            draft = state.draft or state.open()
        if state.report is None:
            with mo.status.spinner("Building the models", remove_on_exit=True):
                state.report = composing.check(draft)
        models = (item for item in draft.nodes if item.startswith("models."))
        key = state.key if state.key in draft.nodes else next(models, next(iter(draft.nodes)))
        return mo.vstack(
            [
                *([mo.callout(mo.plain_text(state.message), kind="warn")] if state.message else []),
                mo.hstack(
                    [mo.vstack(_form(state, draft, key)), mo.vstack(_findings(state, draft, state.report))],
                    widths=[1, 1],
                    align="start",
                ),
            ]
        )
    except MlxError as error:
        again = state.button("Try again", state.open)
        return mo.vstack([mo.callout(mo.plain_text(str(error)), kind="danger"), again])


def _form(state: Composer, draft: composing.Draft, key: str) -> list[Any]:
    """Return the elements that edit the node at a key."""
    node = draft.nodes[key]
    titles = {f"{item}: {(found['target'] or 'null').rpartition('.')[2]}": item for item, found in draft.nodes.items()}
    title = next(name for name, item in titles.items() if item == key)
    shown = [state.dropdown("Node", titles, title, partial(setattr, state, "key"), searchable=True)]
    place = (key, node["target"])
    if place not in state.offers:  # the project's classes, until conf.yaml is read again
        state.offers[place] = draft.offered(key)
    offers, for_blocks = state.offers[place]
    if len(offers) > 1 or not node["target"]:
        choose = partial(draft.replace, key)
        shown.append(state.dropdown("Class", offers, node["target"], choose, searchable=True))
    else:
        shown.append(mo.plain_text(node["target"]))
    for name, item in node["fields"].items():
        shown.append(_field(state, draft, key, name, item))
    if node["open"]:
        shown.append(state.text("`name=value`", "", lambda typed: draft.set(key, *typed.partition("=")[::2])))
    if node["blocks"] is not None:
        shown += _blocks(state, draft, key, node["blocks"], for_blocks)
    return shown


def _field(state: Composer, draft: composing.Draft, key: str, name: str, item: dict[str, Any]) -> Any:
    typed, _ = draft.refused.get(f"{key}.{name}", (item["value"], ""))
    change = partial(draft.set, key, name)
    label = f"`{name}`" if name.isidentifier() else "argument"
    if item["choices"]:
        element = state.dropdown(label, item["choices"], typed if typed in item["choices"] else None, change)
    else:
        element = state.text(label, typed, change)
    default = "" if item["required"] else f" = {item['default']}"
    about = f"{item['type']}{default}  {item['help']}"
    return mo.vstack([element, mo.plain_text(about[:300])], gap=0)


def _blocks(state: Composer, draft: composing.Draft, key: str, blocks: list[str], offers: list[str]) -> list[Any]:
    shown = []
    for index, block in enumerate(blocks):
        row = [mo.plain_text(f"{index}  {draft.nodes[block]['target'] if block in draft.nodes else '?'}")]
        row.append(state.button("edit", partial(setattr, state, "key", block)))
        if index:
            row.append(state.button("up", partial(draft.move_block, key, index, index - 1)))
        row.append(state.button("remove", partial(draft.remove_block, key, index)))
        shown.append(mo.hstack(row, justify="start"))
    return [*shown, state.dropdown("Add block", offers, None, partial(draft.add_block, key), searchable=True)]


def _findings(state: Composer, draft: composing.Draft, report: dict[str, Any]) -> list[Any]:
    """Return the problems, models and changes of the draft, and what saves it and starts a run."""
    problems = "\n".join(line for _, line in report["problems"])
    changes, name, arguments = composing.diff(draft), state.text("Name"), state.text("Arguments")
    rows = [
        [
            state.button("Save conf.yaml", partial(composing.save, draft), disabled=not changes, kind="success"),
            state.button("Drop changes", state.open),
        ],
        [name, state.button("Save as variant", lambda: f"saved {composing.save_variant(draft, name.value)}")],
        [arguments, state.button("Start run", lambda: state.begin(arguments.value))],
        [state.button("Refresh", lambda: None), mo.plain_text(state.start.state())] if state.start else [],
    ]
    return [
        mo.callout(mo.plain_text(problems or "no problems"), kind="danger" if problems else "success"),
        *(mo.hstack(row, justify="start") for row in rows),
        mo.plain_text(changes or "conf.yaml: no changes"),
        mo.md(to_tables(report)),
    ]
