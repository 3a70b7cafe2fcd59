"""Input and output at URLs: a real S3 server, a web server with faults, and stores that fail during upload."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

from megatron.data import remote, remote_pairs
from megatron.data.indexed.dataset import IndexedDataset
from megatron.errors import ConfigError, DataError, StorageError, without_secrets
from megatron.preprocess.options import PreprocessSettings
from megatron.preprocess.to_url import default_folder, preprocess_to_url
from megatron.tokenizer import TokenizerSettings
from tests.unit.preprocess.remote_support import Fault, WebServer, serving
from tests.unit.preprocess.support import ROOT, Workshop, make_workshop, sample_documents

BUCKET = "corpus"


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return make_workshop(tmp_path)


# ---------------------------------------------------------------- S3


@dataclass(frozen=True)
class Bucket:
    """A bucket, accessed with Amazon's own library."""

    client: Any

    def put(self, path: Path, name: str) -> None:
        self.client.upload_file(str(path), BUCKET, name)

    def get(self, name: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
        return content

    def names(self) -> list[str]:
        return sorted(entry["Key"] for entry in self.client.list_objects_v2(Bucket=BUCKET).get("Contents", []))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    boto3 = pytest.importorskip("boto3")
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    given = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in {**given, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    yield Bucket(client)
    for entry in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=entry["Key"])
    client.delete_bucket(Bucket=BUCKET)
    server.stop()


def every_format(workshop: Workshop) -> list[Path]:
    """Writes the same 200 documents to four files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    documents = [{"text": document["text"]} for document in sample_documents(200)]
    lines = workshop.corpus("a.jsonl", documents[:50])
    packed = workshop.folder / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(workshop.corpus("b", documents[50:100]).read_bytes()))
    array = workshop.folder / "c.json"
    array.write_text(json.dumps(documents[100:150]))
    table = workshop.folder / "d.parquet"
    pq.write_table(pa.table({"text": [document["text"] for document in documents[150:]]}), table, row_group_size=20)
    return [lines, packed, array, table]


def run_tool(name: str, workshop: Workshop, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *flags]
    return subprocess.run(command, cwd=workshop.folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_bucket_read_and_written_is_the_local_run(workshop: Workshop, bucket: Bucket) -> None:
    files = every_format(workshop)
    for path in files:
        bucket.put(path, f"in/{path.name}")
    local = workshop.run("--input", *(path.name for path in files), "--output-prefix", "local", "--append-eod")
    assert local.returncode == 0, local.stderr
    flags = ("--input", f"s3://{BUCKET}/in", "--append-eod", "--workers", "2")
    parts = f"s3://{BUCKET}/parts/p"
    done = workshop.run(*flags, "--output-prefix", f"s3://{BUCKET}/whole")
    assert done.returncode == 0, done.stderr
    assert f"s3://{BUCKET}/whole_text_document: 200 documents" in done.stdout
    for rank in ("0", "1"):
        done = workshop.run(*flags, "--output-prefix", parts, "--rank", rank, "--world", "2")
        assert done.returncode == 0, done.stderr
    done = run_tool(
        "merge_datasets", workshop, "--input", f"s3://{BUCKET}/parts", "--output-prefix", f"s3://{BUCKET}/merged"
    )
    assert done.returncode == 0, done.stderr
    wanted = workshop.output("local")
    for name in ("whole_text_document", "merged"):
        assert (bucket.get(f"{name}.bin"), bucket.get(f"{name}.idx")) == wanted
        assert json.loads(bucket.get(f"{name}.meta.json"))["documents"] == 200
    done = run_tool("inspect_dataset", workshop, f"s3://{BUCKET}/merged", "--verify", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["prefix"] == f"s3://{BUCKET}/merged"
    assert not [path.name for path in workshop.folder.iterdir() if path.is_dir()], "nothing is left here"

    again = workshop.run(*flags, "--output-prefix", f"s3://{BUCKET}/whole")
    assert again.returncode == 2 and f"s3://{BUCKET}/whole_text_document.bin exists; give --overwrite" in again.stderr
    assert "is complete" in workshop.run(*flags, "--output-prefix", f"s3://{BUCKET}/whole", "--resume").stderr
    assert workshop.run(*flags, "--output-prefix", f"s3://{BUCKET}/whole", "--overwrite").returncode == 0
    other = workshop.run(*flags[:2], "--output-prefix", f"s3://{BUCKET}/whole", "--resume")
    assert other.returncode == 2 and "exists; give --overwrite" in other.stderr, "other settings"


def test_a_bucket_that_is_not_there_is_named(workshop: Workshop, bucket: Bucket) -> None:
    done = workshop.run("--input", "s3://no-such-bucket/a.jsonl", "--output-prefix", "o")
    assert done.returncode == 2 and "s3://no-such-bucket/a.jsonl: no such object" in done.stderr
    done = workshop.run("--input", f"s3://{BUCKET}/*.jsonl", "--output-prefix", "o")
    assert done.returncode == 2 and "no object matches the pattern" in done.stderr
    assert not workshop.leftovers("o_text")


# ---------------------------------------------------------------- a server that breaks


def run_impatient(workshop: Workshop, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs the tool with all its attempts, but without the pauses between them. Others below have the pauses."""
    program = workshop.folder / "impatient.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom megatron.data import remote\n"
        "remote.PAUSES = tuple(0.0 for _ in remote.PAUSES)\nfrom megatron_anywhere import run\n"
        "sys.exit(run('preprocess_data'))\n"
    )
    command = [sys.executable, str(program), *workshop.command(*flags)[2:]]
    return subprocess.run(command, cwd=workshop.folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
@pytest.mark.parametrize("fault", ["cut", "reset", "gone", "short"])
def test_a_server_that_breaks_never_makes_a_short_dataset(workshop: Workshop, name: str, fault: Fault) -> None:
    content = workshop.corpus("in.jsonl", sample_documents(2000)).read_bytes()
    files = {name: gzip.compress(content) if name.endswith(".gz") else content}
    with serving(WebServer(files, fault=fault, good=1)) as web:
        done = run_impatient(workshop, "--input", web.url(name), "--output-prefix", "o", "--workers", "1")
    assert done.returncode not in (0, 1), done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert web.url(name) in last and "failed 4 times" in last
    assert not workshop.leftovers("o_text")


def test_one_broken_answer_is_asked_for_again(workshop: Workshop) -> None:
    content = workshop.corpus("in.jsonl", sample_documents(500)).read_bytes()
    assert workshop.run("--input", "in.jsonl", "--output-prefix", "local").returncode == 0
    with serving(WebServer({"in.jsonl": content}, fault="once", good=2)) as web:
        done = workshop.run("--input", web.url("in.jsonl"), "--output-prefix", "o", "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert workshop.output("o") == workshop.output("local")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.0))


def test_an_object_that_shrinks_is_refused(tmp_path: Path, impatient: None) -> None:
    store = fsspec.filesystem("memory")
    store.pipe_file("/shrinks", b"x" * 1000)
    with remote.open_remote("memory://shrinks", 1000, 100) as file:
        file.raw._read(0, 10)  # type: ignore[attr-defined]
        store.pipe_file("/shrinks", b"x" * 900)
        with pytest.raises(DataError, match=r"memory://shrinks: .* 0 to 1000 failed 3 times \(got 900 bytes"):
            file.read()


def test_an_object_that_changes_while_it_is_fetched_is_refused(
    tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = fsspec.filesystem("memory")
    store.pipe_file("/changes", b"old")
    before = remote.status_of
    seen: list[remote.RemoteStatus] = []

    def status_of(url: str) -> remote.RemoteStatus:
        seen.append(before(url))
        store.pipe_file("/changes", b"new")
        return seen[-1]

    monkeypatch.setattr(remote, "status_of", status_of)
    with pytest.raises(DataError, match="memory://changes: changed while it was read"):
        remote.download("memory://changes", tmp_path / "changes")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- uploading


def memory_settings(folder: Path, **changes: Any) -> PreprocessSettings:
    if not (folder / "in.jsonl").exists():  # written again it would be another input
        (folder / "in.jsonl").write_text("".join(f'{{"text": "{i}"}}\n' for i in range(50)))
    tokenizer = TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=100)
    given: dict[str, Any] = {"inputs": (str(folder / "in.jsonl"),), "output_prefix": "memory://store/out"}
    return PreprocessSettings(**{**given, "tokenizer": tokenizer, **changes})


def stored() -> list[str]:
    return sorted(name.rpartition("/")[2] for name in fsspec.filesystem("memory").find("/store"))


@pytest.fixture
def memory_store() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()


WHOLE = ["out_text_document.bin", "out_text_document.idx", "out_text_document.meta.json"]


@pytest.mark.parametrize("failing", [".bin", ".idx", ".meta.json"])
def test_an_upload_that_fails_shows_no_dataset_and_is_resumed(
    failing: str, tmp_path: Path, memory_store: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = remote.upload

    def fails(path: Path, url: str) -> None:
        if url.endswith(failing):
            raise StorageError(f"{url}: writing failed")
        upload(path, url)

    work = tmp_path / "work"
    with monkeypatch.context() as patch:
        patch.setattr(remote, "upload", fails)
        with pytest.raises(StorageError, match="writing failed"):
            preprocess_to_url(memory_settings(tmp_path), work, lambda line: None)
    assert "out_text_document.meta.json" not in stored()
    preprocess_to_url(memory_settings(tmp_path, resume=True), work, lambda line: None)
    assert stored() == WHOLE and not work.exists()
    local = remote_pairs.fetch_pair("memory://store/out_text_document", tmp_path)
    assert [int(ids[0]) for ids in map(IndexedDataset(local).get, range(50))] == list(range(50))


def test_an_overwritten_dataset_is_never_half_old(
    tmp_path: Path, memory_store: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocess_to_url(memory_settings(tmp_path), tmp_path / "work", lambda line: None)
    order: list[tuple[str, list[str]]] = []
    upload = remote.upload

    def noting(path: Path, url: str) -> None:
        order.append((url.rpartition("document")[2], stored()))
        upload(path, url)

    monkeypatch.setattr(remote, "upload", noting)
    preprocess_to_url(memory_settings(tmp_path, overwrite=True), tmp_path / "work", lambda line: None)
    assert order == [(".bin", WHOLE[:1]), (".idx", WHOLE[:1]), (".meta.json", WHOLE[:2])]


def test_the_default_folder_is_of_the_url() -> None:
    first, other = default_folder("s3://a/out"), default_folder("s3://b/out")
    assert first != other and first == default_folder("s3://a/out") and first.name.startswith("out-")


def test_sentence_parameters_are_shared_through_the_store(tmp_path: Path, memory_store: None) -> None:
    pytest.importorskip("nltk")
    given = memory_settings(tmp_path, split_sentences=True)
    preprocess_to_url(given, tmp_path / "one", lambda line: None)
    assert "out.sentences.json" in stored()
    said: list[str] = []
    preprocess_to_url(memory_settings(tmp_path, split_sentences=True, resume=True), tmp_path / "two", said.append)
    assert any("is complete" in line for line in said), said


# ---------------------------------------------------------------- flags and packages


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r"gs://b/x: gs:// needs the package gcsfs; pip install gcsfs"):
        remote.status_of("gs://b/x")
    with pytest.raises(ConfigError, match="xyz:// is not supported; use s3, "):
        remote.status_of("xyz://b/x")


def test_work_folder_is_refused_where_it_does_nothing(workshop: Workshop) -> None:
    workshop.corpus("in.jsonl", [{"text": "x"}])
    done = workshop.run("--input", "in.jsonl", "--output-prefix", "o", "--work-folder", "w")
    assert done.returncode == 2 and "--work-folder w: only used with a URL" in done.stderr
    done = run_tool("merge_datasets", workshop, "--input", "a", "--output-prefix", "o", "--work-folder", "w")
    assert done.returncode == 2 and "--work-folder w: only used with URLs" in done.stderr


def test_without_a_url_fsspec_is_not_loaded(workshop: Workshop) -> None:
    workshop.corpus("in.jsonl", [{"text": "x"}])
    (workshop.folder / "fsspec.py").write_text("raise SystemExit('fsspec was imported')\n")
    environment = {**os.environ, "PYTHONPATH": str(workshop.folder)}
    for source, code in (("in.jsonl", 0), ("memory://x", 1)):
        command = workshop.command("--input", source, "--output-prefix", "o")
        done = subprocess.run(command, cwd=workshop.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == code and ("fsspec was imported" in done.stderr) == bool(code), done.stderr


# ---------------------------------------------------------------- addresses of strangers, and passwords in addresses


@pytest.mark.parametrize("url", ["reference://x::http://h/refs.json", "zip://a::file:///b.zip", "s3://b/x::file:///y"])
def test_chains_of_file_systems_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"chains two file systems \(::\), which is not supported; download"):
        remote.status_of(url)


@pytest.mark.parametrize("scheme", ["reference", "zip", "tar", "dir", "github", "local", "filecache", "S3"])
def test_only_schemes_of_the_list_are_read(scheme: str) -> None:
    with pytest.raises(ConfigError, match=rf"{scheme}:// is not supported; use s3, .*https, file"):
        remote.status_of(f"{scheme}://b/x")


def test_an_old_fsspec_is_refused_and_the_tests_ask_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"fsspec>={remote.OLDEST_FSSPEC}" in (ROOT / "pyproject.toml").read_text()
    monkeypatch.setattr(fsspec, "__version__", "2024.12.1")
    with pytest.raises(ConfigError, match=r"fsspec 2024\.12\.1 is too old; pip install 'fsspec>="):
        remote.status_of("memory://x")


def test_a_redirect_to_another_server_is_not_followed() -> None:
    with serving(WebServer({"x": b"inside"})) as inside, serving(WebServer({"y": b"own"})) as outside:
        outside.redirects = {"x": inside.url("x"), "near": "/y"}
        with pytest.raises(ConfigError, match=rf"redirects to another server, http://127.0.0.1:{inside.port}; down"):
            remote.status_of(outside.url("x"))
        with pytest.raises(ConfigError, match="redirects to another server"):
            remote.open_remote(outside.url("x"), 6, 6).read()
        assert remote.open_remote(outside.url("near"), 3, 3).read() == b"own"


@pytest.mark.parametrize(
    ("address", "way"),
    [
        (
            "https://huggingface.co/datasets/a/b/resolve/main/x/y.jsonl?download=true",
            "hf://datasets/a/b@main/x/y.jsonl",
        ),
        ("https://huggingface.co/a/b/resolve/v1/c.json", "hf://a/b@v1/c.json"),
        ("https://example.com/datasets/a/b/resolve/main/y.jsonl", None),
        ("https://huggingface.co/gpt2", None),
    ],
)
def test_a_link_of_the_hub_has_an_address_without_redirects(address: str, way: str | None) -> None:
    line = remote.redirected(address, "https://cdn.example.com")
    assert "redirects to another server, https://cdn.example.com; " in line
    assert line.endswith("download the file (curl -L), and give its path")
    assert ("hf://" in line) == (way is not None)
    if way is not None:
        assert f"; give {way} (pip install huggingface_hub), or " in line


SECRET = "hunter2"


@pytest.mark.parametrize("fault", ["none", "gone", "missing"])
def test_secrets_of_an_address_reach_no_file_and_no_line(workshop: Workshop, fault: Any) -> None:
    content = workshop.corpus("in.jsonl", sample_documents(2000)).read_bytes()
    files = {} if fault == "missing" else {"in.jsonl": content}
    with serving(WebServer(files, fault="gone" if fault == "gone" else "none", good=1)) as web:
        address = web.url("in.jsonl").replace("://", f"://me:{SECRET}@") + f"?part=1&signature={SECRET}"
        done = workshop.run("--input", address, address.replace("part=1", "part=2"), "--output-prefix", "o")
    assert (done.returncode == 0) == (fault == "none"), done.stderr
    assert SECRET not in done.stdout + done.stderr
    written = [path for path in workshop.folder.rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET in path.name or SECRET.encode() in path.read_bytes()]
    if fault == "none":
        record = json.loads((workshop.folder / "o_text_document.meta.json").read_text())
        assert record["source"] == ["in.jsonl?...", "in.jsonl?... (2)"]


@pytest.mark.parametrize("tool", ["preprocess_data", "merge_datasets", "inspect_dataset"])
def test_datasets_take_no_secrets_in_their_address(workshop: Workshop, tool: str) -> None:
    workshop.corpus("in.jsonl", [{"text": "x"}])
    address = f"https://me:{SECRET}@host/corpus?token={SECRET}"
    if tool == "preprocess_data":
        done = workshop.run("--input", "in.jsonl", "--output-prefix", address)
    elif tool == "merge_datasets":
        done = run_tool(tool, workshop, "--input", address, "--output-prefix", "o")
    else:
        done = run_tool(tool, workshop, address)
    assert done.returncode == 2 and SECRET not in done.stdout + done.stderr
    assert "https://...@host/corpus?...: the address of a dataset contains a password or query" in done.stderr
    assert not [path for path in workshop.folder.rglob("*") if SECRET in path.name]


def test_what_is_no_secret_stays_in_the_line() -> None:
    kept = ["s3://bucket/a?.json", "abfs://container@account.dfs/x", "https://host/a@b.json", "memory://x", "a ? b = c"]
    for text in kept:
        assert without_secrets(f"{text}: no") == f"{text}: no"
    assert without_secrets("https:/me:pw@host/x?k=pw.idx: no") == "https:/...@host/x?...: no"
    assert without_secrets("abfs://me:pw@host/x, url='s3://b/x?sig=1'") == "abfs://...@host/x, url='s3://b/x?...'"
