"""`mlx xp export`: a folder with the program of a run, which needs nothing of this project and proves itself.

digits_run_003_epoch_0018/
    README.md              code that loads and runs the program, executed before the folder is published
    export.json            the run, its metrics, the proof, and the sizes and SHA-256 of the other files
    schema.json            columns that the program reads
    examples.safetensors   example rows, without strings
    program.pt2            also `program.onnx`
    weights.safetensors    weights of all models
    code/                  code of the run, without secrets
    tokenizer/             if a tool or dataset has one
"""

import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mlx_runtime.companions.hub.detection import refuse_secrets
from mlx_runtime.companions.serving.exports import instructions, programs
from mlx_runtime.companions.serving.exports.evidence import CHECK_S, collect, prove
from mlx_runtime.companions.serving.exports.exported import EXPORT, PROGRAMS, VERSION, is_export, sha256_of
from mlx_runtime.companions.serving.exports.merging import merge_adapters, weights_of
from mlx_runtime.companions.serving.loading import choose_checkpoint, load_parts
from mlx_runtime.companions.serving.predictor import Predictor
from mlx_runtime.companions.sharding import tensor_files
from mlx_runtime.companions.sharding.consolidation import consolidate
from mlx_runtime.data.batches import Batch
from mlx_runtime.errors import UsageError
from mlx_runtime.extras import require
from mlx_runtime.loop.experiment import BaseModule
from mlx_runtime.runs import snapshots
from mlx_runtime.runs.checkpoints.groups import lacks_weights, members
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.queries.reader import Run
from mlx_runtime.storage.documents import now
from mlx_runtime.storage.files import parent_of, size_text, storage_errors, to_json
from mlx_runtime.storage.publishing import Publication, recover


@dataclass(frozen=True)
class Parts:
    """A run to be exported."""

    folder: RunFolder
    checkpoint: CheckpointInfo
    experiment: BaseModule
    nodes: Mapping[str, Any]
    predictor: Predictor


def export(
    folder: RunFolder,
    output: Path | None = None,
    checkpoint: str | None = None,
    formats: Sequence[str] = ("pt2",),
    *,
    trust: bool = False,
    force: bool = False,
    timeout_s: float = CHECK_S,
    report: Callable[[str], object] = lambda line: None,
) -> str:
    """Export a run to a folder, which appears only once its programs are proven. Return a line that describes it.

    Args:
        folder: the run.
        output: default: a folder in the working directory, named after the checkpoint.
        checkpoint: `best`, `latest` or its name; default: the best, or the latest if there is none.
        formats: some of `PROGRAMS`, or `safetensors` for no program; the weights are always written.
        trust: use the stored code of the run.
        force: replace an earlier export.
        timeout_s: time limit of the check in a process of its own.
        report: receives a line when a stage begins.

    Raises:
        UsageError: the run cannot be exported in this format, or the folder exists.
        ExportError: `predict` cannot be exported, or the exported program has other outputs.
        MissingLibraryError: a format needs a library of the extra `export`.
    """
    wanted = [name for name in PROGRAMS if name in formats]
    if "onnx" in wanted:
        for library in ("onnx", "onnxscript", "onnxruntime", "safetensors"):
            require(library, "--format onnx")
    chosen = choose_checkpoint(folder, checkpoint)
    output = output or Path(f"{folder.experiment}_{folder.name}_{chosen.name}")
    _refuse_present(output, force=force)
    report(f"loading   {chosen.name}")
    experiment, nodes, predictor = load_parts(Run(folder), folder, chosen, device="cpu", trust=trust)
    parts = Parts(folder, chosen, experiment, nodes, predictor)
    if "onnx" in wanted and experiment.cfg.precision == "bf16":
        raise UsageError(f"{folder.title} computes in bfloat16, which onnxruntime lacks on CPUs; export pt2")
    if wanted:
        programs.refuse_strings(predictor.schema)
        programs.refuse_others(experiment)
    above, name = parent_of(str(output.resolve()))
    with storage_errors(f"cannot write {output}"):
        Path(above.path).mkdir(parents=True, exist_ok=True)
        recover(above, name, lambda leftover: False)
        with Publication(above, name, EXPORT) as publication:
            about = _fill(Path(above.path, publication.folder), parts, wanted, timeout_s, report)
            _refuse_present(output, force=force)
            publication.commit(to_json(about).encode())
    return _summary(output, about, predictor.schema.names)


def _refuse_present(output: Path, *, force: bool) -> None:
    if not output.exists():
        return
    if not is_export(output):
        raise UsageError(f"{output} exists and is not an export; name another folder with --output")
    if not force:
        raise UsageError(f"{output} exists; replace it with --force, or name another folder with --output")


