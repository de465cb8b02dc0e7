"""One conversion at a time writes a folder, and what one was killed in is found as it was left."""

import errno
import fcntl

import pytest
from official_layout import TINY, write_official_checkpoint

from moe_int8.dispatch import INTERPRETED
from moe_int8.models.deepseek import convert as converter
from moe_int8.models.deepseek.checkpoint import CONFIG, CheckpointError
from moe_int8.models.deepseek.convert import Settings, convert
from moe_int8.models.deepseek.output import STATE

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the converter takes the CPU path; interpreted it takes minutes")


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    write_official_checkpoint(folder, TINY)
    return folder


def test_a_second_conversion_into_the_same_folder_is_refused_and_harms_nothing(fp8, tmp_path, monkeypatch):
    out, messages = tmp_path / "out", []
    convert_shard = converter._convert_shard

    def with_a_second_one(source, folder, to, file):
        temporary = folder / f".{file}.tmp1"  # as the first one writes while the second begins
        temporary.write_bytes(b"half a shard")
        for settings in (Settings(), Settings(to="bf16")):
            with pytest.raises(CheckpointError, match=f"another conversion is writing {out}: wait") as error:
                convert(fp8, out, settings)
            messages.append(str(error.value))
        assert temporary.read_bytes() == b"half a shard"
        temporary.unlink()
        convert_shard(source, folder, to, file)

    monkeypatch.setattr(converter, "_convert_shard", with_a_second_one)
    assert convert(fp8, out, Settings()).written == 3
    assert len(messages) == 6
    monkeypatch.undo()
    assert convert(fp8, out, Settings()).written == 0  # the lock went with the first one


def test_the_lock_goes_with_a_conversion_that_fails(fp8, tmp_path, monkeypatch):
    monkeypatch.setattr(converter, "_convert_shard", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(fp8, tmp_path / "out", Settings())
    monkeypatch.undo()
    assert convert(fp8, tmp_path / "out", Settings()).written == 3


def test_a_run_killed_before_it_wrote_its_state_has_begun_nothing(fp8, tmp_path):
    (tmp_path / STATE).touch()
    assert convert(fp8, tmp_path, Settings()).written == 3
    assert convert(fp8, tmp_path, Settings()).written == 0


def test_a_damaged_state_file_is_named(fp8, tmp_path):
    (tmp_path / STATE).write_text("{")
    with pytest.raises(CheckpointError, match=f"{STATE} is damaged: delete {tmp_path} and convert again"):
        convert(fp8, tmp_path, Settings())
    assert not (tmp_path / CONFIG).exists()


def test_a_file_system_without_locks_is_written_all_the_same(fp8, tmp_path, monkeypatch):
    def no_locks(stream, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert convert(fp8, tmp_path / "out", Settings()).written == 3


def test_a_state_file_that_cannot_be_written_is_named(fp8, tmp_path):
    (tmp_path / STATE).mkdir()
    with pytest.raises(CheckpointError, match=rf"{STATE} cannot be written \(Is a directory\)"):
        convert(fp8, tmp_path, Settings())
