"""The tab that composes an experiment: forms for the nodes of conf.yaml, problems and shapes at once, and the diff.

All state is on this side. What the browser sends is a text, the number of a choice, or a click.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import marimo as mo
from marimo._runtime.context import get_context

from mlx_runtime.companions.ui import composing
from mlx_runtime.companions.ui.drawing import to_tables
from mlx_runtime.errors import MlxError, short_message

ADDED = "name=value"
"""Label of the field for a further argument of a class that takes any."""


class Composer:
    """What the tab of one browser shows.

    Args:
        project: folder of the experiment.
        storage: of the runs that are started here, instead of the one in conf.yaml.
    """

    def __init__(self, project: Path, storage: str | None) -> None:
        self.project, self.storage = project, storage
        self.draft: Any = None  # a `composing.Draft`, once conf.yaml has been read
        self.key = ""  # of the node that is shown
        self.message = ""
        self.report: dict[str, Any] | None = None  # of `composing.check`, None until it is needed
        self.turn = 0  # number of renderings and events so far
        self.show: Callable[[Any], None] = lambda _: None  # shows the tab again
        self.elements: deque[Any] = deque(maxlen=1000)  # kept alive, also those of earlier renderings, to answer

    def act(self, seen: Any, action: Callable[..., Any], *given: Any) -> None:
        """Do what an event asks for, and show the result: another draft, a message, or an error.

        Args:
            seen: `turn` or `targets` when the element was shown. The person has not seen what changed since.
        """
        self.message, is_current = "", seen in (self.turn, self.targets())
        self.turn += 1
        try:
            if not is_current:
                raise MlxError("nothing was done: the page has changed since that click; check it, and click again")
            done = action(*given)
            if isinstance(done, composing.Draft):
                self.draft, self.report = done, None
            elif done:
                self.message = done
        except (MlxError, OSError) as error:
            self.message = short_message(error)
        self.show(self)

    def button(self, label: str, action: Callable[..., Any], *given: Any, **options: Any) -> Any:
        turn = self.turn
        return self.keep(mo.ui.button(label=label, on_change=lambda _: self.act(turn, action, *given), **options))

    def dropdown(self, label: str, options: Any, value: str, action: Callable[..., Any], *given: Any) -> Any:
        change = partial(self.act, self.turn, action, *given)
        return self.keep(mo.ui.dropdown(options, value, label=label, on_change=change, searchable=True))

    def form(self, label: str, fields: Any, seen: Any, action: Callable[..., Any], *given: Any) -> Any:
        """Return fields that are sent together by a button."""
        change = partial(self.act, seen, action, *given)
        return self.keep(fields.form(submit_button_label=label, on_change=change))

    def keep(self, element: Any) -> Any:
        self.elements.append(element)
        return element

    def open(self) -> Any:
        """Read conf.yaml again, and drop the draft."""
        self.draft, self.report = composing.open_config(self.project), None
        return self.draft

    def targets(self) -> list[tuple[str, str]]:
        return [(key, node["target"]) for key, node in self.draft.nodes.items()] if self.draft else []

    # Called by events: of the draft at that time. They return another draft, or a message.

    def edit(self, action: str, key: str, *arguments: Any) -> Any:
        return self.draft.edit(action, key, *arguments)

    def set(self, key: str, shown: dict[str, str], typed: dict[str, str]) -> Any:
        """Set the arguments whose fields have been edited."""
        added, _, value = typed.pop(ADDED, "").partition("=")
        edited = {name: text for name, text in typed.items() if text != shown[name]}
        return self.edit("set", key, edited | ({added.strip(): value} if added else {}))

    def add(self, key: str, chosen: dict[str, Any]) -> Any:
        return self.edit("add", key, int(chosen["number"]), chosen["path"])

    def save_variant(self, name: str) -> str:
        path = composing.save_variant(self.draft, name)
        self.open()
        return f"saved {path}"


def composer(project: Path, storage: str | None = None) -> Any:
    """Return the state of the tab. Assign it to a variable, in another cell than the one of `composer_tab`."""
    state = Composer(project, storage)
    get, state.show = mo.state(state, allow_self_loops=True)
    return get


def composer_tab(composing_state: Any) -> Any:
    """Return the tab, from the variable that holds what `composer` returned."""
    state: Composer = composing_state()
    state.turn += 1
    # marimo counts the ids of elements again in each rendering, and would press another button for an earlier click.
    with get_context().provide_ui_ids(f"compose-{state.turn}"):
        try:
            draft = state.draft or state.open()
            state.report = state.report or composing.check(draft)
            models = (item for item in draft.nodes if item.startswith("models."))
            key = state.key if state.key in draft.nodes else next(models, next(iter(draft.nodes)))
            columns = [mo.vstack(_form(state, draft, key)), mo.vstack(_findings(state, draft, state.report))]
        except (MlxError, OSError) as error:
            warning = mo.callout(mo.plain_text(short_message(error)), kind="danger")
            return mo.vstack([warning, state.button("Try again", state.open)])
        message = [mo.callout(mo.plain_text(state.message), kind="warn")] if state.message else []
        return mo.vstack([*message, mo.hstack(columns, widths=[1, 1], align="start")])


def _form(state: Composer, draft: composing.Draft, key: str) -> list[Any]:
    """Return the elements that edit the node at a key."""
    node, (classes, for_blocks) = draft.nodes[key], draft.offered(key)
    titles = {f"{item}: {target.rpartition('.')[2]}": item for item, target in state.targets()}
    title = next(name for name, item in titles.items() if item == key)
    shown = [
        state.dropdown("Node", titles, title, partial(setattr, state, "key")),
        state.dropdown("Class", classes, node["target"], state.edit, "replace", key),
    ]
    values = {name: item["value"] for name, item in node["fields"].items()}
    fields = {name: mo.ui.text(value, label=f"`{name}`") for name, value in values.items()}
    layout = "".join(f"{{{name}}}{_about(item)}" for name, item in node["fields"].items())
    if node["open"]:
        fields[ADDED], layout = mo.ui.text(label=f"`{ADDED}`"), f"{layout}{{{ADDED}}}"
    if fields:
        shown.append(state.form("Apply", mo.ui.batch(mo.Html(layout), fields), state.targets(), state.set, key, values))
    if node["blocks"] is not None:
        shown += _blocks(state, draft, key, node["blocks"], for_blocks)
    return shown


def _about(item: dict[str, str]) -> str:
    """Return type, default and explanation of a field, as text in a template of `Html.batch`."""
    default = f" = {item['default']}" if item["default"] else ""
    return mo.plain_text(f"{item['type']}{default}  {item['help']}"[:300]).text.replace("{", "{{").replace("}", "}}")


def _blocks(state: Composer, draft: composing.Draft, key: str, blocks: list[str], offers: list[str]) -> list[Any]:
    shown = []
    for index, block in enumerate(blocks):
        name = mo.plain_text(f"{index}  {draft.nodes[block]['target'] if block in draft.nodes else '?'}")
        edit = state.button("edit", partial(setattr, state, "key"), block)
        shown.append(mo.hstack([name, edit, state.button("remove", state.edit, "remove", key, index)], justify="start"))
    place = mo.ui.number(0, len(blocks), value=len(blocks), label="Number")
    fields = mo.Html("{number}{path}").batch(number=place, path=mo.ui.dropdown(offers, label="Block", searchable=True))
    return [*shown, state.form("Add block", fields, state.turn, state.add, key)]


def _findings(state: Composer, draft: composing.Draft, report: dict[str, Any]) -> list[Any]:
    """Return the problems, models and changes of the draft, and what saves it and starts a run."""
    problems, changes = "\n".join(report["problems"]), composing.diff(draft)
    save = state.button("Save conf.yaml", lambda: composing.save(state.draft), disabled=not changes, kind="success")
    return [
        mo.callout(mo.plain_text(problems or "no problems"), kind="danger" if problems else "success"),
        mo.hstack([save, state.button("Drop changes", state.open)], justify="start"),
        state.form("Save as variant", mo.ui.text(label="Name of a new variant"), state.turn, state.save_variant),
        state.button("Start run", lambda: f"started; output in {composing.start(state.draft, state.storage)}"),
        mo.plain_text(
            f"It is stored in {state.storage or 'cfg.storage_path, or MLX_STORAGE'}, whatever the page shows.\n"
            "With variants or other values: mlx train run --variant NAME KEY=VALUE"
        ),
        mo.plain_text(changes or "conf.yaml: no changes"),
        mo.Html(to_tables(report)),
    ]
