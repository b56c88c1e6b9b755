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
SHA256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

PLANTED = {
    "override: token": "tools.client.token=" + WORDS,
    "override: db_pass": "cfg.db_pass=" + WORDS,
    "override: in a dict": "tools.client={url: x, token: " + WORDS + "}",
    "override: headers": "tools.client.headers={Authorization: 'Token " + WORDS + "'}",
    "override: connection string": "cfg.store='DefaultEndpointsProtocol=https;AccountName=x;AccountKey="
    + "a1B2" * 21
    + "=='",
    "env: export": "export WANDB_API_KEY=" + WORDS,
    "env: aws": "AWS_SECRET_ACCESS_KEY=" + WORDS,
    "header: bearer": "Authorization: Bearer " + WORDS,
    "header: basic": "Authorization: Basic bWU6aHVudGVyMg==",
    "header: api key": "-H 'X-Api-Key: " + WORDS + "'",
    "header: cookie": "Cookie: session=" + WORDS,
    "query: aws": "https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Signature=" + "ab12" * 16,
    "query: gcs": "https://storage.googleapis.com/b/o?X-Goog-Signature=0a1b2c",
    "query: access token": "https://x.org/a?access_token=" + WORDS + "&page=2",
    "userinfo: password": "postgres://me:" + WORDS + "@host/db",
    "userinfo: token": "https://ghp" + KEY + "@github.com/a/b",
    "webhook: slack": "https://hooks.slack.com/services/T0AAAAAAA/B0BBBBBBB/" + KEY,
    "yaml: token": '  token: "' + WORDS + '"',
    "yaml: changed line": "-  db_password: '" + WORDS + "'",
    "yaml: phrase": "passphrase: correct horse battery",
    "json in json": '"{\\"api_key\\": \\"' + WORDS + '\\"}"',
    "python: constant": "API_KEY = '" + WORDS + "'",
    "python: typed": 'token: str = "' + WORDS + '"',
    "python: private key": "KEY = '''-----BEGIN OPENSSH PRIVATE KEY-----\n"
    + WORDS
    + "\n-----END OPENSSH PRIVATE KEY-----'''",
    "github": "x ghp_" + "a1" * 18,
    "hugging face": "x hf_" + "aB" * 17,
    "openai project": "sk-proj-" + "aB3_" * 10,
    "slack": "x xoxb-123456789012-" + KEY,
    "aws": "x AKIAABCDEFGHIJKLMNOP",
    "google": "AIza" + "aB3-_" * 7,
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJlLW9mLXRva2Vu",
    "stripe": "x sk_live_" + "a1" * 12,
    "pypi": "pypi-AgEIcHlwaS5vcmc" + "aB1" * 25,
}
HARMLESS = [
    "# HF_TOKEN=hf_...",
    "optimizers.adam.lr=1e-4",
    "cfg.storage_path=s3://bucket/runs?region=eu",
    f"git checkout {COMMIT}",
    f'revision="{COMMIT}"',
    f"sha256: {SHA256}",
    "id: 123e4567-e89b-12d3-a456-426614174000",
    "cfg.name=vit_base_patch16_224.augreg_in21k_ft_in1k",
    'model = "GPT2LMHeadModel"',
    '"mistralai/Mixtral-8x7B-Instruct-v0.1"',
    "hf://alice/digits@" + COMMIT,
    "https://huggingface.co/alice/digits/blob/main/README.md?raw=1",
    "https://docs.github.com/en/webhooks/about-webhooks",
    "https://host:8265/#/jobs/raysubmit_2",
    "ssh://git@github.com/a/b",
    "git@github.com:a/b",
    "tokenizer: bert-base-uncased",
    "max_tokens=512",
    "models.token_embedding=nn.Embedding",
    "token_embedding = nn.Embedding(50257, 768)",
    "pad_token: '[PAD]'",
    "mask_token: '<mask>'",
    "token_type_ids = batch",
    "password=${oc.env:WORDS}",
    "api_key: null",
    "password = getpass()",
    "token = next_token",
    "for token in tokens:",
    "def login(password: str) -> bool:",
    "login(password=args.password)",
    'key = os.environ["HF_TOKEN"]',
    'headers = {"Authorization": f"Bearer {token}"}',
    "cfg.secrets=[WANDB_API_KEY]",
    "the password is wrong: try again",
    "cfg.name=secretary",
    "a = b[token]",
    "primary_key=id",
    "monkey=see",
    "n_pass=3",
    "HF_TOKEN=<your token>",
    "_target_: src.models.ConvNet2dWithBatchNorm",
    'alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"',
    "@@ -1,7 +1,9 @@ class Experiment(BaseModule):",
    "docker run -u 1000:1000 image",
    "from tools import hf_hub_download_with_retry",
    "sk-text-repr-fallback",
    "def f(token='cls_token'): ...",
    "signature: serving_default",
    "webhook_url: https://example.com",
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


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("Dockerfile", f"ENV WANDB_API_KEY={WORDS}"),
        ("scripts/run.bash", f"export WANDB_API_KEY={WORDS}"),
        ("setup.env.txt", f"HF_TOKEN={WORDS}"),
    ],
)
def test_strings_without_quotes_are_found_except_in_code_and_prose(file: str, line: str) -> None:
    assert find_secrets(line, file) == [f"{file}:1"]
    for name in ("tools.py", "notes.ipynb", "README.md", "index.rst"):
        assert find_secrets(line, name) == []


def test_a_value_in_a_stored_config_has_its_own_cure(tmp_path: Path) -> None:
    """A stored conf.yaml has no comments."""
    (tmp_path / "conf.yaml").write_text(f"tools: {{token: average, password: {WORDS}}}\n")
    with pytest.raises(UsageError, match=r"^conf.yaml: tools.password would .*NAME}; in a .* edit its conf.yaml$"):
        refuse_secrets(tmp_path / "conf.yaml", "the export")


@pytest.mark.parametrize("content", [b"PK\x03\x04 and no more"])
def test_a_damaged_archive_is_an_error_of_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "code.zip").write_bytes(content)
    with pytest.raises(StorageError, match=r"code.zip is damaged: .*zip file$"):
        refuse_secrets(tmp_path / "code.zip", "the export")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", ["password", "a.b-c", "=", "x://", "'", "(", "a", '\\"', "token: ", "y "])
def test_the_time_of_a_scan_is_linear(part: str) -> None:
    """A megabyte of code takes about a second; 30 kB of what is slow for a regular expression could take hours."""
    find_secrets(part * (30_000 // len(part)), "conf.yaml")
