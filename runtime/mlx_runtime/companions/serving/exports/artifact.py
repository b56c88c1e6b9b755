"""`mlx xp export`: a folder with the program of a run, which needs nothing of this project and proves itself.

digits_run_003_epoch_0018/
    README.md              code that loads and runs the program, executed before the folder is published
    export.json            the run, its metrics, the proof, and the sizes and SHA-256 of the other files
    schema.json            columns that the program reads
    examples.safetensors   example rows; strings are in `examples.json`
    program.pt2            also `program.onnx`, and `program_aoti.pt2`
    weights.safetensors    weights of all models
    code/                  code of the run, without secrets
    tokenizer/             if a tool or dataset has one
"""

import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mlx_runtime.companions.hub.detection import refuse_secrets
from mlx_runtime.companions.serving.exports import instructions, origins, programs
from mlx_runtime.companions.serving.exports.evidence import CHECK_S, SIZES, Evidence, collect, prove, too_slow
from mlx_runtime.companions.serving.exports.exported import EXPORT, PROGRAMS, VERSION, is_export, sha256_of
from mlx_runtime.companions.serving.exports.sizes import size_limits
from mlx_runtime.companions.serving.loading import choose_checkpoint, load_parts
from mlx_runtime.companions.serving.predictor import Outputs, Predictor, rows_in
from mlx_runtime.companions.serving.stored_code import project_of
from mlx_runtime.companions.sharding import tensor_files
from mlx_runtime.companions.sharding.consolidation import consolidate
from mlx_runtime.data.batches import Batch, dtype_name
from mlx_runtime.errors import UsageError
from mlx_runtime.extras import require
from mlx_runtime.loop.experiment import BaseModule
from mlx_runtime.runs import snapshots
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.logs import last_lines
from mlx_runtime.runs.queries.reader import Run
from mlx_runtime.storage.documents import now
from mlx_runtime.storage.files import parent_of, size_text, storage_errors, to_json
from mlx_runtime.storage.publishing import Publication, recover
from mlx_runtime.storage.redaction import redact_tree

LIBRARIES = {
    "onnx": ("onnx", "onnxscript", "onnxruntime", "safetensors"),
    "aoti": ("safetensors",),
    "safetensors": ("safetensors",),
}
"""Libraries that the code in the README of a format needs, besides torch."""


