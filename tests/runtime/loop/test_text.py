"""Hugging Face datasets and models in real runs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Mlx, unbound
from hub_server import Hub
from omegaconf import OmegaConf
from tiny_bert import save_tiny_bert

Make = Callable[[str], Path]


@pytest.fixture
def folder(experiment: Make) -> Path:
    folder = experiment("text")
    rows = [{"row": row, "text": "word " * (1 + row * 7 % 5)} for row in range(21)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.local
def test_two_workers_read_every_row_once_and_map_it_once(mlx: Mlx, folder: Path, tmp_path: Path) -> None:
    done = mlx(folder, "train", "bind", MLX_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not (folder / "made.txt").exists()  # only declared
    nodes = OmegaConf.load(folder / "src" / "conf.yaml").datasets
    assert nodes.more == {"_target_": "src.experiment.some", "rows": 9, "batch_size": 2}
    assert (nodes.val["_target_"], nodes.val.batch_size) == ("mlx_runtime.datasets.Batched", 8)
    assert (nodes.val.source["_target_"], nodes.val.source.split) == ("datasets.load.load_dataset", "train")
    done = mlx(
        folder, "train", "run", "datasets.train.batch_size=3", "datasets.more.batch_size=1", MLX_CACHE=str(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    ranks = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]
    for name, rows, steps in (("train", 21, 4), ("more", 9, 4), ("val", 21, 2)):
        for epoch in range(2):
            read = [batch for rank in ranks for batch in rank[name][epoch]]
            assert sorted(row for batch in read for row in batch) == list(range(rows)), name
            assert [len(rank[name][epoch]) for rank in ranks] == [steps] * 2
    assert ranks[0]["train"][0] != ranks[0]["train"][1]
    assert ranks[0]["val"][0] == ranks[0]["val"][1] == [sorted(batch) for batch in ranks[0]["val"][0]]
    assert sorted(map(int, (folder / "mapped.txt").read_text().split())) == list(range(21))


@pytest.mark.kills  # it stops and continues a run, and takes ten seconds
def test_weights_are_downloaded_once_and_not_at_all_if_a_checkpoint_overwrites_them(
    mlx: Mlx, python: Mlx, baked: Path, tmp_path: Path
) -> None:
    folder = unbound("bert", baked, tmp_path)
    with Hub() as hub:
        commit = hub.upload_folder("org/bert", save_tiny_bert(tmp_path / "model"))

        def run(home: str, *arguments: str, **settings: str) -> str:
            settings = hub.variables(None) | {"HF_HOME": str(tmp_path / home), "MLX_CACHE": str(tmp_path)} | settings
            done = mlx(folder, "train", *arguments, **settings)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        def weights() -> list[str]:
            return [path for method, path in hub.requests if method == "GET" and path.endswith("model.safetensors")]

        run("one", "bind")
        nodes = OmegaConf.load(folder / "src" / "conf.yaml")
        assert nodes.models.net.pretrained_model_name_or_path == "org/bert"
        assert nodes.models.net.revision == nodes.datasets.train.tokenizer.revision == commit
        assert not [path for _, path in hub.requests if "/resolve/" in path]
        run("one", "run")
        assert len(weights()) == 1  # of two workers
        record = json.loads((folder / "runs" / "bert" / "run_001" / "run.json").read_text())
        assert record["hub"]["models.net"] == {"repository": "org/bert", "kind": "model", "revision": commit}
        assert set(record["hub"]) == {"models.net", "datasets.train.tokenizer"}
        assert "restored" in run("two", "run", "--resume=run_001", "cfg.num_epochs=2")
        read = (
            "from mlx_runtime import open_run; run = open_run('bert/run_001'); run.load_models().net.classifier\n"
            "predictor = run.predictor(); rows = [{'input_ids': [2, 5, 3], 'attention_mask': [1, 1, 1]}]\n"
            "assert predictor.schema.names == ('input_ids', 'attention_mask')\n"
            "assert predictor(rows)['logits'].shape == (1, 2)"
        )
        (folder / "read.py").write_text(read)
        done = python(folder, "read.py", **hub.variables(None), HF_HOME=str(tmp_path / "three"))
        assert done.returncode == 0, done.stderr
        asked = len(hub.requests)
        run("one", "run", "cfg.start_workers=0", HF_HUB_OFFLINE="1")
        assert (len(weights()), len(hub.requests)) == (1, asked)
        other = hub.upload_folder("org/other", save_tiny_bert(tmp_path / "other", seed=1))
        run("one", "run", "models.net.pretrained_model_name_or_path=org/other", "cfg.start_workers=0")
        record = json.loads((folder / "runs" / "bert" / "run_003" / "run.json").read_text())
        assert record["hub"]["models.net"] == {"repository": "org/other", "kind": "model", "revision": other}
        assert record["hub"]["datasets.train.tokenizer"]["revision"] == commit
