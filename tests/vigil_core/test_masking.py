"""Test masking secrets in everything that leaves a log: known forms become dots, ordinary lines stay the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from diagnosis.evaluate import CASE, read_cases
from vigil_core.masking import DOTS, Form, forms, masked

LOGS = Path(__file__).parents[1] / "logs"
A, N, HEX = "a" * 40, "0a1b2c3d" * 8, "0123456789abcdef" * 4
B64 = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC" * 2
PEM = f"-----BEGIN RSA PRIVATE KEY-----\n{B64}\n-----END RSA PRIVATE KEY-----"
# Lines as people's logs have them, and what must not be readable in each. Long secrets are concatenated, so that
# scanners of repositories do not take them for real ones.
LINES = {
    "our token for a person": ("requests: 401 for vgl_" + A, "vgl_" + A),
    "our token for an attempt": ("report: vga_" + A + " refused", "vga_" + A),
    "our secret for enrolling": ("vigil-agent --secret vge_" + A, "vge_" + A),
    "our secret of a webhook": ("signed by whsec_" + A, "whsec_" + A),
    "password after a flag": ("+ python train.py --password hunter2x", "hunter2x"),
    "password joined to a flag": ("+ python train.py --db-password=hunter2x", "hunter2x"),
    "key after a flag": ("+ python train.py --api-key 8c1f9aa0", "8c1f9aa0"),
    "a flag in a list of arguments": ("argv: ['train.py', '--token', '8c1f9aa0']", "8c1f9aa0"),
    "wandb login": ("+ wandb login " + HEX[:40], HEX[:40]),
    "wandb login with options": ("+ wandb login --host=https://wandb.lab --relogin " + HEX[:40], HEX[:40]),
    "wandb's variable": ("export WANDB_API_KEY=" + HEX[:40], HEX[:40]),
    "wandb's newer key": ("wandb: wandb_v1_" + A, "wandb_v1_" + A),
    "netrc": ("machine api.wandb.ai login user password " + HEX[:40], HEX[:40]),
    "a signature in an address": ("GET https://x.blob.core.windows.net/d.tar?sv=2024&sig=aB%2F0aB%3D", "aB%2F0aB%3D"),
    "AWS's signature": ("GET https://b.s3.amazonaws.com/k?X-Amz-Signature=" + HEX, HEX),
    "AWS's security token in an address": ("?X-Amz-Security-Token=IQoJb3JpZ2lu" + N, "IQoJb3JpZ2lu"),
    "token in an address": ("GET /v1/runs?access_token=0a1b2c3d4e", "0a1b2c3d4e"),
    "cookie": ("> Cookie: sessionid=" + N + "; csrftoken=" + A, N),
    "set-cookie": ("< Set-Cookie: auth=" + N + "; HttpOnly", N),
    "a session of Django": ("jar: csrftoken=" + A, A),
    "Slack's webhook": ("POST https://hooks.slack.com/services/T0/B0/" + A, A),
    "Discord's webhook": ("POST https://discord.com/api/webhooks/123456789012345678/" + A, A),
    "Teams' webhook": ("https://lab.webhook.office.com/webhookb2/" + N + "@x/IncomingWebhook/y/z", N),
    "Slack's token": ("slack: xoxb" + "-123456789012-123456789012-" + A, A),
    "Telegram's bot": ("https://api.telegram.org/bot123456789:AA" + A + "/send", A),
    "Hugging Face": ("401: token hf_" + A[:34], "hf_" + A[:34]),
    "Hugging Face's variable": ("HF_TOKEN=" + N[:30], N[:30]),
    "huggingface-cli": ("+ huggingface-cli login --token " + N[:30], N[:30]),
    "GitHub": ("remote: ghp_" + A[:36], "ghp_" + A[:36]),
    "GitHub's fine-grained": ("remote: github_pat_" + A + A, "github_pat_"),
    "GitHub in an address": ("Cloning https://x-access-token:" + A + "@github.com/lab/r", A),
    "GitLab": ("remote: glpat-" + A[:20], "glpat-" + A[:20]),
    "GitLab's job token": ("remote: glcbt-64_" + A[:20], A[:20]),
    "AWS's key": ("NoCredentials: AKIA" + "IOSFODNN7EXAMPLE", "IOSFODNN7"),
    "AWS's temporary key": ("NoCredentials: ASIA" + "IOSFODNN7EXAMPLE", "IOSFODNN7"),
    "AWS's secret": ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "wJalrXUtnFEMI"),
    "AWS's session": ("AWS_SESSION_TOKEN=IQoJb3JpZ2lu" + N, N),
    "Google's key": ("AIza" + N[:35], "AIza" + N[:35]),
    "Google's token": ("ya29." + A, "ya29." + A),
    "Google's account": ('"private_key": "' + PEM.replace("\n", "\\n") + '"', B64),
    "Azure's account": ("AccountName=lab;AccountKey=" + N + "==;EndpointSuffix=x", N),
    "OpenAI": ("openai: sk-proj-" + A, "sk-proj-" + A),
    "OpenAI's older": ("openai: sk-" + N[:48], N[:48]),
    "Anthropic": ("sk-ant-api03-" + A, "sk-ant-api03-" + A),
    "NVIDIA's registry": ("docker login nvcr.io: nvapi-" + A, "nvapi-" + A),
    "JWT": ("Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJtaXJhIn0." + A, "eyJzdWIiOiJtaXJhIn0"),
    "Slurm's JWT": ("SLURM_JWT=eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJtaXJhIn0." + A, "eyJzdWIiOiJtaXJhIn0"),
    "private key": (PEM, B64),
    "private key cut off": ("-----BEGIN OPENSSH PRIVATE KEY-----\n" + B64, B64),
    "private key of a rank": (PEM.replace("\n", "\n[rank0]: "), B64),
    "authorization": ("> Authorization: Basic bWlyYTpodW50ZXIy", "bWlyYTpodW50ZXIy"),
    "authorization in JSON": ('{"Authorization": "Bearer ' + N[:32] + '"}', N[:32]),
    "API's header": ("> X-Api-Key: " + N[:32], N[:32]),
    "login in an address": ("pip --index-url https://mira:hunter2x@pypi.lab/simple", "hunter2x"),
    "database's address": ("postgresql://vigil:hunter2x@db.lab:5432/vigil", "hunter2x"),
    "Redis without a user": ("redis://:hunter2x@10.0.0.2:6379/0", "hunter2x"),
    "curl's user": ("+ curl -u mira:hunter2x https://data.lab/0.tar", "hunter2x"),
    "docker's password": ("+ docker login -u mira -p hunter2x nvcr.io", "hunter2x"),
    "password in YAML": ("  password: hunter2x", "hunter2x"),
    "password of two words": ("db_password='correct horse'", "horse"),
    "password in JSON": ('{"user": "mira", "password": "hunter2x"}', "hunter2x"),
    "key in Python": ("Namespace(lr=0.1, neptune_api_key='hunter2x')", "hunter2x"),
    "client's secret": ("client_secret=hunter2x", "hunter2x"),
    "PGPASSWORD": ("PGPASSWORD=hunter2x psql -h db", "hunter2x"),
    "npm": ("//registry.npmjs.org/:_authToken=npm_" + A[:36], A[:36]),
    "PyPI": ("twine: pypi-AgE" + A, "pypi-AgE" + A),
    "Vault": ("vault: hvs." + A, "hvs." + A),
    "Stripe": ("stripe: sk_" + "test_" + A[:24], A[:24]),
    "SendGrid": ("SG." + A[:22] + "." + A[:40], A[:22]),
    "Databricks": ("dapi" + "0" * 32, "0" * 32),
    "age": ("AGE-SECRET-KEY-1" + "Q" * 58, "Q" * 58),
    "escaped JSON": ('body: {\\"token\\": \\"8c1f9aa0b1\\"}', "8c1f9aa0b1"),
    "a provider's variable": ("OPENAI_KEY=8c1f9aa0", "8c1f9aa0"),
    "a pair for requests": ("requests.get(url, auth=('mira', 'hunter2x'))", "hunter2x"),
    "a password in a sentence": ("Password for mira: hunter2x", "hunter2x"),
    "a variable of a container": ("- name: DB_PASSWORD\n  value: hunter2x", "hunter2x"),
    "pass=": ("user=mira pass=hunter2x", "hunter2x"),
    "an assignment to os.environ": ('os.environ["HF_TOKEN"] = "8c1f9aa0b1"', "8c1f9aa0b1"),
    "a password in os.environ": ("os.environ['DB_PASSWORD']='hunter2x'", "hunter2x"),
    "our link to sign in": ("Sign in: http://vigil.lab/accounts/link/" + A + "/", A),
    "wandb's key in a sentence": ("wandb: api key " + HEX[:40], HEX[:40]),
    "Outlook's webhook": ("https://outlook.office.com/webhook/" + N + "/IncomingWebhook/y/z", N),
    "password in German": ("Passwort: hunter2x", "hunter2x"),
    "password in Chinese": ("密码：hunter2x", "hunter2x"),
    "Grafana": ("glsa_" + A[:32] + "_00000000", "glsa_" + A[:32]),
}  # fmt: skip
ORDINARY = (
    "HEAD is now at 42d7abcf9e0d1c2b3a4958677f8e9d0c1b2a3948 Tell short times",
    "commit=42d7abcf9e0d1c2b3a4958677f8e9d0c1b2a3948 dirty=False",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08  model-00001-of-00004.safetensors",
    "GPU-5e0a6a3c-7f1c-4d5e-9b6a-2f1e0d9c8b7a, run id 123e4567-e89b-12d3-a456-426614174000",
    "<img src='data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk'>",
    "/data/imagenet/train/n01440764/n01440764_10026.JPEG could not be read",
    "KeyError: 'model.layers.0.self_attn.k_proj.weight'",
    "step=50 loss=2.1934 lr=6.00e-04 tokens=4194304 tokens_per_second=118934.2",
    "tokenizer=LlamaTokenizerFast(vocab_size=32000), eos_token='</s>', pad_token=<|endoftext|>, pad_token_id=50256",
    "num_key_value_heads=8, max_new_tokens=512, cache_key=layers.0.attention, sort_key: length",
    "PRNGKey(0), public_key=ssh-rsa, primary_key=id, key=value",
    "--tokenizer gpt2 --max-tokens 4096 --keyframes 12 --pass-through true",
    "Please set HF_TOKEN or run `huggingface-cli login`; token is required",
    "AuthenticationError: invalid password: required",
    "[Rank 0] Using DeepSpeed Optimizer param name adamw as basic optimizer",
    "https://pytorch.org/notes/cuda.html?highlight=memory#environment-variables",
    "tcp://10.0.0.2:29500, gloo connected mira@dgx-03.lab",
    "NVRM: Xid (PCI:0000:ab:00): 79, pid=41833, name=python, GPU has fallen off the bus.",
    "authorization: disabled, bearer authentication, Basic initialization of NCCL",
    "os.environ['WANDB_API_KEY'], special_tokens['pad_token'] = tokenizer.eos_token, d['key']=[1, 2]",
    "self.api_key = api_key, stop_token: 'Observation:', password = getpass.getpass()",
    "tcp://data-loader-with-a-long-name-0001@10.0.0.1, private_key_path=/home/mira/.ssh/id_rsa",
    "SK-learn 1.5, sk-resnet50-imagenet-224, hf_hub_download, npm_config_cache, r8_scale=0.5",
)


@pytest.mark.parametrize("name", LINES)
def test_a_secret_is_not_readable(name: str) -> None:
    line, secret = LINES[name]
    assert secret in line
    text = masked(line)
    assert secret not in text
    assert DOTS in text
    assert masked(text) == text, "masked twice is as masked once"


@pytest.mark.parametrize("line", ORDINARY)
def test_an_ordinary_line_stays_as_it_is(line: str) -> None:
    assert masked(line) == line


@pytest.mark.parametrize("form", forms(), ids=lambda form: form.name)
def test_each_form_masks_its_example_alone(form: Form) -> None:
    assert form.may_be_in(form.example.lower()), "its words have to be in its example"
    assert DOTS in form.mask(form.example)
    assert masked(form.harmless) == form.harmless
    assert form.source


def test_names_are_given_once() -> None:
    assert len({form.name for form in forms()}) == len(forms())


def test_nothing_in_real_logs_is_taken_for_a_secret() -> None:
    """None of them holds one: hashes, commits, paths, addresses and what trainers print stay readable."""
    for case in read_cases(LOGS):
        assert case.folder is not None
        for path in case.folder.iterdir():
            if path.name != CASE:
                text = case.complete_log(path.name).decode(errors="replace")
                assert masked(text) == text, path


def test_no_text_makes_it_slow() -> None:
    """Bound the time for the worst text of some form: RE2 is linear, so a megabyte takes a fraction of a second."""
    for text in ("https://" * 130_000, "password=" * 120_000, "eyJ" * 350_000, "-----BEGIN PRIVATE KEY-----" * 40_000):
        began = time.process_time()
        masked(text)
        assert time.process_time() - began < 5.0
