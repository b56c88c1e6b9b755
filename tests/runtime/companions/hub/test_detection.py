"""Secrets of many kinds are recognized in any context, and other text remains readable."""

from pathlib import Path

import pytest

from mlx_runtime.companions.hub.detection import find_secrets, refuse_secrets
from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.storage.redaction import redact, redact_override, redact_tree

pytestmark = pytest.mark.pure

WORDS = "hunter2-tell-nobody"
KEY = "Xk29fjQ81mZpq77Lw0tR"
"""What a person and what a service makes up."""

COMMIT = "da55b4c0e0f4d33f84db21cb9df16ce8dc1e0a5b"

PLANTED = {
    "override: token": "tools.client.token=" + WORDS,
    "override: headers": "tools.client.headers={Authorization: 'Token " + WORDS + "'}",
    "env: export": "export WANDB_API_KEY=" + WORDS,
    "header: bearer": "Authorization: Bearer " + WORDS,
    "header: basic": "Authorization: Basic bWU6aHVudGVyMg==",
    "query: aws": "https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Signature=" + "ab12" * 16,
    "userinfo: password": "postgres://me:" + WORDS + "@host/db",
    "yaml: token": '  token: "' + WORDS + '"',
    "json in json": '"{\\"api_key\\": \\"' + WORDS + '\\"}"',
    "python: constant": "API_KEY = '" + WORDS + "'",
    "python: private key": "KEY = '''-----BEGIN OPENSSH PRIVATE KEY-----\n"
    + WORDS
    + "\n-----END OPENSSH PRIVATE KEY-----'''",
    "github": "x ghp_" + "a1" * 18,
    "hugging face": "x hf_" + "aB" * 17,
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJlLW9mLXRva2Vu",
    "pypi": "pypi-AgEIcHlwaS5vcmc" + "aB1" * 25,
}
HARMLESS = [
    "# HF_TOKEN=hf_...",
    f"git checkout {COMMIT}",
    "dataset_files: {train: " + "da55b4c0" * 8 + "}",
    "cfg.name=vit_base_patch16_224.augreg_in21k_ft_in1k",
    '"mistralai/Mixtral-8x7B-Instruct-v0.1"',
    "hf://alice/digits@" + COMMIT,
    "ssh://git@github.com/a/b",
    "tokenizer: bert-base-uncased",
    "token_embedding = nn.Embedding(50257, 768)",
    "password=${oc.env:WORDS}",
    "password = getpass()",
    "def login(password: str) -> bool:",
    'key = os.environ["HF_TOKEN"]',
    "primary_key=id",
    "HF_TOKEN=<your token>",
    "@@ -1,7 +1,9 @@ class Experiment(BaseModule):",
    "def f(token='cls_token'): ...",
]


@pytest.mark.parametrize("name", PLANTED)
def test_a_secret_is_found(name: str) -> None:
    assert find_secrets(f"before\n{PLANTED[name]}\nafter", "conf.yaml")[0] == "conf.yaml:2"


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_harmless_is_not(text: str) -> None:
    """Neither in uploads, nor in records, which are redacted by key."""
    lines = f"before\n{text}\nafter"
    assert find_secrets(lines, "conf.yaml") == find_secrets(lines, "src/tools.py") == []
    assert redact(lines) == lines
    assert redact_override(text) == text
    assert redact_tree([text]) == [text]


def test_only_literals_in_code_are_secrets() -> None:
    code = f"""client = Client(password=typed, token=self.token)
API_KEY: str = "{WORDS}"
URL = "https://x.org/a?access_token={WORDS}"
password = "{WORDS}"  # pragma: allowlist secret
"""
    assert find_secrets(code, "src/tools.py") == ["src/tools.py:2", "src/tools.py:3"]


def test_strings_without_quotes_are_found_except_in_code_and_prose() -> None:
    line = f"ENV WANDB_API_KEY={WORDS}"
    assert find_secrets(line, "Dockerfile") == ["Dockerfile:1"]
    for name in ("tools.py", "README.md"):
        assert find_secrets(line, name) == []


def test_a_value_in_a_stored_config_has_its_own_cure(tmp_path: Path) -> None:
    """A stored conf.yaml has no comments."""
    (tmp_path / "conf.yaml").write_text(f"tools: {{token: average, password: {WORDS}}}\n")
    with pytest.raises(UsageError, match=r"^conf.yaml: tools.password would .*NAME}; in a .* edit its conf.yaml$"):
        refuse_secrets(tmp_path / "conf.yaml", "the export")


def test_a_damaged_archive_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "code.zip").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(StorageError, match=r"code.zip is damaged: .*zip file$"):
        refuse_secrets(tmp_path / "code.zip", "the export")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", ["password", "a.b-c", "=", "x://", "'", "(", "a", '\\"', "token: ", "y "])
def test_the_time_of_a_scan_is_linear(part: str) -> None:
    """A megabyte of code takes about a second; 30 kB of what is slow for a regular expression could take hours."""
    find_secrets(part * (30_000 // len(part)), "conf.yaml")
