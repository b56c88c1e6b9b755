"""Secrets of many kinds are recognized in any context, and other text remains readable."""

import pytest

from mlx_runtime.companions.hub import detection
from mlx_runtime.storage.redaction import HIDDEN, redact, redact_override, redact_tree

pytestmark = pytest.mark.pure

WORDS = "hunter2-tell-nobody"
KEY = "Xk29fjQ81mZpq77Lw0tR"
"""What a person and what a service makes up."""

COMMIT = "da55b4c0e0f4d33f84db21cb9df16ce8dc1e0a5b"
SHA256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

PLANTED: dict[str, tuple[str, str]] = {
    # overrides
    "override: token": ("tools.client.token=" + WORDS, WORDS),
    "override: a new token": ("+tools.hub.hf_token=" + WORDS, WORDS),
    "override: db_pass": ("cfg.db_pass=" + WORDS, WORDS),
    "override: pass": ("cfg.smtp.pass=" + WORDS, WORDS),
    "override: quoted": (f"tools.api.api_key='{WORDS} and more'", WORDS),
    "override: random": ("tools.client.access=" + KEY, KEY),
    "override: in a dict": ("tools.client={url: x, token: " + WORDS + "}", WORDS),
    "override: webhook": ("callbacks.slack.webhook_url=https://example.com/a/" + WORDS, WORDS),
    "override: client secret": ("tools.oauth.clientSecret=" + WORDS, WORDS),
    "override: headers": ("tools.client.headers={Authorization: 'Token " + WORDS + "'}", WORDS),
    "override: connection string": (
        "cfg.store='DefaultEndpointsProtocol=https;AccountName=x;AccountKey=" + "a1B2" * 21 + "=='",
        "a1B2a1B2a1B2",
    ),
    # env
    "env: token": ("HF_TOKEN=" + WORDS, WORDS),
    "env: export": ("export WANDB_API_KEY=" + WORDS, WORDS),
    "env: aws": ("AWS_SECRET_ACCESS_KEY=" + WORDS, WORDS),
    "env: session": ("AWS_SESSION_TOKEN=" + KEY, KEY),
    "env: glued": ("PGPASSWORD=" + WORDS, WORDS),
    "env: pass": ("DB_PASS=" + WORDS, WORDS),
    "env: url": ("DATABASE_URL=postgres://me:" + WORDS + "@db/x", WORDS),
    # header
    "header: bearer": ("Authorization: Bearer " + WORDS, WORDS),
    "header: basic": ("Authorization: Basic bWU6aHVudGVyMg==", "bWU6aHVudGVyMg"),
    "header: token": ("Authorization: token " + WORDS, WORDS),
    "header: dict": ('headers = {"Authorization": "Basic bWU6aHVudGVyMg=="}', "bWU6aHVudGVyMg"),
    "header: bare basic": ("curl said Basic bWU6aHVudGVyMg==", "bWU6aHVudGVyMg"),
    "header: api key": ("-H 'X-Api-Key: " + WORDS + "'", WORDS),
    "header: private token": ("PRIVATE-TOKEN: " + WORDS, WORDS),
    "header: cookie": ("Cookie: session=" + WORDS, WORDS),
    # query
    "query: aws": ("https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Signature=" + "ab12" * 16, "ab12ab12"),
    "query: aws credential": ("https://b/k?X-Amz-Credential=AKIAABCDEFGHIJKLMNOP%2F2026", "AKIAABCDEFG"),
    "query: aws token": ("https://b/k?X-Amz-Security-Token=" + WORDS, WORDS),
    "query: sas": ("https://x.blob.core.windows.net/c?sv=2024&sig=abc%2Fdef%3D", "abc%2Fdef"),
    "query: gcs": ("https://storage.googleapis.com/b/o?X-Goog-Signature=0a1b2c", "0a1b2c"),
    "query: key": ("https://maps.example.com/x?key=" + WORDS, WORDS),
    "query: access token": ("https://x.org/a?access_token=" + WORDS + "&page=2", WORDS),
    # userinfo
    "userinfo: password": ("postgres://me:" + WORDS + "@host/db", WORDS),
    "userinfo: git": ("https://oauth2:" + WORDS + "@gitlab.com/a/b.git", WORDS),
    "userinfo: token": ("https://ghp" + KEY + "@github.com/a/b", KEY),
    "userinfo: s3": ("s3://KEY:" + WORDS + "@bucket/runs", WORDS),
    # webhooks
    "webhook: slack": ("https://hooks.slack.com/services/T0AAAAAAA/B0BBBBBBB/" + KEY, KEY),
    "webhook: discord": ("https://discord.com/api/webhooks/123456789012345678/" + KEY + "_abc", KEY),
    "webhook: teams": ("https://me.webhook.office.com/webhookb2/1b2c-3d@1b2c/IncomingWebhook/0a1b2c3d/9f", "0a1b2c3d"),
    "webhook: telegram": ("https://api.telegram.org/bot123456789:AAF-abc_defghijklmnopqrstuvwxyz12345/send", "AAF-abc"),
    "webhook: zapier": ("https://hooks.zapier.com/hooks/catch/123456/ab1cd2e", "ab1cd2e"),
    "webhook: ifttt": ("https://maker.ifttt.com/trigger/x/with/key/" + KEY, KEY),
    # yaml
    "yaml: password": ("password: " + WORDS, WORDS),
    "yaml: token": ('  token: "' + WORDS + '"', WORDS),
    "yaml: unquoted token": ("  token: " + WORDS, WORDS),
    "yaml: changed line": ("-  db_password: '" + WORDS + "'", WORDS),
    "yaml: random": ("  access: " + KEY, KEY),
    "yaml: phrase": ("passphrase: correct horse battery", "horse"),
    "json": ('{"auth": {"refresh_token": "' + WORDS + '"}}', WORDS),
    "json in json": ('"{\\"api_key\\": \\"' + WORDS + '\\"}"', WORDS),
    # diff
    "diff: bare quoted value": ('+    "' + KEY + '",', KEY),
    "diff: argument": ('+client.connect("me", "' + KEY + '")', KEY),
    "diff: login": ('+    huggingface_hub.login("' + WORDS + '")', WORDS),
    "diff: auth": ('+    auth=("me", "' + WORDS + '"))', WORDS),
    "diff: a pair": ('+    os.environ.setdefault("HF_TOKEN", "' + WORDS + '")', WORDS),
    "diff: item": ('+os.environ["WANDB_API_KEY"] = "' + WORDS + '"', WORDS),
    # python
    "python: constant": ("API_KEY = '" + WORDS + "'", WORDS),
    "python: typed": ('token: str = "' + WORDS + '"', WORDS),
    "python: keyword": ('login(password="' + WORDS + '")', WORDS),
    "python: comparison": ('if password == "' + WORDS + '":', WORDS),
    "python: bytes": ("secret = b'" + WORDS + "'", WORDS),
    "python: private key": (
        "KEY = '''-----BEGIN OPENSSH PRIVATE KEY-----\n" + WORDS + "\n-----END OPENSSH PRIVATE KEY-----'''",
        WORDS,
    ),
    # command line
    "option: password": ("--password " + WORDS, WORDS),
    "option: token": ("--hf-token=" + WORDS, WORDS),
    "option: user": ("curl -u me:" + WORDS + " x", WORDS),
    # services
    "github": ("x ghp_" + "a1" * 18, "ghp_a1"),
    "gitlab": ("x glpat-" + "a1" * 10, "glpat-a1"),
    "hugging face": ("x hf_" + "aB" * 17, "hf_aB"),
    "openai": ("x sk-" + "a1" * 10 + "T3BlbkFJ" + "a1" * 10, "T3Blbk"),
    "openai project": ("sk-proj-" + "aB3_" * 10, "aB3_aB"),
    "slack": ("x xoxb-123456789012-" + KEY, KEY),
    "aws": ("x AKIAABCDEFGHIJKLMNOP", "AKIA"),
    "google": ("AIza" + "aB3-_" * 7, "aB3-_a"),
    "jwt": ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJlLW9mLXRva2Vu", "c2lnbmF0"),
    "stripe": ("x sk_live_" + "a1" * 12, "a1a1"),
    "sendgrid": ("SG." + "a1" * 11 + "." + "b2" * 21 + "c", "b2b2"),
    "npm": ("//registry.npmjs.org/:_authToken=npm_" + "aB1" * 12, "aB1a"),
    "pypi": ("pypi-AgEIcHlwaS5vcmc" + "aB1" * 25, "aB1a"),
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


def screened(text: str) -> str:
    for secret in reversed(detection.find(text)):
        text = text[: secret.start] + HIDDEN + text[secret.end :]
    return text


@pytest.mark.parametrize("name", PLANTED)
def test_a_secret_is_recognized(name: str) -> None:
    text, secret = PLANTED[name]
    shown = screened(f"before\n{text}\nafter")
    assert secret not in shown
    assert shown.startswith("before\n")
    assert shown.endswith("\nafter")
    assert screened(shown) == shown


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_harmless_stays(text: str) -> None:
    """Both in uploads and in records, which are redacted by key."""
    lines = f"before\n{text}\nafter"
    assert screened(lines) == redact(lines) == lines
    assert redact_override(text) == text
    assert redact_tree([text]) == [text]


def test_names_in_code_are_not_secrets() -> None:
    code = 'client = Client(password=typed, token=self.token)\nAPI_KEY: str = "' + WORDS + '"\n'
    (found,) = detection.find(code, code=True)
    assert (code[found.start : found.end], found.kind) == (WORDS, "api_key")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", ["password", "a.b-c", "=", "x://", "'", "(", "a", '\\"', "login(a,", "token: ", "y "])
def test_the_time_of_a_scan_is_linear(part: str) -> None:
    """A megabyte of a diff takes about a second; 30 kB of what is slow for a regular expression could take hours."""
    detection.find(part * (30_000 // len(part)))
    redact(part * (30_000 // len(part)))
