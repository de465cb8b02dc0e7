import json
import shutil

import pytest
from official_layout import TINY, write_official_checkpoint

from moe_int8.models.deepseek.fingerprint import fingerprint
from moe_int8.models.deepseek.weights import open_model


@pytest.fixture
def folder(tmp_path):
    write_official_checkpoint(tmp_path / "model", TINY, fp8=False)
    return tmp_path / "model"


def differences(one, other) -> list[str]:
    prints = [fingerprint(open_model(folder)) for folder in (one, other)]
    assert prints[0].keys() == prints[1].keys()
    return [name for name in prints[0] if prints[0][name] != prints[1][name]]


def test_a_copy_is_the_same_however_its_config_is_written(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items())) | {"transformers_version": "5"}))
    assert differences(folder, copy) == []


def test_another_model_of_the_same_shape_differs_in_its_values(folder, tmp_path):
    write_official_checkpoint(tmp_path / "other", TINY, fp8=False, seed=1)
    assert differences(folder, tmp_path / "other") == ["checkpoint's model.norm.weight"]


def test_another_setting_of_the_model_differs_in_the_config(folder, tmp_path):
    write_official_checkpoint(tmp_path / "other", TINY | {"rope_theta": 5000.0}, fp8=False)
    assert differences(folder, tmp_path / "other") == ["checkpoint's config.json"]


def test_other_shards_differ_in_the_tensors(folder, tmp_path):
    write_official_checkpoint(tmp_path / "other", TINY, fp8=False, shards=2)
    assert differences(folder, tmp_path / "other") == ["checkpoint's tensors"]