@dataclass(frozen=True)
class Parts:
    """A run to be exported."""

    folder: RunFolder
    checkpoint: CheckpointInfo
    experiment: BaseModule
    nodes: Mapping[str, Any]
    predictor: Predictor
    project: Path


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
        formats: some of `PROGRAMS`, or `safetensors` for code that builds the models; the weights are always written.
        trust: use the stored code of the run.
        force: replace an earlier export.
        timeout_s: time limit of each check in a process of its own.
        report: receives a line when a stage begins.

    Raises:
        UsageError: the run cannot be exported in this format, or the folder exists.
        ExportError: `predict` cannot be exported, or the exported program has other outputs.
        MissingLibraryError: a format needs a library of the extra `export`.
    """
    _refuse_missing_tools(formats)
    chosen = choose_checkpoint(folder, checkpoint)
    output = output or Path(f"{folder.experiment}_{folder.name}_{chosen.name}")
    _refuse_present(output, force=force)
    report(f"loading   {chosen.name}")
    experiment, nodes, predictor = load_parts(Run(folder), folder, chosen, device="cpu", trust=trust)
    parts = Parts(folder, chosen, experiment, nodes, predictor, project_of(type(experiment)))
    wanted = [name for name in PROGRAMS if name in formats]
    if "onnx" in wanted and experiment.cfg.precision == "bf16":
        raise UsageError(f"{folder.title} computes in bfloat16, which onnxruntime lacks on CPUs; export pt2 or aoti")
    if wanted:
        programs.refuse_strings(predictor.schema)
    above, name = parent_of(str(output.resolve()))
    with storage_errors(f"cannot write {output}"), tempfile.TemporaryDirectory(prefix="mlx-export-") as scratch:
        Path(above.path).mkdir(parents=True, exist_ok=True)
        recover(above, name, lambda leftover: False)
        with Publication(above, name, EXPORT) as publication:
            staged = Path(above.path, publication.folder)
            about = _fill(staged, parts, wanted, Path(scratch), timeout_s, report, builds="safetensors" in formats)
            _refuse_present(output, force=force)
            publication.commit(to_json(about).encode())
    return _summary(output, about, predictor.schema.names)


def _refuse_missing_tools(formats: Sequence[str]) -> None:
    for name in formats:
        for library in LIBRARIES.get(name, ()):
            require(library, f"--format {name}")
    if "aoti" in formats and not any(map(shutil.which, ("g++", "clang++"))):
        raise UsageError("--format aoti needs a C++ compiler, and there is no g++ or clang++ here; use pt2")


def _refuse_present(output: Path, *, force: bool) -> None:
    if not output.exists():
        return
    if not is_export(output):
        raise UsageError(f"{output} exists and is not an export; name another folder with --output")
    if not force:
        raise UsageError(f"{output} exists; replace it with --force, or name another folder with --output")


def _fill(
    staged: Path,
    parts: Parts,
    wanted: list[str],
    scratch: Path,
    timeout_s: float,
    report: Callable[[str], object],
    *,
    builds: bool,
) -> dict[str, Any]:
    """Write all files of an export except `export.json`, whose content is returned."""
    schema, experiment = parts.predictor.schema, parts.experiment
    examples, limits, evidence = dict(schema.examples), None, None
    if wanted:
        evidence = collect(experiment, parts.nodes, parts.predictor, parts.project)
        schema = evidence.schema
        examples = programs.traced_rows(schema)
    outputs = parts.predictor.predict(examples, rows_in(examples))
    if wanted:
        report("tracing   predict")
        exported = programs.trace(experiment, schema, parts.project)
        limits = size_limits(exported)
        if "pt2" in wanted:
            torch.export.save(exported, staged / PROGRAMS["pt2"])
        if "aoti" in wanted:
            report(f"compiling {PROGRAMS['aoti']}")
            programs.write_compiled(exported, staged / PROGRAMS["aoti"])
        if "onnx" in wanted:
            report(f"writing   {PROGRAMS['onnx']}")
            programs.write_onnx(exported, staged / PROGRAMS["onnx"], list(schema.names), list(outputs))
    consolidate(parts.folder, parts.checkpoint.name, staged / "weights.safetensors")
    _write_examples(staged, examples)
    (staged / "schema.json").write_text(to_json(schema.document()))
    tokenizers = _write_tokenizers(staged, parts)
    about = _description(parts, wanted, outputs, limits, staged)
    about |= {"code": _write_code(staged, parts.folder), "proof": _shape_of_proof(evidence)}
    origin = origins.origin(experiment, parts.nodes, parts.project)

    def write_readme(models: Mapping[str, Any] | None) -> None:
        made = instructions.text(about, schema, programs=wanted, origin=origin, tokenizers=tokenizers, models=models)
        (staged / "README.md").write_text(made, encoding="utf-8")

    if builds:
        about["build_problem"] = "the run has stored no code"
        if about["code"]:
            report("checking  the code that builds the models")
            write_readme(_models(parts))
            about["build_problem"] = _build_problem(staged, timeout_s)
    if not builds or about["build_problem"]:
        write_readme(None)
    if evidence is not None:
        report(f"checking  {' and '.join(PROGRAMS[name] for name in wanted)} with rows of {evidence.source}")
        about["proof"]["programs"] = prove(staged, wanted, evidence, (examples, outputs), scratch, timeout_s)
    shutil.rmtree(staged / "__pycache__", ignore_errors=True)
    about["files"] = {}
    for file in sorted(file for file in staged.rglob("*") if file.is_file()):
        sha256, size = sha256_of(file)
        about["files"][str(file.relative_to(staged))] = {"size_bytes": size, "sha256": sha256}
    return about


def _description(
    parts: Parts, wanted: list[str], outputs: Outputs, limits: dict[str, Any] | None, staged: Path
) -> dict[str, Any]:
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
        "machine": f"{platform.system()} {platform.machine()}",
        "license": copy_license(parts.project, staged),
        "programs": wanted,
        "inputs": limits,  # sizes by column: a number, or minimum and maximum
        "outputs": {name: [dtype_name(value), list(value.shape[1:])] for name, value in outputs.items()},
    }


def _shape_of_proof(evidence: Evidence | None) -> dict[str, Any] | None:
    if evidence is None:
        return None
    shapes = {
        rows: {name: list(value.shape) for name, value in batch.items()} for rows, (batch, _) in evidence.cases.items()
    }
    return {
        "rows_of": evidence.source,
        "batch_sizes": list(SIZES),
        "shapes": shapes,
        "tolerance": evidence.tolerance,
    }


def _write_examples(staged: Path, examples: Batch) -> None:
    tensors = {name: value for name, value in examples.items() if isinstance(value, torch.Tensor)}
    with (staged / "examples.safetensors").open("wb") as file:
        tensor_files.write(file, tensors)
    if texts := {name: value for name, value in examples.items() if isinstance(value, list)}:
        (staged / "examples.json").write_text(to_json(texts))


def _write_tokenizers(staged: Path, parts: Parts) -> dict[str, Any]:
    """Save the tokenizers of a run. Return them by folder."""
    found = origins.tokenizers(parts.experiment, parts.nodes)
    folders = ["tokenizer"] if len(found) == 1 else [f"tokenizer/{name}" for name in found]
    for folder, item in zip(folders, found.values(), strict=True):
        item.save_pretrained(str(staged / folder))
    return dict(zip(folders, found.values(), strict=True))


def _write_code(staged: Path, folder: RunFolder) -> bool:
    """Unpack the stored code of a run. Return False if it has none; raise UsageError if it holds likely secrets."""
    try:
        unpacked = snapshots.unpack(folder)
    except UsageError:
        return False
    archive = staged / snapshots.CODE
    with zipfile.ZipFile(archive, "w") as packed:
        for file in sorted(unpacked.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                packed.write(file, file.relative_to(unpacked))
    refuse_secrets(archive, "the export")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(staged / "code")
    archive.unlink()
    return True


def _models(parts: Parts) -> Mapping[str, Any]:
    node: Mapping[str, Any] = redact_tree(Run(parts.folder).config)["models"]
    return node


def _build_problem(staged: Path, timeout_s: float) -> str | None:
    """Run the code in README.md that builds the models. Return why it fails, in one line, or None."""
    code = re.findall(r"```python\n(.*?)```", (staged / "README.md").read_text(encoding="utf-8"), re.DOTALL)[-1]
    paths = f"import sys\nsys.path[1:1] = {[item for item in sys.path if item]!r}\n"
    command = [sys.executable, "-B", "-c", paths + code]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, cwd=staged, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return too_slow("it", timeout_s)
    return last_lines(done.stderr.decode(errors="replace").strip(), 1) or "it failed" if done.returncode else None


def copy_license(project: Path, staged: Path) -> str | None:
    """Copy the license files of a project. Return its license in pyproject.toml, or the first line of a file."""
    named = None
    if (project / "pyproject.toml").is_file():
        section = (project / "pyproject.toml").read_text(encoding="utf-8").partition("[project]")[2].partition("\n[")[0]
        found = re.search(r'^license\s*=\s*(?:\{\s*text\s*=\s*)?"([^"\n]+)"', section, re.MULTILINE)
        named = found and found[1]
    for file in sorted(filter(Path.is_file, project.glob("LICEN[CS]E*"))):
        text = file.read_text(encoding="utf-8", errors="replace")
        shutil.copy(file, staged / file.name)
        named = named or next((line.strip() for line in text.splitlines() if line.strip()), None)
    return named


def _summary(output: Path, about: Mapping[str, Any], reads: Sequence[str]) -> str:
    size = sum(item["size_bytes"] for item in about["files"].values())
    title = f"{about['experiment']}/{about['run']} {about['checkpoint']['name']} (reads {', '.join(reads)})"
    line = f"wrote {output}: {title}, {len(about['files'])} files, {size_text(size)}"
    if problem := about.get("build_problem"):
        line += f"; README.md has no code that builds the models: {problem}"
    if (proof := about["proof"]) is None:
        return f"{line}; without a program, so nothing was compared"
    largest = max(item["largest_difference"] for item in proof["programs"].values())
    compared = f"{', '.join(about['programs'])} compared with predict on {sum(proof['batch_sizes'])} rows of"
    return f"{line}; {compared} {proof['rows_of']}: at most {largest:.2g} apart (tolerance {proof['tolerance']:g})"