def _fill(
    staged: Path, parts: Parts, wanted: list[str], timeout_s: float, report: Callable[[str], object]
) -> dict[str, Any]:
    """Write all files of an export except `export.json`, whose content is returned."""
    schema, examples = parts.predictor.schema, dict(parts.predictor.schema.examples)
    about = _description(parts, wanted)
    evidence = None
    if wanted:
        report("reading   held-out rows")
        evidence = collect(parts.experiment, parts.nodes, parts.predictor)
        schema, (examples, outputs) = evidence.schema, evidence.cases[0]
        if merged := merge_adapters(parts.experiment):
            report(f"merged    adapters of {', '.join(merged)}")
            about["merged"] = merged
        report("tracing   predict")
        exported = programs.trace(parts.experiment, schema)
        if "pt2" in wanted:
            torch.export.save(exported, staged / PROGRAMS["pt2"])
        if "onnx" in wanted:
            report(f"writing   {PROGRAMS['onnx']}")
            programs.write_onnx(exported, staged / PROGRAMS["onnx"], list(schema.names), list(outputs))
    weights, saved = staged / "weights.safetensors", CheckpointStore(parts.folder.checkpoints)
    if "merged" in about or lacks_weights(saved.load(parts.checkpoint, whole=False)["models"]):
        _write_tensors(weights, weights_of(parts.experiment, about.get("merged", ())))
    else:  # of models that `predict` cannot have changed
        consolidate(parts.folder, parts.checkpoint.name, weights)
    _write_tensors(staged / "examples.safetensors", examples)
    (staged / "schema.json").write_text(to_json(schema.document()))
    _write_code(staged, parts.folder)
    dataset = instructions.dataset_of(parts.experiment, parts.nodes)
    _write_tokenizers(staged, members(parts.experiment.tools) | getattr(dataset, "__dict__", {}))
    readme = instructions.text(about, schema, wanted, instructions.origin_of(dataset))
    (staged / "README.md").write_text(readme, encoding="utf-8")
    if evidence:
        report(f"checking  {' and '.join(PROGRAMS[name] for name in wanted)} with rows of {evidence.source}")
        with tempfile.TemporaryDirectory(prefix="mlx-export-") as scratch:
            proven = prove(staged, wanted, evidence, Path(scratch), timeout_s)
        shapes = [{name: list(value.shape) for name, value in batch.items()} for batch, _ in evidence.cases[1:]]
        about["proof"] = {"rows_of": evidence.source, "rows": evidence.rows, "shapes": shapes}
        about["proof"] |= {"tolerance": evidence.tolerance, "programs": proven}
    about["files"] = {}
    for file in sorted(file for file in staged.rglob("*") if file.is_file()):
        sha256, size = sha256_of(file)
        about["files"][str(file.relative_to(staged))] = {"size_bytes": size, "sha256": sha256}
    return about


def _description(parts: Parts, wanted: list[str]) -> dict[str, Any]:
    own = {"name": parts.checkpoint.name, "epoch": parts.checkpoint.epoch, "global_step": parts.checkpoint.global_step}
    return {
        "version": VERSION,
        "experiment": parts.folder.experiment,
        "run": parts.folder.name,
        "checkpoint": own,
        "metrics": parts.checkpoint.metrics,
        "precision": str(parts.experiment.cfg.precision),
        "created": now(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "programs": wanted,
        "proof": None,
    }


def _write_tensors(path: Path, values: Batch) -> None:
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    with path.open("wb") as file:
        tensor_files.write(file, tensors)


def _write_tokenizers(staged: Path, items: Mapping[str, Any]) -> None:
    """Save the tokenizers and processors among tools and the attributes of a dataset."""
    found = {
        name.strip("_"): item
        for name, item in items.items()
        if callable(getattr(item, "save_pretrained", None)) and not isinstance(item, nn.Module | type)
    }
    for name, item in found.items():
        item.save_pretrained(str(staged / ("tokenizer" if len(found) == 1 else f"tokenizer/{name}")))


def _write_code(staged: Path, folder: RunFolder) -> None:
    """Unpack the stored code of a run, if it has any; raise UsageError if it holds likely secrets."""
    try:
        unpacked = snapshots.unpack(folder)
    except UsageError:
        return
    code = shutil.copytree(unpacked, staged / "code", ignore=shutil.ignore_patterns("__pycache__"))
    archive = Path(shutil.make_archive(str(code), "zip", code))
    refuse_secrets(archive, "the export")
    archive.unlink()


def _summary(output: Path, about: Mapping[str, Any], reads: Sequence[str]) -> str:
    size = sum(item["size_bytes"] for item in about["files"].values())
    title = f"{about['experiment']}/{about['run']} {about['checkpoint']['name']} (reads {', '.join(reads)})"
    line = f"wrote {output}: {title}, {len(about['files'])} files, {size_text(size)}"
    if (proof := about["proof"]) is None:
        return f"{line}; without a program, so nothing was compared"
    largest = max(item["largest_difference"] for item in proof["programs"].values())
    compared = f"{', '.join(about['programs'])} compared with predict on {proof['rows']} rows of {proof['rows_of']}"
    return f"{line}; {compared}: at most {largest:.2g} apart (tolerance {proof['tolerance']:g})"
