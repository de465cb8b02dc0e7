"""Downloads: checked, kept, and a failure that says where to put the files by hand. file:// stands for the network."""

import hashlib
import io
import tarfile

import pytest
from eval_fakes import write_gsm8k, write_mmlu

from moe_int8.evals import data
from moe_int8.evals.gsm8k import Gsm8k
from moe_int8.evals.mmlu import CATEGORIES, Mmlu


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "moe_int8"


@pytest.fixture
def gsm8k_url(tmp_path, monkeypatch):
    write_gsm8k(tmp_path / "site", 3)
    names = ("train.jsonl", "test.jsonl")
    sums = {name: hashlib.sha256((tmp_path / "site" / name).read_bytes()).hexdigest() for name in names}
    monkeypatch.setattr(data, "GSM8K_SHA256", sums)
    return (tmp_path / "site").as_uri() + "/"


def archive(tmp_path, subjects):
    """The layout of the original: data/dev, data/test, and more that is not needed."""
    write_mmlu(tmp_path / "data", dict.fromkeys(subjects, 2))
    for folder in ("val", "auxiliary_train"):
        (tmp_path / "data" / folder).mkdir()
        (tmp_path / "data" / folder / "anatomy_test.csv").write_text("not used")
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        tar.add(tmp_path / "data", "data")
        tar.addfile(tarfile.TarInfo("../outside_test.csv"), io.BytesIO())
    return (tmp_path / "data.tar").as_uri()


def test_gsm8k_is_downloaded_once(gsm8k_url, cache, tmp_path):
    folder = data.gsm8k_folder(gsm8k_url)
    assert folder == cache / "gsm8k"
    assert len(Gsm8k(folder, shots=5, num_questions=None, chat=False).prompts) == 3
    assert data.gsm8k_folder("file:///nonexistent/") == folder
    assert sorted(path.name for path in folder.iterdir()) == ["test.jsonl", "train.jsonl"]


def test_a_changed_file_is_not_used(gsm8k_url, cache, tmp_path):
    with (tmp_path / "site" / "test.jsonl").open("a") as stream:
        stream.write(" ")
    with pytest.raises(ValueError, match=r"test.jsonl has the SHA-256 \w+, expected \w+: not used"):
        data.gsm8k_folder(gsm8k_url)
    assert not (cache / "gsm8k" / "test.jsonl").exists()


def test_a_failed_download_says_where_to_put_the_files(cache):
    with pytest.raises(
        ValueError, match=rf"cannot download file:///no/train.jsonl .* put train.jsonl into {cache}/gsm8k"
    ):
        data.gsm8k_folder("file:///no/")
    with pytest.raises(
        ValueError, match=rf"cannot download .*put its folders dev and test into {cache}/mmlu, or give --data"
    ):
        data.mmlu_folder("file:///no")


def test_mmlu_is_unpacked_once_and_only_its_tables(tmp_path, cache):
    subjects = [subject for members in CATEGORIES.values() for subject in members]
    folder = data.mmlu_folder(archive(tmp_path, subjects))
    mmlu = Mmlu(folder, shots=5, num_questions=None, subjects=None, chat=False, generate=False)
    assert len(mmlu.prompts) == 2 * 57
    assert data.mmlu_folder("file:///nonexistent") == folder
    assert sorted(path.name for path in folder.iterdir()) == ["SHA256", "dev", "test"]
    assert not list(cache.glob("*partial*"))


@pytest.mark.parametrize("kind", ["half", "no archive"])
def test_an_incomplete_mmlu_is_not_used(tmp_path, cache, kind):
    if kind == "half":
        url, message = archive(tmp_path, ["anatomy"]), r"holds \{'dev': 1, 'test': 1\} tables"
    else:
        (tmp_path / "page").write_text("<html>")
        url, message = (tmp_path / "page").as_uri(), "is no tar archive"
    with pytest.raises(ValueError, match=message):
        data.mmlu_folder(url)
    assert not cache.exists()
