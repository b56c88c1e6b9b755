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

    from mlx_runtime import metrics_table
    from mlx_runtime.companions.ui import charts, composer, drawing, elements, storages, views

    return pathlib, charts, composer, drawing, elements, metrics_table, storages, views


@app.cell
def _(elements, mo):
    tab = elements.choice(
        "radio", "tab", ["Runs", "Curves", "Differences", "Run", "Sweep", "Drawing", "Compose"], "Runs", inline=True
    )
    refresh = mo.ui.refresh(options=["2s", "10s", "1m"], default_interval="10s")
    get_runs, set_runs = mo.state(None)  # all runs
    get_columns, set_columns = mo.state([])  # the columns of their table
    get_listed, set_listed = mo.state(None)  # the list as it is shown
    get_chosen, set_chosen = mo.state(elements.remembered("run"))
    mo.hstack([tab, refresh])
    return get_chosen, get_columns, get_listed, get_runs, refresh, set_chosen, set_columns, set_listed, set_runs, tab


@app.cell
def _(elements, get_columns, get_runs, mo, refresh, set_columns, set_runs, storages):
    # Read all runs. The cells that show them run again only if something has changed.
    refresh.value  # noqa: B018
    _runs, _problems = storages.read(mo.cli_args().get_all("storage"))
    if not _runs.equals(get_runs()):
        set_runs(_runs)
    if [*_runs] != get_columns():
        set_columns([*_runs])
    elements.problems(_problems)
    return


@app.cell
def _(elements, get_columns, mo, tab):
    _keys = sorted(name for name in get_columns() if name.startswith(("config.", "metrics.", "sweep.")))
    columns = elements.choice("multiselect", "columns", _keys)
    mo.hstack([columns], justify="start") if tab.value == "Runs" else None
    return (columns,)


@app.cell
def _(columns, elements, get_listed, get_runs, mo, set_listed, tab, views):
    # Runs that train, with numbers that move. The list below is drawn again only if it has changed.
    mo.stop(tab.value != "Runs" or get_runs() is None)
    _listed, _live = views.overview(get_runs(), columns.value)
    if not _listed.equals(get_listed()):
        set_listed(_listed)
    elements.table(_live, label="Training now") if len(_live) else None
    return


@app.cell
def _(elements, get_listed, mo, set_chosen, tab):
    mo.stop(tab.value != "Runs" or get_listed() is None)
    _places, _chosen = [*get_listed()["place"]], elements.remembered("run")

    def _choose(rows):
        places = [_places[row] for row in rows["#"]][:50]
        elements.remember("run")(places)
        set_chosen(places)

    elements.table(
        get_listed().drop(columns="place"),
        selection="multi",
        initial_selection=[row for row, place in enumerate(_places) if place in _chosen],
        on_change=_choose,
        hidden_columns=["#"],
        page_size=20,
    )
    return


@app.cell
def _(get_chosen, get_runs, mo):
    # The chosen runs, at most 50; without a choice, the newest three.
    mo.stop(get_runs() is None)
    chosen = get_runs()[get_runs()["place"].isin(get_chosen())]
    chosen = chosen.head(50) if len(chosen) else get_runs().head(3)
    return (chosen,)


@app.cell
def _(elements, get_columns, mo, tab):
    _metrics = [name.removeprefix("metrics.") for name in get_columns() if name.startswith("metrics.")]
    _groups = ["experiment", *(name for name in get_columns() if name.startswith(("config.", "sweep.")))]
    metrics = elements.choice("multiselect", "metrics", _metrics)
    x = elements.choice("dropdown", "x", ["step", "epoch", "time"], "step")
    log = elements.choice("multiselect", "log", ["x", "y"])
    smooth = elements.choice("dropdown", "smooth", ["0", "0.6", "0.9", "0.99"])
    by = elements.choice("multiselect", "mean by", _groups)
    mo.hstack([metrics, x, log, smooth, by], justify="start", wrap=True) if tab.value == "Curves" else None
    return by, log, metrics, smooth, x


@app.cell
def _(by, charts, chosen, elements, log, metrics, metrics_table, mo, smooth, tab, views, x):
    mo.stop(tab.value != "Curves")
    _names = metrics.value or views.main_metrics(chosen)
    _table = metrics_table(chosen, _names, x=x.value, by=by.value or None, smooth=float(smooth.value))
    _figures = charts.curves(_table, x=x.value, log=log.value, labels=views.labels(chosen))
    mo.vstack([elements.problems(_table.attrs["problems"].values()), *map(mo.ui.plotly, _figures)])
    return


@app.cell
def _(chosen, mo, tab, views):
    mo.stop(tab.value != "Differences")
    mo.vstack(views.differences(chosen))
    return


@app.cell
def _(chosen, elements, mo, tab, views):
    run = elements.choice("dropdown", "of", {label: place for place, label in views.labels(chosen).items()})
    mo.hstack([run], justify="start") if tab.value == "Run" else None
    return (run,)


@app.cell
def _(mo, refresh, run, tab, views):
    refresh.value  # noqa: B018 - the log follows
    mo.stop(tab.value != "Run" or run.value is None)
    mo.vstack(views.run(run.value))
    return


@app.cell
def _(elements, get_runs, mo, tab, views):
    mo.stop(tab.value != "Sweep" or get_runs() is None)
    sweep = elements.choice("dropdown", "sweep", views.sweeps(get_runs()))
    mo.hstack([sweep], justify="start")
    return (sweep,)


@app.cell
def _(mo, sweep, views):
    mo.vstack(views.sweep(sweep.value) if sweep.value else [mo.plain_text("There are no sweeps.")])
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
