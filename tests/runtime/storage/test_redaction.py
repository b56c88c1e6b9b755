"""Secrets in a config, or named by it, are in no file of a run, which can still be resumed and read."""

import json
import subprocess
from pathlib import Path

import pytest
from conftest import Mlx, edit

from mlx_runtime import open_run
from mlx_runtime.runs import records
from mlx_runtime.storage.redaction import is_secret, redact, redact_override, redact_tree

pytestmark = pytest.mark.pure

SECRET = "hunter2-tell-nobody"


@pytest.mark.parametrize(
    "name",
    [
        *("password", "cfg.db_password", "DB_PASSWD", "tools.api.api_key", "apikey", "HF_TOKEN", "cfg.hub_token"),
        *("x.secret", "AWS_SECRET_ACCESS_KEY", "aws_access_key_id", "credentials", "private_key", "auth-token"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)
    assert redact_override(f"{name}={SECRET}") == f"{name}=…"
    assert redact_override(f"+{name}='{SECRET} and more'") == f"+{name}=…"
    assert SECRET not in redact(f"main.py a=1 {name}={SECRET} b=2")
    assert SECRET not in redact(f'+  "{name}": "{SECRET}",')
    assert SECRET not in redact(f"-{name}: {SECRET}\n")
    assert redact_tree({"a": {name.rpartition(".")[2]: SECRET}}) == {"a": {name.rpartition(".")[2]: "…"}}


def test_a_word_is_no_token_but_a_passphrase_is() -> None:
    assert redact("token: average") == "token: average"
    assert redact_tree({"token": "correct-horse-staple"}) == {"token": "…"}


@pytest.mark.parametrize(
    "text",
    [
        *("eos_token=</s>", "num_tokens=5", "cfg.secrets=[WANDB_API_KEY]", "optimizers.adam.lr=1e-4", "tokenizer=bert"),
        *("password=${oc.env:PW}", "password: '${oc.env:PW}'", "api_key: null", "password = getpass()", "passwords=3"),
        *("s3://bucket/runs?region=eu", "me@example.com", "git@github.com:a/b", "the password is wrong: try again"),
        *("def login(password: str) -> bool:", "cfg.name=secretary", "a = b[token]", "keyboard: us"),
    ],
)
def test_what_is_none_stays(text: str) -> None:
    assert redact(text) == text
    assert redact_override(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *(f"postgres://me:{SECRET}@host/db", f"https://{SECRET}@bucket/runs", f"--token={SECRET}"),
        *(f"Authorization: Bearer {SECRET}", f'{{"Authorization": "Token {SECRET}"}}', f"AWS_SESSION_TOKEN={SECRET}"),
        *(f"login(password='{SECRET}')", f'PASSWORD: str = "{SECRET}"', f"cfg.db={{user: me, password: {SECRET}}}"),
        *(f"https://x.org/a?access_token={SECRET}", f'"{{\\"api_key\\": \\"{SECRET}\\"}}"'),
    ],
)
def test_the_values_of_names_and_users_in_urls_are_left_out(text: str) -> None:
    found = redact(f"before {text} after")
    assert SECRET not in found
    assert found.startswith("before ")
    assert found.endswith(" after")
    assert "…" in found
    assert redact(found) == found


# -- git --


def test_the_diff_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *arguments], cwd=tmp_path, check=True)

    names = [".env", ".env.local", "sub/.ENV", "key.pem", "sub/deep/id_rsa", ".aws/credentials", "my-credentials.json"]
    git("init", "-q")
    for name in [*names, "src/experiment.py", "src/conf.yaml"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before\n")
    git("add", "-f", ".")
    git("commit", "-qm", "all")
    for name in names:
        (tmp_path / name).write_text(f"{SECRET}\n")
    (tmp_path / "src/experiment.py").write_text(f'lr = 3\nclient.login(password="{SECRET}")\n')
    (tmp_path / "src/conf.yaml").write_text(f"cfg:\n  db_password: {SECRET}\n")
    monkeypatch.chdir(tmp_path)
    found = records.provenance([f"cfg.password={SECRET}", "cfg.seed=3"])
    assert SECRET not in json.dumps(found)
    assert len(found["git"]["commit"]) == 40
    assert '+lr = 3\n+client.login(password="…")\n' in found["git"]["diff"]
    assert not any(name.rpartition("/")[2] in found["git"]["diff"] for name in names)
    assert found["overrides"] == ["cfg.password=…", "cfg.seed=3"]


# -- a run --

CLIENT = """

class Client:
    def __init__(self, access: str = "", password: str = "", patience: int = 1):
        import os
        assert access in ("", os.environ.get("MLX_TEST_SECRET")), "not what the environment says"
        self.key, self.word, self.patience, self.calls = access, password, patience, 1
"""


@pytest.mark.process
def test_a_run_keeps_no_secret_and_resumes(digits: Path, mlx: Mlx, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool with a text from the environment and a typed password, in a run that is resumed."""
    (digits / "src/tools.py").write_text((digits / "src/tools.py").read_text() + CLIENT)
    edit(digits / "src/experiment.py", "import BestWeights", "import Client, BestWeights")
    edit(digits / "src/experiment.py", "class Tools:\n", "class Tools:\n    client: Client = Client()\n")
    assert mlx(digits, "train", "bind").returncode == 0
    edit(digits / "src/conf.yaml", 'access: ""', "access: ${oc.env:MLX_TEST_SECRET}")
    settings = {"MLX_TEST_SECRET": SECRET}
    typed = ["cfg.start_workers=0", "cfg.num_epochs=1", "tools.client.password=typed-1234"]
    done = mlx(digits, "train", "run", *typed, **settings)
    assert done.returncode == 0, done.stderr
    assert "note      conf.yaml of the run contains tools.client.password in plain text\n" in done.stdout
    folder = digits / "runs/digits/run_001"
    contents = {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert {"state.pt", "conf.yaml", "run.json"} < {*contents}
    assert [name for name, content in contents.items() if SECRET.encode() in content] == []
    assert [name for name, content in contents.items() if b"typed-1234" in content] == ["conf.yaml"]
    assert SECRET not in done.stdout + done.stderr

    done = mlx(digits, "train", "run", "--resume", "cfg.num_epochs=2", "tools.client.patience=3", **settings)
    assert done.returncode == 0, done.stderr
    state = open_run(folder).state()["tools"]["client"]
    assert state == {"patience": 3, "calls": 1}
    monkeypatch.setenv("MLX_TEST_SECRET", SECRET)
    assert open_run(folder).config["tools"]["client"]["access"] == SECRET
    shown = mlx(digits, "xp", "report", "digits", "-o", "page.html", **settings)
    assert shown.returncode == 0
    assert not {SECRET, "typed-1234"} & {*(digits / "page.html").read_text().split()}
    assert "typed-1234" not in (digits / "page.html").read_text()
