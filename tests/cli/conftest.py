"""Tiny models with and without a chat template, and a runner for the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests import tiny_models

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


class Larql:
    """Runs `larql` in this process."""

    def __call__(self, *words: str | Path, stdin: str | None = None, **env: str) -> Result:
        from larql_kv.cli.main import app

        environment = {"LARQL_KV_ENGINE": None, "LARQL_RAW_PROMPT": None, **env}
        return CliRunner().invoke(app, [str(word) for word in words], input=stdin, env=environment)

    def json(self, *words: str | Path, **env: str) -> dict:
        result = self(*words, "--json", **env)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)


@pytest.fixture
def larql() -> Larql:
    return Larql()


@pytest.fixture(scope="session")
def base_model() -> Path:
    """A model without a chat template, context 256."""
    return tiny_models.model_dir("llama")


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a template, and nothing that stops it: it talks until it is told to stop."""
    return make_chat_model(tmp_path_factory.mktemp("chat") / "model", TEMPLATE)


def make_chat_model(path: Path, template: str, context: int = 256) -> Path:
    """A copy of the tiny llama with `template` and `context`, whose end token is one it never says."""
    shutil.copytree(tiny_models.model_dir("llama"), path)
    (path / "chat_template.jinja").write_text(template)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        file = path / name
        if not file.exists():
            continue
        settings = json.loads(file.read_text())
        if name == "config.json":
            settings["max_position_embeddings"] = context
        for key in ("eos_token_id", "eos_token"):
            if key in settings:
                settings[key] = "<pad>" if key == "eos_token" else 0
        file.write_text(json.dumps(settings))
    # "</s>" ends an answer by its name, whatever the settings say.
    vocabulary = path / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace('"</s>"', '"<e>"'))
    return path
