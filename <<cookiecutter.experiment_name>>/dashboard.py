# The page of `mlx xp ui`: a marimo notebook. Change it as you like, with `mlx xp ui --edit` or in an editor.
import marimo

app = marimo.App(width="full", app_title="Runs")


@app.cell
def _():
    import marimo as mo

    return (mo,)


@app.cell
def _():
    import pathlib

    from mlx_runtime.companions.ui import composer, drawing, elements, storages, views

    return pathlib, composer, drawing, elements, storages, views


@app.cell
def _(elements, mo):
    tab = elements.choice(
        "radio", "tab", ["Runs", "Curves", "Differences", "Run", "Sweep", "Drawing", "Compose"], "Runs", inline=True
    )
    refresh = mo.ui.refresh(options=["2s", "10s", "1m"], default_interval="10s")
    mo.hstack([tab, refresh])
    return refresh, tab


@app.cell
def _(elements, mo):
    # Cells that use one of these run again when its value changes, rather than at each refresh.
    runs, listed, chosen, trials = (elements.state() for _ in range(4))
    problems, names, sweeps = (elements.state([]) for _ in range(3))
    get_selected, set_selected = mo.state(elements.remembered("run"))
    get_late, set_late = mo.state(None, allow_self_loops=True)
    return chosen, get_late, get_selected, listed, names, problems, runs, set_late, set_selected, sweeps, trials


@app.cell
def _(elements, get_late, mo, names, problems, refresh, runs, set_late, storages):
    # Read all runs, soon again if a storage has not answered yet.
    # A new tab shows at once what was read within the last 5 s.
    _age_s = 0 if refresh.value or get_late() else 5
    _runs, _problems, _is_late = storages.read(mo.cli_args().get_all("storage"), _age_s)
    runs.settle(_runs)
    names.settle([*_runs])
    problems.settle(_problems)
    again = mo.ui.refresh(default_interval="1s", on_change=set_late)
    mo.vstack([elements.problems(_problems), *([again] if _is_late else [])])
    return (again,)


@app.cell
def _(elements, mo, names, tab):
    _keys = sorted(name for name in names() if name.startswith(("config.", "metrics.", "sweep.")))
    columns = elements.choice("multiselect", "columns", _keys)
    mo.hstack([columns], justify="start") if tab.value == "Runs" else None
    return (columns,)


@app.cell
def _(columns, elements, listed, mo, runs, tab, views):
    # Runs that train, with numbers that move. The list below is drawn again only if it has changed.
    mo.stop(tab.value != "Runs" or runs() is None)
    _listed, _live = views.overview(runs(), columns.value)
    listed.settle(_listed)
    elements.table(_live, label="Training now") if len(_live) else None
    return


@app.cell
def _(elements, listed, mo, set_selected, tab):
    mo.stop(tab.value != "Runs" or listed() is None)
    _places, _chosen = [*listed()["place"]], elements.remembered("run")

    def _choose(rows):
        places = [_places[row] for row in rows["#"]][:50]
        elements.remember("run", places)
        set_selected(places)

    elements.table(
        listed().drop(columns="place"),
        selection="multi",
        initial_selection=[row for row, place in enumerate(_places) if place in _chosen],
        on_change=_choose,
        hidden_columns=["#"],
        page_size=20,
    )
    return


@app.cell
def _(chosen, get_selected, mo, runs):
    # The selected runs, at most 50; without a selection, the newest three.
    mo.stop(runs() is None)
    _chosen = runs()[runs()["place"].isin(get_selected())]
    chosen.settle((_chosen.head(50) if len(_chosen) else runs().head(3)).reset_index(drop=True))
    return


@app.cell
def _(elements, mo, names, tab):
    _metrics = [name.removeprefix("metrics.") for name in names() if name.startswith("metrics.")]
    _groups = ["experiment", *(name for name in names() if name.startswith(("config.", "sweep.")))]
    metrics = elements.choice("multiselect", "metrics", _metrics)
    x = elements.choice("dropdown", "x", ["step", "epoch", "time"], "step")
    log = elements.choice("multiselect", "log", ["x", "y"])
    smooth = elements.choice("dropdown", "smooth", ["0", "0.6", "0.9", "0.99"])
    by = elements.choice("multiselect", "mean by", _groups)
    mo.hstack([metrics, x, log, smooth, by], justify="start", wrap=True) if tab.value == "Curves" else None
    return by, log, metrics, smooth, x


@app.cell
def _(by, chosen, log, metrics, mo, problems, smooth, tab, views, x):
    mo.stop(tab.value != "Curves" or chosen() is None)
    problems()  # a storage may answer again
    _options = {"x": x.value, "by": by.value or None, "smooth": float(smooth.value)}
    mo.vstack(views.curves(chosen(), metrics.value, log=log.value, **_options))
    return


@app.cell
def _(chosen, mo, problems, tab, views):
    mo.stop(tab.value != "Differences" or chosen() is None)
    problems()
    mo.vstack(views.differences(chosen()))
    return


@app.cell
def _(chosen, elements, mo, tab, views):
    mo.stop(chosen() is None)
    run = elements.choice(
        "dropdown", "of", {label: place for place, label in views.labels(chosen()).items()}, label="run"
    )
    mo.hstack([run], justify="start") if tab.value == "Run" else None
    return (run,)


@app.cell
def _(mo, refresh, run, tab, views):
    refresh.value  # noqa: B018 - the log follows
    mo.stop(tab.value != "Run" or run.value is None)
    mo.vstack(views.run(run.value))
    return


@app.cell
def _(elements, mo, sweeps, tab):
    sweep = elements.choice("dropdown", "sweep", sweeps())
    mo.hstack([sweep], justify="start") if tab.value == "Sweep" else None
    return (sweep,)


@app.cell
def _(mo, runs, sweep, sweeps, tab, trials, views):
    mo.stop(tab.value != "Sweep" or runs() is None)
    _found = views.sweeps(runs())
    sweeps.settle([*_found])
    trials.settle(_found.get(sweep.value))
    return


@app.cell
def _(mo, problems, tab, trials, views):
    mo.stop(tab.value != "Sweep")
    problems()
    mo.vstack(views.sweep(trials()) if trials() is not None else [mo.plain_text("There are no sweeps.")])
    return


@app.cell
def _(drawing, mo, pathlib, tab):
    mo.stop(tab.value != "Drawing")
    drawing.drawing_tab(pathlib.Path.cwd())
    return


@app.cell
def _(composer, pathlib):
    composing = composer.composer(pathlib.Path.cwd())
    return (composing,)


@app.cell
def _(composer, composing, mo, tab):
    mo.stop(tab.value != "Compose")
    composer.composer_tab(composing)
    return


if __name__ == "__main__":
    app.run()
