"""The data sets' original files: downloaded once into a cache and checked, or taken from where the user has them."""

import hashlib
import http.client
import io
import os
import tarfile
import urllib.request
from pathlib import Path

TIMEOUT = 60  # seconds without a byte
MAX_BYTES = 1 << 30

GSM8K_URL = (
    "https://raw.githubusercontent.com/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c"
    "/grade_school_math/data/"
)
GSM8K_SHA256 = {
    "train.jsonl": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "test.jsonl": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}
MMLU_URL = "https://people.eecs.berkeley.edu/~hendrycks/data.tar"
MMLU_FILES = {"dev": 57, "test": 57}  # the archive has no published checksum: its content is counted


def cache_folder() -> Path:
    """Where downloads are kept: ~/.cache/moe_int8, or below XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_int8"


def gsm8k_folder(url: str = GSM8K_URL) -> Path:
    """The folder with GSM8K's train.jsonl and test.jsonl; what is missing is downloaded.

    Raises:
        ValueError: it cannot be downloaded or is not what it should be; says where to put it by hand.
    """
    folder = cache_folder() / "gsm8k"
    for name, checksum in GSM8K_SHA256.items():
        if (folder / name).is_file():
            continue
        content = _download(url + name, f"put {name} into {folder}, or give --data FILE")
        found = hashlib.sha256(content).hexdigest()
        if found != checksum:
            raise ValueError(f"{url + name} has the SHA-256 {found}, expected {checksum}: not used")
        _write(folder / name, content)
    return folder


def mmlu_folder(url: str = MMLU_URL) -> Path:
    """The folder with MMLU's dev/ and test/; downloaded and unpacked if it is missing.

    Raises:
        ValueError: it cannot be downloaded or unpacked, or has not 57 subjects; says where to put it by hand.
    """
    folder = cache_folder() / "mmlu"
    if folder.is_dir():
        return folder
    by_hand = f"put its folders dev and test into {folder}, or give --data FOLDER"
    files = _tables(_download(url, by_hand), url)
    counts = {split: sum(name.startswith(f"{split}/") for name in files) for split in MMLU_FILES}
    if counts != MMLU_FILES:
        raise ValueError(f"{url} holds {counts} tables, expected {MMLU_FILES}: not used; {by_hand}")
    partial = folder.with_name(f"mmlu.{os.getpid()}.partial")
    for name, content in files.items():
        _write(partial / name, content)
    (partial / "SHA256").write_text(f"{hashlib.sha256(b''.join(files.values())).hexdigest()}\n")
    partial.rename(folder)
    return folder


def _tables(archive: bytes, url: str) -> dict[str, bytes]:
    """The archive's data/dev/*.csv and data/test/*.csv, by "dev/..." and "test/..."."""
    files = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                path = Path(member.name)
                if member.isfile() and path.suffix == ".csv" and path.parent.name in MMLU_FILES:
                    stream = tar.extractfile(member)
                    assert stream is not None, "it is a file"
                    files[f"{path.parent.name}/{path.name}"] = stream.read()
    except tarfile.TarError as error:
        raise ValueError(f"{url} is no tar archive: {error}") from error
    return files


def _download(url: str, by_hand: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            content = response.read(MAX_BYTES + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ValueError(f"cannot download {url} ({error}); {by_hand}") from error
    if len(content) > MAX_BYTES:
        raise ValueError(f"{url} is larger than {MAX_BYTES >> 20} MB: not used; {by_hand}")
    return content


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, also with another run beside this one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.replace(path)
