"""`larql vindex ...`: what is printed, JSON, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from larql_kv.cli.choose import names_model
from larql_kv.cli.main import app
from larql_kv.model.vindex_edits import Patch
from larql_kv.vindex.patch import delete, insert
from tests import tiny_models


def larql(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_build_info_verify(tmp_path):
    out = tmp_path / "v"
    done = larql("vindex", "build", tiny_models.model_dir("llama"), "-o", out, "--format", "bf16")
    assert done.exit_code == 0, done.output
    assert "4 layers of 96 features, bf16" in done.stdout
    assert "add it with --down-meta" in done.stderr
    assert "gate: rounded, relative error" in done.stderr
    again = larql("vindex", "build", tiny_models.model_dir("llama"), "--out", out, "--format", "bf16",
                  "--down-meta", "--down-top-k", 3, "--json")  # fmt: skip
    facts = json.loads(again.stdout)
    assert facts["down_meta"] == {"top_k": 3, "layers": 4}
    assert facts["features"] == 4 * 96
    assert facts["kinds"]["gate"] == {"BF16": 4}
    assert sum(facts["bytes_by_part"].values()) == facts["bytes"]
    shown = larql("vindex", "info", out)
    assert "4 of 96 features" in shown.stdout
    assert "3 tokens a feature" in shown.stdout
    assert json.loads(larql("vindex", "info", out, "--json").stdout) == facts
    assert larql("vindex", "verify", out).exit_code == 0
    assert larql("info", out).exit_code == 0
    plain = json.loads(larql("info", out, "--json").stdout)
    assert plain["format"] == "vindex (bf16)"
    assert plain["config"]["layers"] == 4
    assert names_model(str(out))
    answer = larql("run", out, "the tea", "--max-tokens", 3, "--raw")
    assert answer.exit_code == 0, answer.output


def test_verify_names_the_bad_file_and_fails(own):
    vindex = own("llama", "hf")
    path = vindex / "layer-0002-ffn.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    done = larql("vindex", "verify", vindex)
    assert done.exit_code == 1
    assert "layer-0002-ffn.safetensors: has checksum" in done.stderr
    (problem,) = json.loads(larql("vindex", "verify", vindex, "--json").stdout)["problems"]
    assert problem["file"] == "layer-0002-ffn.safetensors"


def test_patches(own, tmp_path):
    vindex = own("gemma3", "Q8_0")
    file = tmp_path / "fact.vlp"
    gate = torch.ones(64)
    ops = (insert(1, gate, feature=3, entity="Atlantis", target="Neptune"), delete(2, 4))
    file.write_bytes(Patch("fact", ops).to_bytes())
    assert "no patch is applied" in larql("vindex", "patch", "list", vindex).stdout
    done = larql("vindex", "patch", "apply", vindex, file)
    assert "fact: applied, 2 operations" in done.stdout
    assert "insert layer 1 feature 3" in done.stderr
    named = json.loads(larql("vindex", "patch", "apply", vindex, file, "--name", "two", "--json").stdout)
    assert named["operations"][1] == {"op": "delete", "layer": 2, "feature": 4}
    listed = larql("vindex", "patch", "list", vindex).stdout
    assert "Atlantis Neptune" in listed
    value = json.loads(larql("vindex", "patch", "list", vindex, "--json").stdout)
    assert (value["epoch"], [patch["name"] for patch in value["patches"]]) == (2, ["fact", "two"])
    shown = larql("vindex", "info", vindex).stdout
    assert "2 applied, epoch 2" in shown
    assert "layers.1.gate" in shown
    baked = larql("vindex", "patch", "bake", vindex, "-o", tmp_path / "baked")
    assert "equal to the patched vindex" in baked.stdout
    value = json.loads(larql("vindex", "patch", "bake", vindex, "-o", tmp_path / "b2", "--json").stdout)
    assert len(value["print"]) == 64
    assert "two: removed" in larql("vindex", "patch", "remove", vindex, "two").stdout
    assert json.loads(larql("vindex", "patch", "remove", vindex, "fact", "--json").stdout) == {
        "removed": "fact"
    }
    failed = larql("vindex", "patch", "remove", vindex, "fact", "--json")
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["error"]["kind"] == "StoreError"


def test_compare(shared, tmp_path):
    a, b = shared("llama", "hf"), shared("llama", "hf", "bf16")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the tea\n\na harbour [bold]\n")
    shown = larql("vindex", "compare", a, b, "--prompts", prompts, "--dtype", "float32")
    assert shown.exit_code == 0, shown.output
    assert "2 prompts: argmax agreement" in shown.stdout
    value = json.loads(
        larql(
            "vindex", "compare", a, b, "--prompts", prompts, "--max-seq-len", 2, "--top-k", 3, "--json"
        ).stdout
    )
    assert [len(item["top_a"]) for item in value["prompts"]] == [3, 3]
    assert value["total"]["prompts"] == 2
    assert value["prompts"][1]["tokens"] == 2


def test_recall(shared):
    pytest.importorskip("usearch")
    vindex = shared("llama", "hf")
    shown = larql("vindex", "recall", vindex, "--top-k", 10, "--layer", 2, "--queries", 16)
    assert shown.exit_code == 0, shown.output
    assert "Recall of the top 10" in shown.stdout
    value = json.loads(larql("vindex", "recall", vindex, "--queries", 8, "--json").stdout)
    assert [item["layer"] for item in value["recall"]] == [0, 2, 3]
    assert all(0 < item["recall"] <= 1 for item in value["recall"])
    assert larql("vindex", "recall", vindex, "--layer", 9).exit_code == 2
    assert larql("vindex", "recall", vindex, "--queries", 9999).exit_code == 2


def test_usage_errors(tmp_path):
    model = tiny_models.model_dir("llama")
    bad = larql("vindex", "build", model, "-o", tmp_path / "v", "--format", "int3")
    assert bad.exit_code == 2
    assert "unknown format 'int3'" in bad.stderr
    assert not (tmp_path / "v").exists()
    for command in ("info", "verify"):
        assert larql("vindex", command, tmp_path).exit_code == 1
    (tmp_path / "index.json").write_text("{}")
    assert larql("info", Path(tmp_path)).exit_code == 2
