"""Secrets of many kinds are recognized in any context, and other text remains readable."""

import pytest

from mlx_runtime.companions.hub.detection import find_secrets
from mlx_runtime.storage.redaction import redact, redact_override, redact_tree

pytestmark = pytest.mark.pure

WORDS = "hunter2-tell-nobody"
KEY = "Xk29fjQ81mZpq77Lw0tR"
"""What a person and what a service makes up."""

COMMIT = "da55b4c0e0f4d33f84db21cb9df16ce8dc1e0a5b"
SHA256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

PLANTED = {
    "override: token": "tools.client.token=" + WORDS,
    "override: a new token": "+tools.hub.hf_token=" + WORDS,
    "override: db_pass": "cfg.db_pass=" + WORDS,
    "override: pass": "cfg.smtp.pass=" + WORDS,
    "override: quoted": f"tools.api.api_key='{WORDS} and more'",
    "override: in a dict": "tools.client={url: x, token: " + WORDS + "}",
    "override: webhook": "callbacks.slack.webhook_url=https://example.com/a/" + WORDS,
    "override: client secret": "tools.oauth.clientSecret=" + WORDS,
    "override: headers": "tools.client.headers={Authorization: 'Token " + WORDS + "'}",
    "override: connection string": "cfg.store='DefaultEndpointsProtocol=https;AccountName=x;AccountKey="
    + "a1B2" * 21
    + "=='",
    "env: token": "HF_TOKEN=" + WORDS,
    "env: export": "export WANDB_API_KEY=" + WORDS,
    "env: aws": "AWS_SECRET_ACCESS_KEY=" + WORDS,
    "env: session": "AWS_SESSION_TOKEN=" + KEY,
    "env: glued": "PGPASSWORD=" + WORDS,
    "env: pass": "DB_PASS=" + WORDS,
    "env: url": "DATABASE_URL=postgres://me:" + WORDS + "@db/x",
    "header: bearer": "Authorization: Bearer " + WORDS,
    "header: basic": "Authorization: Basic bWU6aHVudGVyMg==",
    "header: token": "Authorization: token " + WORDS,
    "header: dict": 'headers = {"Authorization": "Basic bWU6aHVudGVyMg=="}',
    "header: api key": "-H 'X-Api-Key: " + WORDS + "'",
    "header: private token": "PRIVATE-TOKEN: " + WORDS,
    "header: cookie": "Cookie: session=" + WORDS,
    "query: aws": "https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Signature=" + "ab12" * 16,
    "query: aws credential": "https://b/k?X-Amz-Credential=AKIAABCDEFGHIJKLMNOP%2F2026",
    "query: aws token": "https://b/k?X-Amz-Security-Token=" + WORDS,
    "query: gcs": "https://storage.googleapis.com/b/o?X-Goog-Signature=0a1b2c",
    "query: access token": "https://x.org/a?access_token=" + WORDS + "&page=2",
    "userinfo: password": "postgres://me:" + WORDS + "@host/db",
    "userinfo: git": "https://oauth2:" + WORDS + "@gitlab.com/a/b.git",
    "userinfo: token": "https://ghp" + KEY + "@github.com/a/b",
    "userinfo: s3": "s3://KEY:" + WORDS + "@bucket/runs",
    "webhook: slack": "https://hooks.slack.com/services/T0AAAAAAA/B0BBBBBBB/" + KEY,
    "webhook: telegram": "https://api.telegram.org/bot123456789:AAF-abc_defghijklmnopqrstuvwxyz12345/send",
    "yaml: password": "password: " + WORDS,
    "yaml: token": '  token: "' + WORDS + '"',
    "yaml: unquoted token": "  token: " + WORDS,
    "yaml: changed line": "-  db_password: '" + WORDS + "'",
    "yaml: phrase": "passphrase: correct horse battery",
    "json": '{"auth": {"refresh_token": "' + WORDS + '"}}',
    "json in json": '"{\\"api_key\\": \\"' + WORDS + '\\"}"',
    "diff: item": '+os.environ["WANDB_API_KEY"] = "' + WORDS + '"',
    "python: constant": "API_KEY = '" + WORDS + "'",
    "python: typed": 'token: str = "' + WORDS + '"',
    "python: keyword": 'login(password="' + WORDS + '")',
    "python: comparison": 'if password == "' + WORDS + '":',
    "python: bytes": "secret = b'" + WORDS + "'",
    "python: private key": "KEY = '''-----BEGIN OPENSSH PRIVATE KEY-----\n"
    + WORDS
    + "\n-----END OPENSSH PRIVATE KEY-----'''",
    "option: token": "--hf-token=" + WORDS,
    "github": "x ghp_" + "a1" * 18,
    "gitlab": "x glpat-" + "a1" * 10,
    "hugging face": "x hf_" + "aB" * 17,
    "openai": "x sk-" + "a1" * 10 + "T3BlbkFJ" + "a1" * 10,
    "openai project": "sk-proj-" + "aB3_" * 10,
    "slack": "x xoxb-123456789012-" + KEY,
    "aws": "x AKIAABCDEFGHIJKLMNOP",
    "google": "AIza" + "aB3-_" * 7,
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJlLW9mLXRva2Vu",
    "stripe": "x sk_live_" + "a1" * 12,
    "sendgrid": "SG." + "a1" * 11 + "." + "b2" * 21 + "c",
    "npm": "//registry.npmjs.org/:_authToken=npm_" + "aB1" * 12,
    "pypi": "pypi-AgEIcHlwaS5vcmc" + "aB1" * 25,
}
HARMLESS = [
    "optimizers.adam.lr=1e-4",
    "optimizers.adam.lr=0.0003",
    "optimizers.adam.betas=[0.9,0.999]",
    "cfg.seed=123456789",
    "cfg.num_epochs=20",
    "cfg.storage_path=/mnt/data/runs/2026-11-24/exp_01",
    "cfg.storage_path=s3://bucket/runs?region=eu",
    "cfg.restore_checkpoint_path=/a/b/run_003/checkpoints/epoch_0012",
    f"git checkout {COMMIT}",
    f"commit: {COMMIT}",
    f'revision="{COMMIT}"',
    f"sha256: {SHA256}",
    f'"digest": "{SHA256}"',
    "hash=da55b4c",
    "id: 123e4567-e89b-12d3-a456-426614174000",
    "cfg.name=resnet50_cifar10_lr1e-3_bs256_seed42",
    "cfg.name=vit_base_patch16_224.augreg_in21k_ft_in1k",
    "models.name=sentence-transformers/all-MiniLM-L6-v2",
    "models.name=meta-llama/Llama-3.1-8B-Instruct",
    "models.name=Qwen2ForSequenceClassification",
    'model = "GPT2LMHeadModel"',
    '"mistralai/Mixtral-8x7B-Instruct-v0.1"',
    "run_2026-11-24T01:55:27",
    "cfg.name=20261124_015527_ab12cd",
    "hf://alice/digits@" + COMMIT,
    "https://huggingface.co/alice/digits/blob/main/README.md?raw=1",
    f"https://github.com/a/b/commit/{COMMIT}",
    "https://github.com/pre-commit/pre-commit-hooks",
    "https://docs.github.com/en/webhooks/about-webhooks",
    "https://host:8265/#/jobs/raysubmit_2",
    "ssh://git@github.com/a/b",
    "git@github.com:a/b",
    "me@example.com",
    "tokenizer=bert",
    "tokenizer: bert-base-uncased",
    "max_tokens=512",
    "n_tokens: 2048",
    "models.token_embedding=nn.Embedding",
    "token_embedding = nn.Embedding(50257, 768)",
    "num_tokens=5",
    "eos_token=</s>",
    "pad_token: '[PAD]'",
    "bos_token = '<|endoftext|>'",
    "mask_token: '<mask>'",
    "loss_per_token=0.31",
    "token_type_ids = batch",
    "tokens_per_second: 123456",
    "password=${oc.env:WORDS}",
    "password: '${oc.env:WORDS}'",
    "api_key: null",
    "password = getpass()",
    "passwords=3",
    "token = next_token",
    "for token in tokens:",
    "token: str",
    "def login(password: str) -> bool:",
    "client = Client(token=self.token)",
    "login(password=args.password)",
    'key = os.environ["HF_TOKEN"]',
    'headers = {"Authorization": f"Bearer {token}"}',
    "Authorization: Bearer ${HF_TOKEN}",
    "cfg.secrets=[WANDB_API_KEY]",
    "the password is wrong: try again",
    "cfg.name=secretary",
    "a = b[token]",
    "keyboard: us",
    "primary_key=id",
    "sort_key=accuracy_of_test",
    "monkey=see",
    "signature = inspect.signature(function)",
    "first_pass: true",
    "n_pass=3",
    "authkey = None",
    "Basic training of a model",
    "HF_TOKEN=<your token>",
    "HF_TOKEN=...",
    "_target_: src.models.ConvNet2dWithBatchNorm",
    "models.net._target_=torch.nn.TransformerEncoderLayer",
    'alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"',
    "@@ -1,7 +1,9 @@ class Experiment(BaseModule):",
    "index 8a1c2f3..9b2d4e5 100644",
    "losses.token={_target_: src.losses.Focal}",
    "docker run -u 1000:1000 image",
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


@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", ["password", "a.b-c", "=", "x://", "'", "(", "a", '\\"', "token: ", "y "])
def test_the_time_of_a_scan_is_linear(part: str) -> None:
    """A megabyte of code takes about a second; 30 kB of what is slow for a regular expression could take hours."""
    find_secrets(part * (30_000 // len(part)), "conf.yaml")
